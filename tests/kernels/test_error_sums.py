"""The error sums: against exact rational arithmetic, and the same however rows are cut."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from mmq.kernels import ops
from mmq.quantize.global_scale import nvfp4_global_scale

BACKENDS = ["cpu", "torch-table", "reference"]
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]


def e4m3(code):
    magnitude = code & 127
    mantissa = magnitude & 7 | (8 if magnitude >> 3 else 0)
    return Fraction(mantissa) * Fraction(2) ** (max(magnitude >> 3, 1) - 10) * (-1) ** (code >> 7)


def exact_sums(source, restored):
    errors = [abs(x - q) for x, q in zip(source, restored, strict=True)]
    return sum(x * x for x in source), sum(e * e for e in errors), max(errors)


def assert_close(error: ops.ErrorSums, exact):
    for name, got, want in zip(error._fields, error, exact, strict=True):
        assert got == pytest.approx(float(want), rel=1e-13), name


@pytest.mark.parametrize("backend", BACKENDS)
def test_nvfp4_from_mxfp8(random_mxfp8, backend):
    codes, scale = random_mxfp8(3, 64, seed=11)
    s2 = nvfp4_global_scale(ops.mxfp8_amax(codes, scale))
    out = ops.quantize_nvfp4_from_mxfp8(codes, scale, s2, backend=backend)
    powers = [Fraction(2) ** (int(b) - 127) for b in np.repeat(scale, 32)]
    source = [e4m3(int(c)) * p for c, p in zip(codes.flat, powers, strict=True)]
    nibbles = np.stack([out.packed & 15, out.packed >> 4], axis=-1).reshape(-1)
    steps = [e4m3(int(c)) * Fraction(float(s2)) for c in np.repeat(out.scale, 16)]
    restored = [Fraction(E2M1[n]) * step for n, step in zip(nibbles, steps, strict=True)]
    assert_close(out.error, exact_sums(source, restored))


@pytest.mark.parametrize("backend", BACKENDS)
def test_mxfp8_from_f32(backend):
    values = np.random.default_rng(7).standard_normal((2, 64)).astype(np.float32)
    out = ops.quantize_mxfp8(values, "F32", backend=backend)
    powers = [Fraction(2) ** (int(b) - 127) for b in np.repeat(out.scale, 32)]
    restored = [e4m3(int(c)) * p for c, p in zip(out.codes.flat, powers, strict=True)]
    assert_close(out.error, exact_sums([Fraction(float(x)) for x in values.flat], restored))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("cut", [1, 2, 5, 16])
def test_running_sums_do_not_depend_on_chunks(random_mxfp8, backend, cut):
    codes, scale = random_mxfp8(17, 96, seed=13)
    s2 = nvfp4_global_scale(ops.mxfp8_amax(codes, scale))
    bits = ops.dequantize_mxfp8(codes, scale)
    jobs = [
        lambda rows, error: ops.quantize_nvfp4_from_mxfp8(
            codes[rows], scale[rows], s2, running=error, backend=backend
        ),
        lambda rows, error: ops.quantize_nvfp4_from_float(
            bits[rows], "BF16", s2, running=error, backend=backend
        ),
        lambda rows, error: ops.quantize_mxfp8(bits[rows], "BF16", running=error, backend=backend),
    ]
    for job in jobs:
        whole = job(slice(None), ops.ErrorSums()).error
        error = ops.ErrorSums()
        for start in range(0, 17, cut):
            error = job(slice(start, start + cut), error).error
        assert error == whole


def test_merge_adds_and_takes_the_maximum():
    one, two = ops.ErrorSums(1.0, 0.25, 0.5), ops.ErrorSums(4.0, 0.5, 0.125)
    assert one + two == ops.ErrorSums(5.0, 0.75, 0.5) == one.merge(two) == two + one
    with pytest.raises(TypeError):
        one + 1.0

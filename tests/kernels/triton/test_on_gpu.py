"""The kernels on the GPU of this machine against the reference, on whole domains.

With TRITON_INTERPRET=1 this file runs in the interpreter instead, slowly.
"""

from __future__ import annotations

import numpy as np
import pytest

triton = pytest.importorskip("triton", reason="needs triton, which has wheels for Linux only")

import torch  # noqa: E402

from mmq.kernels.reference import backend as reference  # noqa: E402
from mmq.kernels.results import ScaleChoice  # noqa: E402
from mmq.kernels.triton import backend  # noqa: E402
from mmq.quantize.global_scale import MIN_GLOBAL_SCALE, nvfp4_global_scale  # noqa: E402

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() and not triton.knobs.runtime.interpret,
    reason="needs a CUDA or ROCm GPU",
)

CHOICES = [
    ScaleChoice("max"),
    ScaleChoice("mse"),
    ScaleChoice("mse", np.linspace(0, 3, 32, dtype=np.float32) ** 4),
    ScaleChoice("four-over-six", errors=False),
]
GLOBAL_SCALES = [
    np.float32(2.0**-7),
    np.float32(19 / 16 * 2.0**-9),
    nvfp4_global_scale(np.float32(0.1234)),
    MIN_GLOBAL_SCALE,
]


def assert_same(name, *arguments, source=None):
    ours = getattr(backend, name)(*(arguments if source is None else source))
    expected = getattr(reference, name)(*arguments)
    pairs = zip(ours, expected, strict=True) if isinstance(ours, tuple) else [(ours, expected)]
    for got, want in pairs:
        np.testing.assert_array_equal(got, want, strict=True)


@pytest.mark.parametrize("choice", CHOICES, ids=lambda c: f"{c.search}-{c.importance is None}")
@pytest.mark.parametrize("s2", GLOBAL_SCALES, ids=lambda s2: f"s2={s2:.3g}")
def test_nvfp4_from_every_code(all_codes_under_every_max, choice, s2):
    codes = np.tile(all_codes_under_every_max, (5, 1))
    exponents = np.repeat(np.array([0, 8, 110, 127, 246], np.uint8), len(codes) // 5)
    assert_same("quantize_nvfp4_from_mxfp8", codes, exponents[:, None], s2, choice)


@pytest.mark.parametrize("choice", CHOICES, ids=lambda c: f"{c.search}-{c.importance is None}")
@pytest.mark.parametrize("s2", GLOBAL_SCALES, ids=lambda s2: f"s2={s2:.3g}")
def test_nvfp4_from_every_bf16(all_bf16_pairs, choice, s2):
    bits = all_bf16_pairs[:: 1 if choice.search == "max" else 8]
    f32 = (bits.astype(np.uint32) << 16).view(np.float32)
    assert_same("quantize_nvfp4_from_f32", f32, s2, choice, source=(bits, s2, choice))
    assert_same("quantize_nvfp4_from_f32", f32, s2, choice)


def test_mxfp8_from_every_bf16(all_bf16_pairs):
    f32 = (all_bf16_pairs.astype(np.uint32) << 16).view(np.float32)
    assert_same("quantize_mxfp8_from_f32", f32, source=(all_bf16_pairs,))
    assert_same("quantize_mxfp8_from_f32", f32)


@pytest.mark.parametrize("form", ["bf16", "f32"])
def test_decoders(form):
    codes = np.tile(np.arange(256, dtype=np.uint8), (256, 1))
    rows = np.arange(256, dtype=np.uint8)[:, None]
    assert_same(f"dequantize_mxfp8_{form}", codes, np.repeat(rows, 8, axis=1))
    for s2 in GLOBAL_SCALES:
        assert_same(f"dequantize_nvfp4_{form}", codes, np.repeat(rows, 32, axis=1), s2)


@pytest.mark.parametrize("rows", [1, 3, 33, 4099])
def test_shapes_and_amax(random_mxfp8, rows):
    codes, exponents = random_mxfp8(rows, 96, seed=rows)
    assert_same("mxfp8_amax", codes, exponents)
    assert_same("quantize_nvfp4_from_mxfp8", codes, exponents, np.float32(0.01))
    assert_same("dequantize_mxfp8_bf16", codes, exponents)

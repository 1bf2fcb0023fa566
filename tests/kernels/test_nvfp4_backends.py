"""NVFP4: the table and the loops against the reference, on whole domains, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from mmq.kernels import ops
from mmq.kernels.cpu import backend as cpu
from mmq.kernels.reference import backend as reference
from mmq.quantize.global_scale import MIN_GLOBAL_SCALE, nvfp4_global_scale

# A power of two (short quotients: many ties), odd amaxes, and both ends of the range.
GLOBAL_SCALES = [
    np.float32(2.0**-7),
    nvfp4_global_scale(np.float32(0.1234)),
    nvfp4_global_scale(np.float32(1.75)),
    MIN_GLOBAL_SCALE,
    nvfp4_global_scale(np.finfo(np.float32).max),
]


def assert_same(ours: ops.Nvfp4, other: ops.Nvfp4):
    np.testing.assert_array_equal(ours.scale, other.scale)
    np.testing.assert_array_equal(ours.packed, other.packed)
    assert ours.error == other.error


@pytest.mark.parametrize("s2", GLOBAL_SCALES, ids=lambda s2: f"s2={s2:.3g}")
def test_table_on_every_exponent_max_and_code(mxfp8_domain, s2):
    ours = cpu.quantize_nvfp4_from_mxfp8(*mxfp8_domain, s2)
    theirs = reference.quantize_nvfp4_from_mxfp8(*mxfp8_domain, s2)
    for name, one, other in zip(("packed", "scale", "row errors"), ours, theirs, strict=True):
        np.testing.assert_array_equal(one, other, err_msg=name)


@pytest.mark.parametrize("s2", GLOBAL_SCALES, ids=lambda s2: f"s2={s2:.3g}")
def test_loops_on_every_bf16(all_bf16_pairs, s2):
    values = (all_bf16_pairs.astype(np.uint32) << 16).view(np.float32)
    ours = cpu.quantize_nvfp4_from_f32(values, s2)
    theirs = reference.quantize_nvfp4_from_f32(values, s2)
    for name, one, other in zip(("packed", "scale", "row errors"), ours, theirs, strict=True):
        np.testing.assert_array_equal(one, other, err_msg=name)


def test_domains_reach_all_scales_and_nibbles(mxfp8_domain):
    """The exhaustive tests would prove little if clamps, subnormals or signs never occurred."""
    codes, exponents = mxfp8_domain
    outs = [ops.quantize_nvfp4_from_mxfp8(codes, exponents, s2) for s2 in GLOBAL_SCALES[:2]]
    assert set(np.unique([out.scale for out in outs])) == set(range(1, 0x7F))
    assert set(np.unique(outs[0].packed & 15)) == set(range(16))


@pytest.mark.parametrize("shape", [(1, 32), (1, 96), (3, 64), (7, 6144)], ids=str)
def test_odd_shapes(random_mxfp8, shape):
    codes, exponents = random_mxfp8(*shape, seed=shape[1])
    s2 = nvfp4_global_scale(ops.mxfp8_amax(codes, exponents))
    ours = ops.quantize_nvfp4_from_mxfp8(codes, exponents, s2, backend="cpu")
    assert_same(ours, ops.quantize_nvfp4_from_mxfp8(codes, exponents, s2, backend="reference"))


def test_mxfp8_and_its_float_values_give_the_same_bytes(random_mxfp8):
    codes, exponents = random_mxfp8(5, 320, seed=3)
    s2 = nvfp4_global_scale(ops.mxfp8_amax(codes, exponents))
    from_codes = ops.quantize_nvfp4_from_mxfp8(codes, exponents, s2)
    f32 = ops.dequantize_mxfp8_f32(codes, exponents)
    bf16 = ops.dequantize_mxfp8(codes, exponents)
    assert_same(ops.quantize_nvfp4_from_float(f32, "F32", s2), from_codes)
    assert_same(ops.quantize_nvfp4_from_float(bf16, "BF16", s2), from_codes)
    f16 = f32.astype(np.float16)
    as_f32 = ops.quantize_nvfp4_from_float(f16.astype(np.float32), "F32", s2)
    assert_same(ops.quantize_nvfp4_from_float(f16, "F16", s2), as_f32)
    assert_same(ops.quantize_nvfp4_from_float(f16.view(np.uint16), "F16", s2), as_f32)


@pytest.mark.parametrize("backend", ["cpu", "torch-table", "reference"])
@pytest.mark.parametrize("order", [1, -1], ids=["ascending", "descending"])
def test_global_scales_do_not_leak_into_each_other(random_mxfp8, backend, order):
    """The table outlives a call: alternating global scales must not see each other's rows."""
    codes, exponents = random_mxfp8(4, 64, seed=5)
    scales = [np.float32(2.0**-n) for n in range(12, 20)][::order]
    once = [ops.quantize_nvfp4_from_mxfp8(codes, exponents, s2, backend=backend) for s2 in scales]
    for s2, before in list(zip(scales, once, strict=True))[::-1]:
        assert_same(ops.quantize_nvfp4_from_mxfp8(codes, exponents, s2, backend=backend), before)
    assert len({out.scale.tobytes() for out in once}) == len(once)


@pytest.mark.parametrize("backend", ["cpu", "torch-table", "reference"])
def test_signs_of_zero(backend):
    """As ModelOpt: −0 becomes +0, a negative number that rounds to zero becomes −0 (code 8)."""
    codes = np.zeros((1, 32), np.uint8)
    codes[0, :4] = [0x7E, 0x80, 0x81, 0x01]  # 448, −0, −2^−9, 2^−9
    out = ops.quantize_nvfp4_from_mxfp8(
        codes, np.array([[127]], np.uint8), np.float32(1), backend=backend
    )
    assert out.packed[0, :2].tolist() == [0x07, 0x08]


@pytest.mark.parametrize("backend", ["cpu", "torch-table", "reference"])
@pytest.mark.parametrize("exponent", [0, 1, 100])
def test_zero_blocks_have_scale_one(backend, exponent):
    codes = np.zeros((2, 32), np.uint8)
    codes[1, 16:] = 0x80
    scale = np.full((2, 1), exponent, np.uint8)
    out = ops.quantize_nvfp4_from_mxfp8(codes, scale, np.float32(1), backend=backend)
    assert (out.scale == 0x38).all()
    assert (out.packed == 0).all()


@pytest.mark.parametrize("backend", ["cpu", "torch-table", "reference"])
def test_subnormal_tensor_stays_finite(backend):
    """ModelOpt's s2 would be subnormal here, or zero; mmq's is the smallest normal number."""
    bits = np.array([[1, 2, 3, 0x8004, 5, 6, 7, 8] * 2], np.uint16)
    s2 = nvfp4_global_scale(ops.float_amax(bits, "BF16"))
    assert s2 == MIN_GLOBAL_SCALE
    out = ops.quantize_nvfp4_from_float(bits, "BF16", s2, backend=backend)
    restored = ops.dequantize_nvfp4(out.packed, out.scale, s2, backend=backend)
    assert (out.scale != 0).all()
    assert ops.count_nonfinite(restored.reshape(-1).view(np.uint8), "BF16") == (0, -1)
    assert restored[0, 7] == 8
    assert restored[0, 3] == 0x8004


def every_scale_and_pair():
    """Packed bytes [127, 256] and scales [127, 32]: every byte under every finite scale code."""
    packed = np.tile(np.arange(256, dtype=np.uint8), (127, 1))
    return packed, np.repeat(np.arange(127, dtype=np.uint8)[:, None], 32, axis=1)


@pytest.mark.parametrize("s2", GLOBAL_SCALES, ids=lambda s2: f"s2={s2:.3g}")
def test_dequantize_every_byte_under_every_scale(s2):
    packed, scale = every_scale_and_pair()
    for op, integer in (
        (ops.dequantize_nvfp4, np.uint16),
        (ops.dequantize_nvfp4_f32, np.uint32),
    ):
        ours = op(packed, scale, s2, backend="cpu")
        other = op(packed, scale, s2, backend="reference")
        np.testing.assert_array_equal(ours.view(integer), other.view(integer))


@pytest.mark.parametrize("backend", ["cpu", "torch-table", "reference"])
def test_dequantized_value_is_the_product(backend):
    """Where s2 is a power of two nothing is rounded, and the formula can be checked in F64."""
    packed, scale = every_scale_and_pair()
    e2m1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    e2m1 = np.concatenate([e2m1, -e2m1])
    elements = np.stack([e2m1[packed & 15], e2m1[packed >> 4]], axis=-1).reshape(127, 512)
    code = scale.astype(int)
    mantissa = np.where(code < 8, code & 7, 8 + (code & 7))
    e4m3 = np.ldexp(mantissa, np.maximum(code >> 3, 1) - 10)
    expected = elements * np.repeat(e4m3, 16, axis=1) * 2.0**-7
    values = ops.dequantize_nvfp4_f32(packed, scale, np.float32(2.0**-7), backend=backend)
    np.testing.assert_array_equal(values, expected)
    np.testing.assert_array_equal(np.signbit(values), np.signbit(expected))
    bits = ops.dequantize_nvfp4(packed, scale, np.float32(2.0**-7), backend=backend)
    np.testing.assert_array_equal((bits.astype(np.uint32) << 16).view(np.float32), expected)


def test_nan_scales_decode_to_nan():
    packed = np.zeros((1, 8), np.uint8)
    for backend in ("cpu", "reference"):
        bits = ops.dequantize_nvfp4(
            packed, np.array([[0x7F]], np.uint8), np.float32(1), backend=backend
        )
        assert (bits == 0x7FC0).all()

"""MXFP8: decoding and encoding on whole domains, against exact arithmetic and between backends."""

from __future__ import annotations

import numpy as np
import pytest

from mmq.kernels import ops

BACKENDS = ["cpu", "torch-table", "reference"]


def every_code_and_exponent():
    """codes U8 [256, 256] and exponents U8 [256, 8]: row b holds all codes under exponent b."""
    codes = np.tile(np.arange(256, dtype=np.uint8), (256, 1))
    return codes, np.repeat(np.arange(256, dtype=np.uint8)[:, None], 8, axis=1)


def exact_values():
    """F64 [256, 256] by the formula of the format; NaN where it has none."""
    code = np.arange(256)
    mantissa = np.where(code & 0x78, 8 + (code & 7), code & 7)
    e4m3 = np.ldexp(mantissa, np.maximum((code >> 3) & 15, 1) - 10) * np.where(code < 128, 1, -1)
    e4m3 = np.where((code & 127) == 127, np.nan, e4m3)
    powers = np.ldexp(1.0, np.arange(256) - 127)
    powers[255] = np.nan
    return e4m3[None, :] * powers[:, None]


def assert_nearest_even(bits, exact):
    """BF16 `bits` are `exact` rounded to nearest, ties to even, by comparing the neighbours."""
    assert (np.signbit(exact) == (bits >= 0x8000)).all()
    magnitude, target = (bits & 0x7FFF).astype(np.int64), np.abs(exact)

    def value(number):
        wide = np.ldexp(np.maximum(number & 127, 0) + 128.0, np.maximum(number >> 7, 1) - 134)
        wide = np.where(number < 128, np.ldexp(number * 1.0, -133), wide)
        return np.where(number >= 0x7F80, 2.0**128, wide)  # inf lies one ulp above the largest

    distance = np.abs(value(magnitude) - target)
    for other in (magnitude - 1, np.minimum(magnitude + 1, 0x7F80)):
        gap = np.where(other < 0, np.inf, np.abs(value(other) - target))
        assert (distance <= gap).all()
        tie = (distance == gap) & (other != magnitude)
        assert (magnitude[tie] % 2 == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_decode_every_code_under_every_exponent(backend):
    codes, scale = every_code_and_exponent()
    exact = exact_values()
    f32 = ops.dequantize_mxfp8_f32(codes, scale, backend=backend)
    in_range = ~(np.abs(exact) >= 2.0**128)
    np.testing.assert_array_equal(f32[in_range], exact[in_range])
    assert np.isinf(f32[~in_range]).all()
    bits = ops.dequantize_mxfp8(codes, scale, backend=backend)
    assert (bits[np.isnan(exact)] == 0x7FC0).all()
    finite = in_range & ~np.isnan(exact)
    assert_nearest_even(bits[finite], exact[finite])
    assert (bits[~in_range] & 0x7FFF == 0x7F80).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_bf16_holds_real_weights_exactly(backend):
    """From exponent 9 to 246 every element is a BF16 number: converting to BF16 loses nothing."""
    codes, scale = every_code_and_exponent()
    bits = ops.dequantize_mxfp8(codes[9:247], scale[9:247], backend=backend)
    values = (bits.astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_array_equal(values, exact_values()[9:247])


def test_encode_every_bf16_as_the_reference(all_bf16_pairs):
    ours = ops.quantize_mxfp8(all_bf16_pairs, "BF16", backend="cpu")
    reference = ops.quantize_mxfp8(all_bf16_pairs, "BF16", backend="reference")
    np.testing.assert_array_equal(ours.scale, reference.scale)
    np.testing.assert_array_equal(ours.codes, reference.codes)
    assert ours.error == reference.error


@pytest.mark.parametrize("backend", BACKENDS)
def test_encode_follows_the_formula(all_bf16_pairs, backend):
    """Exponent by frexp in F64, element as near as any E4M3 code, ties to the even code."""
    out = ops.quantize_mxfp8(all_bf16_pairs, "BF16", backend=backend)
    exact = (all_bf16_pairs.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    amax = np.abs(exact).max(axis=1, keepdims=True)
    floor_log2 = np.where(amax > 0, np.frexp(amax)[1] - 1, -10000)
    np.testing.assert_array_equal(out.scale, np.maximum(floor_log2 - 8 + 127, 0))
    quotient = np.abs(exact) / np.ldexp(1.0, out.scale.astype(int) - 127)
    grid = exact_values()[127, :127]
    midpoints = (grid[1:] + grid[:-1]) / 2
    below = np.searchsorted(midpoints, quotient, side="left")
    tie = np.isin(quotient, midpoints)
    expected = np.where(tie & (below % 2 == 1), below + 1, below)
    np.testing.assert_array_equal(out.codes & 127, expected)
    np.testing.assert_array_equal(out.codes >> 7, all_bf16_pairs >> 15)


@pytest.mark.parametrize("backend", BACKENDS)
def test_round_trip_restores_codes(backend):
    """A block whose largest code is 256 or more comes back as it was, signs of zeros included."""
    codes, scale = every_code_and_exponent()
    codes, scale = codes[9:247].copy(), scale[9:247]
    codes[(codes & 127) == 127] = 0x80
    codes.reshape(len(codes), -1, 32)[:, :, 0] = 0x79
    bits = ops.dequantize_mxfp8(codes, scale, backend=backend)
    out = ops.quantize_mxfp8(bits, "BF16", backend=backend)
    np.testing.assert_array_equal(out.codes, codes)
    np.testing.assert_array_equal(out.scale, scale)
    assert out.error.noise == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_zero_and_largest_blocks(backend):
    bits = np.zeros((3, 32), np.uint16)
    bits[1, 5] = 0x8000
    bits[2, 0] = 0x7F7F  # the largest BF16
    out = ops.quantize_mxfp8(bits, "BF16", backend=backend)
    assert out.scale[:, 0].tolist() == [0, 0, 246]
    assert out.codes[1, 5] == 0x80
    assert out.codes[2, 0] == 0x7E


@pytest.mark.parametrize("backend", BACKENDS)
def test_f32_and_f16_sources(backend):
    values = np.random.default_rng(2).standard_normal((4, 64)).astype(np.float16)
    halves = ops.quantize_mxfp8(values, "F16", backend=backend)
    floats = ops.quantize_mxfp8(values.astype(np.float32), "F32", backend=backend)
    np.testing.assert_array_equal(halves.codes, floats.codes)
    assert halves.error == floats.error
    wide = np.full((1, 32), np.finfo(np.float32).max, np.float32)
    assert ops.quantize_mxfp8(wide, "F32", backend=backend).codes[0, 0] == 0x7E


@pytest.mark.parametrize("seed", range(20))
def test_amax_is_exact(random_mxfp8, seed):
    """Also where a low exponent with a high code beats a high exponent with a low code."""
    codes, scale = random_mxfp8(3, 96, seed)
    if seed % 2:
        codes[:, :64] &= 0x87  # subnormal codes only: the highest exponents may hold little
        codes[:, 64:] &= 0x9F
    expected = np.abs(ops.dequantize_mxfp8_f32(codes, scale)).max()
    for backend in BACKENDS:
        assert ops.mxfp8_amax(codes, scale, backend=backend) == expected


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("high", "low", "expected"),
    [(0x70, 0x7E, 224.0), (0x76, 0x7E, 224.0), (0x77, 0x7E, 240.0), (0x00, 0x01, 2.0**-10)],
    ids=str,
)
def test_amax_may_lie_under_a_lower_exponent(backend, high, low, expected):
    """128 · 2^e against 448 · 2^(e − 1): a block may be skipped only if it cannot win."""
    codes = np.zeros((1, 64), np.uint8)
    codes[0, [3, 40]] = high, low
    scale = np.array([[127, 126]], np.uint8)
    assert ops.mxfp8_amax(codes, scale, backend=backend) == expected


@pytest.mark.parametrize("backend", BACKENDS)
def test_amax_of_zeros_and_of_overflow(backend):
    codes = np.zeros((2, 32), np.uint8)
    scale = np.array([[254], [0]], np.uint8)
    assert ops.mxfp8_amax(codes, scale, backend=backend) == 0
    codes[0, 3] = 0xBF  # −1.875 · 2^127: the last that fits
    assert ops.mxfp8_amax(codes, scale, backend=backend) == np.float32(1.875 * 2.0**127)
    codes[0, 3] = 0xC0
    assert np.isinf(ops.mxfp8_amax(codes, scale, backend=backend))

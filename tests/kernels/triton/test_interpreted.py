"""The kernels in Triton's interpreter against the reference: every byte and every error sum.

Dimensions: O rows, K columns, G = K/32.
"""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("triton", reason="needs triton, which has wheels for Linux only")

from scalar_kernel import products_of_a_scalar

from mmq.kernels.reference import backend as reference
from mmq.kernels.results import ScaleChoice
from mmq.kernels.scan import float_amax
from mmq.kernels.triton import backend
from mmq.quantize.global_scale import MIN_GLOBAL_SCALE, nvfp4_global_scale

# A power of two (short quotients: many ties), odd amaxes, and both ends of the range.
GLOBAL_SCALES = [
    np.float32(2.0**-7),
    nvfp4_global_scale(np.float32(0.1234)),
    nvfp4_global_scale(np.float32(1.75)),
    MIN_GLOBAL_SCALE,
    nvfp4_global_scale(np.finfo(np.float32).max),
]
#: Both ends, where BF16 and F32 get subnormal, and around the exponents of the global scales.
EXPONENTS = [0, 1, 8, 104, 110, 118, 119, 127, 246]

scales = pytest.mark.parametrize("s2", GLOBAL_SCALES, ids=lambda s2: f"s2={s2:.3g}")
#: The same, two of them in the normal suite.
two_scales = pytest.mark.parametrize(
    "s2",
    [*GLOBAL_SCALES[:2], *(pytest.param(s2, marks=pytest.mark.slow) for s2 in GLOBAL_SCALES[2:])],
    ids=lambda s2: f"s2={s2:.3g}",
)


def widen(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def finite_f32(count, seed=1):
    """F32 numbers of all magnitudes, subnormals and zeros included."""
    bits = np.random.default_rng(seed).integers(0, 2**32, count, np.uint32)
    bits[:: count // 64] &= 0x807FFFFF
    bits[1 :: count // 16] &= 0x80000000
    bits[(bits & 0x7F800000) == 0x7F800000] = 1
    return bits.view(np.float32)


@pytest.fixture
def assert_same(interpreted):
    """A function (name, *arguments): the backend's function of that name gives the reference's."""

    def check(name, *arguments, source=None, tile=32768):
        given = arguments if source is None else source
        ours = interpreted(getattr(backend, name), *given, tile=tile)
        expected = getattr(reference, name)(*arguments)
        if isinstance(expected, tuple):
            assert [a.dtype for a in ours] == [a.dtype for a in expected]
            for got, want in zip(ours, expected, strict=True):
                np.testing.assert_array_equal(got, want, strict=True)
        else:
            np.testing.assert_array_equal(ours, expected, strict=True)
            nan = np.isnan(expected) if expected.dtype == np.float32 else False
            np.testing.assert_array_equal(np.signbit(ours) | nan, np.signbit(expected) | nan)
        return ours

    return check


@two_scales
def test_every_max_and_code_to_nvfp4(assert_same, all_codes_under_every_max, s2):
    codes = np.tile(all_codes_under_every_max, (len(EXPONENTS), 1))
    exponents = np.repeat(np.array(EXPONENTS, np.uint8), len(all_codes_under_every_max))
    assert_same("quantize_nvfp4_from_mxfp8", codes, exponents[:, None], s2)


@pytest.mark.slow
@scales
def test_every_exponent_max_and_code_to_nvfp4(assert_same, mxfp8_domain, s2):
    assert_same("quantize_nvfp4_from_mxfp8", *mxfp8_domain, s2)


@two_scales
def test_every_bf16_to_nvfp4(assert_same, all_bf16_pairs, s2):
    f32 = widen(all_bf16_pairs)
    assert_same("quantize_nvfp4_from_f32", f32, s2, source=(all_bf16_pairs, s2))


@scales
def test_f32_to_nvfp4(assert_same, s2):
    assert_same("quantize_nvfp4_from_f32", finite_f32(32768).reshape(64, 512), s2)
    near = finite_f32(32768) % np.float32(8.0) * s2  # quotients where all codes occur
    assert_same("quantize_nvfp4_from_f32", near.reshape(64, 512), s2)


def test_every_bf16_to_mxfp8(assert_same, all_bf16_pairs):
    f32 = widen(all_bf16_pairs)
    assert_same("quantize_mxfp8_from_f32", f32, source=(all_bf16_pairs,))


def test_f32_to_mxfp8(assert_same):
    values = finite_f32(65536).reshape(128, 512)
    assert_same("quantize_mxfp8_from_f32", values)
    assert_same("quantize_mxfp8_from_f32", np.sort(values.ravel()).reshape(128, 512))


@pytest.mark.parametrize("form", ["bf16", "f32"])
def test_every_mxfp8_code_under_every_exponent(assert_same, form):
    codes = np.tile(np.arange(256, dtype=np.uint8), (256, 1))
    exponents = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 8, axis=1)
    assert_same(f"dequantize_mxfp8_{form}", codes, exponents)


@pytest.mark.parametrize("form", ["bf16", "f32"])
@scales
def test_every_nvfp4_byte_under_every_scale(assert_same, s2, form):
    """Negative scales and NaN too: a decoder shows what it was given."""
    packed = np.tile(np.arange(256, dtype=np.uint8), (256, 1))
    scale = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 32, axis=1)
    assert_same(f"dequantize_nvfp4_{form}", packed, scale, s2)


def golden_bits(case):
    rows = [row.split() for row in case["input_bf16_bits"]]
    return np.array([[int(word, 16) for word in row] for row in rows], np.uint16)


def test_golden_bytes(interpreted, golden):
    """ModelOpt's bytes of every edge block; and an all-zero tensor, of which it makes NaN."""
    for name in sorted(set(golden) - {"nan", "inf"}):
        bits = golden_bits(golden[name])
        amax = interpreted(backend.float_amax, bits)
        s2 = nvfp4_global_scale(amax)
        packed, scale, _ = interpreted(backend.quantize_nvfp4_from_f32, bits, s2)
        if name == "allzero":
            assert s2 == 1 and (scale == 0x38).all() and not packed.any()
            continue
        peer = golden[name]["outputs"]["modelopt/NVFP4QTensor"]
        assert s2 == np.float32(peer["s2"])
        assert [row.tobytes().hex() for row in packed] == peer["packed"], name
        assert [row.tobytes().hex() for row in scale] == peer["scale_e4m3"], name


def test_signs_of_zero(interpreted):
    """As the reference: −0 becomes +0, a negative number that rounds to zero becomes −0 (8)."""
    codes = np.zeros((1, 32), np.uint8)
    codes[0, :4] = [0x7E, 0x80, 0x81, 0x01]  # 448, −0, −2^−9, 2^−9
    one = np.array([[127]], np.uint8), np.float32(1)
    packed, scale, _ = interpreted(backend.quantize_nvfp4_from_mxfp8, codes, *one)
    assert packed[0, :2].tolist() == [0x07, 0x08]
    assert scale.tolist() == [[0x69, 0x38]]  # 448 / 6 = 74.7, which E4M3 rounds to 72


def test_subnormal_tensors_and_scales(assert_same):
    bits = np.array([[1, 2, 3, 0x8004, 5, 6, 7, 8] * 4], np.uint16)
    f32 = widen(bits)
    assert_same("quantize_nvfp4_from_f32", f32, MIN_GLOBAL_SCALE, source=(bits, MIN_GLOBAL_SCALE))
    assert_same("quantize_mxfp8_from_f32", f32, source=(bits,))
    # Blocks far below the tensor's largest: E4M3 codes 1 … 7, and quotients that vanish.
    steps = np.exp2(np.linspace(-150, 0, 1500)).astype(np.float32)[:, None]
    blocks = np.linspace(-2, 2, 16, dtype=np.float32)[None, :] * steps
    _, scale, _ = assert_same("quantize_nvfp4_from_f32", blocks, np.float32(0.01))
    assert set(range(1, 8)) < set(scale.ravel().tolist())


@pytest.mark.parametrize("shape", [(1, 32), (1, 96), (3, 64), (33, 160), (2, 6144)], ids=str)
def test_odd_shapes(assert_same, random_mxfp8, shape):
    """One row, rows that end inside a tile, more rows than a warp sums, several tiles."""
    codes, exponents = random_mxfp8(*shape, seed=shape[1])

    def check(name, *arguments, source=None):
        return assert_same(name, *arguments, source=source, tile=backend.TILE)

    s2 = nvfp4_global_scale(check("mxfp8_amax", codes, exponents))
    packed, scale, _ = check("quantize_nvfp4_from_mxfp8", codes, exponents, s2)
    f32 = check("dequantize_mxfp8_f32", codes, exponents)
    bits = check("dequantize_mxfp8_bf16", codes, exponents)
    check("quantize_nvfp4_from_f32", f32, s2)
    check("quantize_nvfp4_from_f32", f32, s2, source=(bits, s2))
    check("quantize_mxfp8_from_f32", f32, source=(bits,))
    check("dequantize_nvfp4_bf16", packed, scale, s2)
    check("dequantize_nvfp4_f32", packed, scale, s2)
    no_errors = ScaleChoice(errors=False)
    assert check("quantize_nvfp4_from_f32", f32, s2, no_errors)[2].shape == (0, 3)


def test_no_rows(interpreted):
    codes, exponents = np.empty((0, 64), np.uint8), np.empty((0, 2), np.uint8)
    assert interpreted(backend.mxfp8_amax, codes, exponents) == 0
    assert interpreted(backend.dequantize_mxfp8_bf16, codes, exponents).shape == (0, 64)
    f32 = np.empty((0, 64), np.float32)
    assert interpreted(backend.float_amax, f32) == 0
    shapes = [a.shape for a in interpreted(backend.quantize_nvfp4_from_f32, f32, np.float32(1))]
    assert shapes == [(0, 32), (0, 4), (0, 3)]
    assert [a.shape for a in interpreted(backend.quantize_mxfp8_from_f32, f32)] == [
        (0, 64), (0, 2), (0, 3)
    ]  # fmt: skip
    values = interpreted(backend.dequantize_nvfp4_f32, codes, np.empty((0, 8)), np.float32(1))
    assert values.shape == (0, 128)


def importance(columns):
    """Weights over 2^40, some of them 0."""
    weights = np.exp2(np.random.default_rng(4).uniform(-20, 20, columns)).astype(np.float32)
    weights[::3] = 0
    return weights


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("search", ["mse", "four-over-six"])
def test_searches_of_odd_shapes(assert_same, random_mxfp8, search, weighted):
    """Three rows in two tiles, from each kind of source, under a short and a long global scale."""
    codes, exponents = random_mxfp8(3, 864, seed=3)
    choice = ScaleChoice(search, importance(864) if weighted else None)
    amax = reference.mxfp8_amax(codes, exponents)
    options = nvfp4_global_scale(amax, search), choice
    tile = backend.TILE
    assert_same("quantize_nvfp4_from_mxfp8", codes, exponents, *options, tile=tile)
    f32 = reference.dequantize_mxfp8_f32(codes, exponents)
    source = reference.dequantize_mxfp8_bf16(codes, exponents), *options
    assert_same("quantize_nvfp4_from_f32", f32, *options, source=source, tile=2 * tile)
    options = nvfp4_global_scale(amax), choice
    assert_same("quantize_nvfp4_from_mxfp8", codes, exponents, *options, tile=2 * tile)


#: A global scale as searches use it.
SHORT_SCALE = np.float32(19 / 16 * 2.0**-9)


def blocks_of_all_kinds(rows, seed=8):
    """BF16 numbers, F32 [O, 16]: Gaussian, two levels, small integers, of many magnitudes."""
    rng = np.random.default_rng(seed)
    unit = rng.uniform(0.05, 1, (rows, 1))
    low, high = rng.uniform(0.05, 0.6, (rows, 1)), rng.uniform(0.8, 0.88, (rows, 1))
    kinds = [
        rng.standard_normal((rows, 16)) * 0.05,
        np.where(rng.random((rows, 16)) < 0.5, low, high) * unit,
        rng.integers(-6, 7, (rows, 16)) / 6 * unit,
        rng.standard_normal((rows, 16)) * np.exp2(rng.uniform(-20, -8, (rows, 1))),
        np.linspace(-2, 2, 16) * np.exp2(np.linspace(-140, 100, rows))[:, None],
        # What a scale code from 9 to 15 holds exactly, while the `max` scale is subnormal.
        rng.choice([0, 0.5, -1, 1.5, 2, -3], (rows, 16))
        * (rng.integers(9, 16, (rows, 1)) * 2.0**-9 * SHORT_SCALE),
    ]
    kinds[1][:, 0] = unit[:, 0]
    bits = np.concatenate(kinds).astype(np.float32).view(np.uint32) & 0xFFFF0000
    return bits.view(np.float32)


@pytest.mark.parametrize("search", ["mse", "four-over-six"])
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_searches_of_blocks_of_all_kinds(assert_same, search, weighted):
    """Blocks that vanish beside s2 or that no scale can hold, ties, zeros, subnormal scales."""
    f32 = blocks_of_all_kinds(150)
    bits = (f32.view(np.uint32) >> 16).astype(np.uint16)
    choice = ScaleChoice(search, importance(16) if weighted else None)
    scales = SHORT_SCALE, MIN_GLOBAL_SCALE, np.finfo(np.float32).max
    for s2 in scales[:1] if weighted else scales:
        options = s2, choice
        source = bits, *options
        assert_same("quantize_nvfp4_from_f32", f32, *options, source=source, tile=16384)
    if not weighted:
        f32 = (f32 * np.float32(1.1))[::4]
        assert_same("quantize_nvfp4_from_f32", f32, scales[0], choice, tile=4096)


def test_best_scales_far_from_max_scaling(assert_same):
    """A program tries what any of its blocks needs, so blocks of each kind get one of their own."""
    f32 = blocks_of_all_kinds(500)

    def scales(choice):
        return reference.quantize_nvfp4_from_f32(f32, SHORT_SCALE, choice)[1].astype(int).ravel()

    first, best = scales(ScaleChoice("max")), scales(ScaleChoice("mse"))
    kinds = [
        (first >= 8) & (best - first <= -3),
        (first >= 8) & (best - first >= 7),
        (first < 8) & (best == 15),
    ]
    assert (best - first)[kinds[2]].max() >= 10
    for kind in kinds:
        bits = (f32[kind].view(np.uint32) >> 16).astype(np.uint16)
        options = SHORT_SCALE, ScaleChoice("mse")
        source = bits, *options
        assert len(bits)
        assert_same("quantize_nvfp4_from_f32", f32[kind], *options, source=source, tile=2048)
    assert (scales(ScaleChoice("mse", importance(16))) - first).min() < -16


@pytest.mark.slow
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("search", ["mse", "four-over-six"])
@two_scales
def test_searches_of_every_max_and_code(
    assert_same, all_codes_under_every_max, s2, search, weighted
):
    codes = np.tile(all_codes_under_every_max, (len(EXPONENTS), 1))
    exponents = np.repeat(np.array(EXPONENTS, np.uint8), len(all_codes_under_every_max))
    choice = ScaleChoice(search, importance(32) if weighted else None)
    assert_same("quantize_nvfp4_from_mxfp8", codes, exponents[:, None], s2, choice)


def test_rows_do_not_depend_on_chunks(interpreted, random_mxfp8):
    codes, exponents = random_mxfp8(5, 320, seed=3)
    quantize = backend.quantize_nvfp4_from_mxfp8
    whole = interpreted(quantize, codes, exponents, GLOBAL_SCALES[1])
    for o in range(5):
        source = codes[o : o + 1], exponents[o : o + 1], GLOBAL_SCALES[1]
        for part, all_rows in zip(interpreted(quantize, *source), whole, strict=True):
            np.testing.assert_array_equal(part, all_rows[o : o + 1])


def test_amax(interpreted, assert_same):
    codes = np.zeros((130, 64), np.uint8)
    exponents = np.full((130, 2), 254, np.uint8)
    assert assert_same("mxfp8_amax", codes, exponents) == 0
    codes[129, 63] = 0xBF  # −1.875 · 2^127, the last that fits, in the last tile
    assert assert_same("mxfp8_amax", codes, exponents) == np.float32(1.875 * 2.0**127)
    codes[129, 63] = 0xC0
    assert np.isinf(assert_same("mxfp8_amax", codes, exponents))
    values = finite_f32(9999).reshape(99, 101)
    assert interpreted(backend.float_amax, values) == float_amax(values, "F32")
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    assert interpreted(backend.float_amax, bits) == float_amax(bits, "BF16")
    bits[0, 0] = 0x7FC0
    assert np.isnan(interpreted(backend.float_amax, bits))


def test_nan_stays_in_bounds(interpreted):
    """Callers scan first. If one does not, codes mean nothing, but no scale byte is NaN."""
    for bad in (np.nan, np.inf, -np.inf):
        values = np.array([[bad, *range(31)]], np.float32)
        nvfp4 = interpreted(backend.quantize_nvfp4_from_f32, values, np.float32(1))
        assert (nvfp4[1] < 0x7F).all()
        assert (interpreted(backend.quantize_mxfp8_from_f32, values)[0] & 0x7F < 0x7F).all()


def test_scalars_are_made_f32_first(interpreted):
    """In the interpreter a scalar argument is a Python float: its products are rounded late."""
    third = float(np.float32(1) / np.float32(3))
    plain, made_f32 = interpreted(products_of_a_scalar, third)
    assert np.float32(third) * np.float32(third) * np.float32(3) == made_f32 != plain


def test_without_a_gpu_the_error_says_so():
    if backend.torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    with pytest.raises(backend.NoDeviceError, match="no CUDA or ROCm device"):
        backend.float_amax(np.zeros(16, np.float32))

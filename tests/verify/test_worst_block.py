"""The bound on every block: what real quantisers make passes, what one fault makes does not."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from m3_source import E2M1, E4M3

from mmq.kernels import ops
from mmq.verify.values import MIN_SQNR_DB, ValueCheck, check_slab

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "nvfp4-golden.json").read_bytes())
#: Without a tensor scale F32 does not suffice there, or no scale does: all of it is lost.
HOPELESS = {("huge_amax", "torchao/single_level"), ("tiny_amax", "torchao/single_level"),
            ("huge_amax", "llmcompressor/expanded_mse")}  # fmt: skip


def peers():
    for name, case in GOLDEN["cases"].items():
        for peer, output in case["outputs"].items():
            usable = name not in ("nan", "inf", "allzero") and "packed" in output
            if usable and (name, peer) not in HOPELESS:
                yield pytest.param(case, output, id=f"{name}-{peer}")


def check(values, packed, scale, s2):
    result = ValueCheck()
    check_slab(values, packed, scale, np.float32(s2), 0, result)
    return result


def rows_of(text):
    return np.array([list(bytes.fromhex(row)) for row in text], np.uint8)


@pytest.mark.parametrize(("case", "output"), list(peers()))
def test_every_public_quantiser_is_nearest(case, output):
    """ModelOpt, torchao, llm-compressor, auto-round, Quark, four-over-six: scale searches too."""
    bits = np.array([[int(w, 16) for w in row.split()] for row in case["input_bf16_bits"]])
    values = (bits.astype(np.uint32) << 16).view(np.float32)
    result = check(values, rows_of(output["packed"]), rows_of(output["scale_e4m3"]), output["s2"])
    assert result.nearest.count == result.step.count == 0
    assert result.blocks == values.size // 16


# ---- a scale search as an independent quantiser would do it -----------------------------------
LEVELS = E2M1[:8]


def rounded(values, unit):
    """Nearest E2M1 codes (ties up, unlike mmq) of values under a block unit, in float64."""
    t = np.abs(values) / unit
    level = np.abs(t[..., None] - LEVELS[::-1]).argmin(-1)
    return (7 - level).astype(np.uint8) | (np.signbit(values) << 3).astype(np.uint8)


def searched(values, s2, offsets):
    """The best of max scaling's code plus each offset, per block: (packed, scale)."""
    blocks = values.reshape(len(values), -1, 16).astype(np.float64)
    wanted = np.abs(blocks).max(-1) / (6 * s2)
    code = np.abs(E4M3[:127] - wanted[..., None]).argmin(-1)
    best = np.full(code.shape, np.inf)
    scale = np.zeros(code.shape, np.uint8)
    codes = np.zeros(blocks.shape, np.uint8)
    for offset in offsets:
        tried = np.clip(code + offset, 1, 126)
        unit = (E4M3[tried] * s2)[..., None]
        c = rounded(blocks, unit)
        error = ((E2M1[c] * unit - blocks) ** 2).sum(-1)
        better = error < best
        best, scale = np.where(better, error, best), np.where(better, tried, scale)
        codes = np.where(better[..., None], c, codes)
    flat = codes.reshape(values.shape)
    return (flat[:, ::2] | flat[:, 1::2] << 4).astype(np.uint8), scale.astype(np.uint8)


@pytest.fixture(scope="module")
def values():
    """Uneven rows with outliers: 64 × 2048, MXFP8-exact as a source is."""
    rng = np.random.default_rng(5)
    raw = rng.standard_t(4, (64, 2048)) * np.exp(rng.standard_normal((64, 1))) * 0.02
    codes, scale, _ = ops.quantize_mxfp8(raw.astype(np.float32), "F32")
    return ops.dequantize_mxfp8_f32(codes, scale)


@pytest.mark.parametrize("offsets", [[0], range(-2, 7), [0, 4], [0, 5]],
                         ids=["max", "search", "four or six", "other"])  # fmt: skip
@pytest.mark.parametrize("factor", [1, 1.75, 10], ids="amax/{}".format)
def test_scale_searches_pass(offsets, factor, values):
    s2 = np.float32(np.abs(values).max() / 2688 * factor)
    result = check(values, *searched(values, float(s2), offsets), s2)
    assert result.nearest.count == 0 and result.sqnr_db > MIN_SQNR_DB


def test_subnormal_scales(values):
    """One huge outlier pushes all other blocks into E4M3's subnormals."""
    values = values.copy()
    values[0, 0] = 2.0**11
    s2 = np.float32(2.0**11 / 2688)
    packed, scale = searched(values, float(s2), [0])
    assert np.mean(scale < 8) > 0.5
    assert check(values, packed, scale, s2).nearest.count == 0


def test_flushed_subnormal_blocks_are_counted_apart(values):
    values = values.copy()
    values[0, 0] = 2.0**9
    s2 = np.float32(2.0**9 / 2688)
    packed, scale = searched(values, float(s2), [0])
    scale[scale < 8] = 0
    result = check(values, packed, scale, s2)
    assert result.nearest.count == 0 and result.faint > 1000
    # but not where a block is large enough for a normal scale
    scale[0, 0] = 0
    assert check(values, packed, scale, s2).nearest.count == 1


def test_brain_float_arithmetic_passes():
    """llm-compressor divides in bf16: quotients are off by up to 2^-8."""
    values = np.random.default_rng(9).standard_normal((64, 2048)).astype(np.float32)
    s2 = np.float32(np.abs(values).max() / 2688)
    for factor in (1 + 2.0**-8, 1 - 2.0**-8):
        packed, scale = searched(values * factor, float(s2), [0])
        assert not np.array_equal(packed, searched(values, float(s2), [0])[0])
        assert check(values, packed, scale, s2).nearest.count == 0


# ---- rounding that is not to nearest ------------------------------------------------------------
def test_weights_quantised_from_another_source_are_recognised(values):
    """NVIDIA quantises BF16 weights; against the MXFP8 release they are no longer nearest."""
    rng = np.random.default_rng(1)
    bf16 = values * (1 + rng.uniform(-1 / 17, 1 / 17, values.shape)).astype(np.float32)
    s2 = np.float32(np.abs(bf16).max() / 2688)
    packed, scale = searched(bf16, float(s2), [0])
    result = check(values, packed, scale, s2)
    assert result.adaptive and result.violations.count == 0 and result.sqnr_db > MIN_SQNR_DB
    # one damaged block is still found
    at = np.unravel_index(np.abs(values).argmax(), values.shape)
    packed[at[0], at[1] // 16 * 8 : at[1] // 16 * 8 + 8] ^= 0x88
    assert check(values, packed, scale, s2).violations.count == 1


# ---- one fault in a large tensor -----------------------------------------------------------------
def swap_codes(packed, scale, row, block):
    part = slice(block * 8, block * 8 + 8)
    packed[row, part] = packed[row, part] << 4 | packed[row, part] >> 4


def next_row(packed, scale, row, block):
    part = slice(block * 8, block * 8 + 8)
    packed[row, part] = packed[row - 1, part]


def raise_scale(packed, scale, row, block):
    scale[row, block] += 8


def swap_scales(packed, scale, row, block):
    scale[row, [block, block ^ 1]] = scale[row, [block ^ 1, block]]


FAULTS = [swap_codes, next_row, raise_scale, swap_scales]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_one_fault_anywhere_in_a_large_tensor(fault, values):
    """In each of 200 random blocks of 8,192, also where neighbouring scales differ by one code."""
    s2 = np.float32(np.abs(values).max() / 2688)
    packed, scale = searched(values, float(s2), [0])
    rng = np.random.default_rng(7)
    missed = 0
    for _ in range(200):
        row, block = int(rng.integers(1, 64)), int(rng.integers(0, 128))
        damaged = packed.copy(), scale.copy()
        fault(*damaged, row, block)
        changed = np.array_equal(damaged[0], packed) and np.array_equal(damaged[1], scale)
        result = check(values, *damaged, s2)
        missed += not changed and result.violations.count == 0
        assert result.violations.count <= 2
    assert missed == 0


def test_sqnr_is_what_it_says(values):
    s2 = np.float32(np.abs(values).max() / 2688)
    packed, scale = searched(values, float(s2), [0])
    byte = np.stack([packed & 15, packed >> 4], -1).reshape(values.shape)
    q = E2M1[byte] * np.repeat(E4M3[scale], 16, 1) * float(s2)
    x = values.astype(np.float64)
    expected = 10 * math.log10((x * x).sum() / ((x - q) ** 2).sum())
    assert abs(check(values, packed, scale, s2).sqnr_db - expected) < 1e-3


def test_tiny_and_huge_tensors_have_the_same_sqnr(values):
    found = []
    for factor in (1.0, 2.0**-100, 2.0**100):
        scaled = values * np.float32(factor)
        s2 = np.float32(np.abs(scaled).max() / 2688)
        packed, scale = searched(scaled, float(s2), [0])
        found.append(check(scaled, packed, scale, s2).sqnr_db)
    assert max(found) - min(found) < 1e-6


def test_zeros_are_exact():
    zeros = np.zeros((4, 32), np.float32)
    result = check(zeros, np.zeros((4, 16), np.uint8), np.full((4, 2), 0x38, np.uint8), 1.0)
    assert result.sqnr_db == math.inf and result.nearest.count == 0
    ones = np.full((4, 16), 0x22, np.uint8)
    result = check(zeros, ones, np.full((4, 2), 0x38, np.uint8), 1.0)
    assert result.sqnr_db == -math.inf and result.nearest.count == 8


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_nan_scale_never_passes(byte, values):
    s2 = np.float32(np.abs(values).max() / 2688)
    packed, scale = searched(values, float(s2), [0])
    scale[3, 4] = byte
    result = check(values, packed, scale, s2)
    assert not result.sqnr_db >= MIN_SQNR_DB and result.nearest.count == 1

"""The searches: every backend against the definition, which tries all 126 codes."""

from __future__ import annotations

import numpy as np
import pytest
import sample_blocks
import torch

from mmq.kernels import ops, tables
from mmq.kernels.cpu import code_blocks
from mmq.kernels.reference import scale_search
from mmq.quantize.global_scale import MIN_GLOBAL_SCALE, nvfp4_global_scale

FAST = ["cpu", "torch-table"]
BACKENDS = [*FAST, "reference"]
SEARCHES = ["mse", "four-over-six"]


def assert_same(ours: ops.Nvfp4, other: ops.Nvfp4):
    np.testing.assert_array_equal(ours.scale, other.scale)
    np.testing.assert_array_equal(ours.packed, other.packed)
    assert ours.error == other.error


def as_bf16(values):
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def check_blocks(blocks):
    """All backends agree on F32, BF16 and MXFP8 forms of the blocks."""
    values = blocks.reshape(-1, 64)
    bits = as_bf16(values)
    mxfp8 = ops.quantize_mxfp8(values, "F32")
    s2 = nvfp4_global_scale(ops.float_amax(values, "F32"), "mse")
    for op, arguments in (
        (ops.quantize_nvfp4_from_float, (values, "F32", s2)),
        (ops.quantize_nvfp4_from_float, (bits, "BF16", s2)),
        (ops.quantize_nvfp4_from_mxfp8, (mxfp8.codes, mxfp8.scale, s2)),
    ):
        definition = op(*arguments, search="mse", backend="reference")
        for backend in FAST:
            assert_same(op(*arguments, search="mse", backend=backend), definition)


@pytest.mark.parametrize("blocks", sample_blocks.DISTRIBUTIONS, ids=lambda f: f.__name__)
def test_is_the_best_of_all_codes(blocks):
    """Five times 20,000 blocks, a third of them in each source format."""
    check_blocks(blocks(20_000 // 3 // 4 * 4, seed=1))


def test_every_rounding_of_the_error_counts():
    """Near ties: another order of additions, or wider ones, would choose other codes in many."""
    blocks = sample_blocks.near_ties(1000, seed=13)
    assert len(blocks) == 1000
    s2 = np.float32(sample_blocks.S2)
    definition = ops.quantize_nvfp4_from_float(blocks, "F32", s2, search="mse", backend="reference")
    weights = np.ones(16, np.float32)
    for backend in FAST:
        options = {"search": "mse", "backend": backend}
        assert_same(ops.quantize_nvfp4_from_float(blocks, "F32", s2, **options), definition)
        weighted = ops.quantize_nvfp4_from_float(blocks, "F32", s2, importance=weights, **options)
        assert_same(weighted, definition)


def test_tree_of_the_definition():
    x = np.random.default_rng(14).random((50, 16)).astype(np.float32)
    tree = scale_search.tree_sum(torch.from_numpy(x)).numpy()
    a, b, c, d, e, f, g, h, i, j, k, m, n, o, p, q = x.T
    by_hand = (((a + b) + (c + d)) + ((e + f) + (g + h))) + (
        ((i + j) + (k + m)) + ((n + o) + (p + q))
    )
    np.testing.assert_array_equal(tree, by_hand)


def test_rows_of_tables_are_added_in_the_order_of_the_tree():
    """With a table of near ties instead of errors, so that the order decides."""
    rng = np.random.default_rng(15)
    ulps = 1 + rng.integers(-2, 3, (128, 128, 16)) * 2.0**-24
    table = (rng.uniform(0.5, 1, (128, 128, 1)) * ulps).astype(np.float32)
    table[:, :, len(tables.CANDIDATES) :] = np.inf
    rows = tables.search_tables(19 / 16)[1]
    codes = rng.integers(1, 127, (1, 64_000)).astype(np.uint8)
    exponents = np.full((1, 2_000), 122, np.uint8)
    packed, scale = np.empty((1, 32_000), np.uint8), np.empty((1, 4_000), np.uint8)
    s2 = np.float32(19 / 16 * 2.0**-5)
    code_blocks.quantize_nvfp4_codes_mse(
        codes, exponents, table, rows, 5 - 127, s2, 19 / 16, 2.0**5, packed, scale, np.empty((0, 3))
    )
    blocks = codes.reshape(-1, 16)
    largest = blocks.max(axis=1)
    sums = table[largest[:, None], blocks]
    while sums.shape[1] > 1:
        sums = sums[:, 0::2] + sums[:, 1::2]
    lanes = sums[:, 0].argmin(axis=1)
    regular = largest > 0x50
    assert regular.sum() > 3_900
    expected = rows[largest, lanes, 7].astype(int) - tables.CODE_BIAS
    np.testing.assert_array_equal(scale[0][regular], expected[regular])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 12))
@pytest.mark.parametrize("blocks", sample_blocks.DISTRIBUTIONS, ids=lambda f: f.__name__)
def test_is_the_best_of_all_codes_on_a_million_blocks(blocks, seed):
    check_blocks(blocks(8_000, seed))


@pytest.mark.parametrize("backend", FAST)
def test_every_max_and_code_under_many_exponents(all_codes_under_every_max, backend):
    """A window of exponents in which the `max` code runs from 1 to 126 and beyond."""
    exponents = np.arange(95, 127, dtype=np.uint8)
    codes = np.tile(all_codes_under_every_max, (len(exponents), 1))
    scale = np.repeat(exponents, len(all_codes_under_every_max))[:, None]
    s2 = np.float32(19 / 16 * 2.0**-9)
    ours = ops.quantize_nvfp4_from_mxfp8(codes, scale, s2, search="mse", backend=backend)
    definition = _definition(codes, scale, s2)
    assert_same(ours, definition)
    assert set(np.unique(ours.scale)) == set(range(1, 0x7F))


_memory: dict[str, ops.Nvfp4] = {}


def _definition(codes, scale, s2):
    """The reference takes seconds here: once for all backends."""
    if "window" not in _memory:
        _memory["window"] = ops.quantize_nvfp4_from_mxfp8(
            codes, scale, s2, search="mse", backend="reference"
        )
    return _memory["window"]


@pytest.mark.parametrize("search", SEARCHES)
def test_every_bf16(all_bf16_pairs, search):
    """Sorted, shuffled and strided: every finite number in some block, at some position."""
    for s2 in (np.float32(19 / 16 * 2.0**-9), np.float32(19 / 16 * 2.0**100)):
        definition = ops.quantize_nvfp4_from_float(
            all_bf16_pairs, "BF16", s2, search=search, backend="reference"
        )
        ours = ops.quantize_nvfp4_from_float(all_bf16_pairs, "BF16", s2, search=search)
        assert_same(ours, definition)


def test_every_bf16_at_every_position():
    """One element of a block runs through all numbers, the others stay; `max` scaling."""
    finite = np.array([b for b in range(65536) if b & 0x7F80 != 0x7F80], np.uint16)
    still = as_bf16(sample_blocks.gaussian(16, seed=3))
    for position in range(16):
        blocks = np.tile(still[position], (len(finite), 1))
        blocks[:, position] = finite
        s2 = np.float32(2.0**-11 if position % 2 else 0.0007)
        rows = blocks.reshape(-1, 512)
        ours = ops.quantize_nvfp4_from_float(rows, "BF16", s2, backend="cpu")
        assert_same(ours, ops.quantize_nvfp4_from_float(rows, "BF16", s2, backend="reference"))


@pytest.mark.slow
@pytest.mark.parametrize("position", range(16))
def test_every_bf16_at_every_position_searched(position):
    finite = np.array([b for b in range(65536) if b & 0x7F80 != 0x7F80], np.uint16)
    blocks = np.tile(as_bf16(sample_blocks.gaussian(16, seed=3))[position], (len(finite), 1))
    blocks[:, position] = finite
    blocks = blocks.reshape(-1, 512)
    s2 = np.float32(19 / 16 * 2.0**-10)
    definition = ops.quantize_nvfp4_from_float(
        blocks, "BF16", s2, search="mse", backend="reference"
    )
    for backend in FAST:
        ours = ops.quantize_nvfp4_from_float(blocks, "BF16", s2, search="mse", backend=backend)
        assert_same(ours, definition)


# Global scales nobody's rule gives: long mantissas, both ends of the range, far too small or large.
ODD_SCALES = [
    np.float32(1 / 2688),
    np.float32(1.2345e-3),
    np.float32(1 + 2.0**-17),
    np.float32(19 / 16 * 2.0**-40),
    np.float32(19 / 16 * 2.0**20),
    MIN_GLOBAL_SCALE,
    np.float32(1.7 * 2.0**-110),
    np.float32(2.0**120),
]


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("s2", ODD_SCALES, ids=lambda s2: f"s2={s2:.3g}")
def test_any_global_scale(s2, backend, search):
    values = sample_blocks.adversarial(280, seed=5).reshape(-1, 32)
    values = np.concatenate([values, values * np.float32(2.0**60), values * np.float32(2.0**-60)])
    mxfp8 = ops.quantize_mxfp8(values, "F32")
    for op, arguments in (
        (ops.quantize_nvfp4_from_float, (values, "F32", s2)),
        (ops.quantize_nvfp4_from_mxfp8, (mxfp8.codes, mxfp8.scale, s2)),
    ):
        definition = op(*arguments, search=search, backend="reference")
        assert_same(op(*arguments, search=search, backend=backend), definition)


@pytest.mark.parametrize("shape", [(1, 16), (1, 48), (3, 80), (5, 112), (2, 6144)], ids=str)
@pytest.mark.parametrize("search", ops.SEARCHES)
def test_odd_shapes(shape, search):
    """Rows that end inside a group of four blocks: codes, scales and error sums."""
    values = np.random.default_rng(shape[1]).standard_normal(shape).astype(np.float32)
    s2 = nvfp4_global_scale(ops.float_amax(values, "F32"), search)
    definition = ops.quantize_nvfp4_from_float(
        values, "F32", s2, search=search, backend="reference"
    )
    assert_same(ops.quantize_nvfp4_from_float(values, "F32", s2, search=search), definition)


@pytest.mark.parametrize("search", ops.SEARCHES)
def test_sources_agree(random_mxfp8, search):
    """MXFP8 and its values as BF16, F32 and F16 give the same bytes."""
    codes, exponents = random_mxfp8(5, 320, seed=3)
    s2 = nvfp4_global_scale(ops.mxfp8_amax(codes, exponents), search)
    from_codes = ops.quantize_nvfp4_from_mxfp8(codes, exponents, s2, search=search)
    f32 = ops.dequantize_mxfp8_f32(codes, exponents)
    bf16 = ops.dequantize_mxfp8(codes, exponents)
    for values, dtype in ((f32, "F32"), (bf16, "BF16")):
        assert_same(ops.quantize_nvfp4_from_float(values, dtype, s2, search=search), from_codes)
    f16 = f32.astype(np.float16)
    as_f32 = ops.quantize_nvfp4_from_float(f16.astype(np.float32), "F32", s2, search=search)
    assert_same(ops.quantize_nvfp4_from_float(f16, "F16", s2, search=search), as_f32)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("search", SEARCHES)
def test_zero_blocks(backend, search):
    """Scale 1 and codes 0, of −0 too; beside them a block that is not zero."""
    codes = np.zeros((2, 64), np.uint8)
    codes[0, 16:32] = 0x80
    codes[1, 40] = 0x7E
    exponents = np.full((2, 2), 120, np.uint8)
    s2 = nvfp4_global_scale(ops.mxfp8_amax(codes, exponents), search)
    out = ops.quantize_nvfp4_from_mxfp8(codes, exponents, s2, search=search, backend=backend)
    assert (np.delete(out.scale.reshape(-1), 6) == 0x38).all()
    assert np.count_nonzero(out.packed) == 1
    values = ops.dequantize_mxfp8_f32(codes, exponents)
    as_floats = ops.quantize_nvfp4_from_float(values, "F32", s2, search=search, backend=backend)
    assert_same(as_floats, out)


@pytest.mark.parametrize("backend", BACKENDS)
def test_ties_go_to_the_nearest_code_then_the_smaller(backend):
    """1 alone is exact under many scales: the chosen one is the nearest to 1 / (6 · s2)."""
    s2 = np.float32(2.0**-7)
    values = np.zeros((1, 16), np.float32)
    values[0, 3] = 1.0  # `max` wants 21.33 and takes 22 (0x5B), which gives 132 / 128
    out = ops.quantize_nvfp4_from_float(values, "F32", s2, search="mse", backend=backend)
    # Exact are 32 · 4, 64 · 2, 128 · 1, 256 · 0.5, and none below 0x5B: 0x60 (32) is the nearest.
    assert out.scale[0, 0] == 0x60
    assert out.error.noise == 0
    values[0, :4] = np.array([66, -38, 0, 38]) / 128
    # 0x53 (11) gives 66 but 33 twice, error 50; 10 and 12 give [60, 40, 40] and [72, 36, 36]: 44.
    out = ops.quantize_nvfp4_from_float(values, "F32", s2, search="mse", backend=backend)
    assert out.scale[0, 0] == 0x52
    values[0] = 0
    values[0, 3] = 42.5 / 128  # wants 7.08, takes 7 (0x4E): error 0.5 from 42
    # 0x4D (6.5) gives 39, 0x53 (11) gives 44, 0x56 (14) 42, 0x5D (28) 42: none nearer.
    out = ops.quantize_nvfp4_from_float(values, "F32", s2, search="mse", backend=backend)
    assert out.scale[0, 0] == 0x4E


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("ratio", "kept"), [(2.0**60, True), (2.0**59.9, False)])
def test_hopeless_blocks_keep_the_max_code(backend, ratio, kept):
    """From amax = 2^60 · s2 on; below, columns that do not count are given up for the others."""
    s2 = np.float32(19 / 16 * 2.0**-30)
    values = np.full((1, 16), s2 * 6, np.float32)
    values[0, 7] = s2 * np.float32(ratio)
    importance = np.ones(16, np.float32)
    importance[7] = 0
    out = ops.quantize_nvfp4_from_float(
        values, "F32", s2, search="mse", importance=importance, backend=backend
    )
    # 12 · 0.5 is 6 exactly, and of the scales that can say so 12 is the nearest to 448.
    assert out.scale[0, 0] == (0x7E if kept else 0x54)


def test_searches_never_do_worse_than_max():
    """Under the same global scale, in their own measure."""
    values = sample_blocks.student_t4(4096, seed=9).reshape(-1, 256)
    s2 = nvfp4_global_scale(ops.float_amax(values, "F32"), "mse")
    noise = {
        search: ops.quantize_nvfp4_from_float(values, "F32", s2, search=search).error.noise
        for search in ops.SEARCHES
    }
    assert noise["mse"] < 0.95 * noise["four-over-six"] < 0.95 * noise["max"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("search", ops.SEARCHES)
def test_without_error_sums_the_bytes_stay(random_mxfp8, backend, search):
    codes, exponents = random_mxfp8(3, 96, seed=29)
    values = ops.dequantize_mxfp8_f32(codes, exponents)
    s2 = nvfp4_global_scale(ops.mxfp8_amax(codes, exponents), search)
    before = ops.ErrorSums(3.0, 2.0, 1.0)
    options = {"search": search, "backend": backend, "running": before}
    for op, arguments in (
        (ops.quantize_nvfp4_from_mxfp8, (codes, exponents, s2)),
        (ops.quantize_nvfp4_from_float, (values, "F32", s2)),
    ):
        with_sums, without = op(*arguments, **options), op(*arguments, errors=False, **options)
        np.testing.assert_array_equal(without.packed, with_sums.packed)
        np.testing.assert_array_equal(without.scale, with_sums.scale)
        assert without.error == before != with_sums.error


def test_unknown_searches_are_refused():
    with pytest.raises(ValueError, match="four-over-six"):
        ops.quantize_nvfp4_from_mxfp8(
            np.zeros((1, 32), np.uint8), np.zeros((1, 1), np.uint8), np.float32(1), search="best"
        )

"""QKV kernels in Triton's interpreter: heads, queries and pages, bit for bit, and in all ways.

Dimensions: T tokens, M hidden, Z columns of the row, P pages.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="needs triton, which has wheels for Linux only")

import interpreted_qkv as run
from qkv_cases import (
    M3,
    SMALL,
    TINY,
    assert_same,
    codes_of,
    destination,
    expected,
    head_pages,
    integers,
    norms,
    reals,
    some_positions,
    some_rows,
)  # fmt: skip

from mmq.kernels.reference import qkv_rope as reference
from mmq.kernels.reference.mxfp8 import quantize_mxfp8
from mmq.kernels.reference.qkv_rope import RowLayout, rope_tables
from mmq.kernels.triton import qkv_rope

SIZES = [1, 127, 128, 129, 511, 512, 513]
#: Fewer and larger programs than on a GPU: the interpreter's time goes by programs.
FAST = {"insert_tokens": 128}
FASTER = {"insert_tokens": 1024, "wide_tokens": 256}


@pytest.mark.parametrize(("dtype", "gemma"), [(torch.bfloat16, True), (torch.float32, False)])
def test_heads_have_the_bits_of_the_reference(interpreted, dtype, gemma):
    """Norm and RoPE in F32, at M3's geometry, in two programs a head."""
    row_TZ, positions_T, weights = some_rows(19, M3, dtype), some_positions(19), norms(gemma=gemma)
    tables = rope_tables(positions_T)
    ours = interpreted(run.heads, {}, row_TZ, M3, weights, tables)
    assert_same(ours, reference.project_heads(row_TZ, M3, weights, positions_T))


FORMATS = [
    (M3, "nvfp4", "linear", "nvfp4", "bf16"),
    (M3, "nvfp4", "quads", "fp8", "fp8"),
    (SMALL, "fp8", "linear", "fp8", "fp8"),
    (SMALL, "bf16", "linear", "bf16", "bf16"),
]


@pytest.mark.parametrize(
    ("layout", "format", "order", "index", "queries"),
    FORMATS,
    ids=["nvfp4", "nvfp4 in quads", "fp8", "bf16"],
)
def test_pages_and_queries_have_the_bytes_of_the_reference(
    interpreted, layout, format, order, index, queries
):
    """Scattered slots, every fourth token nowhere, and no other byte touched."""
    row_TZ, positions_T, weights = some_rows(37, layout), some_positions(37), norms()
    where = destination(37, layout, format, order, index, queries, skip=4)
    ours = interpreted(run.inserted, FAST, row_TZ, layout, weights, rope_tables(positions_T), where)
    assert_same(ours, expected(row_TZ, layout, weights, positions_T, where))
    slots_T = where.slots_T[where.slots_T >= 0]
    assert len(slots_T) == 27
    written = torch.zeros(where.cache.pages_PZ.shape[0] * 128, dtype=torch.bool)
    written[slots_T] = True
    data_PZ = ours[2][:, : where.cache.layout.head_token_bytes * 128]
    poison = (data_PZ.reshape(len(written), -1) == 0xEE).all(1)
    assert torch.equal(poison, ~written)


def test_a_layer_without_an_indexer(interpreted):
    layout, positions_T, weights = replace(SMALL, index_heads=0), some_positions(5), norms()
    row_TZ, where = some_rows(5, layout), destination(5, layout)
    ours = interpreted(run.inserted, {}, row_TZ, layout, weights, rope_tables(positions_T), where)
    assert ours[1] is None is ours[3]
    assert_same(ours, expected(row_TZ, layout, weights, positions_T, where))


def test_no_tokens(interpreted):
    where = destination(0, SMALL)
    tables = rope_tables(torch.zeros(0, dtype=torch.int32))
    x, w = torch.zeros(0, 64).bfloat16(), torch.zeros(SMALL.width, 64).bfloat16()
    for way in (run.fused, run.unfused):
        q, index_q, pages, keys = interpreted(way, {}, x, w, SMALL, norms(), tables, where)
        assert q.shape == (0, 4, 128)
        assert index_q.shape == (0, 2, 128)
        assert (pages == 0xEE).all()
        assert (keys == 0xEE).all()


@pytest.mark.parametrize("tokens", SIZES)
def test_all_ways_give_the_same_pages(interpreted, tokens):
    """One kernel, two, and the reference, over an exact GEMM; the order of the sum is no matter."""
    x_TM, w, w_ZM = integers(tokens, 64, TINY)
    positions_T, weights, where = some_positions(tokens), norms(), destination(tokens, TINY)
    case = x_TM, w, TINY, weights, rope_tables(positions_T), where
    how = FASTER if tokens > 500 else FAST
    fused = interpreted(run.fused, how, *case)
    assert_same(fused, interpreted(run.unfused, how, *case))
    row_TZ = reference.project_rows(x_TM, w_ZM)
    assert_same(fused, expected(row_TZ, TINY, weights, positions_T, where))


@pytest.mark.parametrize("tokens", [1, 65, pytest.param(513, marks=pytest.mark.slow)])
def test_ways_agree_on_any_data(interpreted, tokens):
    x_TM, w, _ = reals(tokens, 96, TINY)
    case = x_TM, w, TINY, norms(), rope_tables(some_positions(tokens)), destination(tokens, TINY)
    fused = interpreted(run.fused, FAST, *case)
    assert_same(fused, interpreted(run.unfused, FAST, *case))
    assert_same(fused[2:], interpreted(run.in_steps, FAST, *case))


@pytest.mark.parametrize(
    ("layout", "columns", "tokens", "larger"),
    [
        pytest.param(TINY, 192, 65, 4096, id="192 columns"),
        pytest.param(M3.shard(4), 6144, 17, 64, marks=pytest.mark.slow, id="M3 on 4 ranks"),
    ],
)
def test_at_most_one_code_from_the_reference(
    interpreted, layout, columns, tokens, larger, record_testsuite_property
):
    """Another order of the GEMM's sum moves a few of the row's numbers by a bit of BF16.

    What follows the row is exact: the pages are those of the reference for the same row. An NVFP4
    code counts in steps of a twelfth of its block's largest number at least, far above such a bit.
    """
    x_TM, w, w_ZM = reals(tokens, columns, layout, larger)
    positions_T, weights, where = some_positions(tokens), norms(), destination(tokens, layout)
    case = x_TM, w, layout, weights, rope_tables(positions_T), where
    fused = interpreted(run.fused, FAST, *case)
    row_TZ = interpreted(run.rows, {}, x_TM, w, layout)
    assert_same(fused, expected(row_TZ, layout, weights, positions_T, where))
    their_row_TZ = reference.project_rows(x_TM, w_ZM)
    share = f"{int((row_TZ != their_row_TZ).sum())} of {row_TZ.numel()} differ"
    record_testsuite_property(f"rows of {columns} columns", share)
    assert not torch.equal(row_TZ, their_row_TZ), "this data would show nothing"
    for format in ("nvfp4", "fp8"):
        where = destination(tokens, layout, format)
        pages = (
            codes_of(where.cache.layout, expected(row, layout, weights, positions_T, where)[2])
            for row in (row_TZ, their_row_TZ)
        )
        for kind, got, want in zip(("codes", "scales"), *pages, strict=True):
            numbers = tokens * layout.kv_heads * layout.dim * 2 // (16 if kind == "scales" else 1)
            if not got.numel():
                continue
            apart = (got - want).abs()
            share = f"{int((apart > 0).sum())} of {numbers} differ"
            record_testsuite_property(f"{format} {kind}, {columns} columns", share)
            # An FP8 number that is what cancellation left has as small steps as itself.
            assert format == "fp8" or apart.max() <= 1


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_write_slices(interpreted, ranks):
    """Each rank's pages are its heads' regions of the whole pages."""
    layout = RowLayout(heads=8)
    x_TM, w, w_ZM = integers(5, 32, layout)
    positions_T, weights, own = some_positions(5), norms(), layout.shard(ranks)
    whole = destination(5, layout, "nvfp4", "quads")
    row_TZ = reference.project_rows(x_TM, w_ZM)
    q, index_q, pages_PZ, keys_PZ = expected(row_TZ, layout, weights, positions_T, whole)
    for rank in range(ranks):
        columns = layout.shard_columns(rank, ranks)
        part = qkv_rope.Mxfp8(*(matrix[columns] for matrix in w))
        where = destination(5, own, "nvfp4", "quads")
        got = interpreted(run.fused, {}, x_TM, part, own, weights, rope_tables(positions_T), where)
        heads = slice(rank * own.heads, (rank + 1) * own.heads)
        groups = slice(rank * own.kv_heads, (rank + 1) * own.kv_heads)
        wanted_PZ = head_pages(whole.cache.layout, pages_PZ, groups)
        assert_same(got, (q[:, heads], index_q[:, groups], wanted_PZ, keys_PZ))


@pytest.mark.parametrize("target", ["sm_90", "sm_100", "sm_120"])
def test_activations_in_mxfp8(interpreted, target):
    """Multiplied as they are in tiles of 128 and 64 tokens, and decoded where there is no MMA."""
    x_TM, w, w_ZM = integers(20, 96, TINY)
    x = qkv_rope.Mxfp8(*quantize_mxfp8(x_TM.float())[:2])
    positions_T, weights, where = some_positions(20), norms(), destination(20, TINY)
    case = x, w, TINY, weights, rope_tables(positions_T), where
    fused = interpreted(run.fused, {"target": target}, *case)
    row_TZ = reference.project_rows(x_TM, w_ZM)
    assert_same(fused, expected(row_TZ, TINY, weights, positions_T, where))
    assert qkv_rope.supports(target, "mxfp8", "mxfp8").path == (
        "fallback" if target == "sm_90" else "native"
    )


def test_weights_in_bf16(interpreted):
    x_TM, _, w_ZM = integers(3, 96, TINY)
    row_TZ = interpreted(run.rows, {}, x_TM, w_ZM.bfloat16(), TINY)
    assert torch.equal(row_TZ, reference.project_rows(x_TM, w_ZM))


_SLOTS = "tl.load(slots + token_T, mask=inside_T, other=-1)"
_PAIRS = "here_TD - there_TD, here_TD + there_TD"
_OTHER = "other_D = tl.where(first_D, d + R // 2, tl.where(turning_D, d - R // 2, d))"
_HALVES = "first_D, turning_D = d < R // 2, d < R"
#: Mistakes: what in the kernels' text becomes what.
MISTAKES = {
    "1 + w forgotten": ("scale_D = 1.0 + scale_D", "scale_D = scale_D"),
    "no ε": ("tl.sqrt_rn(mean_T + eps)", "tl.sqrt_rn(mean_T)"),
    "sum of squares, not mean": ("* (1.0 / D)", "* 1.0"),
    "weight of another part": ("weights_5D + part * D", "weights_5D + (part + 1) % 5 * D"),
    "rope on the wrong half": (_HALVES, f"d = d ^ R\n    {_HALVES}"),
    "interleaved pairs": (
        _OTHER,
        "other_D = tl.where(turning_D, d ^ 1, d)\n    first_D = d % 2 == 0",
    ),
    "turned backwards": (_PAIRS, "here_TD + there_TD, here_TD - there_TD"),
    "values normed": ("if part != 2:", "if part != 5:"),
    "index key not turned": ("if part != 2:", "if (part != 2) & (part != 4):"),
    "slot off by one": (_SLOTS, f"{_SLOTS} + 1"),
    "slots of −1 written": (_SLOTS, f"tl.maximum({_SLOTS}, 0)"),
    "order of V's scales": ("G, B, 2, True, V_QUADS)", "G, B, 2, True, False)"),
    "K's scale for V": ("head - H - G, v_scale", "head - H - G, k_scale"),
    "K in V's place": ("G, B, 2, False, False)", "G, B, 2, True, V_QUADS)"),
    "next head": ("slot_T, head - H, k_scale", "slot_T, (head - H + 1) % G, k_scale"),
}


@pytest.fixture(scope="module")
def small_case():
    positions_T, weights = some_positions(19), norms()
    where = destination(19, SMALL, "nvfp4", "quads", "nvfp4", skip=4)
    row_TZ = some_rows(19, SMALL)
    case = row_TZ, SMALL, weights, rope_tables(positions_T), where
    return case, expected(row_TZ, SMALL, weights, positions_T, where)


@pytest.mark.parametrize("name", [None, *MISTAKES])
def test_mistakes_are_seen(interpreted, small_case, name):
    case, theirs = small_case
    changes = [MISTAKES[name]] if name else []
    ours = interpreted(run.inserted, {"insert_tokens": 32, "changes": changes}, *case)
    if name:
        with pytest.raises(AssertionError):
            assert_same(ours, theirs)
    else:
        assert_same(ours, theirs)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(("return acc_TD.to(tl.bfloat16)", "return acc_TD"), id="row not rounded"),
        pytest.param(("token_T, inside_T, head * D, M", "token_T, inside_T, 0, M"), id="one head"),
    ],
)
def test_mistakes_of_the_fused_kernel_are_seen(interpreted, change):
    x_TM, w, _ = reals(9, 96, TINY)
    case = x_TM, w, TINY, norms(), rope_tables(some_positions(9)), destination(9, TINY)
    how = {"changes": [change]}
    fused, unfused = (interpreted(way, how, *case) for way in (run.fused, run.unfused))
    with pytest.raises(AssertionError):
        assert_same(fused, unfused)


def test_misfits_are_refused(interpreted):
    tables, where, weights = rope_tables(some_positions(3)), destination(3, SMALL), norms()
    row_TZ, x, w = some_rows(3, SMALL), torch.zeros(3, 64), torch.zeros(SMALL.width, 64)
    short = replace(where, slots_T=where.slots_T[:2])
    for arguments, message in [
        ((row_TZ[:, 1:], SMALL, weights, tables, where), "columns"),
        ((row_TZ[:2], SMALL, weights, tables, where), "tables"),
        ((row_TZ, SMALL, weights, tables, short), "2 slots"),
        ((row_TZ, SMALL, weights, tables, destination(3, TINY)), "does not fit"),
        ((row_TZ, SMALL, weights, tables, replace(where, index_cache=None)), "index cache"),
    ]:
        with pytest.raises(ValueError, match=message):
            interpreted(run.inserted, {}, *arguments)
    with pytest.raises(ValueError, match="W "):
        interpreted(run.rows, {}, x, w[1:], SMALL)
    with pytest.raises(NotImplementedError, match="sm_89"):
        interpreted(run.rows, {"said": "sm_89"}, x, w, SMALL)
    odd = RowLayout(2, 1, 48, 0)
    with pytest.raises(ValueError, match="power of two"):
        interpreted(
            run.heads, {}, some_rows(3, odd), odd, weights, rope_tables(some_positions(3), 32)
        )

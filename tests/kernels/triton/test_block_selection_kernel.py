"""Block selection kernels in Triton's interpreter against the reference.

Selections are equal, scores within the bound of a dot product, and equal where sums are exact.

Dimensions: T query tokens, G index heads, E index dimension, S keys, N blocks, C chosen blocks.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

pytest.importorskip("triton", reason="needs triton, which has wheels for Linux only")

import selection_launches as launches
import torch
from selection_cases import SCORE_KINDS, make_pages, make_scores
from tolerances import score_error

from mmq.kernels.kv_pages import PagedCache, PageLayout
from mmq.kernels.reference import block_selection as reference
from mmq.kernels.reference.kv_cache import read_pages
from mmq.kernels.triton import block_selection
from mmq.kernels.triton.launch import TARGETS

FORMATS = ["bf16", "fp8", "nvfp4"]
formats = pytest.mark.parametrize("key_format", FORMATS)

#: Tokens of two contexts, one past 2,048 tokens, where selection leaves blocks out.
LENGTHS = [2500, 300]
PREFILL = [*((0, at) for at in range(2484, 2500)), *((1, at) for at in (0, 5, 127, 128, 299))]
DECODE = [(1, 299), (0, 2499)]
SPECULATION = [(0, 2497), (0, 2498), (0, 2499), (1, 299)]


def reference_scores(case):
    return reference.score_pages(*case.tensors()).numpy()


@formats
@pytest.mark.parametrize("tokens", [PREFILL, SPECULATION, DECODE], ids=["prefill", "few", "one"])
def test_selection_at_the_true_geometry(interpreted, key_format, tokens):
    """4 heads of 128, blocks of 128, 16 of 20 chosen: every sum exact, so everything is equal."""
    case = make_pages(key_format, tokens, LENGTHS, integers=True)
    scores_GTN = interpreted(launches.score, case)
    expected_GTN = reference_scores(case)
    np.testing.assert_array_equal(scores_GTN, expected_GTN)
    chosen_GTC = interpreted(launch_select, scores_GTN, case.positions_T)
    expected_GTC = reference.select_blocks(
        torch.from_numpy(expected_GTN), torch.from_numpy(case.positions_T), block=128
    )
    np.testing.assert_array_equal(chosen_GTC, expected_GTC)
    left_out = (case.positions_T // 128 + 1)[None, :] > (chosen_GTC >= 0).sum(2)
    assert left_out.any()


def launch_select(scores_GTN, positions_T):
    return launches.select(scores_GTN, positions_T, block=128)


def exact_scores(case):
    """F64 scores, and the largest Σ|q|·|k| of each block, of keys decoded without rounding."""
    q_TGE, cache, batch, _ = case.tensors()
    unscaled = dataclasses.replace(cache, k_scale=1.0)
    tokens, heads, _ = q_TGE.shape
    shape = heads, tokens, case.page_table_QN.shape[1]
    both = torch.full((2, *shape), -torch.inf, dtype=torch.float64)
    scale = 1.0 if case.layout.format == "bf16" else float(np.float32(case.k_scale))
    for sequence, length in enumerate(case.lengths_Q):
        own_T = (batch.sequence_T == sequence).nonzero()[:, 0]
        keys_SGE, _ = read_pages(unscaled, batch.page_table_QN[sequence], int(length))
        q, k = q_TGE[own_T].double(), keys_SGE[:, 0].double() * scale
        at = batch.positions_T[own_T]
        for into, (a, b) in zip(both, ((q, k), (q.abs(), k.abs())), strict=True):
            scores_GTN = reference.score_blocks(a, b, at, case.layout.tokens)
            into[:, own_T, : scores_GTN.shape[2]] = scores_GTN
    return both[0].numpy(), both[1]


def bounded_case(key_format):
    tokens = [(0, at) for at in range(388, 400)]
    return make_pages(key_format, tokens, [400], k_scale=0.0137)


def within_bound(scores_GTN, case):
    """Whether scores are as near to the exact ones as sums in any order and one scale are."""
    exact_GTN, magnitude_GTN = exact_scores(case)
    bound_GTN = score_error(magnitude_GTN, 128).numpy()
    seen_GTN = np.isfinite(exact_GTN)
    np.testing.assert_array_equal(np.isfinite(scores_GTN), seen_GTN)
    error = np.abs(scores_GTN[seen_GTN] - exact_GTN[seen_GTN])
    return (error <= bound_GTN[seen_GTN]).all()


@formats
def test_scores_are_within_the_bound_of_a_dot_product(interpreted, key_format):
    case = bounded_case(key_format)
    assert within_bound(interpreted(launches.score, case), case)
    assert within_bound(reference_scores(case), case)


BOUND_MUTANTS = {
    "scores in BF16": ("score_M * k_scale", "(score_M * k_scale).to(tl.bfloat16).to(tl.float32)"),
    "scores in F16": ("score_M * k_scale", "(score_M * k_scale).to(tl.float16).to(tl.float32)"),
    "a scale with 12 bits": ("tl.full((), k_scale, tl", "tl.full((), k_scale * 1.0001, tl"),
    "keys off by 1 %": ("decode_e4m3(code_BE).to(tl.bfloat16)",
                     "(decode_e4m3(code_BE) * 1.01).to(tl.bfloat16)"),
}  # fmt: skip


@pytest.mark.parametrize("mutant", BOUND_MUTANTS)
def test_the_bound_catches_rounding_that_is_not_there(interpreted, mutant):
    case = bounded_case("fp8")
    assert not within_bound(interpreted(scored, case, 64, None, [BOUND_MUTANTS[mutant]]), case)


SMALL = {"heads": 2, "dim": 16, "block": 16, "integers": True}


@formats
def test_tokens_in_any_order_of_any_sequence(interpreted, key_format):
    """Three sequences in one tile; a token past its sequence's keys sees those there are."""
    tokens = [(2, 40), (0, 0), (2, 3), (0, 70), (1, 33), (2, 41), (0, 15), (0, 16), (1, 200)] * 2
    case = make_pages(key_format, tokens, [71, 34, 42], **SMALL)
    expected_GTN = reference_scores(case)
    for columns, many in ((64, 32), (2, 8)):
        ours_GTN = interpreted(scored, case, columns, many)
        np.testing.assert_array_equal(ours_GTN, expected_GTN)


def scored(case, columns, many, edits=()):
    return launches.score(case, columns=columns, many=many, edits=edits)


@formats
@pytest.mark.parametrize("heads", [1, 3, 4])
def test_heads_and_empty_sequences(interpreted, key_format, heads):
    shape = SMALL | {"heads": heads, "dim": 32}
    case = make_pages(key_format, [(0, 4), (1, 0), (2, 17)], [5, 0, 18], **shape)
    ours_GTN = interpreted(launches.score, case)
    np.testing.assert_array_equal(ours_GTN, reference_scores(case))
    assert np.isneginf(ours_GTN[:, 1]).all()
    nothing = make_pages(key_format, [], [5], **shape)
    assert interpreted(launches.score, nothing).shape == (heads, 0, 2)


@formats
def test_a_block_without_a_page_and_nan_keys(interpreted, key_format):
    """Everything unwritten is NaN; block 1 of the sequence has no page here."""
    case = make_pages(key_format, [(0, 60), (0, 61)], [62], poison=0xFF, **SMALL)
    case.page_table_QN[0, 1] = -1
    ours_GTN = interpreted(launches.score, case)
    np.testing.assert_array_equal(ours_GTN, reference_scores(case))
    assert np.isneginf(ours_GTN[..., 1]).all()
    # A key that is NaN is invisible: the last block has 14 keys, now 13 and none.
    page_bytes = case.pages_PZ[case.page_table_QN[0, 3]]
    width = case.layout.head_token_bytes
    scales = case.layout.head_token_scales
    for first, last in ((0, 1), (0, 14)):
        page_bytes[first * width : last * width] = 0xFF
        if scales:
            page_bytes[16 * width + first : 16 * width + last] = 0xFF
        ours_GTN = interpreted(launches.score, case)
        np.testing.assert_array_equal(ours_GTN, reference_scores(case))
    assert np.isneginf(ours_GTN[..., 3]).all()


#: Edits of the kernel. Where both forms of the product have the text, both are edited.
SCORE_MUTANTS = {
    "a token does not see itself": [
        ("position_B[None, :] <= limit_M", "position_B[None, :] < limit_M"),
        ("position_B[:, None] <= limit_M", "position_B[:, None] < limit_M"),
    ],
    "a token sees the next key": [
        ("tl.where(own_M, limit_M, -1)", "tl.where(own_M, limit_M + 1, -1)")
    ],
    "the cache's end is not looked at": [("tl.load(lengths + sequence) - 1)", "2147483647)")],
    "blocks anchored one key early": [("limit_M, block * BLOCK,", "limit_M, block * BLOCK - 1,")],
    "the next block's page": [("tl.load(table + block)", "tl.load(table + block + 1)")],
    "all sequences have the first one's pages": [("wide(sequence) * table_stride", "0")],
    "one head for all": [("* HEADS + head_M) * DIM", "* HEADS) * DIM")],
    "an invisible key counts as 0": [
        ('float("-inf")), 1)', "0.0), 1)"),
        ('float("-inf")), 0)', "0.0), 0)"),
    ],
    "the sum over a block": [
        ('tl.max(tl.where(seen_MB, dot_MB, float("-inf")), 1)',
         "tl.sum(tl.where(seen_MB, dot_MB, 0.0), 1)"),
        ('tl.max(tl.where(seen_BM, dot_BM, float("-inf")), 0)',
         "tl.sum(tl.where(seen_BM, dot_BM, 0.0), 0)"),
    ],
    "columns start at the program's number": [
        ("begin = tl.program_id(1) * COLUMNS", "begin = tl.program_id(1)")
    ],
    "unseen blocks are not written": [("tl.maximum(begin, seen), end", "end, end")],
}  # fmt: skip
FORMAT_MUTANTS = {
    "nibbles swapped": ("nvfp4", "byte_BP & 15, byte_BP >> 4", "byte_BP >> 4, byte_BP & 15"),
    "block scales of one token for all": ("nvfp4", "scales + key_B1 * (DIM // 16)", "scales"),
    "block scales one byte late": ("nvfp4", "BLOCK * (DIM // 2)\n", "BLOCK * (DIM // 2) + 1\n"),
    "no block scale": ("nvfp4", "* decode_e4m3(scale_BS.to(tl.int32))[:, :, None]", ""),
    "no scale of the tensor": ("fp8", "score_M * k_scale", "score_M"),
    "a scale for BF16 too": ("bf16", '1.0 if layout.format == "bf16" else index', "index"),
}


def mutant_case(key_format):
    """Scores that every mutant changes: two sequences in a tile, ends inside blocks, a scale."""
    tokens = [(0, 70), (1, 33), (0, 15), (0, 16), (1, 0), (0, 39), (1, 200), (0, 3), (1, 12)]
    shape = SMALL | {"dim": 32, "heads": 4}
    return make_pages(key_format, tokens, [71, 34], k_scale=0.5, **shape)


def differs(interpreted, key_format, edits):
    """Whether scores differ from the reference's: with the keys as the long side, and with rows."""
    case = mutant_case(key_format)
    expected_GTN = reference_scores(case)
    return [
        not np.array_equal(interpreted(scored, case, 2, many, edits), expected_GTN)
        for many in (4, 16)
    ]


@pytest.mark.parametrize("mutant", SCORE_MUTANTS)
def test_mutants_of_scoring_are_caught(interpreted, mutant):
    assert differs(interpreted, "bf16", SCORE_MUTANTS[mutant]) == [True, True]


@pytest.mark.parametrize("mutant", FORMAT_MUTANTS)
def test_mutants_of_decoding_are_caught(interpreted, mutant):
    key_format, *edit = FORMAT_MUTANTS[mutant]
    assert differs(interpreted, key_format, [edit]) == [True, True]


@formats
def test_the_case_for_mutants_is_right(interpreted, key_format):
    assert differs(interpreted, key_format, ()) == [False, False]


def selected(scores_GTN, positions_T, chunk, rules, edits=()):
    return launches.select(scores_GTN, positions_T, chunk=chunk, edits=edits, **rules)


RULES = [
    {"block": 8},
    {"block": 8, "local_blocks": 0},
    {"block": 8, "top_k": 6, "local_blocks": 2, "init_blocks": 1},
    {"block": 8, "top_k": 1},
]


@pytest.mark.parametrize(("blocks", "chunk"), [(1, 16), (17, 4096), (100, 32), (100, 4096)])
def test_selection_of_given_scores(interpreted, blocks, chunk):
    scores_GTN = torch.cat([make_scores(kind, 2, 11, blocks) for kind in SCORE_KINDS], 1)
    positions_T = torch.linspace(0, blocks * 8 - 1, 11).int().repeat(len(SCORE_KINDS))
    for rules in RULES:
        ours_GTC = interpreted(
            selected, scores_GTN.numpy(), positions_T.numpy(), chunk, rules
        )  # fmt: skip
        expected_GTC = reference.select_blocks(scores_GTN, positions_T, **rules)
        np.testing.assert_array_equal(ours_GTC, expected_GTC)


@pytest.mark.parametrize("chunk", [4096, 512])
def test_selection_at_512k_tokens(interpreted, chunk):
    """4,096 blocks, in one go or in eight."""
    scores_GTN = torch.cat([make_scores(kind, 1, 2, 4096) for kind in SCORE_KINDS], 1)
    ends = [4096 * 128 - 1, 3000 * 128] * len(SCORE_KINDS)
    positions_T = torch.tensor(ends, dtype=torch.int32)
    ours_GTC = interpreted(
        selected, scores_GTN.numpy(), positions_T.numpy(), chunk, {"block": 128}
    )  # fmt: skip
    expected_GTC = reference.select_blocks(scores_GTN, positions_T, block=128)
    np.testing.assert_array_equal(ours_GTC, expected_GTC)


def select_strided(scores_TNG, positions_T):
    return launches.select(scores_TNG.transpose(2, 0, 1), positions_T, block=8)


def test_selection_of_strided_scores_and_of_none(interpreted):
    scores_GTN = make_scores("tied", 3, 5, 40)
    positions_T = torch.tensor([319, 0, 200, 128, 127], dtype=torch.int32)
    strided_TNG = np.ascontiguousarray(scores_GTN.permute(1, 2, 0).numpy())
    ours_GTC = interpreted(select_strided, strided_TNG, positions_T.numpy())
    expected_GTC = reference.select_blocks(scores_GTN, positions_T, block=8)
    np.testing.assert_array_equal(ours_GTC, expected_GTC)
    no_tokens = scores_GTN[:, :0].numpy(), positions_T[:0].numpy()
    assert interpreted(selected, *no_tokens, 16, {"block": 8}).shape == (3, 0, 16)
    no_blocks = scores_GTN[..., :0].numpy(), positions_T.numpy()
    assert (interpreted(selected, *no_blocks, 16, {"block": 8}) == -1).all()


SELECTION_MUTANTS = {
    "the local block is not forced": [("tl.where(forced_RN, 3, 1)", "tl.where(forced_RN, 1, 1)")],
    "one local block too many": [("local_R[:, None] - LOCAL", "local_R[:, None] - LOCAL - 1")],
    "the first block is forced": [("block_N[None, :] < INIT", "block_N[None, :] < INIT + 1")],
    "ties go to the higher block": [
        ("key_RN = high_RN + low_RN + (65535 - block_N[None, :])",
         "key_RN = high_RN + low_RN + block_N[None, :]"),
        ("block_RK = (65535 - (key_RK & 65535))", "block_RK = (key_RK & 65535)"),
    ],
    "NaN is the highest": [("-246811958, bits_RN)", "2139095041, bits_RN)")],
    "NaN is what its bits say": [("-246811958, bits_RN)", "bits_RN, bits_RN)")],
    "−0 is lower than +0": [("bits_RN == -2147483648, 0,", "bits_RN == -2147483648, bits_RN,")],
    "negative scores the wrong way round": [("((bits_RN >> 31) | -2147483648)", "-2147483648")],
    "future blocks are chosen": [
        ("return tl.where(block_N[None, :] <= local_R[:, None], key_RN, 0)", "return key_RN"),
        ("& (block_N[None, :] <= local_R[:, None])\n", "& (block_N[None, :] >= 0)\n"),
    ],
    "chunks are not merged": [("if start == 0:", "if start >= 0:")],
    "one head's scores for all": [("head * head_stride", "0")],
    "by score, not ascending": [("(key_RK > 0, block_RK, 65536", "(key_RK > 0, 0, 0")],
}  # fmt: skip


@pytest.fixture
def selects_right(interpreted):
    """Whether the kernel, with edits, selects as the reference does."""
    scores_GTN = torch.cat([make_scores(kind, 2, 4, 60) for kind in ("tied", "special")], 1)
    positions_T = torch.tensor([59, 40, 31, 17] * 2, dtype=torch.int32)
    expected_GTC = reference.select_blocks(scores_GTN, positions_T, block=1)

    def run(edits):
        arguments = scores_GTN.numpy(), positions_T.numpy(), 32, {"block": 1}
        return np.array_equal(interpreted(selected, *arguments, edits), expected_GTC)

    return run


@pytest.mark.parametrize("mutant", SELECTION_MUTANTS)
def test_mutants_of_selection_are_caught(selects_right, mutant):
    assert not selects_right(SELECTION_MUTANTS[mutant])


def test_the_selection_for_mutants_is_right(selects_right):
    assert selects_right(())


def test_refusals():
    layout = PageLayout("fp8", heads=1, sides=1)
    pages_PZ = torch.zeros(1, layout.page_bytes, dtype=torch.uint8)
    q_TGE = torch.zeros(1, 4, 128, dtype=torch.bfloat16)
    refused = [
        (q_TGE.float(), PagedCache(layout, pages_PZ), "float32, not bfloat16"),
        (q_TGE, PagedCache(PageLayout("fp8", heads=1), pages_PZ), "not 2 and 1"),
        (q_TGE, PagedCache(PageLayout("fp8", sides=1), pages_PZ), "not 1 and 4"),
        (q_TGE[..., :64], PagedCache(layout, pages_PZ), "64 numbers, keys of 128"),
        (q_TGE, PagedCache(layout, pages_PZ, k_scale=0.0), "k_scale 0.0"),
        (q_TGE, PagedCache(layout, pages_PZ, k_scale=float("nan")), "k_scale nan"),
    ]
    odd = PageLayout("fp8", heads=1, tokens=96, sides=1)
    refused.append((q_TGE, PagedCache(odd, pages_PZ), "block 96 is no power of two"))
    for q, cache, message in refused:
        with pytest.raises(ValueError, match=message):
            block_selection.check_scoring(q, cache)
    with pytest.raises(ValueError, match="17 local"):
        block_selection.select_blocks(
            torch.zeros(1, 1, 4), torch.tensor([0]), block=8, local_blocks=17
        )


def test_support():
    for target in TARGETS:
        assert block_selection.supports(target).path == "native"
        for key_format in ("fp8", "nvfp4"):
            assert block_selection.supports(target, key_format=key_format).path == "fallback"
    assert not block_selection.supports("sm_80").ok
    assert not block_selection.supports("sm_100", key_format="int8").ok
    assert not block_selection.supports("sm_100", dim=96).ok

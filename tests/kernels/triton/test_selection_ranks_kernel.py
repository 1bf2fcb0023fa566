"""Selection over ranks: kernels in Triton's interpreter against the reference.

Dimensions: P ranks, T query tokens, G index heads, N blocks, J blocks of one rank, C chosen blocks.
"""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("triton", reason="needs triton, which has wheels for Linux only")

import selection_launches as launches
import torch
from selection_cases import SCORE_KINDS, make_pages, make_scores

from mmq.kernels.reference import block_selection, selection_ranks
from mmq.kernels.triton import selection_ranks as triton_ranks


def candidates(scores_GTN, positions_T, rank, ranks, chunk, rules, edits=()):
    return launches.candidates(
        scores_GTN, positions_T, rank, ranks, chunk=chunk, edits=edits, **rules
    )


def reference_keys(scores_GTN, positions_T, rank, ranks, **rules):
    own_GTJ = scores_GTN[..., rank::ranks]
    return selection_ranks.candidate_keys(own_GTJ, positions_T, rank=rank, ranks=ranks, **rules)


@pytest.fixture
def merged(interpreted):
    """Select by `ranks` ranks: candidates are the reference's, the selection that of one rank."""

    def run(scores_GTN, positions_T, ranks, chunk=1024, **rules):
        keys = []
        for rank in range(ranks):
            given = scores_GTN.numpy(), positions_T.numpy(), rank, ranks, chunk, rules
            keys.append(interpreted(candidates, *given))
            expected_GTC = reference_keys(scores_GTN, positions_T, rank, ranks, **rules)
            np.testing.assert_array_equal(keys[-1], expected_GTC)
        ours_GTC = interpreted(launches.merge, np.stack(keys))
        expected_GTC = block_selection.select_blocks(scores_GTN, positions_T, **rules)
        np.testing.assert_array_equal(ours_GTC, expected_GTC)

    return run


@pytest.mark.parametrize("ranks", [1, 3, 8], ids="P={}".format)
@pytest.mark.parametrize("blocks", [1, 17, 100], ids="N={}".format)
def test_equal_to_one_rank(merged, ranks, blocks):
    scores_GTN = torch.cat([make_scores(kind, 2, 5, blocks) for kind in SCORE_KINDS], 1)
    positions_T = torch.linspace(0, blocks * 8 - 1, 5).int().repeat(len(SCORE_KINDS))
    merged(scores_GTN, positions_T, ranks, block=8)
    merged(scores_GTN, positions_T, ranks, 16, block=8, top_k=6, local_blocks=2, init_blocks=1)


@pytest.mark.parametrize("ranks", [4, pytest.param(1, marks=pytest.mark.slow)], ids="P={}".format)
def test_at_512k_tokens(merged, ranks):
    scores_GTN = torch.cat([make_scores(kind, 1, 2, 4096) for kind in SCORE_KINDS], 1)
    ends = [4096 * 128 - 1, 3000 * 128 + 5] * len(SCORE_KINDS)
    positions_T = torch.tensor(ends, dtype=torch.int32)
    merged(scores_GTN, positions_T, ranks, block=128)


@pytest.mark.parametrize("key_format", ["bf16", "fp8", "nvfp4"])
@pytest.mark.parametrize("tokens", [[(0, 299), (1, 150)], [(0, at) for at in range(283, 300)]])
def test_scores_of_a_ranks_own_blocks(interpreted, key_format, tokens):
    """Equal in every bit to those of one rank; the pages of other ranks are NaN."""
    case = make_pages(key_format, tokens, [300, 151], heads=2, dim=16, block=16)
    whole_GTN = interpreted(launches.score, case)
    for rank, ranks in ((0, 4), (3, 4), (1, 2)):
        own = make_pages(key_format, tokens, [300, 151], heads=2, dim=16, block=16)
        columns = np.arange(own.page_table_QN.shape[1])
        others = own.page_table_QN[:, columns % ranks != rank]
        own.pages_PZ[others[others >= 0]] = 0xFF
        own_GTJ = interpreted(scored, own, rank, ranks)
        np.testing.assert_array_equal(own_GTJ, whole_GTN[..., rank::ranks])


def scored(case, rank, ranks):
    return launches.score(case, columns=3, rank=rank, ranks=ranks)


KEY_MUTANTS = {
    "blocks in one piece, not in turns": [
        ("block_N = column_N * RANKS + rank", "block_N = column_N + rank * columns")
    ],
    "a rank's own numbers": [("block_N = column_N * RANKS + rank", "block_N = column_N")],
    "one column too few": [("(tl.max(local_R, 0) + RANKS - rank)", "(tl.max(local_R, 0) - rank)")],
    "keys without the block": [("+ (65535 - block_N[None, :])", "+ 65535")],
}
MERGE_MUTANTS = {
    "half of each rank's keys": [("(from_W < TOP_K)", "(from_W < TOP_K // 2)")],
    "one rank too few": [("(rank_W < ranks)", "(rank_W < ranks - 1)")],
    "rank 0's keys for all": [("rank_W.to(tl.int64)[None, :] * rows", "0")],
}


@pytest.fixture
def selects_right(interpreted):
    """Whether 4 ranks, with mutants of their kernels, select as one; the last rank has the best."""
    scores_GTN = make_scores("tied", 2, 4, 132)
    scores_GTN[..., 3::4] += 9.0
    positions_T = torch.arange(128, 132).int()
    expected_GTC = block_selection.select_blocks(scores_GTN, positions_T, block=1)
    given = scores_GTN.numpy(), positions_T.numpy()

    def run(key_edits=(), merge_edits=()):
        rules = 4, 16, {"block": 1}, key_edits
        keys = [interpreted(candidates, *given, rank, *rules) for rank in range(4)]
        return np.array_equal(interpreted(merge, np.stack(keys), merge_edits), expected_GTC)

    return run


@pytest.mark.parametrize("mutant", KEY_MUTANTS)
def test_mutants_of_candidates_are_caught(selects_right, mutant):
    assert not selects_right(key_edits=KEY_MUTANTS[mutant])


@pytest.mark.parametrize("mutant", MERGE_MUTANTS)
def test_mutants_of_the_merge_are_caught(selects_right, mutant):
    assert not selects_right(merge_edits=MERGE_MUTANTS[mutant])


def test_the_case_for_mutants_is_right(selects_right):
    assert selects_right()


def merge(keys_PGTC, edits):
    return launches.merge(keys_PGTC, edits=edits)


def test_no_tokens_and_refusals(interpreted):
    assert interpreted(launches.merge, np.zeros((2, 4, 0, 16), np.int64)).shape == (4, 0, 16)
    with pytest.raises(ValueError, match="no rank 2 of 2"):
        triton_ranks.candidate_keys(
            torch.zeros(1, 1, 4), torch.tensor([0]), rank=2, ranks=2, block=1
        )

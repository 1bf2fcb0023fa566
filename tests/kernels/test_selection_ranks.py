"""Selection by several ranks equals selection by one, whatever the scores.

Dimensions: P ranks, T query tokens, G index heads, N blocks, J blocks of one rank, C chosen blocks.
"""

from __future__ import annotations

import multiprocessing
import time

import pytest
import selection_rank_process
import torch
from selection_cases import SCORE_KINDS, make_scores

from mmq.kernels.reference.block_selection import select_blocks
from mmq.kernels.reference.selection_ranks import (
    candidate_keys,
    merge_candidates,
    owned_blocks,
)

ranks_everywhere = pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8], ids="P={}".format)


def select_by_ranks(scores_GTN, positions_T, ranks, candidates=candidate_keys, **rules):
    """Each rank has a score of its own blocks alone: all others are +inf."""
    keys = []
    for rank in range(ranks):
        poisoned_GTN = torch.full_like(scores_GTN, torch.inf)
        poisoned_GTN[..., rank::ranks] = scores_GTN[..., rank::ranks]
        own_GTJ = poisoned_GTN[..., rank::ranks]
        assert own_GTJ.shape[2] == owned_blocks(scores_GTN.shape[2], rank, ranks)
        keys.append(candidates(own_GTJ, positions_T, rank=rank, ranks=ranks, **rules))
    return torch.stack(keys)


@ranks_everywhere
@pytest.mark.parametrize("kind", SCORE_KINDS)
def test_equal_to_one_rank(kind, ranks):
    """From one block to 100, so that ranks have no block, few, and more than they send."""
    for blocks in (1, 3, 16, 17, 31, 100):
        scores_GTN = make_scores(kind, 3, 9, blocks)
        positions_T = torch.linspace(0, blocks * 8 - 1, 9).int()
        for rules in ({}, {"local_blocks": 0}, {"local_blocks": 3, "init_blocks": 2}, {"top_k": 5}):
            rules["block"] = 8
            keys_PGTC = select_by_ranks(scores_GTN, positions_T, ranks, **rules)
            assert keys_PGTC.shape == (ranks, 3, 9, rules.get("top_k", 16))
            assert keys_PGTC.dtype == torch.int64
            ours_GTC = merge_candidates(keys_PGTC)
            assert torch.equal(ours_GTC, select_blocks(scores_GTN, positions_T, **rules))


@ranks_everywhere
def test_at_512k_tokens(ranks):
    """4,096 blocks and a ragged tail of 77 tokens: 16 candidates a rank and head all the same."""
    length = 512 * 1024
    scores_GTN = torch.cat([make_scores(kind, 1, 2, 4096) for kind in SCORE_KINDS])
    positions_T = torch.tensor([length - 1, length - 128 - 51])
    keys_PGTC = select_by_ranks(scores_GTN, positions_T, ranks, block=128)
    assert keys_PGTC[:, :, 0].numel() == 16 * ranks * len(SCORE_KINDS)
    expected_GTC = select_blocks(scores_GTN, positions_T, block=128)
    assert torch.equal(merge_candidates(keys_PGTC), expected_GTC)


def test_the_local_block_comes_from_whoever_has_it():
    scores_GTN = make_scores("random", 2, 8, 40)
    scores_GTN[..., 32:] = -torch.inf
    positions_T = torch.arange(32, 40)
    chosen_GTC = merge_candidates(select_by_ranks(scores_GTN, positions_T, 8, block=1))
    assert torch.equal(chosen_GTC[..., 15], positions_T.expand(2, 8).int())


def test_keys_are_unique_and_descending():
    scores_GTN = make_scores("equal", 2, 3, 100)
    keys_PGTC = select_by_ranks(scores_GTN, torch.full((3,), 99), 4, block=1)
    all_GTK = keys_PGTC.permute(1, 2, 0, 3).flatten(2)
    assert (all_GTK.sort(2).values.diff(dim=2) > 0).all()
    assert (keys_PGTC.diff(dim=3) < 0).all()


def test_worked_example():
    scores_GTN = torch.tensor([[[1.0, 5, 4, 3]]])
    rules = {"block": 1, "top_k": 2, "local_blocks": 0}
    keys_PGTC = select_by_ranks(scores_GTN, torch.tensor([3]), 2, **rules)
    assert (65535 - (keys_PGTC & 65535)).flatten(1).tolist() == [[2, 0], [1, 3]]
    assert merge_candidates(keys_PGTC).tolist() == [[[1, 2]]]


def test_refusals():
    scores_GTN = torch.zeros(1, 1, 4)
    for rank in (-1, 2):
        with pytest.raises(ValueError, match="no rank"):
            candidate_keys(scores_GTN, torch.tensor([0]), rank=rank, ranks=2, block=1)
    with pytest.raises(ValueError, match="65537 blocks"):
        wide = torch.zeros(1, 1, 1).expand(1, 1, 32769)
        candidate_keys(wide, torch.tensor([0]), rank=0, ranks=2, block=1)


# Planted mistakes in what a rank sends.


def _without_ids(keys_GTC):
    return keys_GTC & ~0xFFFF | 0xFFFF


MISTAKES = {
    "blocks in one piece, not in turns": lambda own, at, rank, ranks, **rules: candidate_keys(
        own, at - rank * own.shape[2], rank=0, ranks=1, **rules
    ),
    "a rank's own numbers": lambda own, at, rank, ranks, **rules: candidate_keys(
        own, at // ranks, rank=0, ranks=1, **rules
    ),
    "keys without the block": lambda own, at, **rules: _without_ids(
        candidate_keys(own, at, **rules)
    ),
    "eight candidates": lambda own, at, **rules: torch.nn.functional.pad(
        candidate_keys(own, at, **rules | {"top_k": 8}), (0, 8)
    ),
    "the local block not forced": lambda own, at, **rules: candidate_keys(
        own, at, **rules | {"local_blocks": 0}
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistaken_candidates_differ(mistake):
    scores_GTN = make_scores("tied", 3, 9, 100)
    scores_GTN[..., ::4] += 9.0  # one rank has all of the best
    positions_T = torch.arange(91, 100)
    mistaken = MISTAKES[mistake]
    keys_PGTC = select_by_ranks(scores_GTN, positions_T, 4, candidates=mistaken, block=1)
    expected_GTC = select_blocks(scores_GTN, positions_T, block=1)
    assert not torch.equal(merge_candidates(keys_PGTC), expected_GTC)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_real_processes(tmp_path, ranks):
    """Ranks that share nothing but a gloo group: index keys of others' blocks are NaN to each."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [
        context.Process(
            target=selection_rank_process.run, args=(rank, ranks, str(tmp_path / "store"), results)
        )
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    try:
        chosen = dict(results.get(timeout=120) for _ in processes)
    finally:
        deadline = time.monotonic() + 20
        for process in processes:
            process.join(max(0, deadline - time.monotonic()))
            process.kill()
    scores_GTN, positions_T = selection_rank_process.all_scores()
    expected_GTC = select_blocks(scores_GTN, positions_T, block=selection_rank_process.BLOCK)
    assert (expected_GTC[:, :, -1] >= 0).any()
    assert chosen == dict.fromkeys(range(ranks), expected_GTC.tolist())

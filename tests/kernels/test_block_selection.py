"""Block scores and selection against definitions written out key by key and block by block.

Dimensions: T query tokens, G index heads, E index dimension, S keys, B tokens of a block, N blocks,
C chosen blocks.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from selection_cases import SCORE_KINDS, make_pages, make_scores

from mmq.kernels.reference import block_selection
from mmq.kernels.reference.block_selection import score_blocks, score_pages, select_blocks
from mmq.kernels.reference.kv_cache import read_pages

NAN_AS = torch.tensor(-1e30).item()


def scores_by_key(index_q_TGE, index_k_SE, positions_T, block, visible=lambda key, at: key <= at):
    """F64 [G, T, N], one dot product at a time."""
    tokens, heads, _ = index_q_TGE.shape
    blocks = math.ceil(len(index_k_SE) / block)
    scores_GTN = torch.full((heads, tokens, blocks), -torch.inf, dtype=torch.float64)
    for t, g, s in torch.cartesian_prod(*map(torch.arange, (tokens, heads, len(index_k_SE)))):
        if visible(s, positions_T[t]):
            dot = (index_q_TGE[t, g].double() * index_k_SE[s].double()).sum()
            if not dot.isnan():
                scores_GTN[g, t, s // block] = max(scores_GTN[g, t, s // block], dot)
    return scores_GTN


def choose(scores_N, position, block, top_k=16, local_blocks=1, init_blocks=0):
    """The selection of one token and head, by sorting tuples."""
    local = position // block

    def order(n):
        score = scores_N[n]
        forced = n < init_blocks or n > local - local_blocks
        return not forced, -(NAN_AS if math.isnan(score) else score), n

    chosen = sorted(sorted(range(min(local + 1, len(scores_N))), key=order)[:top_k])
    return chosen + [-1] * (top_k - len(chosen))


def choose_all(scores_GTN, positions_T, **rules):
    return [
        [choose(row, int(at), **rules) for row, at in zip(rows, positions_T, strict=True)]
        for rows in scores_GTN.tolist()
    ]


def small_integers(*shape, seed=0, largest=3):
    """F32 whose products and sums are exact."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-largest, largest + 1, shape, generator=generator).float()


@pytest.mark.parametrize("keys", [1, 7, 8, 9, 40], ids="S={}".format)
def test_scores_key_by_key(keys):
    positions_T = torch.tensor([0, 6, 7, 8, 13, 39, 20]).clamp(max=keys - 1)
    q_TGE, k_SE = small_integers(7, 2, 16), small_integers(keys, 16, seed=1)
    expected = scores_by_key(q_TGE, k_SE, positions_T, 8)
    assert torch.equal(score_blocks(q_TGE, k_SE, positions_T, 8).double(), expected)


def test_scores_do_not_depend_on_chunks(monkeypatch):
    positions_T = torch.arange(40).flip(0)
    q_TGE, k_SE = small_integers(40, 4, 16), small_integers(40, 16, seed=1)
    whole = score_blocks(q_TGE, k_SE, positions_T, 8)
    monkeypatch.setattr(block_selection, "_CHUNK", 3 * 4 * 40)
    assert torch.equal(score_blocks(q_TGE, k_SE, positions_T, 8), whole)
    assert whole.isneginf().any()


def test_a_key_with_a_nan_product_is_invisible():
    q_TGE, k_SE = torch.ones(3, 1, 4), torch.full((16, 4), -1.0)
    k_SE[3] = torch.nan
    k_SE[8:] = torch.nan
    positions_T = torch.tensor([3, 7, 15])
    scores_TN = score_blocks(q_TGE, k_SE, positions_T, 4)[0]
    none = -torch.inf
    assert scores_TN.tolist() == [
        [-4, none, none, none],
        [-4, -4, none, none],
        [-4, -4, none, none],
    ]


def test_no_tokens_and_no_keys():
    assert score_blocks(torch.ones(0, 4, 8), torch.ones(9, 8), torch.arange(0), 8).shape == (
        4,
        0,
        2,
    )
    scores_GTN = score_blocks(torch.ones(2, 4, 8), torch.ones(0, 8), torch.tensor([0, 1]), 8)
    assert scores_GTN.shape == (4, 2, 0)
    assert (select_blocks(scores_GTN, torch.tensor([0, 1]), block=8) == -1).all()


@pytest.mark.parametrize("key_format", ["bf16", "fp8", "nvfp4"])
def test_pages_give_the_scores_of_their_keys(key_format):
    """Tokens of three sequences in any order; one past the cache's end; a block without a page."""
    tokens = [(2, 40), (0, 0), (2, 3), (0, 70), (1, 33), (0, 15), (0, 16), (1, 200), (3, 0)]
    shape = {"heads": 2, "dim": 16, "block": 16, "integers": True}
    case = make_pages(key_format, tokens, [71, 34, 41, 0], k_scale=0.5, **shape)
    case.page_table_QN[0, 3] = -1
    q_TGE, cache, batch, lengths_Q = case.tensors()
    scores_GTN = score_pages(q_TGE, cache, batch, lengths_Q)
    assert scores_GTN.shape == (2, 9, 6)
    for t, (sequence, position) in enumerate(tokens):
        pages_N = batch.page_table_QN[sequence]
        keys_SGE, _ = read_pages(cache, pages_N.clamp(min=0), case.lengths_Q[sequence])
        at = torch.tensor([position])
        expected_GN = scores_by_key(q_TGE[t : t + 1].float(), keys_SGE[:, 0], at, 16)[:, 0]
        expected_GN = torch.nn.functional.pad(
            expected_GN, (0, 6 - expected_GN.shape[1]), value=-torch.inf
        )
        expected_GN[:, pages_N < 0] = -torch.inf
        assert torch.equal(scores_GTN[:, t].double(), expected_GN)
    assert scores_GTN[0, 3].isfinite().tolist() == [True, True, True, False, True, False]


@pytest.mark.parametrize("kind", SCORE_KINDS)
@pytest.mark.parametrize("blocks", [1, 15, 16, 17, 40, 64], ids="N={}".format)
@pytest.mark.parametrize(("local_blocks", "init_blocks"), [(1, 0), (0, 0), (2, 1), (3, 13)])
def test_selection_by_sorting(kind, blocks, local_blocks, init_blocks):
    scores_GTN = make_scores(kind, 2, 12, blocks)
    positions_T = torch.linspace(0, blocks * 8 - 1, 12).int()
    rules = {"block": 8, "local_blocks": local_blocks, "init_blocks": init_blocks}
    ours = select_blocks(scores_GTN, positions_T, **rules)
    assert ours.dtype == torch.int32
    assert ours.tolist() == choose_all(scores_GTN, positions_T, **rules)


def test_worked_example():
    scores_GTN = torch.tensor([[[0.5, 2, 0.5, -9], [0.5, 2, 0.5, -9]]])
    positions_T = torch.tensor([6, 5])
    assert select_blocks(scores_GTN, positions_T, block=2, top_k=3).tolist() == [
        [[0, 1, 3], [0, 1, 2]]
    ]


def test_the_order_of_special_scores():
    """One block more than may be chosen: the one left out is the lowest."""
    ascending = [-torch.inf, -3e38, -1e30, -1.0, -1e-45, 0.0, 1e-45, 1.0, 3e38, torch.inf]
    for low, high in itertools.pairwise(ascending):
        for pair, left in (([low, high], 1), ([high, low], 0)):
            scores_GTN = torch.tensor([[[*pair, -9.0]]])
            chosen = select_blocks(scores_GTN, torch.tensor([2]), block=1, top_k=2)
            assert chosen.tolist() == [[[left, 2]]]


@pytest.mark.parametrize(
    ("equal", "same"), [(0.0, -0.0), (torch.nan, -1e30), (-1e30, torch.nan), (-0.0, 0.0)]
)
def test_equals_go_to_the_lower_block(equal, same):
    scores_GTN = torch.tensor([[[equal, same, -9.0]]])
    chosen = select_blocks(scores_GTN, torch.tensor([2]), block=1, top_k=2)
    assert chosen.tolist() == [[[0, 2]]]


def test_forced_blocks_beat_infinity():
    scores_GTN = torch.full((1, 1, 5), torch.inf)
    scores_GTN[..., [0, 4]] = -torch.inf
    rules = {"block": 1, "top_k": 3, "init_blocks": 1}
    assert select_blocks(scores_GTN, torch.tensor([4]), **rules).tolist() == [[[0, 1, 4]]]


def test_a_block_that_is_both_local_and_first_counts_once():
    scores_GTN = torch.zeros(1, 1, 4)
    rules = {"block": 4, "top_k": 4, "init_blocks": 2, "local_blocks": 2}
    assert select_blocks(scores_GTN, torch.tensor([5]), **rules).tolist() == [[[0, 1, -1, -1]]]


def test_up_to_2048_tokens_everything_is_selected():
    """At M3's geometry 16 blocks of 128 are the whole of a short context."""
    q_TGE, k_SE = small_integers(32, 4, 128), small_integers(2048, 128, seed=1)
    positions_T = torch.linspace(0, 2047, 32).int()
    scores_GTN = score_blocks(q_TGE, k_SE, positions_T, 128)
    chosen_GTC = select_blocks(scores_GTN, positions_T, block=128)
    assert torch.equal((chosen_GTC >= 0).sum(2), (positions_T // 128 + 1).expand(4, 32))


def test_refusals():
    scores_GTN = torch.zeros(1, 1, 4)
    with pytest.raises(ValueError, match="15 local and 2 first blocks are forced, 16 chosen"):
        select_blocks(scores_GTN, torch.tensor([0]), block=8, local_blocks=15, init_blocks=2)
    too_many = torch.zeros(1, 1, 1).expand(1, 1, 65537)
    with pytest.raises(ValueError, match="65537 blocks"):
        select_blocks(too_many, torch.tensor([0]), block=8)


# Planted mistakes: each of these must differ from the product somewhere in the cases above.

SCORE_MISTAKES = {
    "a token does not see itself": lambda key, at: key < at,
    "a token sees the next key": lambda key, at: key <= at + 1,
    "no causal mask": lambda key, at: True,
}


@pytest.mark.parametrize("mistake", SCORE_MISTAKES)
def test_mistaken_scores_differ(mistake):
    positions_T = torch.tensor([1, 6, 7, 8, 13, 38, 20])
    q_TGE, k_SE = small_integers(7, 2, 16), small_integers(40, 16, seed=1)
    wrong = scores_by_key(q_TGE, k_SE, positions_T, 8, SCORE_MISTAKES[mistake])
    assert not torch.equal(score_blocks(q_TGE, k_SE, positions_T, 8).double(), wrong)


def test_blocks_anchored_at_the_query_differ():
    """As with left padding: the same keys, cut at other places."""
    q_TGE, k_SE = small_integers(1, 2, 16), small_integers(36, 16, seed=1)
    at = torch.tensor([35])
    shifted_SE = torch.nn.functional.pad(k_SE, (0, 0, 4, 0), value=torch.nan)
    shifted = score_blocks(q_TGE, shifted_SE, at + 4, 8)
    assert not torch.equal(score_blocks(q_TGE, k_SE, at, 8), shifted)


@pytest.mark.parametrize(
    ("name", "value"), [("_FORCED", 0), ("NAN_SCORE", 1e30), ("NAN_SCORE", -torch.inf)]
)
def test_mistaken_keys_differ(monkeypatch, name, value):
    """The local block not forced; NaN highest; NaN below everything."""
    scores_GTN = make_scores("special", 2, 12, 40)
    scores_GTN[..., 0] = torch.nan
    scores_GTN[..., 1] = -3e38
    positions_T = torch.arange(28, 40)
    expected = choose_all(scores_GTN, positions_T, block=1)
    assert select_blocks(scores_GTN, positions_T, block=1).tolist() == expected
    monkeypatch.setattr(block_selection, name, value)
    assert select_blocks(scores_GTN, positions_T, block=1).tolist() != expected


def test_mistaken_orders_differ():
    """Ties to the higher block, and one selection for all heads."""
    scores_GTN = make_scores("tied", 4, 12, 40)
    positions_T = torch.full((12,), 39)
    chosen_GTC = select_blocks(scores_GTN, positions_T, block=1)
    mirrored = select_blocks(scores_GTN.flip(2), positions_T, block=1, local_blocks=0)
    assert not torch.equal(39 - mirrored.flip(2), chosen_GTC)
    together = scores_GTN.amax(0, keepdim=True).expand(4, -1, -1)
    assert not torch.equal(select_blocks(together, positions_T, block=1), chosen_GTC)

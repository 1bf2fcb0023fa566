"""Block selection against the indexer of transformers, on random weights.

Its queries and keys are taken as they leave RoPE, rounded to multiples of 2^−6 so that every dot
product is exact in F32 in any order: what differs then is selection. Equal scores at the edge are
the one thing it leaves open, and there the scores chosen must be the same, if not the blocks.

Dimensions: T query tokens (all of the sequence), G index heads, N blocks, C chosen blocks.
"""

from __future__ import annotations

import pytest
import torch
from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl as theirs
from transformers.models.minimax_m3_vl.configuration_minimax_m3_vl import MiniMaxM3VLTextConfig

from mmq.kernels.reference.block_selection import score_blocks, select_blocks

M3 = {"index_head_dim": 128, "index_block_size": 128, "index_topk_blocks": 16}
SMALL = {"index_head_dim": 32, "index_block_size": 16, "index_topk_blocks": 5}
GRID = 64


@pytest.fixture
def indexer_of(monkeypatch):
    """A function (tokens, **config) that gives queries, keys and selection of their indexer."""
    rotated = []
    rope = theirs.apply_rotary_pos_emb

    def rounded_rope(*arguments, **options):
        rotated[:] = ((x * GRID).round() / GRID for x in rope(*arguments, **options))
        return tuple(rotated)

    monkeypatch.setattr(theirs, "apply_rotary_pos_emb", rounded_rope)

    def run(tokens, **config):
        torch.manual_seed(tokens)
        config = MiniMaxM3VLTextConfig(
            hidden_size=64, num_hidden_layers=1, head_dim=config["index_head_dim"],
            layer_types=["minimax_m3_sparse"], **config,
        )  # fmt: skip
        indexer = theirs.MiniMaxM3VLIndexer(config, 0)
        for norm in (indexer.q_norm, indexer.k_norm):
            torch.nn.init.normal_(norm.weight, std=0.1)
        hidden = torch.randn(1, tokens, config.hidden_size)
        positions = torch.arange(tokens)[None]
        tables = theirs.MiniMaxM3VLRotaryEmbedding(config)(hidden, positions)
        with torch.no_grad():
            selection = indexer(hidden, tables, None, positions)
        q_GTE, k_1SE = (x[0] for x in rotated)
        return q_GTE.transpose(0, 1), k_1SE[0], selection[0]

    return run


def compare(q_TGE, k_SE, theirs_GTC, block, local_blocks):
    """How many selections are the same set; those that are not, choose equal scores."""
    magnitude = (q_TGE.abs().flatten(0, 1) @ k_SE.abs().T).max()
    assert magnitude * GRID**2 < 2**24, "sums are not exact"
    positions_T = torch.arange(len(q_TGE))
    scores_GTN = score_blocks(q_TGE, k_SE, positions_T, block)
    rules = {"block": block, "top_k": theirs_GTC.shape[2], "local_blocks": local_blocks}
    ours_GTC = select_blocks(scores_GTN, positions_T, **rules)
    # −1 sorts before 0 there.
    sorted_GTC = theirs_GTC.sort(dim=2).values
    valid_GTC = sorted_GTC >= 0
    assert torch.equal(valid_GTC.sum(2), (ours_GTC >= 0).sum(2))
    same_GT = (sorted_GTC == ours_GTC.sort(dim=2).values).all(2)

    def chosen_scores(selection_GTC):
        scores = scores_GTN.gather(2, selection_GTC.clamp(min=0).long())
        return scores.where(selection_GTC >= 0, -torch.inf).sort(dim=2).values

    assert torch.equal(chosen_scores(ours_GTC), chosen_scores(theirs_GTC))
    return int(same_GT.sum())


@pytest.mark.parametrize(
    ("tokens", "local_blocks", "shape"),
    [(2500, 1, M3), (300, 1, SMALL), (300, 2, SMALL), (45, 1, SMALL)],
)
def test_same_selection(indexer_of, tokens, local_blocks, shape):
    """At M3's geometry and a smaller one, with more blocks than may be chosen, and fewer."""
    q_TGE, k_SE, theirs_GTC = indexer_of(tokens, index_local_blocks=local_blocks, **shape)
    block = shape["index_block_size"]
    if tokens > shape["index_topk_blocks"] * block:
        assert (theirs_GTC[:, -1] >= 0).all()
    same = compare(q_TGE, k_SE, theirs_GTC, block, local_blocks)
    assert same >= 0.995 * tokens * q_TGE.shape[1]


@pytest.mark.parametrize("mistake", ["one selection for all heads", "local block not forced"])
def test_mistakes_differ(indexer_of, mistake):
    """The first is what transformers did before 5.24 (issue 46762)."""
    q_TGE, k_SE, theirs_GTC = indexer_of(300, index_local_blocks=1, **SMALL)
    positions_T = torch.arange(300)
    scores_GTN = score_blocks(q_TGE, k_SE, positions_T, 16)
    local_blocks = 1
    if mistake == "local block not forced":
        local_blocks = 0
    else:
        scores_GTN = scores_GTN.amax(0, keepdim=True).expand_as(scores_GTN)
    rules = {"block": 16, "top_k": 5, "local_blocks": local_blocks}
    wrong_GTC = select_blocks(scores_GTN, positions_T, **rules).sort(dim=2).values
    same_GT = (wrong_GTC == theirs_GTC.sort(dim=2).values).all(2)
    assert same_GT.float().mean() < 0.9

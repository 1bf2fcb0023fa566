"""Normed and turned heads against MiniMax-M3 in transformers, which shares no code with us.

The tables of cos and sin, and the turning, are the same operations and so the same bits. The norm
adds in another order: within the bound that both orders' roundings allow.
"""

from __future__ import annotations

import pytest
import torch
from tolerances import rope_error
from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl as theirs
from transformers.models.minimax_m3_vl.configuration_minimax_m3_vl import MiniMaxM3VLTextConfig

from mmq.kernels.reference import qkv_rope as ours

#: First and last, around a block's edge, beyond code defaults, and where F32 angles are coarse.
POSITIONS = torch.tensor([0, 1, 2, 127, 128, 129, 4096, 524_287, 524_288, 1_000_001, 1_048_575])
LAYOUT = ours.RowLayout()
#: Depths of the two sums of 128 squares: a tree, and any order at all.
OUR_DEPTH, ANY_DEPTH = 7, 127


def config() -> MiniMaxM3VLTextConfig:
    """M3's attention, behind a narrow hidden state."""
    rope = {"rope_type": "default", "rope_theta": 5_000_000, "partial_rotary_factor": 0.5}
    return MiniMaxM3VLTextConfig(
        hidden_size=64, num_hidden_layers=1, num_attention_heads=64, num_key_value_heads=4,
        head_dim=128, rms_norm_eps=1e-6, rope_parameters=rope, layer_types=["minimax_m3_sparse"],
        index_n_heads=4, index_head_dim=128, index_block_size=128, index_topk_blocks=16,
        max_position_embeddings=1_048_576, attn_implementation="eager",
    )  # fmt: skip


def attention(generator: torch.Generator) -> theirs.MiniMaxM3VLAttention:
    module = theirs.MiniMaxM3VLAttention(config(), 0)
    for name, weight in module.named_parameters():
        weight.requires_grad_(False)
        weight.copy_(torch.randn(weight.shape, generator=generator) * 0.25)
        assert "norm" in name or weight.ndim == 2
    return module


def hidden_states(generator: torch.Generator) -> torch.Tensor:
    """F32 [T, 64], rows so small that ε decides, and so large that it vanishes."""
    sizes_T1 = torch.logspace(-5, 4, len(POSITIONS))[:, None]
    return torch.randn(len(POSITIONS), 64, generator=generator) * sizes_T1


def packed_row(module, x_TM):
    indexer = module.indexer
    parts = module.q_proj, module.k_proj, module.v_proj, indexer.q_proj, indexer.k_proj
    return torch.cat([part(x_TM) for part in parts], 1)


def norms_of(module) -> ours.HeadNorms:
    weights = (
        module.q_norm.weight,
        module.k_norm.weight,
        module.indexer.q_norm.weight,
        module.indexer.k_norm.weight,
    )
    return ours.HeadNorms(*weights, eps=module.q_norm.eps)


def their_heads(module, x_TM, monkeypatch):
    """q, k, v, index_q, index_k, [T, heads, 128] each, as the module's forward passes them on."""
    turned, values = [], []
    turn = theirs.apply_rotary_pos_emb

    def recording_turn(q, k, *tables):
        turned.extend(turn(q, k, *tables))
        return turned[-2:]

    def recording_attention(module, q, k, v, *rest, **more):
        values.append(v)
        return q.transpose(1, 2), None

    monkeypatch.setattr(theirs, "apply_rotary_pos_emb", recording_turn)
    monkeypatch.setattr(theirs, "eager_attention_forward", recording_attention)
    x_1TM, positions_1T = x_TM[None], POSITIONS[None]
    tables = theirs.MiniMaxM3VLRotaryEmbedding(module.config)(x_1TM, positions_1T)
    # Their indexer takes keys' places for positions, so its scores mean nothing here.
    module(x_1TM, tables, None, position_ids=torch.arange(len(POSITIONS))[None])
    q, k, index_q, index_k = (x[0].transpose(0, 1) for x in turned)
    return q, k, values[0][0].transpose(0, 1), index_q, index_k


def error_bound(row_TZ, part: int, norms: ours.HeadNorms) -> torch.Tensor:
    """What the roundings of both sides allow, F64 [T, heads, 128]."""
    x_THD = list(_split(row_TZ.double(), LAYOUT))[part]
    if part == 2:
        return torch.full_like(x_THD, 2.0**-200)  # V is the row's, to the bit
    weights = norms.q_D, norms.k_D, None, norms.index_q_E, norms.index_k_E
    mean = (x_THD**2).mean(-1, keepdim=True)
    n_THD = x_THD / (mean + norms.eps).sqrt() * (1 + weights[part].double())
    cos, sin = (t.double()[:, None] for t in _tables(POSITIONS))
    pairs = n_THD[..., :32], n_THD[..., 32:64]
    still = torch.zeros(())
    bounds = []
    for depth in (OUR_DEPTH, ANY_DEPTH):
        turned = rope_error(*pairs, cos, sin, depth)
        rest, _ = rope_error(n_THD[..., 64:], still, still + 1, still, depth)
        bounds.append(torch.cat([*turned, rest], -1))
    return bounds[0] + bounds[1]


def differences(monkeypatch) -> list[float]:
    """Largest error over its bound of q, k, v, index_q, index_k."""
    generator = torch.Generator().manual_seed(1)
    module, x_TM = attention(generator), hidden_states(generator)
    row_TZ, norms = packed_row(module, x_TM), norms_of(module)
    expected = their_heads(module, x_TM, monkeypatch)
    q, k, v, index_q, index_k = ours.project_heads(row_TZ, LAYOUT, norms, POSITIONS)
    ratios = []
    for part, got in enumerate([q, k, v, index_q, index_k[:, None]]):
        error = (got.double() - expected[part].double()).abs()
        ratios.append(float((error / error_bound(row_TZ, part, norms)).max()))
    return ratios


def test_tables_have_the_same_bits():
    cos, sin = theirs.MiniMaxM3VLRotaryEmbedding(config())(torch.zeros(()), POSITIONS[None])
    our_cos, our_sin = ours.rope_tables(POSITIONS)
    assert torch.equal(cos[0], torch.cat([our_cos, our_cos], -1))
    assert torch.equal(sin[0], torch.cat([our_sin, our_sin], -1))


def test_turning_has_the_same_bits():
    x_THD = torch.randn(len(POSITIONS), 4, 128, generator=torch.Generator().manual_seed(2))
    tables = theirs.MiniMaxM3VLRotaryEmbedding(config())(x_THD, POSITIONS[None])
    turned, _ = theirs.apply_rotary_pos_emb(x_THD[None], x_THD[None], *tables, unsqueeze_dim=2)
    assert torch.equal(turned[0], ours.apply_rope(x_THD, *ours.rope_tables(POSITIONS)))


def test_heads_of_a_whole_layer(monkeypatch):
    ratios = differences(monkeypatch)
    assert all(ratio <= 1 for ratio in ratios)
    assert max(ratios) > 1e-3, "the two orders of summation differ somewhere"


_norm, _rope = ours.gemma_norm, ours.apply_rope
_split, _tables = ours.split_row, ours.rope_tables


def _interleaved(x_THD, cos, sin):
    pairs = x_THD[..., :64].unflatten(-1, (32, 2)).transpose(-1, -2).flatten(-2)
    turned = _rope(torch.cat([pairs, x_THD[..., 64:]], -1), cos, sin)
    back = turned[..., :64].unflatten(-1, (2, 32)).transpose(-1, -2).flatten(-2)
    return torch.cat([back, turned[..., 64:]], -1)


def _second_half(x_THD, cos, sin):
    turned = _rope(torch.cat([x_THD[..., 64:], x_THD[..., :64]], -1), cos, sin)
    return torch.cat([turned[..., 64:], turned[..., :64]], -1)


def _skip_index_key(x_THD, cos, sin):
    return x_THD if x_THD.shape[1] == 1 else _rope(x_THD, cos, sin)


def _norm_values(row_TZ, layout):
    q, k, v, *index = _split(row_TZ, layout)
    return q, k, _norm(v, torch.zeros(layout.dim), 1e-6), *index


def norm_with(change):
    """A mutant whose norm gets other (weight, eps, gemma)."""
    return "gemma_norm", lambda x, *rest: _norm(x, *change(*rest))


def tables_with(change):
    """A mutant whose tables are made for other (rotary_dim, theta)."""
    return "rope_tables", lambda positions, *rest: _tables(positions, *change(*rest))


EVERY_NORMED = (0, 1, 3, 4)
#: A name, what is replaced in the reference by what, and the parts in which it must be seen.
MUTANTS = {
    "1 + w forgotten": (*norm_with(lambda w, eps, gemma: (w, eps, False)), EVERY_NORMED),
    "no ε": (*norm_with(lambda w, eps, gemma: (w, 0.0, gemma)), EVERY_NORMED),
    "ε of another model": (*norm_with(lambda w, eps, gemma: (w, 1e-5, gemma)), EVERY_NORMED),
    "interleaved pairs": ("apply_rope", _interleaved, EVERY_NORMED),
    "the other half turned": ("apply_rope", _second_half, EVERY_NORMED),
    "turned backwards": ("apply_rope", lambda x, c, s: _rope(x, c, -s), EVERY_NORMED),
    "the whole head turned": (*tables_with(lambda dim, theta: (128, theta)), EVERY_NORMED),
    "theta 10^4": (*tables_with(lambda dim, theta: (dim, 1e4)), EVERY_NORMED),
    "index key not turned": ("apply_rope", _skip_index_key, (4,)),
    "values normed": ("split_row", _norm_values, (2,)),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mistakes_are_seen(monkeypatch, name):
    attribute, function, parts = MUTANTS[name]
    monkeypatch.setattr(ours, attribute, function)
    ratios = differences(monkeypatch)
    for part in range(5):
        assert ratios[part] > 100 if part in parts else ratios[part] <= 1

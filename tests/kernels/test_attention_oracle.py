"""The attention module of MiniMax-M3 in transformers, with its own masks, against ours.

The whole module runs: projections, norms, RoPE, indexer and its block mask. Attention itself is
compared on the heads that the module passes on, in F32, within the bound of both; and what the
module gives to its output projection with what our own norms, RoPE, selection and attention make
of its hidden states.

Dimensions: T tokens, M hidden size, Z packed row, H query heads, G KV heads, D head dimension, C
chosen blocks.
"""

from __future__ import annotations

import pytest
import torch
from attention_cases import Geometry, Operands, assert_close, visible
from tolerances import F32, AttentionRoundings, attention_error, norm_error
from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl as theirs
from transformers.models.minimax_m3_vl.configuration_minimax_m3_vl import MiniMaxM3VLTextConfig

from mmq.kernels.reference import qkv_rope
from mmq.kernels.reference.block_attention import attend
from mmq.kernels.reference.block_selection import score_blocks, select_blocks

ROUNDINGS = AttentionRoundings()
#: M3's heads with a small block, so that a short context leaves blocks out, and a small model's.
WIDE = Geometry(64, 4, 128, 16, 4)
SMALL = Geometry(8, 2, 32, 16, 3)


def make_module(geometry: Geometry, layer: str, implementation: str) -> theirs.MiniMaxM3VLAttention:
    rope = {"rope_type": "default", "rope_theta": 5_000_000, "partial_rotary_factor": 0.5}
    config = MiniMaxM3VLTextConfig(
        hidden_size=48, num_hidden_layers=1, num_attention_heads=geometry.heads,
        num_key_value_heads=geometry.kv_heads, head_dim=geometry.dim, rms_norm_eps=1e-6,
        rope_parameters=rope, layer_types=[layer], index_n_heads=geometry.kv_heads,
        index_head_dim=geometry.dim, index_block_size=geometry.block,
        index_topk_blocks=geometry.choices, index_local_blocks=1,
        attn_implementation=implementation,
    )  # fmt: skip
    module = theirs.MiniMaxM3VLAttention(config, 0)
    generator = torch.Generator().manual_seed(1)
    for weight in module.parameters():
        weight.requires_grad_(False)
        weight.copy_(torch.randn(weight.shape, generator=generator) * 0.25)
    return module


def hidden_states(tokens: int) -> torch.Tensor:
    return torch.randn(1, tokens, 48, generator=torch.Generator().manual_seed(2))


def run(module, hidden_1TM, monkeypatch):
    """The module's output [T, M], and what its attention got and gave: q, k, v, blocks, output."""
    seen = {}
    names = theirs.ALL_ATTENTION_FUNCTIONS
    attention = names.get_interface(
        module.config._attn_implementation, theirs.eager_attention_forward
    )

    def recording(module, q, k, v, mask, block_indices=None, **more):
        output = attention(module, q, k, v, mask, **more)
        seen.update(q=q, k=k, v=v, blocks=block_indices, mask=mask, out=output[0])
        return output

    monkeypatch.setattr(type(names), "get_interface", lambda *_: recording)
    tokens = hidden_1TM.shape[1]
    positions_1T = torch.arange(tokens)[None]
    tables = theirs.MiniMaxM3VLRotaryEmbedding(module.config)(hidden_1TM, positions_1T)
    causal = torch.full((tokens, tokens), -torch.inf).triu(1)[None, None]
    with torch.no_grad():
        output, _ = module(hidden_1TM, tables, causal, position_ids=positions_1T)
    return output[0], seen


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("layer", ["minimax_m3_sparse", "full_attention"])
@pytest.mark.parametrize(
    ("geometry", "tokens"), [(WIDE, 85), (SMALL, 120), (SMALL, 1)], ids=["wide", "small", "one"]
)
def test_attention_of_their_heads(monkeypatch, geometry, tokens, layer, implementation):
    module = make_module(geometry, layer, implementation)
    _, seen = run(module, hidden_states(tokens), monkeypatch)
    heads = (seen[name][0].transpose(0, 1) for name in ("q", "k", "v"))
    operands = Operands(*heads, torch.arange(tokens))
    sparse = layer == "minimax_m3_sparse"
    selection_GTC = seen["blocks"][0] if sparse else None
    visible_GTS = visible(geometry, tokens, operands.positions_T, selection_GTC)
    assert ((seen["mask"][0] == 0) == visible_GTS.repeat_interleave(
        geometry.heads // geometry.kv_heads if sparse else 1, 0
    )).all()  # fmt: skip
    ours_THD = attend(*operands, selection_GTC, block=geometry.block)
    bound_THD = attention_error(*operands[:3], visible_GTS, geometry.dim**-0.5, ROUNDINGS)
    assert ((ours_THD - seen["out"][0]).abs() <= 2 * bound_THD).all()
    assert_close(seen["out"][0], operands, visible_GTS, geometry.dim**-0.5, ROUNDINGS)
    if sparse and tokens > geometry.choices * geometry.block:
        assert (visible_GTS.sum(-1) < torch.arange(1, tokens + 1)).any()
        wrong_THD = attend(*operands, selection_GTC.roll(1, 0), block=geometry.block)
        assert ((wrong_THD - seen["out"][0]).abs() > 2 * bound_THD).any()


def ours(module, geometry: Geometry, hidden_TM: torch.Tensor):
    """What goes to the output projection, [T, H, D], and the selection, by our functions."""
    indexer = module.indexer
    parts = module.q_proj, module.k_proj, module.v_proj, indexer.q_proj, indexer.k_proj
    row_TZ = torch.cat([part(hidden_TM) for part in parts], 1)
    layout = qkv_rope.RowLayout(
        geometry.heads, geometry.kv_heads, geometry.dim, geometry.kv_heads, geometry.dim
    )
    norms = qkv_rope.HeadNorms(
        module.q_norm.weight, module.k_norm.weight, indexer.q_norm.weight, indexer.k_norm.weight
    )
    positions_T = torch.arange(len(hidden_TM))
    rope = qkv_rope.Rope(geometry.dim // 2)
    heads = qkv_rope.project_heads(row_TZ, layout, norms, positions_T, rope)
    scores_GTN = score_blocks(heads.index_q_TGE, heads.index_k_TE, positions_T, geometry.block)
    selection_GTC = select_blocks(
        scores_GTN, positions_T, block=geometry.block, top_k=geometry.choices
    )
    out_THD = attend(
        heads.q_THD, heads.k_TGD, heads.v_TGD, positions_T, selection_GTC, block=geometry.block
    )
    return out_THD, selection_GTC


def whole_bound(geometry: Geometry, heads: Operands, visible_GTS: torch.Tensor):
    """How far the two outputs can be apart, F64 [T, H, D].

    Norms and RoPE leave each q and k off by √2·ε of its length on either side, for ε the error of
    an element of a turned pair. So a score is off by 2·2·√2·ε·scale·|q||k|, and p by twice that.
    """
    q_THD, k_SGD, v_SGD, _ = heads
    scale, group = geometry.dim**-0.5, geometry.heads // geometry.kv_heads
    epsilon = norm_error(geometry.dim) + 3 * F32
    lengths_TH = q_THD.double().norm(dim=-1) * k_SGD.double().norm(dim=-1).max()
    moved_TH = (8 * 2**0.5 * epsilon * scale * lengths_TH).expm1()
    size_HD = v_SGD.double().abs().amax(0).repeat_interleave(group, 0)
    apart_THD = 2 * attention_error(*heads[:3], visible_GTS, scale, ROUNDINGS)
    return apart_THD + moved_TH[..., None] * size_HD


@pytest.mark.parametrize(("geometry", "tokens"), [(WIDE, 85), (SMALL, 120)], ids=["wide", "small"])
def test_whole_module(monkeypatch, geometry, tokens):
    module = make_module(geometry, "minimax_m3_sparse", "eager")
    hidden_1TM = hidden_states(tokens)
    output_TM, seen = run(module, hidden_1TM, monkeypatch)
    with torch.no_grad():
        assert torch.equal(module.o_proj(seen["out"].flatten(2))[0], output_TM)
        ours_THD, selection_GTC = ours(module, geometry, hidden_1TM[0])
    assert torch.equal(selection_GTC.sort().values, seen["blocks"][0].sort().values)
    heads = Operands(*(seen[name][0].transpose(0, 1) for name in "qkv"), torch.arange(tokens))
    visible_GTS = visible(geometry, tokens, heads.positions_T, selection_GTC)
    bound_THD = whole_bound(geometry, heads, visible_GTS)
    assert ((ours_THD - seen["out"][0]).abs() <= bound_THD).all()
    assert bound_THD.max() < 0.01 * seen["out"].abs().max()

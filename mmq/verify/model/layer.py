"""One decoder layer of M3, written once for every backend.

    h ← h + W_o · attention(heads(W_qkv · norm(h)))
    h ← h + mlp(norm(h))            layers with a dense MLP
    h ← h + shared(norm(h)) + Σ_k weight_k · expert_k(norm(h))

Attention works window by window; the mixture of experts takes the tokens of all windows at once,
so that each expert is read once and those that no token reaches are not read at all.

Dimensions: T tokens, M hidden, Z columns of the projected row, H query heads, G KV heads, D head
dimension, C chosen blocks, E experts, K experts of a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from mmq.kernels.reference.moe import Mlp, Swiglu, linear, mlp
from mmq.kernels.reference.qkv_rope import HeadNorms, Rope, RowLayout, gemma_norm
from mmq.kernels.reference.router import Routing
from mmq.quantize.architecture import TEXT
from mmq.quantize.layouts import K_SCALE, V_SCALE
from mmq.verify.model.config import TextConfig
from mmq.verify.model.operations import CacheMode, Operations, SelectionRule
from mmq.verify.model.weights import ModelWeights

#: Gate, up and down of a dense or shared MLP, and of a routed expert.
MLP, EXPERT = ("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")
_INDEX_PROJECTIONS = ("index_q_proj", "index_k_proj")


class Attended(NamedTuple):
    """What attention adds to the hidden state, F32 [T, M], and the blocks it looked at."""

    added_TM: Tensor
    selection_GTC: Tensor | None


@dataclass(frozen=True)
class AttentionWeights:
    """A layer's attention, decoded.

    Attributes:
        row_ZM: q, k, v and, in a sparse layer, index_q and index_k projections, one above the
            other: [Z, M].
    """

    input_norm_M: Tensor
    row_ZM: Tensor
    output_MZ: Tensor
    norms: HeadNorms
    layout: RowLayout


class Layer:
    """Layer `number` of one checkpoint.

    Args:
        weights: read on first use of each part; nothing outlives this object.
    """

    def __init__(
        self, config: TextConfig, weights: ModelWeights, number: int, operations: Operations
    ) -> None:
        self.config = config
        self.number = number
        self.moe = config.moe[number]
        self.sparse = config.sparse[number]
        self._weights = weights
        self._operations = operations
        self._prefix = f"{TEXT}model.layers.{number}."

    @cached_property
    def attention(self) -> AttentionWeights:
        config, weights, name = self.config, self._weights, self._prefix + "self_attn."
        projections = ["q_proj", "k_proj", "v_proj", *(_INDEX_PROJECTIONS if self.sparse else ())]
        norms = HeadNorms(
            weights.vector(name + "q_norm"),
            weights.vector(name + "k_norm"),
            weights.vector(name + "index_q_norm") if self.sparse else None,
            weights.vector(name + "index_k_norm") if self.sparse else None,
            config.eps,
            config.gemma,
        )
        layout = RowLayout(
            config.heads, config.kv_heads, config.head_dim,
            config.kv_heads if self.sparse else 0, config.index_dim,
        )  # fmt: skip
        return AttentionWeights(
            weights.vector(self._prefix + "input_layernorm"),
            torch.cat([weights.matrix(name + p) for p in projections]),
            weights.matrix(name + "o_proj"),
            norms,
            layout,
        )

    def attend(
        self, hidden_TM: Tensor, mode: CacheMode, selection_GTC: Tensor | None = None
    ) -> Attended:
        """One window's attention.

        Args:
            hidden_TM: F32, positions 0 to T − 1.
            mode: with this layer's scales.
            selection_GTC: blocks to look at instead of those the indexer would choose.
        """
        config, own, operations = self.config, self.attention, self._operations
        positions_T = torch.arange(len(hidden_TM), dtype=torch.int32, device=hidden_TM.device)
        row_TZ = linear(self._norm(hidden_TM, own.input_norm_M), own.row_ZM)
        rope = Rope(config.rotary_dim, config.rope_theta)
        heads = operations.heads(row_TZ, own.layout, own.norms, positions_T, rope)
        if self.sparse and selection_GTC is None:
            assert heads.index_q_TGE is not None and heads.index_k_TE is not None
            rule = SelectionRule(
                config.block, config.top_k, config.local_blocks, config.init_blocks
            )
            selection_GTC = operations.select(
                heads.index_q_TGE, heads.index_k_TE, positions_T, rule, mode.index_k
            )
        out_THD = operations.attend(heads, positions_T, selection_GTC, config.block, mode)
        return Attended(linear(out_THD.flatten(1), own.output_MZ), selection_GTC)

    def drop_attention(self) -> None:
        """Free what `attend` needed, before experts are read."""
        self.__dict__.pop("attention", None)

    def normed(self, hidden_TM: Tensor) -> Tensor:
        """The MLP's input."""
        return self._norm(hidden_TM, self._post_norm_M)

    def route(self, normed_TM: Tensor) -> Routing:
        """The router's choice, in F32 whatever the run's dtype: near ties decide otherwise."""
        config, operations = self.config, self._operations
        gate_EM, bias_E = self._router
        return operations.route(
            normed_TM, gate_EM, bias_E, config.experts_per_token, config.routed_scaling
        )

    def mixture(self, normed_TM: Tensor, routing: Routing) -> Tensor:
        """Routed and shared experts, F32 [T, M]; reads each expert that some token reaches."""
        return self._operations.moe(normed_TM, routing, self.expert, self.shared(), self.swiglu)

    def expert(self, number: int) -> Mlp:
        """A routed expert's weights, read anew at every call."""
        return self._mlp(f"block_sparse_moe.experts.{number}.", EXPERT)

    def shared(self) -> Mlp:
        """The shared expert's weights."""
        return self._mlp("block_sparse_moe.shared_experts.", MLP)

    def _mlp(self, name: str, parts: tuple[str, str, str]) -> Mlp:
        read = self._weights.stored if self._operations.decodes else self._weights.matrix
        gate, up, down = (read(self._prefix + name + part) for part in parts)
        return Mlp(gate, up, down)

    def dense(self, normed_TM: Tensor) -> Tensor:
        """The dense MLP of the first layers, F32 [T, M]."""
        return mlp(normed_TM, *self._dense, swiglu=self.swiglu)

    @cached_property
    def _dense(self) -> Mlp:
        gate, up, down = (self._weights.matrix(f"{self._prefix}mlp.{part}") for part in MLP)
        return Mlp(gate, up, down)

    @cached_property
    def _post_norm_M(self) -> Tensor:
        return self._weights.vector(self._prefix + "post_attention_layernorm")

    @property
    def routing_bias(self) -> Tensor | None:
        """What is added to the router's scores for the choice alone, F32 [E]."""
        return self._router[1]

    @cached_property
    def _router(self) -> tuple[Tensor, Tensor | None]:
        name = self._prefix + "block_sparse_moe"
        bias_E = None
        if self.config.routing_bias:
            bias_E = self._weights.vector(name, "e_score_correction_bias")
        return self._weights.vector(name + ".gate"), bias_E

    @property
    def swiglu(self) -> Swiglu:
        """The activation between the projections."""
        return Swiglu(self.config.alpha, self.config.limit, self.config.beta)

    def _norm(self, x_TM: Tensor, weight_M: Tensor) -> Tensor:
        return gemma_norm(x_TM, weight_M, self.config.eps, self.config.gemma)


def kv_scales(weights: ModelWeights, number: int) -> tuple[float, float]:
    """Scales of K and V that a checkpoint stores for a layer; 1.0 where it stores none."""
    stored = (weights.scalar(f"{TEXT}model.layers.{number}.{s}") for s in (K_SCALE, V_SCALE))
    k_scale, v_scale = (1.0 if scale is None else scale for scale in stored)
    return k_scale, v_scale

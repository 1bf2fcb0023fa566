"""The operations of a layer, behind one interface: the reference here, Triton in `on_gpu`.

A layer's forward is written once (`layer`), in terms of these; what differs between backends is
whether keys and values go through a round trip in F32 tensors or through the pages of a cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch
from torch import Tensor

from mmq.kernels.reference import block_attention, block_selection, kv_cache, moe, qkv_rope, router
from mmq.kernels.reference.moe import Mlp, Swiglu
from mmq.kernels.reference.qkv_rope import HeadNorms, Heads, Rope, RowLayout
from mmq.kernels.reference.router import Routing

#: Formats a cache may have in a run; "exact" keeps what the layer computed, in F32.
CacheFormat = Literal["exact", "bf16", "fp8", "nvfp4"]


@dataclass(frozen=True)
class CacheMode:
    """What the KV cache does to keys and values.

    Attributes:
        kv: format of K and V.
        staged: NVFP4 is turned into FP8 before the dot products, as the fast kernels do.
        index_k: format of the indexer's keys.
        k_scale, v_scale: of the layer, F32 multipliers; index keys have none (1.0).
    """

    kv: CacheFormat = "exact"
    staged: bool = False
    index_k: CacheFormat = "exact"
    k_scale: float = 1.0
    v_scale: float = 1.0

    def with_scales(self, k_scale: float, v_scale: float) -> CacheMode:
        """The same for a layer that has these scales."""
        return replace(self, k_scale=k_scale, v_scale=v_scale)


EXACT_CACHE = CacheMode()


@dataclass(frozen=True)
class SelectionRule:
    """How blocks are chosen; see `mmq.kernels.reference.block_selection`."""

    block: int
    top_k: int
    local_blocks: int = 1
    init_blocks: int = 0


class Operations(Protocol):
    """One backend. Tensors are F32 but for weights; dimensions as in the references.

    Attributes:
        decodes: whether `moe` takes weights as they are stored and decodes them itself.
        device: where weights and hidden states have to be.
    """

    name: str
    decodes: bool
    device: torch.device

    def heads(
        self, row_TZ: Tensor, layout: RowLayout, norms: HeadNorms, positions_T: Tensor, rope: Rope
    ) -> Heads: ...

    def select(
        self, index_q_TGE: Tensor, index_k_SE: Tensor, positions_T: Tensor, rule: SelectionRule,
        format: CacheFormat,
    ) -> Tensor: ...  # fmt: skip

    def attend(
        self, heads: Heads, positions_T: Tensor, selection_GTC: Tensor | None, block: int,
        mode: CacheMode,
    ) -> Tensor: ...  # fmt: skip

    def route(
        self, hidden_TM: Tensor, gate_EM: Tensor, bias_E: Tensor | None, top_k: int, scaling: float
    ) -> Routing: ...

    def moe(
        self, hidden_TM: Tensor, routing: Routing, experts: Callable[[int], Mlp], shared: Mlp,
        swiglu: Swiglu,
    ) -> Tensor: ...  # fmt: skip


class ReferenceOperations:
    """The normative references, on whatever device the tensors are."""

    name = "reference"
    decodes = False
    device = torch.device("cpu")

    def heads(
        self, row_TZ: Tensor, layout: RowLayout, norms: HeadNorms, positions_T: Tensor, rope: Rope
    ) -> Heads:
        return qkv_rope.project_heads(row_TZ, layout, norms, positions_T, rope)

    def select(
        self, index_q_TGE: Tensor, index_k_SE: Tensor, positions_T: Tensor, rule: SelectionRule,
        format: CacheFormat,
    ) -> Tensor:  # fmt: skip
        """Chosen blocks I32 [G, T, C], through an index cache of the given format."""
        keys = round_trip(index_k_SE[:, None], format, 1.0)[:, 0]
        scores = block_selection.score_blocks(index_q_TGE, keys, positions_T, rule.block)
        return block_selection.select_blocks(
            scores, positions_T, block=rule.block, top_k=rule.top_k,
            local_blocks=rule.local_blocks, init_blocks=rule.init_blocks,
        )  # fmt: skip

    def attend(
        self, heads: Heads, positions_T: Tensor, selection_GTC: Tensor | None, block: int,
        mode: CacheMode,
    ) -> Tensor:  # fmt: skip
        """Attention output F32 [T, H, D], keys and values through a cache of the mode's format."""
        k = round_trip(heads.k_TGD, mode.kv, mode.k_scale, staged=mode.staged)
        v = round_trip(heads.v_TGD, mode.kv, mode.v_scale, staged=mode.staged)
        return block_attention.attend(
            heads.q_THD, k, v, positions_T, selection_GTC, block=block
        )  # fmt: skip

    def route(
        self, hidden_TM: Tensor, gate_EM: Tensor, bias_E: Tensor | None, top_k: int, scaling: float
    ) -> Routing:
        return router.route(hidden_TM, gate_EM, bias_E, top_k=top_k, scaling=scaling)

    def moe(
        self, hidden_TM: Tensor, routing: Routing, experts: Callable[[int], Mlp], shared: Mlp,
        swiglu: Swiglu,
    ) -> Tensor:  # fmt: skip
        return moe.moe(hidden_TM, routing, experts, shared, swiglu=swiglu)


def round_trip(x_TGD: Tensor, format: CacheFormat, scale: float, *, staged: bool = False) -> Tensor:
    """F32 vectors as a cache of `format` gives them back."""
    if format == "exact":
        return x_TGD
    x_RD = x_TGD.reshape(-1, x_TGD.shape[-1])
    data, scales = kv_cache.encode_rows(x_RD, format, scale)
    return kv_cache.decode_rows(data, scales, format, scale, staged=staged).view_as(x_TGD)

"""A layer's operations on a GPU: keys and values in the pages of a cache, as engines have them.

Queries, keys and values are BF16 where the reference has F32, so that an "exact" cache is one of
BF16. Heads are normed and turned by the reference itself, which runs on the device. Experts stored
in NVFP4 are multiplied as they are; those in other formats are decoded, for the reference.

With TRITON_INTERPRET=1 the same code runs on the CPU, slowly.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mmq.kernels.kv_pages import KvFormat, PagedCache, PageLayout, TokenBatch
from mmq.kernels.reference.moe import Mlp, Nvfp4Weight, Swiglu
from mmq.kernels.reference.qkv_rope import Heads
from mmq.kernels.reference.router import Routing
from mmq.kernels.triton import block_attention, block_selection, kv_cache, launch, router
from mmq.kernels.triton import moe as experts_kernels
from mmq.verify.model.operations import (
    CacheFormat,
    CacheMode,
    ReferenceOperations,
    SelectionRule,
)


class TritonOperations(ReferenceOperations):
    """The kernels of `mmq.kernels.triton`.

    Raises:
        NoDeviceError: there is no GPU. Operations raise what their kernels raise for shapes that
            these do not take.
    """

    name = "triton"
    decodes = True

    def __init__(self) -> None:
        self.device = launch.device()

    def select(
        self, index_q_TGE: Tensor, index_k_SE: Tensor, positions_T: Tensor, rule: SelectionRule,
        format: CacheFormat,
    ) -> Tensor:  # fmt: skip
        """Chosen blocks I32 [G, T, C]."""
        batch, lengths_Q = _one_sequence(positions_T, rule.block)
        layout = PageLayout(
            _stored(format), heads=1, tokens=rule.block, dim=index_k_SE.shape[1], sides=1
        )
        cache = _filled(layout, batch, index_k_SE[:, None], None)
        scores_GTN = block_selection.score_pages(index_q_TGE.bfloat16(), cache, batch, lengths_Q)
        return block_selection.select_blocks(
            scores_GTN, positions_T, block=rule.block, top_k=rule.top_k,
            local_blocks=rule.local_blocks, init_blocks=rule.init_blocks,
        )  # fmt: skip

    def attend(
        self, heads: Heads, positions_T: Tensor, selection_GTC: Tensor | None, block: int,
        mode: CacheMode,
    ) -> Tensor:  # fmt: skip
        """Attention output F32 [T, H, D]."""
        batch, lengths_Q = _one_sequence(positions_T, block)
        _, kv_heads, dim = heads.k_TGD.shape
        layout = PageLayout(_stored(mode.kv), heads=kv_heads, tokens=block, dim=dim)
        cache = _filled(layout, batch, heads.k_TGD, heads.v_TGD, mode.k_scale, mode.v_scale)
        return block_attention.attend_pages(
            heads.q_THD.bfloat16(), cache, batch, lengths_Q, selection_GTC, staged=mode.staged,
            dtype=torch.float32,
        )  # fmt: skip

    def route(
        self, hidden_TM: Tensor, gate_EM: Tensor, bias_E: Tensor | None, top_k: int, scaling: float
    ) -> Routing:
        return router.route(hidden_TM, gate_EM, bias_E, top_k=top_k, scaling=scaling)

    def moe(
        self, hidden_TM: Tensor, routing: Routing, experts: Callable[[int], Mlp], shared: Mlp,
        swiglu: Swiglu,
    ) -> Tensor:  # fmt: skip
        """Output F32 [T, M]; experts that no token reaches are not asked for."""
        if not len(hidden_TM):
            return torch.zeros_like(hidden_TM)
        reached, place_TK = torch.unique(routing.experts_TK, return_inverse=True)
        if not _is_nvfp4(experts(int(reached[0]))):
            return super().moe(hidden_TM, routing, experts, shared, swiglu)
        # The kernels know an expert by its place in the stack, which holds the reached ones.
        layer = experts_kernels.stack_experts([experts(e) for e in reached.tolist()], shared)
        placed = routing._replace(experts_TK=place_TK.int())
        return experts_kernels.moe(hidden_TM.bfloat16(), placed, layer, swiglu=swiglu).float()


def _is_nvfp4(mlp: Mlp) -> bool:
    return all(isinstance(weight, Nvfp4Weight) for weight in mlp)


def _stored(format: CacheFormat) -> KvFormat:
    return "bf16" if format == "exact" else format


def _one_sequence(positions_T: Tensor, block: int) -> tuple[TokenBatch, Tensor]:
    """All tokens of one sequence, from position 0 on, on pages 0, 1, 2 …"""
    tokens, device = len(positions_T), positions_T.device
    pages = torch.arange(-(-tokens // block), dtype=torch.int32, device=device)
    batch = TokenBatch(positions_T, torch.zeros_like(positions_T), pages[None])
    return batch, torch.tensor([tokens], dtype=torch.int32, device=device)


def _filled(
    layout: PageLayout, batch: TokenBatch, k_TGD: Tensor, v_TGD: Tensor | None,
    k_scale: float = 1.0, v_scale: float = 1.0,
) -> PagedCache:  # fmt: skip
    """A cache that holds the keys (and values) of all tokens."""
    shape = batch.page_table_QN.shape[1], layout.page_bytes
    pages = torch.zeros(shape, dtype=torch.uint8, device=k_TGD.device)
    cache = PagedCache(layout, pages, k_scale, v_scale)
    kv_cache.write_pages(cache, batch.slots(layout.tokens), k_TGD, v_TGD)
    return cache

"""Sequences in pages, in any order, for the kernels that read a cache.

Dimensions: T query tokens, G KV heads, D head dimension, Q sequences, N blocks, P pages.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mmq.kernels.kv_pages import KvFormat, PagedCache, PageLayout, ScaleOrder, TokenBatch
from mmq.kernels.reference.kv_cache import write_pages
from mmq.verify.kernels.material import Material


class Paged(NamedTuple):
    """A batch over pages; bytes that no key was written to are 0xFF, which is NaN in any format.

    Attributes:
        lengths_Q: I32, keys of each sequence.
        index_cache: keys of the indexer, in the same pages.
    """

    q_THD: Tensor
    index_q_TGE: Tensor
    cache: PagedCache
    index_cache: PagedCache
    batch: TokenBatch
    lengths_Q: Tensor


def make_paged(
    material: Material, format: KvFormat, tokens: tuple[int, int], order: ScaleOrder = "linear"
) -> Paged:
    """The last `tokens` of two sequences: one longer than selection covers, one of half a block.

    Queries, keys and values are heads of `material`.
    """
    geometry = material.geometry
    lengths = geometry.context, geometry.block // 2 + 3
    blocks = [-(-length // geometry.block) for length in lengths]
    order_P = torch.randperm(sum(blocks) + 2, generator=material.generator(3)).int()
    table_QN = torch.full((2, blocks[0] + 1), -1, dtype=torch.int32)
    layout = PageLayout(
        format, geometry.kv_heads, geometry.block, geometry.dim, v_scale_order=order
    )
    index_layout = PageLayout(format, 1, geometry.block, geometry.dim, sides=1)
    cache, index_cache = (
        PagedCache(each, torch.full((len(order_P), each.page_bytes), 0xFF).to(torch.uint8), *scales)
        for each, scales in (
            (layout, (material.k_scale, material.v_scale)),
            (index_layout, (material.index_scale,)),
        )
    )
    queries, index_queries, positions, sequences = [], [], [], []
    for s, (length, last) in enumerate(zip(lengths, tokens, strict=True)):
        table_QN[s, : blocks[s]], order_P = order_P[: blocks[s]], order_P[blocks[s] :]
        heads = material.heads(length, salt=4 + s)
        whole = TokenBatch(torch.arange(length), torch.full((length,), s), table_QN)
        slots_T = whole.slots(geometry.block)
        write_pages(cache, slots_T, heads.k_TGD, heads.v_TGD)
        assert heads.index_k_TE is not None and heads.index_q_TGE is not None
        write_pages(index_cache, slots_T, heads.index_k_TE[:, None], None)
        queries.append(heads.q_THD[length - last :])
        index_queries.append(heads.index_q_TGE[length - last :])
        positions.append(torch.arange(length - last, length))
        sequences.append(torch.full((last,), s))
    batch = TokenBatch(torch.cat(positions).int(), torch.cat(sequences).int(), table_QN)
    return Paged(
        torch.cat(queries).bfloat16(),
        torch.cat(index_queries).bfloat16(),
        cache,
        index_cache,
        batch,
        torch.tensor(lengths, dtype=torch.int32),
    )


def choose_blocks(material: Material, positions_T: Tensor) -> Tensor:
    """I32 [G, T, C]: the local block and random earlier ones in any order, −1 in between."""
    geometry, generator = material.geometry, material.generator(6)
    shape = geometry.kv_heads, len(positions_T), geometry.top_k
    selection_GTC = torch.full(shape, -1, dtype=torch.int32)
    for g in range(geometry.kv_heads):
        for t, position in enumerate(positions_T.tolist()):
            local = position // geometry.block
            earlier = torch.randperm(local, generator=generator)[: geometry.top_k - 1]
            chosen = torch.cat([earlier, torch.tensor([local])]).int()
            places = torch.randperm(geometry.top_k, generator=generator)[: len(chosen)]
            selection_GTC[g, t, places] = chosen
    return selection_GTC

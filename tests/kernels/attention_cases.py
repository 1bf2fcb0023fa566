"""Attention to compare: operands, selections, pages of ragged batches, and exact outputs.

Dimensions: T query tokens, S key positions, H query heads, G KV heads, D head dimension, C chosen
blocks, N blocks, Q sequences, P pages, Z page bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from tolerances import AttentionRoundings, attention_error
from torch import Tensor

from mmq.kernels.kv_pages import PagedCache, PageLayout, TokenBatch
from mmq.kernels.reference.kv_cache import read_pages, write_pages


@dataclass(frozen=True)
class Geometry:
    heads: int
    kv_heads: int
    dim: int
    block: int
    choices: int


M3 = Geometry(64, 4, 128, 128, 16)
SMALL = Geometry(8, 2, 32, 16, 4)
#: One query head a KV head, and a group that is no power of two.
SINGLE = Geometry(3, 3, 16, 16, 2)
ODD_GROUP = Geometry(6, 2, 16, 16, 3)


class Operands(NamedTuple):
    """Of one sequence; numbers are exact in BF16."""

    q_THD: Tensor
    k_SGD: Tensor
    v_SGD: Tensor
    positions_T: Tensor


def normal(*shape: int, seed: int = 0) -> Tensor:
    """F32 numbers that BF16 holds."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).bfloat16().float()


def make_operands(geometry: Geometry, keys: int, positions: list[int] | Tensor) -> Operands:
    positions_T = torch.as_tensor(positions, dtype=torch.int32)
    return Operands(
        normal(len(positions_T), geometry.heads, geometry.dim, seed=1),
        normal(keys, geometry.kv_heads, geometry.dim, seed=2),
        normal(keys, geometry.kv_heads, geometry.dim, seed=3),
        positions_T,
    )


def choose_blocks(geometry: Geometry, positions_T: Tensor, seed: int = 4) -> Tensor:
    """I32 [G, T, C]: the local block and random earlier ones in any order, −1 in between."""
    generator = torch.Generator().manual_seed(seed)
    shape = geometry.kv_heads, len(positions_T), geometry.choices
    selection_GTC = torch.full(shape, -1, dtype=torch.int32)
    for g in range(geometry.kv_heads):
        for t, position in enumerate(positions_T.tolist()):
            local = position // geometry.block
            order = torch.randperm(local, generator=generator)[: geometry.choices - 1]
            blocks = torch.cat([order, torch.tensor([local])]).int()
            places = torch.randperm(geometry.choices, generator=generator)[: len(blocks)]
            selection_GTC[g, t, places] = blocks
    return selection_GTC


def visible(
    geometry: Geometry, keys: int, positions_T: Tensor, selection_GTC: Tensor | None = None
) -> Tensor:
    """Bool [G, T, S], key by key as the rule says it."""
    shape = geometry.kv_heads, len(positions_T), keys
    visible_GTS = torch.zeros(shape, dtype=torch.bool)
    for t, position in enumerate(positions_T.tolist()):
        for g in range(geometry.kv_heads):
            chosen = None if selection_GTC is None else set(selection_GTC[g, t].tolist())
            for key in range(min(keys, position + 1)):
                visible_GTS[g, t, key] = chosen is None or key // geometry.block in chosen
    return visible_GTS


def exact(operands: Operands, visible_GTS: Tensor, scale: float) -> Tensor:
    """F64 [T, H, D]: head by head, with every number exact but for F64's roundings."""
    q_THD, k_SGD, v_SGD, _ = operands
    group = q_THD.shape[1] // k_SGD.shape[1]
    out_THD = torch.empty(q_THD.shape, dtype=torch.float64)
    for head in range(q_THD.shape[1]):
        g = head // group
        score_TS = scale * (q_THD[:, head].double() @ k_SGD[:, g].double().T)
        p_TS = score_TS.masked_fill(~visible_GTS[g], -torch.inf).softmax(1)
        out_THD[:, head] = p_TS @ v_SGD[:, g].double()
    return out_THD


def assert_close(
    got_THD: Tensor,
    operands: Operands,
    visible_GTS: Tensor,
    scale: float,
    roundings: AttentionRoundings,
    times: float = 1.0,
) -> None:
    """`got_THD` is exact attention, times `times`, within the error of its roundings."""
    wanted_THD = exact(operands, visible_GTS, scale)
    bound_THD = attention_error(*operands[:3], visible_GTS, scale, roundings)
    error_THD = (got_THD.double() / times - wanted_THD).abs()
    assert (error_THD <= bound_THD).all(), (error_THD / bound_THD).max()


class Paged(NamedTuple):
    """A batch over pages in any order; what is not written is 0xFF, which is NaN in any format."""

    q_THD: Tensor
    cache: PagedCache
    batch: TokenBatch
    lengths_Q: Tensor
    selection_GTC: Tensor

    @property
    def arguments(self) -> tuple[Tensor, PagedCache, TokenBatch, Tensor]:
        return self[:4]


def make_paged(
    geometry: Geometry,
    format: str,
    lengths: list[int],
    tokens: list[int],
    order: str = "linear",
    k_scale: float = 0.3,
    v_scale: float = 2.7,
) -> Paged:
    """The last `tokens` of sequences of `lengths`, with K and V of a size that the scales suit."""
    block, heads = geometry.block, geometry.kv_heads
    layout = PageLayout(format, heads, block, geometry.dim, v_scale_order=order)
    blocks = [-(-length // block) for length in lengths]
    pages_PZ = torch.full((sum(blocks) + 2, layout.page_bytes), 0xFF, dtype=torch.uint8)
    cache = PagedCache(layout, pages_PZ, k_scale, v_scale)
    free = torch.randperm(len(pages_PZ), generator=torch.Generator().manual_seed(5)).int()
    table_QN = torch.full((len(lengths), max([1, *blocks])), -1, dtype=torch.int32)
    for s, length in enumerate(lengths):
        table_QN[s, : blocks[s]], free = free[: blocks[s]], free[blocks[s] :]
        whole = TokenBatch(torch.arange(length), torch.full((length,), s), table_QN)
        k_TGD = normal(length, heads, geometry.dim, seed=10 + s)
        v_TGD = normal(length, heads, geometry.dim, seed=50 + s)
        write_pages(cache, whole.slots(block), k_TGD, v_TGD)
    spans = zip(lengths, tokens, strict=True)
    positions_T = torch.cat([torch.arange(last - n, last) for last, n in spans]).int()
    sequence_T = torch.repeat_interleave(torch.arange(len(tokens)), torch.tensor(tokens)).int()
    q_THD = normal(len(positions_T), geometry.heads, geometry.dim, seed=1).bfloat16()
    return Paged(
        q_THD,
        cache,
        TokenBatch(positions_T, sequence_T, table_QN),
        torch.tensor(lengths, dtype=torch.int32),
        choose_blocks(geometry, positions_T),
    )


def assert_pages_close(
    got_THD: Tensor,
    geometry: Geometry,
    paged: Paged,
    roundings: AttentionRoundings,
    *,
    selected: bool,
    staged: bool = False,
) -> None:
    """`got_THD` is exact attention over the elements of the pages, sequence by sequence."""
    cache, batch = paged.cache, paged.batch
    scaled = cache.layout.format != "bf16"
    k_scale, v_scale = (cache.k_scale, cache.v_scale) if scaled else (1.0, 1.0)
    unit = PagedCache(cache.layout, cache.pages_PZ)
    for s, length in enumerate(paged.lengths_Q.tolist()):
        row_T = batch.sequence_T == s
        if not row_T.any():
            continue
        k_SGD, v_SGD = read_pages(unit, batch.page_table_QN[s], length, staged=staged)
        operands = Operands(paged.q_THD[row_T], k_SGD, v_SGD, batch.positions_T[row_T])
        selection_GTC = paged.selection_GTC[:, row_T] if selected else None
        visible_GTS = visible(geometry, length, operands.positions_T, selection_GTC)
        scale = geometry.dim**-0.5 * k_scale
        assert_close(got_THD[row_T], operands, visible_GTS, scale, roundings, v_scale)

"""Block scores to select from, and pages of index keys to score.

Dimensions: G index heads, T query tokens, E index dimension, S keys, N blocks, P pages, Z bytes of
a page, Q sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mmq.kernels.kv_pages import PagedCache, PageLayout, TokenBatch
from mmq.kernels.reference.kv_cache import write_pages

SCORE_KINDS = ["random", "tied", "clustered", "special", "equal", "all NaN"]

_SPECIAL = [
    0.0,
    -0.0,
    torch.nan,
    torch.inf,
    -torch.inf,
    -1e30,
    1e30,
    3.4e38,
    -3.4e38,
    1e-45,
    -1e-45,
]


def make_scores(kind: str, heads: int, tokens: int, blocks: int, seed: int = 0) -> Tensor:
    """F32 [G, T, N] of one of `SCORE_KINDS`."""
    generator = torch.Generator().manual_seed(seed)
    shape = heads, tokens, blocks
    if kind == "random":
        return torch.randn(shape, generator=generator)
    if kind == "tied":
        return torch.randint(-2, 3, shape, generator=generator).float()
    if kind == "clustered":
        # Neighbouring F32 numbers around 1, of both signs.
        bits = 0x3F800000 + torch.randint(-3, 4, shape, generator=generator, dtype=torch.int32)
        signs = torch.randint(0, 2, shape, generator=generator) * 2 - 1
        return bits.view(torch.float32) * signs
    if kind == "special":
        special = torch.tensor(_SPECIAL)
        return special[torch.randint(0, len(special), shape, generator=generator)]
    return torch.full(shape, torch.nan if kind == "all NaN" else 1.5)


@dataclass(frozen=True)
class PagesCase:
    """Index keys in pages and tokens that read them, as NumPy arrays, which travel.

    Attributes:
        pages_PZ: U8. Bytes that no key of a sequence was written to are all `poison`.
        q_TGE: F32 with BF16 values.
    """

    layout: PageLayout
    pages_PZ: np.ndarray
    k_scale: float
    positions_T: np.ndarray
    sequence_T: np.ndarray
    page_table_QN: np.ndarray
    lengths_Q: np.ndarray
    q_TGE: np.ndarray

    def tensors(self) -> tuple[Tensor, PagedCache, TokenBatch, Tensor]:
        """Arguments of `score_pages`."""
        names = "positions_T", "sequence_T", "page_table_QN"
        batch = TokenBatch(*(torch.from_numpy(getattr(self, name)) for name in names))
        cache = PagedCache(self.layout, torch.from_numpy(self.pages_PZ), self.k_scale)
        q_TGE = torch.from_numpy(self.q_TGE).to(torch.bfloat16)
        return q_TGE, cache, batch, torch.from_numpy(self.lengths_Q)


def make_pages(
    key_format: str,
    tokens: list[tuple[int, int]],
    lengths: list[int],
    *,
    heads: int = 4,
    dim: int = 128,
    block: int = 128,
    k_scale: float = 1.0,
    integers: bool = False,
    poison: int = 0x5E,
    seed: int = 0,
) -> PagesCase:
    """Pages in random order, with a page and a column of the table to spare.

    Args:
        tokens: (sequence, position) of each.
        lengths: keys of each sequence.
        integers: q and k from −3 to 3, all products and sums exact in F32, also as NVFP4.
        poison: byte of everything else; 0x5E is a large number in every format, 0xFF NaN.
    """
    generator = torch.Generator().manual_seed(seed)
    layout = PageLayout(key_format, heads=1, tokens=block, dim=dim, sides=1)
    counts = [-(-length // block) for length in lengths]
    order = torch.randperm(sum(counts) + 1, generator=generator).int()
    table_QN = torch.full((len(lengths), max(counts) + 1), -1, dtype=torch.int32)
    cache = PagedCache(
        layout, torch.full((len(order), layout.page_bytes), poison, dtype=torch.uint8), k_scale
    )
    for sequence, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        table_QN[sequence, :count], order = order[:count], order[count:]
        positions = torch.arange(length)
        batch = TokenBatch(positions, torch.full_like(positions, sequence), table_QN)
        write_pages(cache, batch.slots(block), _keys(length, dim, integers, generator), None)
    sequence_T, positions_T = torch.tensor(tokens, dtype=torch.int32).reshape(-1, 2).T.contiguous()
    q_TGE = _numbers((len(tokens), heads, dim), integers, generator).to(torch.bfloat16).float()
    arrays = cache.pages_PZ, positions_T, sequence_T, table_QN, torch.tensor(lengths).int(), q_TGE
    pages_PZ, positions_T, sequence_T, table_QN, lengths_Q, q_TGE = (a.numpy() for a in arrays)
    return PagesCase(layout, pages_PZ, k_scale, positions_T, sequence_T, table_QN, lengths_Q, q_TGE)


def _numbers(shape: tuple[int, ...], integers: bool, generator: torch.Generator) -> Tensor:
    if integers:
        return torch.randint(-3, 4, shape, generator=generator).float()
    return torch.randn(shape, generator=generator)


def _keys(length: int, dim: int, integers: bool, generator: torch.Generator) -> Tensor:
    k_SGE = _numbers((length, 1, dim), integers, generator)
    if integers:
        # Blocks of 16 that reach 3 or 6, which NVFP4 stores as 6 · 0.5 and 6 · 1.
        k_SGE[..., ::16] = 3.0
        k_SGE *= (torch.arange(length)[:, None, None] + torch.arange(dim) // 16) % 2 + 1
    return k_SGE

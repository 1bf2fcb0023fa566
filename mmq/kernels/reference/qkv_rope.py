"""Attention heads from a packed projection row: per-head norm, partial RoPE, write to the KV cache.

    row   = x · Wᵀ rounded to BF16, by heads [q | k | v | index_q | index_k]
    n     = x · (1 / √(Σ x² / D + ε)) · (1 + w)             q, k, index_q, index_k; v stays as it is
    a_i   = n_i · cos t_i − n_{i+R/2} · sin t_i             i < R/2, the first R of D elements turn
    b_i   = n_{i+R/2} · cos t_i + n_i · sin t_i             a to i, b to i + R/2, the rest stays
    t_i   = position · f_i,   f_i = 1 / theta^(2i / R)

Everything from the row on is F32, one rounding an operation in the order written. Σ x² adds
neighbours, then neighbouring sums, as long as their number is even, and the rest from left to
right; the root and both divisions are IEEE's. So a kernel that is given the same tables of cos and
sin has the same bits.

Four numbers: x = [3, 4, 0, 0], w = 0, ε = 0, R = 2. Σ x² = 25, mean 6.25, root 2.5, n = [1.2, 1.6,
0, 0]. At position 1, where f = 1: a = 1.2 · 0.5403 − 1.6 · 0.8415 = −0.698, b = 1.6 · 0.5403 +
1.2 · 0.8415 = 1.874.

Sources: transformers 5.24 models/minimax_m3_vl (MiniMaxM3VLRMSNorm, MiniMaxM3VLRotaryEmbedding,
apply_rotary_pos_emb); the packed row: vLLM fused_minimax_m3_qknorm_rope_kv_insert_kernel.cu.

Dimensions: T tokens, M hidden, Z columns of the row, H query heads, G KV heads (= index heads),
D head dimension, E index head dimension, D2 = R/2.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..kv_pages import PagedCache
from .e4m3 import encode_e4m3
from .kv_cache import write_pages

QueryFormat = Literal["bf16", "fp8"]


@dataclass(frozen=True)
class RowLayout:
    """Which columns of a packed row are whose.

    Attributes:
        index_heads: query heads of the indexer, which has one key head; 0 in a layer without one.
        index_dim: of each head of the indexer.
    """

    heads: int = 64
    kv_heads: int = 4
    dim: int = 128
    index_heads: int = 4
    index_dim: int = 128

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(
                f"{self.heads} query heads do not divide over {self.kv_heads} KV heads"
            )

    @property
    def widths(self) -> tuple[int, int, int, int, int]:
        """Columns of q, k, v, index_q, index_k."""
        index_key = self.index_dim if self.index_heads else 0
        kv = self.kv_heads * self.dim
        return self.heads * self.dim, kv, kv, self.index_heads * self.index_dim, index_key

    @property
    def starts(self) -> tuple[int, int, int, int, int]:
        """First column of each part."""
        q, k, v, index_q, _ = self.widths
        return 0, q, q + k, q + k + v, q + k + v + index_q

    @property
    def width(self) -> int:
        return sum(self.widths)

    def shard(self, ranks: int) -> RowLayout:
        """The layout of one of `ranks` tensor-parallel ranks, which all have the same.

        Raises:
            ValueError: the heads do not divide evenly.
        """
        if self.kv_heads % ranks or self.index_heads % ranks:
            raise ValueError(f"{self.kv_heads} KV heads do not divide over {ranks} ranks")
        return replace(
            self,
            heads=self.heads // ranks,
            kv_heads=self.kv_heads // ranks,
            index_heads=self.index_heads // ranks,
        )

    def shard_columns(self, rank: int, ranks: int) -> Tensor:
        """I64: columns of the whole row that rank `rank` has, in its own order.

        Query and KV heads go to ranks in runs; every rank has the one index key.
        """
        own = self.shard(ranks).widths
        offsets = [rank * width for width in own[:4]] + [0]
        parts = zip(self.starts, offsets, own, strict=True)
        return torch.cat([torch.arange(n) + start + offset for start, offset, n in parts])


@dataclass(frozen=True)
class HeadNorms:
    """Norm weights, each shared by the heads of its part.

    Attributes:
        q_D, k_D, index_q_E, index_k_E: F32 or BF16; the last two None without an indexer.
        gemma: scale by 1 + w; else by w.
    """

    q_D: Tensor
    k_D: Tensor
    index_q_E: Tensor | None = None
    index_k_E: Tensor | None = None
    eps: float = 1e-6
    gemma: bool = True

    @cached_property
    def stacked_5D(self) -> Tensor:
        """Weights by part of the row, one tensor for a kernel; zeros for those that there are not.

        Raises:
            ValueError: head dimensions differ.
        """
        none = torch.zeros_like(self.q_D)
        index = [none if w is None else w for w in (self.index_q_E, self.index_k_E)]
        parts = [self.q_D, self.k_D, none, *index]
        if {len(part) for part in parts} != {len(self.q_D)}:
            raise ValueError(f"heads of {[len(part) for part in parts]}, not of one dimension")
        return torch.stack(parts)


@dataclass(frozen=True)
class Rope:
    """Rotary embedding of the first `rotary_dim` elements of a head."""

    rotary_dim: int = 64
    theta: float = 5e6


class Heads(NamedTuple):
    """What a layer's attention works with, F32; the last two None without an indexer."""

    q_THD: Tensor
    k_TGD: Tensor
    v_TGD: Tensor
    index_q_TGE: Tensor | None
    index_k_TE: Tensor | None

    @property
    def layout(self) -> RowLayout:
        """Of the row they come from."""
        _, heads, dim = self.q_THD.shape
        if self.index_q_TGE is None:
            return RowLayout(heads, self.k_TGD.shape[1], dim, 0)
        return RowLayout(heads, self.k_TGD.shape[1], dim, *self.index_q_TGE.shape[1:])


@dataclass(frozen=True)
class Destination:
    """Where a layer's heads go.

    Attributes:
        slots_T: I64, page · block size + offset of each token, each once; negative for tokens that
            are not to be cached. Both caches have the same slots.
        cache: K and V. index_cache: index keys, pages of one head and one side; None without an
            indexer.
        q_format, index_q_format: "bf16", or "fp8": E4M3 codes (U8) without a scale, saturating.
    """

    slots_T: Tensor
    cache: PagedCache
    index_cache: PagedCache | None = None
    q_format: QueryFormat = "bf16"
    index_q_format: QueryFormat = "bf16"

    def check(self, layout: RowLayout, tokens: int) -> None:
        """See that rows of `tokens` tokens fit slots and caches.

        Raises:
            ValueError: they do not.
        """
        if len(self.slots_T) != tokens:
            raise ValueError(f"{len(self.slots_T)} slots for {tokens} tokens")
        pages = self.cache.layout
        if (pages.heads, pages.dim, pages.sides) != (layout.kv_heads, layout.dim, 2):
            raise ValueError(f"{layout} does not fit pages of {pages}")
        if (self.index_cache is None) != (layout.index_heads == 0):
            raise ValueError("an index cache goes with index heads, and only with them")
        if self.index_cache is not None:
            keys = self.index_cache.layout
            wanted = 1, layout.index_dim, 1, pages.tokens
            if (keys.heads, keys.dim, keys.sides, keys.tokens) != wanted:
                raise ValueError(f"{layout} does not fit index pages of {keys}")


def project_rows(x_TM: Tensor, w_ZM: Tensor) -> Tensor:
    """The packed row as a GEMM leaves it: products and sums in F32, rounded to BF16 [T, Z].

    The order of the sum is the GEMM's own: nothing is promised about the last bit.
    """
    return (x_TM.float() @ w_ZM.float().T).bfloat16()


def gemma_norm(x: Tensor, weight: Tensor, eps: float, gemma: bool = True) -> Tensor:
    """RMS norm over the last dimension, times 1 + weight, or times weight if not `gemma`.

    Args:
        x: F32 or BF16 [..., D]; weight: F32 or BF16 [D].

    Returns:
        F32 [..., D].
    """
    x = x.float()
    scale = 1.0 + weight.float() if gemma else weight.float()
    mean = _tree_sum(x * x) / x.shape[-1]
    # torch.sqrt of F32 is MKL's on many machines, whose last bit is not IEEE's. The root of an F32
    # number is never so near to where F32 rounds that the detour could change it.
    root = torch.sqrt((mean + eps).double()).float()
    return x * (1.0 / root)[..., None] * scale


def _tree_sum(x: Tensor) -> Tensor:
    """Σ over the last dimension: neighbours while their number is even, the rest left to right."""
    while x.shape[-1] % 2 == 0:
        x = x[..., 0::2] + x[..., 1::2]
    total = x[..., 0]
    for i in range(1, x.shape[-1]):
        total = total + x[..., i]
    return total


def rope_tables(
    positions_T: Tensor, rotary_dim: int = 64, theta: float = 5e6
) -> tuple[Tensor, Tensor]:
    """cos and sin of position · frequency, F32 [T, rotary_dim / 2] each.

    Angles are F32 products, as engines and transformers have them: at position 10^6 some are off
    by 0.03, which is part of the model. Positions are exact up to 2^24.
    """
    exponents_D2 = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    frequencies_D2 = (1.0 / theta**exponents_D2).to(positions_T.device)
    angles_TD2 = positions_T[:, None].float() * frequencies_D2
    return angles_TD2.cos(), angles_TD2.sin()


def apply_rope(x_THD: Tensor, cos_TD2: Tensor, sin_TD2: Tensor) -> Tensor:
    """Turn the pairs (i, i + R/2) of the first R elements of each head; F32 [T, H, D]."""
    half = cos_TD2.shape[-1]
    first, second = x_THD[..., :half], x_THD[..., half : 2 * half]
    cos, sin = cos_TD2[:, None], sin_TD2[:, None]
    turned = [first * cos - second * sin, second * cos + first * sin]
    return torch.cat([*turned, x_THD[..., 2 * half :]], -1)


def split_row(row_TZ: Tensor, layout: RowLayout) -> Iterator[Tensor]:
    """The parts q, k, v, index_q, index_k of a row by heads, [T, heads, dim] each.

    Raises:
        ValueError: the row has another width than the layout.
    """
    if row_TZ.shape[1] != layout.width:
        raise ValueError(f"a row of {row_TZ.shape[1]} columns, not {layout.width}")
    dims = [layout.dim] * 3 + [layout.index_dim] * 2
    for start, width, dim in zip(layout.starts, layout.widths, dims, strict=True):
        yield row_TZ[:, start : start + width].reshape(len(row_TZ), width // dim, dim)


def project_heads(
    row_TZ: Tensor,
    layout: RowLayout,
    norms: HeadNorms,
    positions_T: Tensor,
    rope: Rope = Rope(),
) -> Heads:
    """Normed and turned heads of a packed row (BF16 or F32 [T, Z]), all F32.

    Raises:
        ValueError: the row has another width than the layout.
    """
    cos_TD2, sin_TD2 = rope_tables(positions_T, rope.rotary_dim, rope.theta)

    def finish(x_THD: Tensor, weight: Tensor) -> Tensor:
        return apply_rope(gemma_norm(x_THD, weight, norms.eps, norms.gemma), cos_TD2, sin_TD2)

    q_THD, k_TGD, v_TGD, index_q_TGE, index_k_T1E = split_row(row_TZ, layout)
    index_q: Tensor | None = None
    index_k: Tensor | None = None
    if norms.index_q_E is not None and norms.index_k_E is not None and layout.index_heads:
        index_q = finish(index_q_TGE, norms.index_q_E)
        index_k = finish(index_k_T1E, norms.index_k_E)[:, 0]
    q, k = finish(q_THD, norms.q_D), finish(k_TGD, norms.k_D)
    return Heads(q, k, v_TGD.float(), index_q, index_k)


def encode_queries(q_THD: Tensor, format: QueryFormat) -> Tensor:
    """Queries as kernels take them: BF16, or E4M3 codes (U8)."""
    return encode_e4m3(q_THD) if format == "fp8" else q_THD.bfloat16()


def write_heads(heads: Heads, destination: Destination) -> tuple[Tensor, Tensor | None]:
    """K, V and index keys to their pages, in place; queries q and index_q as kernels take them.

    Raises:
        ValueError: the heads do not fit the destination.
    """
    destination.check(heads.layout, len(heads.q_THD))
    write_pages(destination.cache, destination.slots_T, heads.k_TGD, heads.v_TGD)
    index_q: Tensor | None = None
    if heads.index_q_TGE is not None and heads.index_k_TE is not None and destination.index_cache:
        keys_T1E = heads.index_k_TE[:, None]
        write_pages(destination.index_cache, destination.slots_T, keys_T1E, None)
        index_q = encode_queries(heads.index_q_TGE, destination.index_q_format)
    return encode_queries(heads.q_THD, destination.q_format), index_q

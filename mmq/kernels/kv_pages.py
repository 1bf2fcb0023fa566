"""Pages of the KV cache: how a block of tokens lies in memory, as data.

A page holds one block (128 tokens in M3) of one layer, and is a row of bytes with up to four
regions, each contiguous by head:

    NVFP4   [K data | K scales | V data | V scales]    data [G, B, D/2], scales [G, B, D/16]
    FP8     [K data | V data]                          data [G, B, D], E4M3
    BF16    [K data | V data]                          data [G, B, D], two bytes an element

Four numbers, NVFP4 with 4 heads, 128 tokens, D 128: data 32,768 B a side, scales 4,096 B a side,
V data at 36,864, the page 73,728 B; 60 layers × 73,728 / 128 = 34,560 B a token.

The order of V's scales is a property of the layout, not of the format: FlashInfer's readers on
SM100 take them in quads of 4 tokens, MSA's and those of SM12x in plain rows.
Sources: FlashInfer PR 4982, vLLM nvfp4_kv_cache_kernels.cu, MiniMax MSA.

Dimensions: G KV heads, B tokens of a block, D head dimension, T tokens of a batch, Q sequences,
N blocks of a sequence, P pages, Z bytes of a page.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

KvFormat = Literal["bf16", "fp8", "nvfp4"]
ScaleOrder = Literal["linear", "quads"]

#: Elements that share an NVFP4 block scale.
SCALE_BLOCK = 16
#: Tokens whose V scales lie together in the order "quads".
QUAD = 4


@dataclass(frozen=True)
class PageLayout:
    """Where everything of a page lies.

    Attributes:
        format: of the elements.
        heads: KV heads of a page; 1 for index keys.
        tokens: block size.
        dim: head dimension, a multiple of 16.
        sides: 2 for K and V, 1 for index keys, which have no V.
        v_scale_order: "linear" [B, D/16] inside a head, or "quads": byte
            (t div 4)·(4·D/16) + 4·s + t mod 4 for token t and scale s.
    """

    format: KvFormat
    heads: int = 4
    tokens: int = 128
    dim: int = 128
    sides: int = 2
    v_scale_order: ScaleOrder = "linear"

    def __post_init__(self) -> None:
        if self.dim % SCALE_BLOCK:
            raise ValueError(f"head dimension {self.dim} is no multiple of {SCALE_BLOCK}")
        if self.v_scale_order == "quads" and self.tokens % QUAD:
            raise ValueError(f"a page of {self.tokens} tokens has no whole quads")

    @property
    def head_token_bytes(self) -> int:
        """Data bytes of one head of one token."""
        return {"bf16": 2 * self.dim, "fp8": self.dim, "nvfp4": self.dim // 2}[self.format]

    @property
    def head_token_scales(self) -> int:
        """Block scales, one byte each, of one head of one token; 0 but for NVFP4."""
        return self.dim // SCALE_BLOCK if self.format == "nvfp4" else 0

    @property
    def data_bytes(self) -> int:
        """Bytes of the data region of one side."""
        return self.heads * self.tokens * self.head_token_bytes

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scale region of one side."""
        return self.heads * self.tokens * self.head_token_scales

    @property
    def k_scales(self) -> int:
        """Offset of K's scales; K's data starts at 0."""
        return self.data_bytes

    @property
    def v_data(self) -> int:
        """Offset of V's data."""
        return self.data_bytes + self.scale_bytes

    @property
    def v_scales(self) -> int:
        """Offset of V's scales."""
        return self.v_data + self.data_bytes

    @property
    def page_bytes(self) -> int:
        return self.sides * (self.data_bytes + self.scale_bytes)


@dataclass(frozen=True)
class PagedCache:
    """Pages of one layer.

    Attributes:
        pages_PZ: U8 [P, page_bytes].
        k_scale, v_scale: F32 multipliers of the tensor: value = scale · e4m3, or
            scale · block scale · e2m1. Ignored for BF16.
    """

    layout: PageLayout
    pages_PZ: Tensor
    k_scale: float = 1.0
    v_scale: float = 1.0


@dataclass(frozen=True)
class TokenBatch:
    """Which tokens a kernel works on: of which sequences, at which positions.

    A prefill has many tokens of a sequence, a decode one; the kernels' mathematics is the same.

    Attributes:
        positions_T: I32, position of each token in its sequence, from 0.
        sequence_T: I32, row of `page_table_QN` for each token.
        page_table_QN: I32, page of each block of each sequence; −1 where there is none. Block n
            holds positions n·B to n·B + B − 1: blocks are anchored at position 0.
    """

    positions_T: Tensor
    sequence_T: Tensor
    page_table_QN: Tensor

    def slots(self, tokens: int) -> Tensor:
        """I64 [T]: page · `tokens` + offset, where K and V of each token go; −1 for nowhere."""
        blocks_T = (self.positions_T // tokens).long()
        page_T = self.page_table_QN[self.sequence_T.long(), blocks_T].long()
        return (page_T * tokens + self.positions_T % tokens).where(page_T >= 0, -1)

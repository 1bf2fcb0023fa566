"""Sizes at which kernels are compared: small ones for the interpreter, M3's, those of a config."""

from __future__ import annotations

from dataclasses import dataclass

from mmq.kernels.reference.moe import M3_SWIGLU, Swiglu
from mmq.kernels.reference.qkv_rope import RowLayout


@dataclass(frozen=True)
class Geometry:
    """One layer's sizes, and how much of it is run.

    Attributes:
        block: tokens of a block and page. top_k: blocks that a token chooses.
        reached: experts that have weights here; a model may have more.
        context: keys of the longest sequence, more than `top_k` blocks.
        queries: tokens of a prefill.
    """

    heads: int = 64
    kv_heads: int = 4
    dim: int = 128
    rotary_dim: int = 64
    theta: float = 5e6
    eps: float = 1e-6
    gemma: bool = True
    block: int = 128
    top_k: int = 16
    local_blocks: int = 1
    init_blocks: int = 0
    hidden: int = 6144
    inner: int = 3072
    experts: int = 128
    reached: int = 8
    top_experts: int = 4
    scaling: float = 2.0
    swiglu: Swiglu = M3_SWIGLU
    context: int = 2500
    queries: int = 20

    @property
    def row(self) -> RowLayout:
        """The packed projection row."""
        return RowLayout(self.heads, self.kv_heads, self.dim, self.kv_heads, self.dim)


#: M3's own sizes, with 8 of 128 experts; 2,500 keys are 20 blocks, of which 16 are chosen.
M3 = Geometry()
#: The least that still has partial tiles, blocks and pages: 160 rows are a tile of 128 and a part,
#: 80 bytes a step of 64 and a part, 75 keys five blocks of which four are chosen.
SMALL = Geometry(
    heads=8, kv_heads=2, dim=32, rotary_dim=16, block=16, top_k=4, hidden=96, inner=160, experts=20,
    reached=6, scaling=1.7, context=75, queries=5,
)  # fmt: skip

"""Weights and tokens for the MoE tests, and the layer's definition token by token.

`exact` cases are made of so few bits that every F32 sum of products is exact, in any order: then
implementations must agree to the bit up to the first function that is not, the exponential.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmq.kernels.reference.moe import Mlp, Mxfp8Weight, Nvfp4Weight
from mmq.kernels.reference.mxfp8 import quantize_mxfp8
from mmq.kernels.reference.nvfp4 import quantize_nvfp4


class Cases:
    """Random numbers from a seed.

    Attributes:
        exact: whether products and sums of what it makes are exact.
    """

    def __init__(self, seed: int, exact: bool = False) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.exact = exact

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator)

    def tokens(self, count: int, width: int) -> Tensor:
        """BF16 [T, M]."""
        values = self.integers(-3, 4, count, width) if self.exact else self.normal(count, width)
        return values.to(torch.bfloat16)

    def nvfp4(self, rows: int, columns: int, input_scale: float = 1.0) -> Nvfp4Weight:
        if not self.exact:
            values = self.normal(rows, columns) * 0.1
            # No power of two: products with it are rounded.
            s2 = (values.abs().max() / 2688 * (1 + self.integers(0, 99, 1)[0] / 128)).float()
            packed, scale, _ = quantize_nvfp4(values, s2)
        else:
            packed = self.integers(0, 256, rows, columns // 2).to(torch.uint8)
            # E4M3 codes of 0.5, 1 and 2.
            scale = (self.integers(6, 9, rows, columns // 16) * 8).to(torch.uint8)
            s2 = torch.tensor(0.011) * (1 + self.integers(0, 9, 1)[0] / 16)
        return Nvfp4Weight(packed, scale, float(s2), input_scale)

    def mxfp8(self, rows: int, columns: int) -> Mxfp8Weight:
        if not self.exact:
            return Mxfp8Weight(*quantize_mxfp8(self.normal(rows, columns) * 0.1)[:2])
        codes = self.integers(0x30, 0x48, rows, columns) + 128 * self.integers(0, 2, rows, columns)
        exponents = self.integers(119, 122, rows, columns // 32)
        return Mxfp8Weight(codes.to(torch.uint8), exponents.to(torch.uint8))

    def expert(self, width: int, inner: int, x_scale: float = 1.0, act_scale: float = 1.0) -> Mlp:
        up = (inner, width, x_scale)
        return Mlp(self.nvfp4(*up), self.nvfp4(*up), self.nvfp4(width, inner, act_scale))

    def shared(self, width: int, inner: int) -> Mlp:
        up = (inner, width)
        return Mlp(self.mxfp8(*up), self.mxfp8(*up), self.mxfp8(width, inner))

    def dense(self, width: int, inner: int) -> Mlp:
        """An MLP of F32 weights."""
        shapes = (inner, width), (inner, width), (width, inner)
        return Mlp(*(self.normal(*shape) * 0.2 for shape in shapes))

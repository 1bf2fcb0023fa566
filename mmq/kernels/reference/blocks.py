"""Rows cut into blocks, and the errors of a row summed in a fixed order.

    signal = Σx²      noise = Σ(x − q)²      max_error = max |x − q|        all in F64

Four numbers [1, −0.3, 0.01, 0] stored as [1, −0.3125, 0.01, 0]: signal 1.0901, noise 1.5625e−4,
max_error 0.0125.
"""

from __future__ import annotations

import torch
from torch import Tensor


def in_blocks(values_OK: Tensor, size: int) -> Tensor:
    """[O, K] as [O, K/size, size]: blocks lie along the inner dimension."""
    return values_OK.reshape(values_OK.shape[0], -1, size)


def row_errors(x_OGN: Tensor, q_OGN: Tensor) -> Tensor:
    """Per row Σx², Σ(x − q)² and max |x − q|: F64 [O, 3], from values F64 [O, blocks, block size].

    The order of additions is part of the definition, so that every backend gives the same bits: in
    a block the even columns from left to right, the odd columns from left to right, then both; in a
    row the blocks from left to right.
    """
    error_OGN = (x_OGN - q_OGN).abs()
    sums = []
    for squares_OGN in (x_OGN * x_OGN, error_OGN * error_OGN):
        even_OG = torch.zeros_like(squares_OGN[..., 0])
        odd_OG = torch.zeros_like(even_OG)
        for column in range(0, squares_OGN.shape[-1], 2):
            even_OG = even_OG + squares_OGN[..., column]
            odd_OG = odd_OG + squares_OGN[..., column + 1]
        row_O = torch.zeros_like(even_OG[:, 0])
        for block_O in (even_OG + odd_OG).unbind(1):
            row_O = row_O + block_O
        sums.append(row_O)
    return torch.stack([*sums, error_OGN.flatten(1).amax(1)], dim=1)

"""The `mse` scale of MXFP8 blocks by table, and of floats from twelve candidates: torch alone.

    error(S) = tree over the 16 columns of table[m][|code|][S]         m the block's largest |code|

A row of the table holds the F32 errors of one |code| under all candidates, so the sum over a block
has a lane for each, and the first lane of least error wins (`mmq.kernels.tables`, with a
four-number example). The 126 codes of the definition are tried for blocks far below the tensor's
largest only.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..reference.blocks import in_blocks
from ..reference.nvfp4 import max_scale
from ..reference.scale_search import BLOCK, block_errors, scale_with_least_error, tree_sum
from ..tables import CANDIDATES, CODE_BIAS, REGULAR_SEARCH, search_tables, split_scale

# Blocks at a time: their table rows, 1 KB each, fill 4 MB.
_BLOCKS = 4096


def scales_of_codes(codes_OK: Tensor, exponent_OG: Tensor, values_OK: Tensor, s2: Tensor) -> Tensor:
    """E4M3 codes U8 [O, B] of least error for MXFP8 whose values are `values_OK`, F32."""
    first_OB = max_scale(values_OK, s2)
    c, n = split_scale(np.float32(s2.item()))
    errors, rows = (torch.from_numpy(table.copy()) for table in search_tables(c))
    magnitude_NJ = (codes_OK & 127).reshape(-1, BLOCK).long()
    shift_N = exponent_OG.repeat_interleave(2, dim=1).reshape(-1).long() - 127 + n
    best_N = torch.empty(len(magnitude_NJ), dtype=torch.long)
    for start in range(0, len(best_N), _BLOCKS):
        piece = slice(start, start + _BLOCKS)
        largest_N = magnitude_NJ[piece].amax(1)
        row_NJ = largest_N[:, None] * 128 + magnitude_NJ[piece]
        lanes_NSJ = errors.reshape(128 * 128, -1)[row_NJ].transpose(1, 2)
        lane_N = tree_sum(lanes_NSJ).argmin(1)  # of equal numbers the first
        best_N[piece] = rows[largest_N, lane_N, 7].long() - CODE_BIAS + 8 * shift_N[piece]
    best_OB = best_N.reshape(first_OB.shape)
    return _with_irregular(best_OB, values_OK, first_OB, s2)


def scales_of_floats(values_OK: Tensor, s2: Tensor) -> Tensor:
    """E4M3 codes U8 [O, B] of least error for F32."""
    first_OB = max_scale(values_OK, s2)
    x_OBN = in_blocks(values_OK, BLOCK)
    best_OB = first_OB
    least_OB = block_errors(x_OBN, first_OB, s2, None)
    for offset in CANDIDATES[1:]:
        code_OB = (first_OB.short() + offset).clamp(1, 126).to(torch.uint8)
        error_OB = block_errors(x_OBN, code_OB, s2, None)
        best_OB = torch.where(error_OB < least_OB, code_OB, best_OB)
        least_OB = torch.minimum(error_OB, least_OB)
    return _with_irregular(best_OB, values_OK, first_OB, s2)


def _with_irregular(best_OB: Tensor, values_OK: Tensor, first_OB: Tensor, s2: Tensor) -> Tensor:
    """The codes found, but of irregular blocks the definition's."""
    x_OBN = in_blocks(values_OK, BLOCK)
    zero_OB = x_OBN.abs().amax(-1) == 0
    regular_OB = (first_OB >= REGULAR_SEARCH[0]) & (first_OB <= REGULAR_SEARCH[1])
    best_OB = torch.where(regular_OB & ~zero_OB, best_OB, first_OB).to(torch.uint8)
    rest_OB = ~regular_OB & ~zero_OB
    if rest_OB.any():
        first_N1 = first_OB[rest_OB][:, None]
        best_OB[rest_OB] = scale_with_least_error(x_OBN[rest_OB], first_N1, s2)[:, 0]
    return best_OB

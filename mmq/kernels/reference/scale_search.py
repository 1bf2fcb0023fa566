"""Block scales with the least error: which of the 126 E4M3 codes stores a block best?

    s2       = c · 2^−n with 1 ≤ c < 2                    t = x · 2^n
    d(S)     = t − q · e4m3(S) · c                        q = e2m1(x / (e4m3(S) · s2))
    error(S) = tree over the 16 columns of f32(d(S)²)     chosen: the code S of least error

d is one F64 subtraction of exact products, d² one F64 product, then rounded to F32; with importance
weights each F32 square is multiplied by its column's weight in F32. The tree adds neighbours in
F32: ((0 + 1) + (2 + 3)) + …, so the order never depends on a machine. Of equal errors the code
nearest the `max` code wins, then the smaller one.

Four numbers, as if they were a block, with s2 = 2^−7 (c = 1, n = 7): [0.5, −0.34, 0.25, 0] are
t = [64, −43.52, 32, 0]. The `max` code 0x53 (11) gives 11 · [6, −4, 3, 0] = [66, −44, 33, 0] and
the error 4 + 0.23 + 1; code 0x58 (16) gives 16 · [4, −3, 2, 0] = [64, −48, 32, 0] and 20.07; code
0x53 stays ahead of both neighbours, 0x52 (10: 16 + 12.39 + 4) and 0x54 (12: 64 + 20.07 + 16).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .blocks import in_blocks
from .e4m3 import E4M3_MAX, E4M3_MIN_SUBNORMAL, decode_e2m1, decode_e4m3, encode_e2m1, encode_e4m3

BLOCK = 16
CODES = range(1, 127)

#: A block is not searched from this multiple of s2 on: no scale can hold it, all saturate.
HOPELESS = 2.0**60


def scale_with_least_error(
    values_OK: Tensor, first_OB: Tensor, s2: Tensor, importance_K: Tensor | None = None
) -> Tensor:
    """The `mse` rule: E4M3 codes U8 [O, B] of least error, looking at all 126.

    Args:
        values_OK: finite F32.
        first_OB: the `max` codes, which win ties.
        s2: a normal positive F32 scalar.
        importance_K: F32 [K], finite and not negative; None counts every column as 1.
    """
    x_OBN = in_blocks(values_OK, BLOCK)
    w_BN = None if importance_K is None else importance_K.reshape(-1, BLOCK)
    best_OB = first_OB.clone()
    least_OB = torch.full_like(best_OB, torch.inf, dtype=torch.float32)
    nearest_OB = torch.full_like(best_OB, 127, dtype=torch.int16)
    for code in CODES:
        scale_OB = torch.full_like(first_OB, code)
        error_OB = block_errors(x_OBN, scale_OB, s2, w_BN)
        distance_OB = (first_OB.to(torch.int16) - code).abs()
        # Codes come in ascending order, so that of two equally near ones the smaller stays.
        better_OB = (error_OB < least_OB) | ((error_OB == least_OB) & (distance_OB < nearest_OB))
        best_OB[better_OB] = code
        least_OB = torch.where(better_OB, error_OB, least_OB)
        nearest_OB = torch.where(better_OB, distance_OB, nearest_OB)
    return torch.where(_hopeless(x_OBN, s2), first_OB, best_OB)


def four_over_six_scale(
    values_OK: Tensor, first_OB: Tensor, s2: Tensor, importance_K: Tensor | None = None
) -> Tensor:
    """The `four-over-six` rule: the block's largest magnitude to 6 or to 4, the better of the two.

    Arguments as in `scale_with_least_error`; 6 wins ties. Source: Cook et al., "Four Over Six"
    (arXiv 2512.02010).
    """
    x_OBN = in_blocks(values_OK, BLOCK)
    w_BN = None if importance_K is None else importance_K.reshape(-1, BLOCK)
    wanted_OB = x_OBN.abs().amax(-1) / (4.0 * s2)
    four_OB = encode_e4m3(wanted_OB.clamp(E4M3_MIN_SUBNORMAL, E4M3_MAX))
    better_OB = block_errors(x_OBN, four_OB, s2, w_BN) < block_errors(x_OBN, first_OB, s2, w_BN)
    return torch.where(better_OB & ~_hopeless(x_OBN, s2), four_OB, first_OB)


def block_errors(x_OBN: Tensor, scale_OB: Tensor, s2: Tensor, w_BN: Tensor | None) -> Tensor:
    """error(S) of each block under its scale code: F32 [O, B]."""
    mantissa, exponent = torch.frexp(s2)
    n = 1 - int(exponent)  # frexp's mantissa lies in [0.5, 1)
    element_OB1 = decode_e4m3(scale_OB)[..., None]
    q_OBN = decode_e2m1(encode_e2m1(x_OBN / (element_OB1 * s2))).double()
    t_OBN = x_OBN.double() * 2.0**n
    d_OBN = t_OBN - q_OBN * (element_OB1.double() * (2.0 * mantissa.double()))
    square_OBN = (d_OBN * d_OBN).float()
    if w_BN is not None:
        square_OBN = square_OBN * w_BN
    return tree_sum(square_OBN)


def tree_sum(x_OBN: Tensor) -> Tensor:
    """Sum over the last dimension, a power of two: neighbours first, then neighbouring sums."""
    while x_OBN.shape[-1] > 1:
        x_OBN = x_OBN[..., 0::2] + x_OBN[..., 1::2]
    return x_OBN[..., 0]


def _hopeless(x_OBN: Tensor, s2: Tensor) -> Tensor:
    return x_OBN.abs().amax(-1).double() >= HOPELESS * s2.double()

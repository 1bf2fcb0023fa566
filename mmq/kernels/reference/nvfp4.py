"""NVFP4: E2M1 elements, one E4M3 scale for 16 columns, one F32 scale s2 for the tensor.

    value = e2m1(code) · (e4m3(scale) · s2)
    scale = e4m3(clamp(amax16 / (6 · s2), 2^−9, 448))     where the quotient is 0: scale = 1
    code  = e2m1(x / (e4m3(scale) · s2))                  with the stored, rounded scale

Every operation is one F32 operation in the order written, and every rounding is to nearest, ties to
even. 1 to 5 % of the elements of an MXFP8 tensor lie exactly on a tie, so the order is part of
what is specified.

Four numbers, as if they were a block, with s2 = 2^−7: [0.5, −0.03, 0.125, 0]. amax = 0.5, and
0.5 / (6 · 2^−7) = 10.67, which E4M3 rounds to 11 (0x53). The step is 11 · 2^−7 = 0.0859, the
quotients [5.82, −0.349, 1.45, 0], the codes 7 (6), 9 (−0.5), 3 (1.5), 0. Packed, even column low:
0x97, 0x03. Back: [0.5156, −0.0430, 0.1289, 0].

Source: NVIDIA ModelOpt 0.47 ``NVFP4QTensor``, to which these functions are bit-equal on finite
tensors that are not all zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .blocks import in_blocks, row_errors
from .e4m3 import (
    E2M1_MAX,
    E4M3_MAX,
    E4M3_MIN_SUBNORMAL,
    decode_e2m1,
    decode_e4m3,
    encode_e2m1,
    encode_e4m3,
)
from .scale_search import four_over_six_scale, scale_with_least_error

BLOCK = 16


def max_scale(values_OK: Tensor, s2: Tensor) -> Tensor:
    """`max` scaling, each block's largest magnitude to 6: F32 [O, K] to E4M3 codes U8 [O, K/16].

    The lower clamp keeps a block with data from being stored as zero; scale 1 for a quotient of 0
    (a zero block, or one that vanishes in F32 beside s2) is what ModelOpt stores.
    """
    amax_OB = in_blocks(values_OK, BLOCK).abs().amax(-1)
    wanted_OB = amax_OB / (E2M1_MAX * s2)
    wanted_OB[wanted_OB == 0] = 1.0
    return encode_e4m3(wanted_OB.clamp(E4M3_MIN_SUBNORMAL, E4M3_MAX))


def quantize_elements(values_OK: Tensor, scale_OB: Tensor, s2: Tensor) -> Tensor:
    """E2M1 codes U8 [O, K], one a byte, of F32 values under given block scales (E4M3 codes)."""
    step_OB1 = (decode_e4m3(scale_OB) * s2)[..., None]
    return encode_e2m1(in_blocks(values_OK, BLOCK) / step_OB1).flatten(1)


def choose_scale(
    values_OK: Tensor, s2: Tensor, search: str = "max", importance_K: Tensor | None = None
) -> Tensor:
    """E4M3 codes U8 [O, K/16] by the rule `search`: "max", "mse" or "four-over-six"."""
    first_OB = max_scale(values_OK, s2)
    if search == "mse":
        return scale_with_least_error(values_OK, first_OB, s2, importance_K)
    if search == "four-over-six":
        return four_over_six_scale(values_OK, first_OB, s2, importance_K)
    return first_OB


def quantize_nvfp4(
    values_OK: Tensor, s2: Tensor, search: str = "max", importance_K: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Finite F32 [O, K] to packed U8 [O, K/2], scales U8 [O, K/16], per-row errors F64 [O, 3]."""
    return quantize_under(values_OK, choose_scale(values_OK, s2, search, importance_K), s2)


def quantize_under(
    values_OK: Tensor, scale_OB: Tensor, s2: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The same under given block scales (E4M3 codes)."""
    codes_OK = quantize_elements(values_OK, scale_OB, s2)
    # Errors are taken against the exact product, which F64 holds: 2 + 4 + 24 significant bits.
    exact_step_OB1 = (decode_e4m3(scale_OB).double() * s2.double())[..., None]
    restored_OBN = in_blocks(decode_e2m1(codes_OK), BLOCK).double() * exact_step_OB1
    source_OBN = in_blocks(values_OK, BLOCK).double()
    return pack_nibbles(codes_OK), scale_OB, row_errors(source_OBN, restored_OBN)


def dequantize_nvfp4(packed_OP: Tensor, scale_OB: Tensor, s2: Tensor) -> Tensor:
    """NVFP4 to F32 [O, K]: first the step scale · s2, then element · step, each rounded to F32.

    This is the order of ModelOpt's and torchao's own decoders, and the step is the one the
    quantiser divided by.
    """
    step_OB1 = (decode_e4m3(scale_OB) * s2)[..., None]
    return (in_blocks(decode_e2m1(unpack_nibbles(packed_OP)), BLOCK) * step_OB1).flatten(1)


def pack_nibbles(codes_OK: Tensor) -> Tensor:
    """Two codes a byte, U8 [O, K/2]: the even column in the low nibble."""
    return codes_OK[:, 0::2] | (codes_OK[:, 1::2] << 4)


def unpack_nibbles(packed_OP: Tensor) -> Tensor:
    """The inverse of `pack_nibbles`: U8 [O, K]."""
    return torch.stack([packed_OP & 15, packed_OP >> 4], dim=-1).flatten(1)

"""Small floats: E4M3 and E2M1 elements, E8M0 exponents, and rounding to BF16.

    E4M3 (fn)  s eeee mmm   (−1)^s · 2^(e−7) · 1.mmm, subnormals m · 2^−9, max 448, 0x7F / 0xFF NaN
    E2M1       s ee m       ±{0, 0.5, 1, 1.5, 2, 3, 4, 6}
    E8M0       eeeeeeee     2^(b − 127), 0 is 2^−127, 255 is NaN

Four numbers: E4M3 0x38 = 1, 0x01 = 2^−9, 0x7E = 448; E8M0 130 = 8. Source: OCP Microscaling Formats
1.0 §5.3, §5.4.
"""

from __future__ import annotations

import torch
from torch import Tensor

E4M3_MAX = 448.0
E4M3_MIN_SUBNORMAL = 2.0**-9
E2M1_MAX = 6.0
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
BF16_NAN = 0x7FC0


def decode_e4m3(codes: Tensor) -> Tensor:
    """E4M3 codes (U8) to F32, exactly; 0x7F and 0xFF give NaN."""
    return codes.view(torch.float8_e4m3fn).to(torch.float32)


def encode_e4m3(values: Tensor) -> Tensor:
    """F32 to E4M3 codes (U8): round to nearest, ties to even, saturating at ±448; −0 stays −0."""
    return values.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def decode_e8m0(exponents: Tensor) -> Tensor:
    """E8M0 exponents (U8) to F32 powers of two, exactly; 255 gives NaN."""
    bits = exponents.to(torch.int32) << 23  # the byte is F32's own exponent field ...
    bits[exponents == 0] = 1 << 22  # ... except that 2^−127 is an F32 subnormal
    powers = bits.view(torch.float32)
    powers[exponents == 255] = torch.nan
    return powers


def decode_e2m1(codes: Tensor) -> Tensor:
    """E2M1 codes (U8, 0–15) to F32; code 8 is −0."""
    table = torch.tensor([*E2M1_VALUES, *(-value for value in E2M1_VALUES)])
    return table[codes.long()]


def encode_e2m1(values: Tensor) -> Tensor:
    """F32 to E2M1 codes (U8, 0–15): round to nearest, ties to the even code, saturating at ±6.

    A midpoint belongs to the neighbour with the even code, so that every second comparison includes
    it. The sign is that of the number, not the sign bit: −0 gives code 0, while a negative number
    that rounds to zero gives code 8. ModelOpt does both.
    """
    magnitude = values.abs()
    level = (
        (magnitude > 0.25).to(torch.uint8)
        + (magnitude >= 0.75).to(torch.uint8)
        + (magnitude > 1.25).to(torch.uint8)
        + (magnitude >= 1.75).to(torch.uint8)
        + (magnitude > 2.5).to(torch.uint8)
        + (magnitude >= 3.5).to(torch.uint8)
        + (magnitude > 5.0).to(torch.uint8)
    )
    return level | ((values < 0).to(torch.uint8) << 3)


def bf16_bits(values: Tensor) -> Tensor:
    """F32 to BF16 bits (U16): to nearest, ties to even; overflow gives inf, every NaN 0x7FC0."""
    bits = values.to(torch.bfloat16).view(torch.int16).to(torch.int32) & 0xFFFF
    bits[values.isnan()] = BF16_NAN
    return bits.to(torch.uint16)

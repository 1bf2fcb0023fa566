"""Small floats inside kernels: E4M3, E2M1, E8M0 and BF16 by integer arithmetic.

Reference: `mmq.kernels.reference.e4m3`. No float8 cast is used: what one compiles to differs
between targets, and Triton's interpreter truncates.

    code = bits · 2^−(23 − M), rounded to nearest even, exponent bias 127 replaced by BIAS
    M, BIAS = 3, 7 for E4M3 and 1, 1 for E2M1

Four numbers as E4M3: 1 = 0x38, 2^−9 = 0x01, 17 (a tie between 16 and 18) = 0x58, 448 = 0x7E.
"""

import triton
import triton.language as tl


@triton.jit
def bits_of(values):
    """The bits of F32 numbers, as I32."""
    return values.to(tl.int32, bitcast=True)


@triton.jit
def number_of(bits):
    """The F32 numbers of I32 bits."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def encode_magnitude(magnitude, M: tl.constexpr, BIAS: tl.constexpr):
    """Codes, I32, of F32 magnitudes up to the format's largest: to nearest, ties to even."""
    SHIFT: tl.constexpr = 23 - M
    bits = bits_of(magnitude)
    # Half an ulp of the code, a little less where the code is even, then the spare bits cut off.
    normal = (bits + ((1 << (SHIFT - 1)) - 1) + ((bits >> SHIFT) & 1)) >> SHIFT
    normal -= (127 - BIAS) << M
    # Added to 2^23 ulps of the smallest codes a number keeps no smaller bits: the addition rounds.
    subnormal = bits_of(magnitude + 2.0 ** (24 - BIAS - M)) - ((151 - BIAS - M) << 23)
    return tl.where(magnitude < 2.0 ** (1 - BIAS), subnormal, normal)


@triton.jit
def decode_magnitude(code, M: tl.constexpr, BIAS: tl.constexpr):
    """F32 magnitudes of codes without sign, I32, exactly."""
    normal = number_of((code << (23 - M)) + ((127 - BIAS) << 23))
    # Converted and scaled, so that no F32 subnormal occurs here that a mode bit might flush.
    subnormal = code.to(tl.float32) * (2.0 ** (1 - BIAS - M))
    return tl.where(code < (1 << M), subnormal, normal)


@triton.jit
def with_sign(magnitude, sign):
    """F32 numbers from magnitudes and signs, I32, 1 for negative; zero gets its sign too."""
    return number_of(bits_of(magnitude) | (sign << 31))


@triton.jit
def decode_e4m3(code):
    """F32 of E4M3 codes, I32 0 … 255; 0x7F and 0xFF give NaN."""
    magnitude = decode_magnitude(code & 127, 3, 7)
    magnitude = tl.where((code & 127) == 127, float("nan"), magnitude)
    return with_sign(magnitude, code >> 7)


@triton.jit
def decode_e8m0(exponent):
    """F32 powers of two of E8M0 bytes, I32; 255 gives NaN."""
    bits = tl.where(exponent == 0, 1 << 22, exponent << 23)  # 2^−127 is an F32 subnormal
    return number_of(tl.where(exponent == 255, 0x7FC00000, bits))


@triton.jit
def decode_e2m1(code):
    """F32 of E2M1 codes, I32 0 … 15; code 8 is −0."""
    return with_sign(decode_magnitude(code & 7, 1, 1), code >> 3)


@triton.jit
def encode_e2m1(values):
    """E2M1 codes, I32, saturating at ±6; −0 gives 0, a negative number that rounds to 0 gives 8."""
    code = encode_magnitude(tl.minimum(tl.abs(values), 6.0), 1, 1)
    return code | ((values < 0).to(tl.int32) << 3)


@triton.jit
def widen_bf16(bits):
    """F32 of BF16 bits, U16."""
    return number_of(bits.to(tl.int32) << 16)


@triton.jit
def bf16_bits(values):
    """BF16 bits, U16: to nearest even; overflow gives inf, every NaN 0x7FC0."""
    bits = values.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(values != values, 0x7FC0, rounded).to(tl.uint16)

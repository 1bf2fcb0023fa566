"""Instructions that stage NVFP4 as FP8: their texts, and what each computes, in NumPy.

    staged = e4m3(clamp(e2m1(code) · e4m3(scale), −448, 448))

Four codes lie in 16 bits, the first in the low nibble; four scales or results in 32 bits, the first
in the low byte. Four numbers: codes 3, 7, 15, 1 are 0x1F73, scale 0x6B for each is 0x6B6B6B6B, the
result is 0x63FE7E70.

The functions are what the tests run in place of the instructions, and the specification to hold a
device to. NaN: a scale of 0x7F or 0xFF makes each text for NVIDIA give 0x7F; AMD's minimum and
maximum drop it, so that the kernel puts it back. Sources: PTX ISA 9.4 (`mul` and `cvt` of packed
alternate floats), AMD CDNA4 ISA (V_CVT_SCALEF32_PK_*, of which the scale 1.0 leaves numbers alone).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from numpy.typing import NDArray

from .interpreter import register_twin

Array = NDArray[Any]

#: One instruction for four codes. sm_100a and sm_103a alone have it.
QMUL4: tl.constexpr = tl.constexpr("mul.rn.satfinite.e4m3x4.e2m1x4.e4m3x4 $0, $1, $2;")

_SCALE_AND_ROUND = """
  mov.b32 {s0, s1}, $2;
  cvt.rn.f16x2.e4m3x2 s, s0;
  mul.rn.f16x2 x0, x0, s;
  cvt.rn.f16x2.e4m3x2 s, s1;
  mul.rn.f16x2 x1, x1, s;
  cvt.rn.satfinite.e4m3x2.f16x2 s0, x0;
  cvt.rn.satfinite.e4m3x2.f16x2 s1, x1;
  mov.b32 $0, {s0, s1};
}"""

#: Through F16, where targets convert E2M1: sm_100 and up.
F16: tl.constexpr = tl.constexpr(
    """{
  .reg .b8 c0, c1;
  .reg .b16 s0, s1;
  .reg .b32 x0, x1, s;
  mov.b16 {c0, c1}, $1;
  cvt.rn.f16x2.e2m1x2 x0, c0;
  cvt.rn.f16x2.e2m1x2 x1, c1;"""
    + _SCALE_AND_ROUND
)

#: Through F16 on sm_90, where the bits of a code are put in place and 2^14 corrects the exponent.
F16_BITS: tl.constexpr = tl.constexpr(
    """{
  .reg .b16 s0, s1;
  .reg .b32 x0, x1, s, e;
  cvt.u32.u16 e, $1;
  and.b32 x0, e, 0x000F;
  and.b32 s, e, 0x00F0;
  shl.b32 s, s, 12;
  or.b32 x0, x0, s;
  shr.u32 x1, e, 8;
  and.b32 x1, x1, 0x000F;
  and.b32 s, e, 0xF000;
  shl.b32 s, s, 4;
  or.b32 x1, x1, s;
  and.b32 s, x0, 0x00080008;
  shl.b32 s, s, 12;
  and.b32 x0, x0, 0x00070007;
  shl.b32 x0, x0, 9;
  or.b32 x0, x0, s;
  and.b32 s, x1, 0x00080008;
  shl.b32 s, s, 12;
  and.b32 x1, x1, 0x00070007;
  shl.b32 x1, x1, 9;
  or.b32 x1, x1, s;
  mov.b32 s, 0x74007400;
  mul.rn.f16x2 x0, x0, s;
  mul.rn.f16x2 x1, x1, s;"""
    + _SCALE_AND_ROUND
)

#: AMD, two numbers at a time: codes of the low byte, or of the low two bytes, to F16 ...
F16_OF_FP4: tl.constexpr = tl.constexpr("v_cvt_scalef32_pk_f16_fp4 $0, $1, 1.0")
F16_OF_FP8: tl.constexpr = tl.constexpr("v_cvt_scalef32_pk_f16_fp8 $0, $1, 1.0")
#: ... arithmetic on pairs of F16 ...
F16_PRODUCT: tl.constexpr = tl.constexpr("v_pk_mul_f16 $0, $1, $2")
F16_MINIMUM: tl.constexpr = tl.constexpr("v_pk_min_f16 $0, $1, $2")
F16_MAXIMUM: tl.constexpr = tl.constexpr("v_pk_max_f16 $0, $1, $2")
#: ... and back to E4M3 in the low two bytes; the high two are nothing's.
FP8_OF_F16: tl.constexpr = tl.constexpr("v_cvt_scalef32_pk_fp8_f16 $0, $1, 1.0")

_MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float16)
_E2M1 = np.concatenate([_MAGNITUDES, -_MAGNITUDES])
_LEVELS = np.array(
    [(c & 7) * 2.0**-9 if c < 8 else (8 + (c & 7)) * 2.0 ** ((c >> 3) - 10) for c in range(127)]
)
_E4M3 = np.concatenate([_LEVELS, [np.nan], -_LEVELS, [np.nan]]).astype(np.float16)


def round_to_e4m3(values: Array) -> Array:
    """E4M3 codes, U8: to nearest, ties to even, saturating at ±448; every NaN gives 0x7F."""
    magnitude = np.minimum(np.abs(np.nan_to_num(values.astype(np.float64))), 448.0)
    above = np.searchsorted(_LEVELS, magnitude)
    below = np.maximum(above - 1, 0)
    up, down = _LEVELS[above] - magnitude, magnitude - _LEVELS[below]
    code = np.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
    code = code | np.where(np.signbit(values), 0x80, 0)
    return np.where(np.isnan(values), 0x7F, code).astype(np.uint8)


def _lanes(words: Array, bits: int, count: int) -> list[Array]:
    """Fields of `bits` bits, the lowest first."""
    wide = words.astype(np.uint32)
    return [(wide >> (bits * i)) & ((1 << bits) - 1) for i in range(count)]


def _word(lanes: list[Array], bits: int) -> Array:
    word = np.zeros(lanes[0].shape, np.uint32)
    for i, lane in enumerate(lanes):
        word |= lane.astype(np.uint32) << (bits * i)
    return word


def _qmul4(codes: Array, scales: Array) -> Array:
    """Four products, each exact, rounded once."""
    pairs = zip(_lanes(codes, 4, 4), _lanes(scales, 8, 4), strict=True)
    products = (_E2M1[c].astype(np.float64) * _E4M3[s].astype(np.float64) for c, s in pairs)
    return _word([round_to_e4m3(product) for product in products], 8)


def _through_f16(codes: Array, scales: Array) -> Array:
    """Each product rounded to F16 and then to E4M3."""
    pairs = zip(_lanes(codes, 4, 4), _lanes(scales, 8, 4), strict=True)
    return _word([round_to_e4m3(_E2M1[c] * _E4M3[s]) for c, s in pairs], 8)


def _through_f16_bits(codes: Array, scales: Array) -> Array:
    """The same; a code's F16 made of its bits."""
    products = []
    for code, scale in zip(_lanes(codes, 4, 4), _lanes(scales, 8, 4), strict=True):
        bits = ((code & 7) << 9) | ((code & 8) << 12)
        number = bits.astype(np.uint16).view(np.float16) * np.float16(2**14)
        products.append(round_to_e4m3(number * _E4M3[scale]))
    return _word(products, 8)


def _halves(words: Array) -> list[Array]:
    """The two F16 numbers of each word."""
    return [lane.astype(np.uint16).view(np.float16) for lane in _lanes(words, 16, 2)]


def _of_halves(numbers: list[Array]) -> Array:
    return _word([number.view(np.uint16) for number in numbers], 16)


def _f16_of_fp4(codes: Array) -> Array:
    return _of_halves([_E2M1[lane] for lane in _lanes(codes, 4, 2)])


def _f16_of_fp8(codes: Array) -> Array:
    return _of_halves([_E4M3[lane] for lane in _lanes(codes, 8, 2)])


def _by_halves(operation: Any) -> Any:
    def apply(left: Array, right: Array) -> Array:
        pairs = zip(_halves(left), _halves(right), strict=True)
        return _of_halves([operation(a, b) for a, b in pairs])

    return apply


def _fp8_of_f16(words: Array) -> Array:
    return _word([round_to_e4m3(half) for half in _halves(words)], 8) | np.uint32(0xEEEE0000)


for _text, _function in (
    (QMUL4, _qmul4),
    (F16, _through_f16),
    (F16_BITS, _through_f16_bits),
    (F16_OF_FP4, _f16_of_fp4),
    (F16_OF_FP8, _f16_of_fp8),
    (F16_PRODUCT, _by_halves(np.multiply)),
    (F16_MINIMUM, _by_halves(np.fmin)),
    (F16_MAXIMUM, _by_halves(np.fmax)),
    (FP8_OF_F16, _fp8_of_f16),
):
    register_twin(_text, _function)

"""Everything numba compiles, in one file.

numba keeps compiled code on disk and drops it when the file of that very function changes; it does
not notice changes in what the function calls or in the constants it reads. In one file no stale
code can survive an edit or an update. What the loops compute is said where they are called:
`nvfp4_table`, `float_loops` and `decode`; the definitions are in `mmq.kernels.reference`.

    scale  = e4m3(clamp(amax / (6 · s2), 2^−9, 448))       code = e2m1(x / (e4m3(scale) · s2))

Four numbers: the quotients 0.25, 0.75, 2.5, −5 are ties and go to the even codes 0 (0), 2 (1),
4 (2), 14 (−4). Inputs are finite by contract; NaN gives meaningless codes but stays in bounds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np

from ..results import F32, F64, U8, U16, AnyArray

Function = TypeVar("Function", bound=Callable[..., Any])

# Without fastmath every F32 operation is the IEEE one, in the order written, and none is contracted
# to an FMA. With error_model="numpy" division follows IEEE as well, without a branch that raises.
_SETTINGS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": False}


def jit(function: Function) -> Function:
    """Compile at the first call, cached on disk where a writable place can be found."""
    try:
        return cast(Function, numba.njit(cache=True, **_SETTINGS)(function))
    except RuntimeError:
        # Neither the package nor a user cache folder is writable: compile in every process.
        return cast(Function, numba.njit(**_SETTINGS)(function))


def _e4m3_values() -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    value = np.where(
        exponent == 0,
        np.ldexp(mantissa / 8, -6),
        np.ldexp(1 + mantissa / 8, exponent - 7),
    )
    value[(code & 127) == 127] = np.nan
    return np.where(code < 128, value, -value).astype(np.float32)


def _e8m0_values() -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    value = np.ldexp(1.0, np.arange(256) - 127)
    value[255] = np.nan
    return value.astype(np.float32)


#: F32 value of every E4M3 code, E8M0 exponent and E2M1 code.
E4M3 = _e4m3_values()
E8M0 = _e8m0_values()
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)

#: e4m3(c)² for every |c|, and (2^(e − 127))² for every exponent: their products are exact in F64.
_SQUARE = E4M3[:128].astype(np.float64) ** 2
_POWER = E8M0.astype(np.float64) ** 2

_MIN_NORMAL = np.float32(2.0**-6)
_MIN_SUBNORMAL = np.float32(2.0**-9)
_MAX = np.float32(448.0)
_SIX = np.float32(6.0)
_ZERO = np.float32(0.0)
# Adding 2^23 · ulp to a number below it leaves no room for smaller bits: the sum is rounded to
# whole ulps, to nearest even, by the addition itself. Here the ulp is 2^−9, E4M3's smallest
# subnormal.
_ROUND_SUBNORMAL = np.float32(2.0**14)


@jit
def encode_e4m3(magnitude: np.float32) -> np.signedinteger[Any]:
    """E4M3 code of a number from 0 to 448, to nearest even."""
    if magnitude < _MIN_NORMAL:
        rounded = (magnitude + _ROUND_SUBNORMAL) - _ROUND_SUBNORMAL
        return np.int64(rounded * np.float32(512.0))
    bits = np.int64(np.float32(magnitude).view(np.uint32))
    bits += 0x7FFFF + ((bits >> 20) & 1)  # half an E4M3 ulp, a little less where the code is even
    return (bits >> 20) - (120 << 3)  # exponent bias 127 to 7


@jit
def block_scale(amax: np.float32, s2: np.float32) -> np.signedinteger[Any]:
    """E4M3 code of the `max` scale of a block of largest magnitude amax."""
    wanted = np.float32(amax / (_SIX * s2))
    if wanted == _ZERO:
        return np.int64(0x38)
    if not wanted > _MIN_SUBNORMAL:  # written so that NaN is caught too
        wanted = _MIN_SUBNORMAL
    return encode_e4m3(min(wanted, _MAX))


@jit
def encode_e2m1(quotient: np.float32) -> np.signedinteger[Any]:
    """E2M1 code, ties to even; −0 gives 0 and a negative number that rounds to zero gives 8."""
    magnitude = abs(quotient)
    level = (
        np.int32(magnitude > np.float32(0.25))
        + np.int32(magnitude >= np.float32(0.75))
        + np.int32(magnitude > np.float32(1.25))
        + np.int32(magnitude >= np.float32(1.75))
        + np.int32(magnitude > np.float32(2.5))
        + np.int32(magnitude >= np.float32(3.5))
        + np.int32(magnitude > np.float32(5.0))
    )
    return level + (np.int32(quotient < _ZERO) << np.int32(3))


@jit
def bf16_bits(value: np.float32) -> np.signedinteger[Any]:
    """BF16 bits of any number: to nearest even, every NaN to 0x7FC0."""
    if value != value:
        return np.int64(0x7FC0)
    bits = np.int64(np.float32(value).view(np.uint32))
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


@jit
def build_table_row(
    row: int, s2: np.float32, built: AnyArray, scales: U8, nibbles: U8, noises: F64
) -> None:
    """Fill the table row of one exponent (row >> 7) and largest code (row & 127)."""
    power = E8M0[row >> 7]
    largest = row & 127
    scale = block_scale(E4M3[largest] * power, s2)
    step = E4M3[scale] * s2
    exact_step = np.float64(E4M3[scale]) * np.float64(s2)
    for code in range(largest + 1):
        value = E4M3[code] * power
        nibble = encode_e2m1(value / step)
        nibbles[row, code] = nibble
        nibbles[row, code + 128] = encode_e2m1(-value / step)
        error = np.float64(value) - np.float64(E2M1[nibble]) * exact_step
        noises[row, code] = error * error
    scales[row] = scale
    built[row] = True


@jit
def quantize_nvfp4_by_table(
    codes: U8,
    exponents: U8,
    s2: np.float32,
    built: AnyArray,
    scales: U8,
    nibbles: U8,
    noises: F64,
    packed: U8,
    scale_out: U8,
    errors: F64,
) -> None:
    """Pack codes [O, K] under exponents [O, G]; extends the table (built … noises) as needed."""
    for o in range(codes.shape[0]):
        signal = 0.0
        noise = 0.0
        worst = 0.0
        for b in range(scale_out.shape[1]):
            first = b * 16
            exponent = exponents[o, b >> 1]
            largest = 0
            for j in range(16):
                largest = max(largest, codes[o, first + j] & 127)
            row = (exponent << 7) | largest
            if not built[row]:
                build_table_row(row, s2, built, scales, nibbles, noises)
            scale_out[o, b] = scales[row]
            even = 0.0
            odd = 0.0
            squares = 0.0
            for j in range(8):
                low = codes[o, first + 2 * j]
                high = codes[o, first + 2 * j + 1]
                packed[o, b * 8 + j] = nibbles[row, low] | (nibbles[row, high] << 4)
                noise_low = noises[row, low & 127]
                noise_high = noises[row, high & 127]
                even += noise_low
                odd += noise_high
                worst = max(worst, noise_low, noise_high)
                squares += _SQUARE[low & 127] + _SQUARE[high & 127]
            noise += even + odd
            signal += squares * _POWER[exponent]
        errors[o, 0] = signal
        errors[o, 1] = noise
        errors[o, 2] = np.sqrt(worst)  # exact: the root of a rounded square is the number itself


@jit
def block_error(
    block: F32, t: F64, scale: int, s2: np.float32, mantissa: np.float64, weights: F32
) -> np.float32:
    """The search's error of a block under a scale code; weights may be empty."""
    step = E4M3[scale] * s2
    exact_step = np.float64(E4M3[scale]) * mantissa
    square = np.empty(16, np.float32)
    for j in range(16):
        d = t[j] - np.float64(E2M1[encode_e2m1(block[j] / step)]) * exact_step
        square[j] = np.float32(d * d)
        if weights.size:
            square[j] *= weights[j]
    for half in (8, 4, 2, 1):
        for j in range(half):
            square[j] = square[2 * j] + square[2 * j + 1]
    return square[0]


@jit
def search_scale(
    block: F32, first: int, search: int, amax: np.float32, s2: np.float32, weights: F32
) -> int:
    """Scale code by search 1 (mse) or 2 (four-over-six); `first` is the `max` code."""
    if np.float64(amax) >= np.float64(s2) * 2.0**60:
        return first
    mantissa = np.float64(s2)
    power = 1.0
    while mantissa >= 2.0:
        mantissa *= 0.5
        power *= 0.5
    while mantissa < 1.0:
        mantissa *= 2.0
        power *= 2.0
    t = np.empty(16, np.float64)
    for j in range(16):
        t[j] = np.float64(block[j]) * power
    best = first
    least = block_error(block, t, first, s2, mantissa, weights)
    if search == 2:
        four = np.float32(amax / (np.float32(4.0) * s2))
        other = encode_e4m3(min(max(four, _MIN_SUBNORMAL), _MAX))
        if block_error(block, t, other, s2, mantissa, weights) < least:
            best = other
        return best
    for code in range(1, 127):
        error = block_error(block, t, code, s2, mantissa, weights)
        if error < least or (error == least and abs(code - first) < abs(best - first)):
            best = code
            least = error
    return best


@jit
def add_block_errors(values: F32, restored: F64, errors_3: F64) -> None:
    """Add one block to a row's (signal, noise, max_error), in the order the reference defines."""
    signal_even = 0.0
    signal_odd = 0.0
    noise_even = 0.0
    noise_odd = 0.0
    worst = 0.0
    for j in range(0, values.size, 2):
        even = np.float64(values[j])
        odd = np.float64(values[j + 1])
        error_even = abs(even - restored[j])
        error_odd = abs(odd - restored[j + 1])
        signal_even += even * even
        signal_odd += odd * odd
        noise_even += error_even * error_even
        noise_odd += error_odd * error_odd
        worst = max(worst, error_even, error_odd)
    errors_3[0] += signal_even + signal_odd
    errors_3[1] += noise_even + noise_odd
    errors_3[2] = max(errors_3[2], worst)


@jit
def quantize_nvfp4_blocks(
    values: F32,
    s2: np.float32,
    search: int,
    weights: F32,
    packed: U8,
    scale_out: U8,
    errors: F64,
) -> None:
    """Fill packed [O, P], scale_out [O, B] and errors [O, 3] from values [O, K]."""
    codes = np.empty(16, np.uint8)
    restored = np.empty(16, np.float64)
    for o in range(values.shape[0]):
        errors[o] = 0.0
        for b in range(scale_out.shape[1]):
            block = values[o, b * 16 : b * 16 + 16]
            amax = np.float32(0.0)
            for j in range(16):
                amax = max(amax, abs(block[j]))
            scale = block_scale(amax, s2)
            if search:
                scale = search_scale(
                    block, scale, search, amax, s2, weights[b * 16 : b * 16 + 16]
                )
            step = E4M3[scale] * s2
            exact_step = np.float64(E4M3[scale]) * np.float64(s2)
            for j in range(16):
                codes[j] = encode_e2m1(block[j] / step)
            for j in range(16):
                restored[j] = np.float64(E2M1[codes[j]]) * exact_step
            for j in range(8):
                packed[o, b * 8 + j] = codes[2 * j] | (codes[2 * j + 1] << 4)
            scale_out[o, b] = scale
            add_block_errors(block, restored, errors[o])


@jit
def quantize_mxfp8_blocks(values: F32, codes_out: U8, exponent_out: U8, errors: F64) -> None:
    """Fill codes_out [O, K], exponent_out [O, G] and errors [O, 3] from values [O, K]."""
    restored = np.empty(32, np.float64)
    for o in range(values.shape[0]):
        errors[o] = 0.0
        for g in range(exponent_out.shape[1]):
            block = values[o, g * 32 : g * 32 + 32]
            amax = np.float32(0.0)
            for j in range(32):
                amax = max(amax, abs(block[j]))
            # F32's exponent field is floor(log2) + 127 already; its 0 for subnormals clamps too.
            field = np.int64(np.float32(amax).view(np.uint32) >> 23)
            exponent = max(field - np.int64(8), np.int64(0))
            exponent_out[o, g] = exponent
            step = E8M0[exponent]
            for j in range(32):
                magnitude = abs(block[j] / step)
                if not magnitude < _MAX:  # written so that NaN is caught too
                    magnitude = _MAX
                code = encode_e4m3(magnitude)
                sign = np.int64(np.float32(block[j]).view(np.uint32) >> 31)
                codes_out[o, g * 32 + j] = code | (sign << 7)
                restored[j] = np.float64(E4M3[code | (sign << 7)]) * np.float64(step)
            add_block_errors(block, restored, errors[o])


@jit
def round_to_bf16(values: F32, bits: U16) -> None:
    """Fill bits [n] from values [n]."""
    for i in range(values.size):
        bits[i] = bf16_bits(values[i])


@jit
def look_up_codes(codes_OK: U8, exponent_OG: U8, table: AnyArray, out_OK: AnyArray) -> None:
    """Decode MXFP8 by a table [exponent, code]."""
    for o in range(codes_OK.shape[0]):
        for g in range(exponent_OG.shape[1]):
            row = table[exponent_OG[o, g]]
            for k in range(g * 32, g * 32 + 32):
                out_OK[o, k] = row[codes_OK[o, k]]


@jit
def look_up_nibbles(packed_OP: U8, scale_OB: U8, table: AnyArray, out_OK: AnyArray) -> None:
    """Decode NVFP4 by a table [scale code, element code]."""
    for o in range(packed_OP.shape[0]):
        for b in range(scale_OB.shape[1]):
            row = table[scale_OB[o, b]]
            for p in range(b * 8, b * 8 + 8):
                pair = packed_OP[o, p]
                out_OK[o, 2 * p] = row[pair & 15]
                out_OK[o, 2 * p + 1] = row[pair >> 4]

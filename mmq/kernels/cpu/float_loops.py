"""F32 to NVFP4 and to MXFP8, block by block, in the F32 expressions of the reference.

    NVFP4  scale = e4m3(clamp(amax16 / (6 · s2), 2^−9, 448)),  code = e2m1(x / (e4m3(scale) · s2))
    MXFP8  b = max(floor(log2(amax32)) − 8 + 127, 0),          code = e4m3(x / 2^(b − 127))

Four numbers to NVFP4 with s2 = 2^−7: [0.5, −0.03, 0.125, 0] have scale 0x53 (11) and codes 7, 9, 3,
0; to MXFP8: [1, −0.3, 0.01, 0] have exponent 119 and codes 0x78, 0xEA, 0x42, 0x00.
"""

from __future__ import annotations

import numpy as np

from ..results import F32, F64, U8
from .jit import jit
from .rounding import E2M1, E4M3, E8M0, block_scale, encode_e2m1, encode_e4m3

_E4M3_MAX = np.float32(448.0)


def quantize_nvfp4(values_OK: F32, s2: np.float32) -> tuple[U8, U8, F64]:
    """Finite F32 to packed codes U8 [O, K/2], scales U8 [O, K/16], per-row errors F64 [O, 3]."""
    rows_O, columns_K = values_OK.shape
    packed_OP = np.empty((rows_O, columns_K // 2), np.uint8)
    scale_OB = np.empty((rows_O, columns_K // 16), np.uint8)
    errors_O3 = np.empty((rows_O, 3), np.float64)
    _quantize_nvfp4(values_OK, s2, packed_OP, scale_OB, errors_O3)
    return packed_OP, scale_OB, errors_O3


def quantize_mxfp8(values_OK: F32) -> tuple[U8, U8, F64]:
    """Finite F32 to codes U8 [O, K], exponents U8 [O, K/32], per-row errors F64 [O, 3]."""
    rows_O, columns_K = values_OK.shape
    codes_OK = np.empty((rows_O, columns_K), np.uint8)
    exponent_OG = np.empty((rows_O, columns_K // 32), np.uint8)
    errors_O3 = np.empty((rows_O, 3), np.float64)
    _quantize_mxfp8(values_OK, codes_OK, exponent_OG, errors_O3)
    return codes_OK, exponent_OG, errors_O3


@jit
def _block_errors(values: F32, restored: F64, errors_3: F64) -> None:
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
def _quantize_nvfp4(values: F32, s2: np.float32, packed: U8, scale_out: U8, errors: F64) -> None:
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
            step = E4M3[scale] * s2
            exact_step = np.float64(E4M3[scale]) * np.float64(s2)
            for j in range(16):
                codes[j] = encode_e2m1(block[j] / step)
            for j in range(16):
                restored[j] = np.float64(E2M1[codes[j]]) * exact_step
            for j in range(8):
                packed[o, b * 8 + j] = codes[2 * j] | (codes[2 * j + 1] << 4)
            scale_out[o, b] = scale
            _block_errors(block, restored, errors[o])


@jit
def _quantize_mxfp8(values: F32, codes_out: U8, exponent_out: U8, errors: F64) -> None:
    restored = np.empty(32, np.float64)
    for o in range(values.shape[0]):
        errors[o] = 0.0
        for g in range(exponent_out.shape[1]):
            block = values[o, g * 32 : g * 32 + 32]
            amax = np.float32(0.0)
            for j in range(32):
                amax = max(amax, abs(block[j]))
            # The F32 exponent field is floor(log2) + 127 already; 0 for subnormals, which clamp to
            # 0 as well.
            exponent = max(
                np.int64(np.float32(amax).view(np.uint32) >> 23) - np.int64(8), np.int64(0)
            )
            exponent_out[o, g] = exponent
            step = E8M0[exponent]
            for j in range(32):
                quotient = block[j] / step
                code = encode_e4m3(min(abs(quotient), _E4M3_MAX))
                sign = np.int64(np.float32(block[j]).view(np.uint32) >> 31)
                codes_out[o, g * 32 + j] = code | (sign << 7)
                restored[j] = np.float64(E4M3[code | (sign << 7)]) * np.float64(step)
            _block_errors(block, restored, errors[o])

"""F32 to NVFP4 and to MXFP8, block by block, in the F32 expressions of the reference.

    NVFP4  scale = e4m3(clamp(amax16 / (6 · s2), 2^−9, 448)),  code = e2m1(x / (e4m3(scale) · s2))
    MXFP8  b = max(floor(log2(amax32)) − 8 + 127, 0),          code = e4m3(x / 2^(b − 127))

Four numbers to NVFP4 with s2 = 2^−7: [0.5, −0.03, 0.125, 0] have scale 0x53 (11) and codes 7, 9, 3,
0; to MXFP8: [1, −0.3, 0.01, 0] have exponent 119 and codes 0x78, 0xEA, 0x42, 0x00.
"""

from __future__ import annotations

import numpy as np

from ..results import F32, F64, U8
from .compiled import quantize_mxfp8_blocks, quantize_nvfp4_blocks


def quantize_nvfp4(values_OK: F32, s2: np.float32) -> tuple[U8, U8, F64]:
    """Finite F32 to packed codes U8 [O, K/2], scales U8 [O, K/16], per-row errors F64 [O, 3]."""
    rows_O, columns_K = values_OK.shape
    packed_OP = np.empty((rows_O, columns_K // 2), np.uint8)
    scale_OB = np.empty((rows_O, columns_K // 16), np.uint8)
    errors_O3 = np.empty((rows_O, 3), np.float64)
    quantize_nvfp4_blocks(values_OK, s2, packed_OP, scale_OB, errors_O3)
    return packed_OP, scale_OB, errors_O3


def quantize_mxfp8(values_OK: F32) -> tuple[U8, U8, F64]:
    """Finite F32 to codes U8 [O, K], exponents U8 [O, K/32], per-row errors F64 [O, 3]."""
    rows_O, columns_K = values_OK.shape
    codes_OK = np.empty((rows_O, columns_K), np.uint8)
    exponent_OG = np.empty((rows_O, columns_K // 32), np.uint8)
    errors_O3 = np.empty((rows_O, 3), np.float64)
    quantize_mxfp8_blocks(values_OK, codes_OK, exponent_OG, errors_O3)
    return codes_OK, exponent_OG, errors_O3

"""F32 to NVFP4 and to MXFP8, block by block, in the F32 expressions of the reference.

    NVFP4  scale = e4m3(clamp(amax16 / (6 · s2), 2^−9, 448)),  code = e2m1(x / (e4m3(scale) · s2))
    MXFP8  b = max(floor(log2(amax32)) − 8 + 127, 0),          code = e4m3(x / 2^(b − 127))

Four numbers to NVFP4 with s2 = 2^−7: [0.5, −0.03, 0.125, 0] have scale 0x53 (11) and codes 7, 9, 3,
0; to MXFP8: [1, −0.3, 0.01, 0] have exponent 119 and codes 0x78, 0xEA, 0x42, 0x00.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..arguments import frozen
from ..results import F32, F64, MAX_SCALES, U8, U16, ScaleChoice
from .compiled import quantize_mxfp8_blocks, quantize_nvfp4_blocks


_SEARCHES = {"max": 0, "mse": 1, "four-over-six": 2}


def quantize_nvfp4(
    values_OK: F32 | U16, s2: np.float32, choice: ScaleChoice = MAX_SCALES
) -> tuple[U8, U8, F64]:
    """Finite F32 or BF16 to packed codes U8 [O, K/2], scales U8 [O, K/16], errors F64 [O, 3]."""
    rows_O, columns_K = values_OK.shape
    packed_OP = np.empty((rows_O, columns_K // 2), np.uint8)
    scale_OB = np.empty((rows_O, columns_K // 16), np.uint8)
    errors_O3 = np.empty((rows_O, 3), np.float64)
    weights_K = _NO_WEIGHTS if choice.importance_K is None else choice.importance_K
    search = _SEARCHES[choice.search]
    for rows, slab in _f32_slabs(values_OK):
        out = packed_OP[rows], scale_OB[rows], errors_O3[rows]
        quantize_nvfp4_blocks(slab, s2, search, weights_K, *out)
    return packed_OP, scale_OB, errors_O3 if choice.errors else errors_O3[:0]


def quantize_mxfp8(values_OK: F32 | U16) -> tuple[U8, U8, F64]:
    """Finite F32 or BF16 to codes U8 [O, K], exponents U8 [O, K/32], per-row errors F64 [O, 3]."""
    rows_O, columns_K = values_OK.shape
    codes_OK = np.empty((rows_O, columns_K), np.uint8)
    exponent_OG = np.empty((rows_O, columns_K // 32), np.uint8)
    errors_O3 = np.empty((rows_O, 3), np.float64)
    for rows, slab in _f32_slabs(values_OK):
        quantize_mxfp8_blocks(slab, codes_OK[rows], exponent_OG[rows], errors_O3[rows])
    return codes_OK, exponent_OG, errors_O3


_NO_WEIGHTS = np.empty(0, np.float32)
_NO_WEIGHTS.flags.writeable = False


def _f32_slabs(values_OK: F32 | U16) -> Iterator[tuple[slice, F32]]:
    rows_O, columns_K = values_OK.shape
    step = max(1, 65536 // columns_K)
    for start in range(0, rows_O, step):
        rows = slice(start, min(start + step, rows_O))
        slab = values_OK[rows]
        if slab.dtype == np.uint16:
            slab = np.left_shift(slab, 16, dtype=np.uint32).view(np.float32)
        yield rows, frozen(slab)

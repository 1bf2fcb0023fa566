"""MXFP8 from floats, and its largest magnitude without reading most elements.

    amax = max over blocks of e4m3(largest |code|) · 2^(b − 127)

Four blocks with exponents [120, 119, 120, 117]: if a block at 120 holds 256 · 2^−7 = 2, no element
at 119 can pass it, since 448 · 2^−8 = 1.75, and only the two blocks at 120 are read. Quantisers
that follow OCP give every block a largest code of at least 256, so the highest exponent decides;
other tensors cost more reads and give the exact answer too.
"""

from __future__ import annotations

import numpy as np

from ..results import F32, F64, U8, U16
from .lanes import BF16_SOURCE, F32_SOURCE
from .mxfp8_blocks import largest_code, quantize_mxfp8_floats
from .scalars import E4M3, E8M0

_LARGEST_CODE = 0x7E


def mxfp8_amax(codes_OK: U8, exponent_OG: U8) -> np.float32:
    """F32 maximum of a tensor without NaN; inf where an element overflows F32."""
    blocks, exponents = codes_OK.reshape(-1, 32), exponent_OG.reshape(-1)
    amax = np.float32(0.0)
    with np.errstate(over="ignore"):
        for exponent in range(int(exponents.max(initial=0)), -1, -1):
            if E4M3[_LARGEST_CODE] * E8M0[exponent] <= amax:
                break
            largest = largest_code(blocks, exponents, exponent)
            amax = max(amax, E4M3[largest] * E8M0[exponent])
    return amax


def quantize_mxfp8_from_f32(values_OK: F32 | U16) -> tuple[U8, U8, F64]:
    """Finite F32, or BF16 bits, to codes U8 [O, K], exponents U8 [O, K/32], errors F64 [O, 3]."""
    rows_O, columns_K = values_OK.shape
    codes_OK = np.empty((rows_O, columns_K), np.uint8)
    exponent_OG = np.empty((rows_O, columns_K // 32), np.uint8)
    errors_O3 = np.empty((rows_O, 3), np.float64)
    kind = BF16_SOURCE if values_OK.dtype == np.uint16 else F32_SOURCE
    raw = values_OK.view(np.uint8)
    raw.flags.writeable = False
    quantize_mxfp8_floats(raw, kind, codes_OK, exponent_OG, errors_O3)
    return codes_OK, exponent_OG, errors_O3

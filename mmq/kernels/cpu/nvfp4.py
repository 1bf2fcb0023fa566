"""NVFP4 from MXFP8 codes or from floats: which loop runs, and with which tables.

    s2 = c · 2^−n, 1 ≤ c < 2          tables depend on c alone

Four global scales: 19/16 · 2^−14 has (19/16, 14); 2^−7 has (1, 7); 1 has (1, 0); 3 has (1.5, −1).
`max` has a table for any c. The search has tables, and its F32 shortcut for floats, where every
step e2m1 · e4m3 · c is an F32 number, so c has at most 18 significant bits; every other s2 is
searched through all codes in F64. The bytes are the same either way.
"""

from __future__ import annotations

import numpy as np

from ..results import F32, F64, MAX_SCALES, U8, U16, ScaleChoice
from ..tables import is_regular, is_searchable, max_table, search_tables, split_scale
from .code_blocks import quantize_nvfp4_codes_max, quantize_nvfp4_codes_mse
from .decode import dequantize_mxfp8_f32
from .float_blocks import FOUR_OVER_SIX, MAX, MSE, quantize_nvfp4_floats
from .lanes import BF16_SOURCE, F32_SOURCE

_SEARCHES = {"max": MAX, "mse": MSE, "four-over-six": FOUR_OVER_SIX}
_NO_WEIGHTS = np.empty(0, np.float32)
_NO_WEIGHTS.flags.writeable = False

# Elements of MXFP8 widened at a time where no table serves: 256 KB of F32 stays in a core's cache.
_SLAB_ELEMENTS = 65536


def quantize_nvfp4_from_mxfp8(
    codes_OK: U8, exponent_OG: U8, s2: np.float32, choice: ScaleChoice = MAX_SCALES
) -> tuple[U8, U8, F64]:
    """Packed codes U8 [O, K/2], scales U8 [O, K/16] and per-row errors F64 [O, 3].

    Args:
        codes_OK: E4M3 codes U8 [O, K], no NaN.
        exponent_OG: E8M0 exponents U8 [O, K/32], no NaN.
        s2: a normal positive F32.
    """
    packed, scale, errors = _outputs(codes_OK, choice)
    c, n = split_scale(s2)
    if is_regular(s2) and choice.search == "max":
        quantize_nvfp4_codes_max(
            codes_OK, exponent_OG, max_table(c), n - 127, s2, packed, scale, errors
        )
    elif is_searchable(s2) and choice.search == "mse" and choice.importance is None:
        error_rows, rows = search_tables(c)
        quantize_nvfp4_codes_mse(
            codes_OK, exponent_OG, error_rows, rows, n - 127, s2, c, 2.0**n, packed, scale, errors
        )
    else:
        step = max(1, _SLAB_ELEMENTS // codes_OK.shape[1])
        for start in range(0, codes_OK.shape[0], step):
            slab = slice(start, start + step)
            values = dequantize_mxfp8_f32(codes_OK[slab], exponent_OG[slab])
            _quantize_floats(values, s2, choice, packed[slab], scale[slab], errors[slab])
    return packed, scale, errors


def quantize_nvfp4_from_f32(
    values_OK: F32 | U16, s2: np.float32, choice: ScaleChoice = MAX_SCALES
) -> tuple[U8, U8, F64]:
    """The same from finite F32, or BF16 bits."""
    packed, scale, errors = _outputs(values_OK, choice)
    _quantize_floats(values_OK, s2, choice, packed, scale, errors)
    return packed, scale, errors


def _quantize_floats(
    values_OK: F32 | U16, s2: np.float32, choice: ScaleChoice, packed: U8, scale: U8, errors: F64
) -> None:
    c, n = split_scale(s2)
    weights = _NO_WEIGHTS if choice.importance is None else choice.importance
    kind = BF16_SOURCE if values_OK.dtype == np.uint16 else F32_SOURCE
    search = _SEARCHES[choice.search]
    everything = not is_searchable(s2)
    raw = values_OK.view(np.uint8)
    raw.flags.writeable = False
    quantize_nvfp4_floats(
        raw, kind, weights, search, s2, c, 2.0**n, everything, packed, scale, errors
    )


def _outputs(source_OK: U8 | U16 | F32, choice: ScaleChoice) -> tuple[U8, U8, F64]:
    rows_O, columns_K = source_OK.shape
    packed_OP = np.empty((rows_O, columns_K // 2), np.uint8)
    scale_OB = np.empty((rows_O, columns_K // 16), np.uint8)
    return packed_OP, scale_OB, np.empty((rows_O if choice.errors else 0, 3), np.float64)

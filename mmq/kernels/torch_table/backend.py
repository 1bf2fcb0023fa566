"""torch without numba: the references, but with the `mse` search by tables."""

from __future__ import annotations

import numpy as np

from ..reference import backend as reference
from ..reference.backend import (
    arrays,
    dequantize_mxfp8_bf16,
    dequantize_mxfp8_f32,
    dequantize_nvfp4_bf16,
    dequantize_nvfp4_f32,
    mxfp8_amax,
    quantize_mxfp8_from_f32,
    scalar,
    tensor,
    widened,
)
from ..reference.mxfp8 import dequantize_mxfp8
from ..reference.nvfp4 import quantize_under
from ..results import F32, F64, MAX_SCALES, U8, U16, ScaleChoice
from ..tables import is_searchable
from .scale_search import scales_of_codes, scales_of_floats

__all__ = [
    "dequantize_mxfp8_bf16",
    "dequantize_mxfp8_f32",
    "dequantize_nvfp4_bf16",
    "dequantize_nvfp4_f32",
    "mxfp8_amax",
    "quantize_mxfp8_from_f32",
    "quantize_nvfp4_from_f32",
    "quantize_nvfp4_from_mxfp8",
]


def quantize_nvfp4_from_mxfp8(
    codes_OK: U8, scale_OG: U8, s2: np.float32, choice: ScaleChoice = MAX_SCALES
) -> tuple[U8, U8, F64]:
    """MXFP8 to NVFP4."""
    if not _by_table(s2, choice):
        return reference.quantize_nvfp4_from_mxfp8(codes_OK, scale_OG, s2, choice)
    codes, exponents, s2_ = tensor(codes_OK), tensor(scale_OG), scalar(s2)
    values = dequantize_mxfp8(codes, exponents)
    scale = scales_of_codes(codes, exponents, values, s2_)
    return arrays(quantize_under(values, scale, s2_), choice.errors)


def quantize_nvfp4_from_f32(
    values_OK: F32 | U16, s2: np.float32, choice: ScaleChoice = MAX_SCALES
) -> tuple[U8, U8, F64]:
    """F32, or BF16 bits, to NVFP4."""
    if not _by_table(s2, choice):
        return reference.quantize_nvfp4_from_f32(values_OK, s2, choice)
    values, s2_ = widened(values_OK), scalar(s2)
    return arrays(quantize_under(values, scales_of_floats(values, s2_), s2_), choice.errors)


def _by_table(s2: np.float32, choice: ScaleChoice) -> bool:
    return choice.search == "mse" and choice.importance is None and is_searchable(s2)

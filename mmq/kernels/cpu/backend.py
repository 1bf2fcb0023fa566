"""The fast operations behind the interface of `mmq.kernels.results.Backend`."""

from __future__ import annotations

from .decode import (
    dequantize_mxfp8_bf16,
    dequantize_mxfp8_f32,
    dequantize_nvfp4_bf16,
    dequantize_nvfp4_f32,
)
from .float_loops import quantize_mxfp8 as quantize_mxfp8_from_f32
from .float_loops import quantize_nvfp4 as quantize_nvfp4_from_f32
from .mxfp8_amax import mxfp8_amax
from .nvfp4_table import quantize as quantize_nvfp4_from_mxfp8

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

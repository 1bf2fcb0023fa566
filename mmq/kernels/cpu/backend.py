"""The fast operations behind the interface of `mmq.kernels.results.Backend`."""

from __future__ import annotations

from .decode import (
    dequantize_mxfp8_bf16,
    dequantize_mxfp8_f32,
    dequantize_nvfp4_bf16,
    dequantize_nvfp4_f32,
)
from .mxfp8 import mxfp8_amax, quantize_mxfp8_from_f32
from .nvfp4 import quantize_nvfp4_from_f32, quantize_nvfp4_from_mxfp8

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

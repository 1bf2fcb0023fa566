"""The torch references behind the numpy interface of `mmq.kernels.results.Backend`."""

from __future__ import annotations

from typing import cast

import numpy as np
import torch
from torch import Tensor

from ..results import F32, F64, MAX_SCALES, U8, U16, AnyArray, ScaleChoice
from . import mxfp8, nvfp4
from .e4m3 import bf16_bits


def tensor(array: AnyArray) -> Tensor:
    """The same numbers as a tensor."""
    # A copy, because torch cannot share read-only memory, which is what mapped files give.
    return torch.from_numpy(np.array(array))


def scalar(s2: np.float32) -> Tensor:
    """F32 []."""
    return torch.tensor(float(s2), dtype=torch.float32)


def mxfp8_amax(codes_OK: U8, scale_OG: U8) -> np.float32:
    """The largest magnitude of an MXFP8 tensor; inf where it overflows F32."""
    values = mxfp8.dequantize_mxfp8(tensor(codes_OK), tensor(scale_OG))
    return np.float32(values.abs().max().item())


def quantize_nvfp4_from_mxfp8(
    codes_OK: U8, scale_OG: U8, s2: np.float32, choice: ScaleChoice = MAX_SCALES
) -> tuple[U8, U8, F64]:
    """MXFP8 to NVFP4 by way of the F32 values, which hold every MXFP8 number exactly."""
    return _quantize_nvfp4(mxfp8.dequantize_mxfp8(tensor(codes_OK), tensor(scale_OG)), s2, choice)


def quantize_nvfp4_from_f32(
    values_OK: F32 | U16, s2: np.float32, choice: ScaleChoice = MAX_SCALES
) -> tuple[U8, U8, F64]:
    """F32, or BF16 bits, to NVFP4."""
    return _quantize_nvfp4(widened(values_OK), s2, choice)


def quantize_mxfp8_from_f32(values_OK: F32 | U16) -> tuple[U8, U8, F64]:
    """F32, or BF16 bits, to MXFP8."""
    return arrays(mxfp8.quantize_mxfp8(widened(values_OK)))


def dequantize_mxfp8_bf16(codes_OK: U8, scale_OG: U8) -> U16:
    """MXFP8 to BF16 bits."""
    values = mxfp8.dequantize_mxfp8(tensor(codes_OK), tensor(scale_OG))
    return cast(U16, bf16_bits(values).numpy())


def dequantize_mxfp8_f32(codes_OK: U8, scale_OG: U8) -> F32:
    """MXFP8 to F32."""
    return cast(F32, mxfp8.dequantize_mxfp8(tensor(codes_OK), tensor(scale_OG)).numpy())


def dequantize_nvfp4_bf16(packed_OP: U8, scale_OB: U8, s2: np.float32) -> U16:
    """NVFP4 to BF16 bits: the F32 value, rounded once more."""
    values = nvfp4.dequantize_nvfp4(tensor(packed_OP), tensor(scale_OB), scalar(s2))
    return cast(U16, bf16_bits(values).numpy())


def dequantize_nvfp4_f32(packed_OP: U8, scale_OB: U8, s2: np.float32) -> F32:
    """NVFP4 to F32."""
    values = nvfp4.dequantize_nvfp4(tensor(packed_OP), tensor(scale_OB), scalar(s2))
    return cast(F32, values.numpy())


def widened(values_OK: F32 | U16) -> Tensor:
    """F32, of U16 that is BF16 bits too."""
    if values_OK.dtype == np.uint16:
        return tensor(values_OK).view(torch.bfloat16).to(torch.float32)
    return tensor(values_OK)


def _quantize_nvfp4(values_OK: Tensor, s2: np.float32, choice: ScaleChoice) -> tuple[U8, U8, F64]:
    weights = None if choice.importance is None else tensor(choice.importance)
    packed, scale, rows = arrays(
        nvfp4.quantize_nvfp4(values_OK, scalar(s2), choice.search, weights)
    )
    return packed, scale, rows if choice.errors else rows[:0]


def arrays(tensors: tuple[Tensor, Tensor, Tensor], errors: bool = True) -> tuple[U8, U8, F64]:
    """A quantize function's results as arrays, row errors where they are asked for."""
    elements, scale, rows = (each.numpy() for each in tensors)
    return elements, scale, rows if errors else rows[:0]

"""The Triton kernels behind the interface of `mmq.kernels.results.Backend`.

Arrays go to the device whole, one kernel runs, results come back. The functions that take F32 take
BF16 as U16 bits too: half the bytes to move. Error sums are computed on the device, in the order
that the reference defines, because they need both the source and the codes, and only the codes
come back.

With TRITON_INTERPRET=1 in the environment before the first import of Triton, the same kernels run
in Triton's interpreter on the CPU: slow, for tests.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
import triton
from torch import Tensor

from ..results import F32, F64, U8, U16, AnyArray
from . import amax, blocks, mxfp8, nvfp4

#: Threads of a program, and elements: 16 bytes of codes a thread, the widest load there is.
THREADS = 256
TILE = THREADS * 16
#: Packed codes are half a byte each.
PACKED_TILE = TILE * 2
#: Rows that one warp sums, one a thread.
ROWS = 32


class NoDeviceError(RuntimeError):
    """PyTorch sees neither a CUDA nor a ROCm device."""


@functools.cache
def device() -> torch.device:
    """Where the kernels run: the current GPU, or the CPU under TRITON_INTERPRET=1.

    Raises:
        NoDeviceError: there is no GPU.
    """
    if triton.knobs.runtime.interpret:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise NoDeviceError(
            "PyTorch sees no CUDA or ROCm device; TRITON_INTERPRET=1 runs the kernels on the CPU"
        )
    return torch.device("cuda")


def mxfp8_amax(codes_OK: U8, scale_OG: U8) -> np.float32:
    """The largest magnitude of an MXFP8 tensor; inf where it overflows F32."""
    largest = _empty(triton.cdiv(codes_OK.size, TILE), torch.int32)
    arguments = _upload(codes_OK), _upload(scale_OG), largest, scale_OG.size
    _launch(amax.mxfp8_amax_kernel, codes_OK.size, TILE, *arguments)
    return np.int32(largest.max().item()).view(np.float32)


def float_amax(values: F32 | U16) -> np.float32:
    """The largest magnitude of F32 numbers, or of BF16 numbers as bits; inf or NaN if it holds one.

    Args:
        values: of any shape, not empty.
    """
    largest = _empty(triton.cdiv(values.size, TILE), torch.int32)
    _launch(amax.float_amax_kernel, values.size, TILE, _upload(values), largest, values.size)
    return np.int32(largest.max().item()).view(np.float32)


def quantize_nvfp4_from_mxfp8(codes_OK: U8, scale_OG: U8, s2: np.float32) -> tuple[U8, U8, F64]:
    """MXFP8 to packed codes U8 [O, K/2], scales U8 [O, K/16], per-row errors F64 [O, 3]."""
    source = _upload(codes_OK), _upload(scale_OG)
    packed, scale, errors = _nvfp4_outputs(codes_OK.size)
    arguments = *source, packed, scale, errors, float(s2), scale_OG.size
    _launch(nvfp4.quantize_nvfp4_from_mxfp8_kernel, codes_OK.size, TILE, *arguments)
    return _quantized(codes_OK.shape[0], packed, scale, errors)


def quantize_nvfp4_from_f32(values_OK: F32 | U16, s2: np.float32) -> tuple[U8, U8, F64]:
    """Finite F32 numbers, or BF16 bits, to the same."""
    packed, scale, errors = _nvfp4_outputs(values_OK.size)
    arguments = _upload(values_OK), packed, scale, errors, float(s2), values_OK.size // 16
    _launch(nvfp4.quantize_nvfp4_from_float_kernel, values_OK.size, TILE, *arguments)
    return _quantized(values_OK.shape[0], packed, scale, errors)


def quantize_mxfp8_from_f32(values_OK: F32 | U16) -> tuple[U8, U8, F64]:
    """Finite F32 numbers, or BF16 bits, to codes U8 [O, K], exponents U8 [O, K/32], errors."""
    groups = values_OK.size // 32
    codes, exponents = _empty(values_OK.size, torch.uint8), _empty(groups, torch.uint8)
    errors = _empty(3 * groups, torch.float64)
    arguments = _upload(values_OK), codes, exponents, errors, groups
    _launch(mxfp8.quantize_mxfp8_kernel, values_OK.size, TILE, *arguments)
    return _quantized(values_OK.shape[0], codes, exponents, errors)


def dequantize_mxfp8_bf16(codes_OK: U8, scale_OG: U8) -> U16:
    """MXFP8 to BF16 bits U16 [O, K]."""
    return _dequantize_mxfp8(codes_OK, scale_OG, torch.uint16)


def dequantize_mxfp8_f32(codes_OK: U8, scale_OG: U8) -> F32:
    """MXFP8 to F32 [O, K]."""
    return _dequantize_mxfp8(codes_OK, scale_OG, torch.float32)


def dequantize_nvfp4_bf16(packed_OP: U8, scale_OB: U8, s2: np.float32) -> U16:
    """NVFP4 to BF16 bits U16 [O, K]."""
    return _dequantize_nvfp4(packed_OP, scale_OB, s2, torch.uint16)


def dequantize_nvfp4_f32(packed_OP: U8, scale_OB: U8, s2: np.float32) -> F32:
    """NVFP4 to F32 [O, K]."""
    return _dequantize_nvfp4(packed_OP, scale_OB, s2, torch.float32)


def _dequantize_mxfp8(codes_OK: U8, scale_OG: U8, dtype: torch.dtype) -> AnyArray:
    values = _empty(codes_OK.size, dtype)
    arguments = _upload(codes_OK), _upload(scale_OG), values, scale_OG.size
    _launch(mxfp8.dequantize_mxfp8_kernel, codes_OK.size, TILE, *arguments)
    return values.cpu().numpy().reshape(codes_OK.shape)


def _dequantize_nvfp4(packed_OP: U8, scale_OB: U8, s2: np.float32, dtype: torch.dtype) -> AnyArray:
    values = _empty(packed_OP.size * 2, dtype)
    arguments = _upload(packed_OP), _upload(scale_OB), values, float(s2), scale_OB.size
    _launch(nvfp4.dequantize_nvfp4_kernel, values.numel(), PACKED_TILE, *arguments)
    return values.cpu().numpy().reshape(packed_OP.shape[0], -1)


def _upload(array: AnyArray) -> Tensor:
    # Read-only arrays are copied first: torch cannot share their memory.
    return torch.from_numpy(np.require(array, requirements=["C", "W"])).to(device())


def _empty(count: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(count, dtype=dtype, device=device())


def _nvfp4_outputs(count: int) -> tuple[Tensor, Tensor, Tensor]:
    blocks = count // 16
    errors = _empty(3 * blocks, torch.float64)
    return _empty(blocks * 8, torch.uint8), _empty(blocks, torch.uint8), errors


def _launch(kernel: triton.JITFunction, count: int, tile: int, *arguments: object) -> None:
    """Run `kernel` over `count` elements, `tile` a program."""
    kernel[(triton.cdiv(count, tile),)](*arguments, TILE=tile, **settings(THREADS))


def settings(threads: int, warp_size: int | None = None) -> dict[str, object]:
    """Launch options: no operation may be fused, or bits would depend on the device."""
    if warp_size is None:
        warp_size = _warp_size()
    return {"num_warps": max(1, threads // warp_size), "enable_fp_fusion": False}


@functools.cache
def _warp_size() -> int:
    if device().type == "cpu":
        return 32
    return triton.runtime.driver.active.get_current_target().warp_size


def _quantized(rows: int, *tensors: Tensor) -> tuple[U8, U8, F64]:
    """Elements and scales by rows, and the block errors added up along each row."""
    elements, scale, errors = tensors
    sums = _empty(rows * 3, torch.float64)
    arguments = errors, sums, rows, scale.numel() // rows
    grid = (triton.cdiv(rows, ROWS),)
    blocks.row_sums_kernel[grid](*arguments, R=ROWS, **settings(ROWS))
    return tuple(t.cpu().numpy().reshape(rows, -1) for t in (elements, scale, sums))

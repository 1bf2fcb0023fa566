"""The Triton kernels behind the interface of `mmq.kernels.results.Backend`.

Arrays go to the device whole, one kernel runs, results come back. The functions that take F32 take
BF16 as U16 bits too: half the bytes to move. Error sums are computed on the device, in the order
that the reference defines, because they need both the source and the codes, and only the codes
come back.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget

from ..results import F32, F64, MAX_SCALES, U8, U16, AnyArray, ScaleChoice
from . import amax, mxfp8, nvfp4
from .blocks import row_sums_kernel
from .launch import NoDeviceError as NoDeviceError
from .launch import device, gpu_target, launch_options

#: Threads of a program, and elements: 16 bytes of codes a thread, the widest load there is.
THREADS = 128
TILE = THREADS * 16
#: Packed codes are half a byte each.
PACKED_TILE = TILE * 2
#: Rows that one warp sums, one a thread.
ROWS = 32


def mxfp8_amax(codes_OK: U8, scale_OG: U8) -> np.float32:
    """The largest magnitude of an MXFP8 tensor; inf where it overflows F32."""
    source = _upload(codes_OK), _upload(scale_OG)
    return _largest(amax.mxfp8_amax_kernel, source, codes_OK.size, scale_OG.size)


def float_amax(values: F32 | U16) -> np.float32:
    """The largest magnitude of F32 numbers, or of BF16 numbers as bits; inf or NaN if it holds one.

    Args:
        values: of any shape.
    """
    return _largest(amax.float_amax_kernel, (_upload(values),), values.size, values.size)


def quantize_nvfp4_from_mxfp8(
    codes_OK: U8, scale_OG: U8, s2: np.float32, choice: ScaleChoice = MAX_SCALES
) -> tuple[U8, U8, F64]:
    """MXFP8 to packed codes U8 [O, K/2], scales U8 [O, K/16], per-row errors F64 [O, 3]."""
    kernel = nvfp4.quantize_nvfp4_from_mxfp8_kernel
    source = _upload(codes_OK), _upload(scale_OG)
    return _quantize_nvfp4(kernel, source, codes_OK.shape, s2, scale_OG.size, choice)


def quantize_nvfp4_from_f32(
    values_OK: F32 | U16, s2: np.float32, choice: ScaleChoice = MAX_SCALES
) -> tuple[U8, U8, F64]:
    """Finite F32 numbers, or BF16 bits, to the same."""
    kernel = nvfp4.quantize_nvfp4_from_float_kernel
    source = (_upload(values_OK),)
    return _quantize_nvfp4(kernel, source, values_OK.shape, s2, values_OK.size // 16, choice)


def quantize_mxfp8_from_f32(values_OK: F32 | U16) -> tuple[U8, U8, F64]:
    """Finite F32 numbers, or BF16 bits, to codes U8 [O, K], exponents U8 [O, K/32], errors."""
    rows_O, columns_K = values_OK.shape
    groups = values_OK.size // 32
    codes, exponents = _empty(values_OK.size, torch.uint8), _empty(groups, torch.uint8)
    outputs = codes, exponents, _empty(3 * groups, torch.float64)
    _launch(mxfp8.quantize_mxfp8_kernel, values_OK.size, TILE, _upload(values_OK), *outputs, groups)
    return _quantized(*outputs, (columns_K, columns_K // 32), rows_O)


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
    return values.cpu().numpy().reshape(packed_OP.shape[0], packed_OP.shape[1] * 2)


def _upload(array: AnyArray) -> Tensor:
    # Read-only arrays are copied first: torch cannot share their memory.
    return torch.from_numpy(np.require(array, requirements=["C", "W"])).to(device())


def _empty(count: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(count, dtype=dtype, device=device())


def _largest(
    kernel: triton.JITFunction, source: tuple[Tensor, ...], elements: int, count: int
) -> np.float32:
    """The largest of what `kernel` finds in each tile; 0 of nothing."""
    tiles = max(1, triton.cdiv(elements, TILE))
    largest = torch.zeros(tiles, dtype=torch.int32, device=device())
    _launch(kernel, elements, TILE, *source, largest, count)
    return np.int32(largest.max().item()).view(np.float32)


def _quantize_nvfp4(
    kernel: triton.JITFunction,
    source: tuple[Tensor, ...],
    shape: tuple[int, ...],
    s2: np.float32,
    count: int,
    choice: ScaleChoice,
) -> tuple[U8, U8, F64]:
    rows_O, columns_K = shape
    blocks = rows_O * columns_K // 16
    packed, scale = _empty(blocks * 8, torch.uint8), _empty(blocks, torch.uint8)
    errors = _empty(3 * blocks if choice.errors else 0, torch.float64)
    weighted = choice.importance is not None
    importance = _upload(choice.importance) if weighted else _empty(0, torch.float32)
    outputs = packed, scale, errors
    arguments = *source, *outputs, float(s2), count, importance, columns_K // 16
    flags = {"SEARCH": choice.search, "WEIGHTED": weighted, "ERRORS": choice.errors}
    _launch(kernel, rows_O * columns_K, TILE, *arguments, **flags)
    return _quantized(*outputs, (columns_K // 2, columns_K // 16), rows_O)


def _launch(
    kernel: triton.JITFunction, count: int, tile: int, *arguments: object, **flags: object
) -> None:
    """Run `kernel` over `count` elements, `tile` a program."""
    options = settings(THREADS, flags.get("SEARCH", "max"))
    if count:
        kernel[(triton.cdiv(count, tile),)](*arguments, TILE=tile, **flags, **options)


def settings(
    threads: int, search: str = "max", target: GPUTarget | None = None
) -> dict[str, object]:
    """Launch options on `target`, by default the current device's, for scales by `search`."""
    target = target or gpu_target()
    options = launch_options(threads, target)
    if target.backend == "cuda" and search != "max":
        # Without a limit ptxas spills a register or two to let more programs run at a time.
        options["maxnreg"] = 160
    return options


def _quantized(
    elements: Tensor, scale: Tensor, errors: Tensor, widths: tuple[int, int], rows: int
) -> tuple[U8, U8, F64]:
    """Elements and scales by rows; block errors added up along each row, if there are any."""
    sums = errors
    if errors.numel():
        sums = _empty(rows * 3, torch.float64)
        grid = (triton.cdiv(rows, ROWS),)
        row_sums_kernel[grid](errors, sums, rows, widths[1], R=ROWS, **settings(ROWS))
    by_rows = (
        tensor.cpu().numpy().reshape(rows, width)
        for tensor, width in zip((elements, scale), widths, strict=True)
    )
    return *by_rows, sums.cpu().numpy().reshape(-1, 3)

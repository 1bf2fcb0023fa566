"""The operations on weights, the same bits from every backend: numpy arrays in, numpy arrays out.

Importing this module imports neither torch nor numba; the first call does. `backend` is "cpu"
(numba, fast), "reference" (torch, the definition) or "auto": cpu where numba can be imported, else
the reference with one warning. Formats and their formulas: `mmq.kernels.reference`. Dimensions:
`mmq.kernels.results`.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Iterator
from typing import cast

import numpy as np

from .results import F32, U8, U16, AnyArray, Backend, ErrorSums, Mxfp8, Nvfp4
from .scan import count_nonfinite, float_amax

__all__ = [
    "BACKENDS",
    "ErrorSums",
    "Mxfp8",
    "Nvfp4",
    "count_nonfinite",
    "dequantize_mxfp8",
    "dequantize_mxfp8_f32",
    "dequantize_nvfp4",
    "dequantize_nvfp4_f32",
    "float_amax",
    "mxfp8_amax",
    "quantize_mxfp8",
    "quantize_nvfp4_from_float",
    "quantize_nvfp4_from_mxfp8",
    "resolve_backend",
]

MXFP8_BLOCK = 32
NVFP4_BLOCK = 16

#: Backend names and the module behind each.
BACKENDS = {
    "cpu": "mmq.kernels.cpu.backend",
    "reference": "mmq.kernels.reference.backend",
}

_NO_ERRORS = ErrorSums()

# Elements converted to F32 at a time: 256 KB of F32 stays in a core's cache.
_SLAB_ELEMENTS = 65536


def resolve_backend(name: str = "auto") -> str:
    """The backend that `name` stands for on this machine.

    Warns once when "auto" has to fall back to the reference.

    Raises:
        ValueError: unknown name.  ImportError: the backend asked for cannot be imported.
    """
    return _resolve(name)


@functools.cache
def _resolve(name: str) -> str:
    if name == "auto":
        try:
            importlib.import_module(BACKENDS["cpu"])
        except ImportError as error:
            warnings.warn(
                f"numba cannot be imported ({error}): the reference backend gives the same bytes, "
                "slowly",
                RuntimeWarning,
                stacklevel=3,
            )
            return "reference"
        return "cpu"
    if name not in BACKENDS:
        raise ValueError(f"unknown backend {name!r}: expected auto, {', '.join(BACKENDS)}")
    importlib.import_module(BACKENDS[name])
    return name


def mxfp8_amax(codes_OK: U8, scale_OG: U8, *, backend: str = "auto") -> np.float32:
    """The largest magnitude of an MXFP8 tensor, exactly.

    Args:
        codes_OK: E4M3 codes, U8 [O, K], no NaN: scan them first with `count_nonfinite`.
        scale_OG: E8M0 exponents, U8 [O, K/32], no NaN.

    Returns:
        F32; inf where an element is too large for F32 (possible from exponent 247 on).

    Raises:
        ValueError: shapes do not fit.
    """
    codes_OK, scale_OG = _check_mxfp8(codes_OK, scale_OG)
    return _load(backend).mxfp8_amax(codes_OK, scale_OG)


def quantize_nvfp4_from_mxfp8(
    codes_OK: U8,
    scale_OG: U8,
    s2: np.float32,
    *,
    backend: str = "auto",
    running: ErrorSums = _NO_ERRORS,
) -> Nvfp4:
    """MXFP8 to NVFP4 with `max` scaling under the global scale s2.

    Args:
        codes_OK: E4M3 codes, U8 [O, K], no NaN.
        scale_OG: E8M0 exponents, U8 [O, K/32], no NaN.
        s2: multiplier, a normal positive F32 (`mmq.quantize.global_scale`).
        running: error sums of the rows before these. Passing each chunk the sums of the last makes
            the total the same however a tensor is cut into chunks of rows.

    Returns:
        Packed codes, block scales, and `running` extended by these rows.

    Raises:
        ValueError: shapes do not fit, or s2 is not a normal positive F32.
    """
    codes_OK, scale_OG = _check_mxfp8(codes_OK, scale_OG)
    s2 = _check_s2(s2)
    packed, scale, rows = _load(backend).quantize_nvfp4_from_mxfp8(codes_OK, scale_OG, s2)
    return Nvfp4(packed, scale, running.extended_by(rows))


def quantize_nvfp4_from_float(
    values_OK: AnyArray,
    dtype: str,
    s2: np.float32,
    *,
    backend: str = "auto",
    running: ErrorSums = _NO_ERRORS,
) -> Nvfp4:
    """BF16, F16 or F32 to NVFP4 with `max` scaling under the global scale s2.

    Args:
        values_OK: [O, K], K a multiple of 16, finite. BF16 as U16 bits; F16 as float16 or U16 bits;
            F32 as float32.
        dtype: "BF16", "F16" or "F32".
        s2, running: as in `quantize_nvfp4_from_mxfp8`.

    Raises:
        ValueError: shape, dtype or s2 do not fit.
    """
    _check_float(values_OK, dtype, NVFP4_BLOCK)
    s2 = _check_s2(s2)
    kernels = _load(backend)
    rows_O, columns_K = values_OK.shape
    packed = np.empty((rows_O, columns_K // 2), np.uint8)
    scale = np.empty((rows_O, columns_K // NVFP4_BLOCK), np.uint8)
    error = running
    for rows, slab in _f32_slabs(values_OK, dtype):
        packed[rows], scale[rows], sums = kernels.quantize_nvfp4_from_f32(slab, s2)
        error = error.extended_by(sums)
    return Nvfp4(packed, scale, error)


def quantize_mxfp8(
    values_OK: AnyArray, dtype: str, *, backend: str = "auto", running: ErrorSums = _NO_ERRORS
) -> Mxfp8:
    """BF16, F16 or F32 to MXFP8: OCP floor exponent, elements saturating and to nearest even.

    Args:
        values_OK: [O, K], K a multiple of 32, finite; forms as in `quantize_nvfp4_from_float`.

    Raises:
        ValueError: shape or dtype do not fit.
    """
    _check_float(values_OK, dtype, MXFP8_BLOCK)
    kernels = _load(backend)
    rows_O, columns_K = values_OK.shape
    codes = np.empty((rows_O, columns_K), np.uint8)
    scale = np.empty((rows_O, columns_K // MXFP8_BLOCK), np.uint8)
    error = running
    for rows, slab in _f32_slabs(values_OK, dtype):
        codes[rows], scale[rows], sums = kernels.quantize_mxfp8_from_f32(slab)
        error = error.extended_by(sums)
    return Mxfp8(codes, scale, error)


def dequantize_mxfp8(codes_OK: U8, scale_OG: U8, *, backend: str = "auto") -> U16:
    """MXFP8 to BF16 bits, U16 [O, K]: exact, but rounded below exponent 9 and inf from 2^128.

    Codes 0x7F and 0xFF and exponent 255 give NaN, 0x7FC0.
    """
    codes_OK, scale_OG = _check_mxfp8(codes_OK, scale_OG)
    return _load(backend).dequantize_mxfp8_bf16(codes_OK, scale_OG)


def dequantize_mxfp8_f32(codes_OK: U8, scale_OG: U8, *, backend: str = "auto") -> F32:
    """MXFP8 to F32 [O, K]: exact, inf from 2^128, NaN as in `dequantize_mxfp8`."""
    codes_OK, scale_OG = _check_mxfp8(codes_OK, scale_OG)
    return _load(backend).dequantize_mxfp8_f32(codes_OK, scale_OG)


def dequantize_nvfp4(packed_OP: U8, scale_OB: U8, s2: np.float32, *, backend: str = "auto") -> U16:
    """NVFP4 to BF16 bits, U16 [O, K]: `dequantize_nvfp4_f32`, rounded to nearest even.

    Args:
        packed_OP: U8 [O, K/2], even columns in the low nibbles.
        scale_OB: E4M3 codes, U8 [O, K/16].
        s2: multiplier, a normal positive F32.
    """
    packed_OP, scale_OB = _check_nvfp4(packed_OP, scale_OB)
    return _load(backend).dequantize_nvfp4_bf16(packed_OP, scale_OB, _check_s2(s2))


def dequantize_nvfp4_f32(
    packed_OP: U8, scale_OB: U8, s2: np.float32, *, backend: str = "auto"
) -> F32:
    """NVFP4 to F32 [O, K]: e2m1 · (e4m3 · s2), both products rounded to F32."""
    packed_OP, scale_OB = _check_nvfp4(packed_OP, scale_OB)
    return _load(backend).dequantize_nvfp4_f32(packed_OP, scale_OB, _check_s2(s2))


def _load(backend: str) -> Backend:
    return cast(Backend, importlib.import_module(BACKENDS[_resolve(backend)]))


def _check_mxfp8(codes_OK: U8, scale_OG: U8) -> tuple[U8, U8]:
    return _check_blocks(codes_OK, scale_OG, MXFP8_BLOCK, "MXFP8 codes")


def _check_nvfp4(packed_OP: U8, scale_OB: U8) -> tuple[U8, U8]:
    return _check_blocks(packed_OP, scale_OB, NVFP4_BLOCK // 2, "packed NVFP4")


def _check_blocks(elements: U8, scale: U8, block: int, what: str) -> tuple[U8, U8]:
    fits = (
        elements.ndim == 2
        and elements.shape[1] > 0
        and elements.shape[1] % block == 0
        and scale.shape == (elements.shape[0], elements.shape[1] // block)
    )
    if not fits:
        raise ValueError(
            f"{what} of shape {list(elements.shape)} and scales of shape {list(scale.shape)} "
            f"do not fit: expected [O, n·{block}] and [O, n]"
        )
    if elements.dtype != np.uint8 or scale.dtype != np.uint8:
        raise ValueError(f"{what} and scales must be uint8, got {elements.dtype}, {scale.dtype}")
    return _frozen(elements), _frozen(scale)


def _frozen(array: AnyArray) -> AnyArray:
    """The array contiguous, aligned and read-only: in one form numba compiles each kernel once."""
    view = np.require(array, requirements=["C", "A"]).view()
    view.flags.writeable = False
    return view


def _check_s2(s2: np.float32) -> np.float32:
    s2 = np.float32(s2)
    if not (np.isfinite(s2) and s2 >= np.finfo(np.float32).smallest_normal):
        raise ValueError(f"the global scale must be a normal positive F32, got {s2}")
    return s2


_FLOAT_FORMS = {"BF16": ("uint16",), "F16": ("float16", "uint16"), "F32": ("float32",)}


def _check_float(values_OK: AnyArray, dtype: str, block: int) -> None:
    if dtype not in _FLOAT_FORMS or values_OK.dtype.name not in _FLOAT_FORMS[dtype]:
        raise ValueError(f"an array of {values_OK.dtype} cannot be read as {dtype}")
    if values_OK.ndim != 2 or values_OK.shape[1] == 0 or values_OK.shape[1] % block:
        raise ValueError(f"shape {list(values_OK.shape)} does not fit: expected [O, n·{block}]")


def _f32_slabs(values_OK: AnyArray, dtype: str) -> Iterator[tuple[slice, F32]]:
    """Runs of rows as contiguous F32, exactly."""
    rows_O, columns_K = values_OK.shape
    step = max(1, _SLAB_ELEMENTS // columns_K)
    for start in range(0, rows_O, step):
        rows = slice(start, min(start + step, rows_O))
        slab = values_OK[rows]
        if dtype == "BF16":
            yield rows, _frozen(np.left_shift(slab, 16, dtype=np.uint32).view(np.float32))
        elif dtype == "F16":
            yield rows, _frozen(np.ascontiguousarray(slab).view(np.float16).astype(np.float32))
        else:
            yield rows, _frozen(slab)

"""The operations on weights, the same bits from every backend: numpy arrays in, numpy arrays out.

Importing this module imports neither torch nor numba; the first call does. `backend` is "cpu"
(numba, fast), "triton" (a GPU), "reference" (torch, the definition), "torch-table" (the reference
with tables for the search) or "auto": cpu where numba works, else torch-table with one warning.
Formats and their formulas: `mmq.kernels.reference`. Dimensions: `mmq.kernels.results`.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Iterator
from typing import cast

import numpy as np

from .arguments import (
    MXFP8_BLOCK,
    NVFP4_BLOCK,
    SEARCHES,
    check_choice,
    check_float,
    check_mxfp8,
    check_nvfp4,
    check_s2,
    frozen,
)
from .results import F32, U8, U16, AnyArray, Backend, ErrorSums, Mxfp8, Nvfp4
from .scan import count_nonfinite, float_amax

__all__ = [
    "BACKENDS",
    "SEARCHES",
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

#: Backend names and the module behind each.
BACKENDS = {
    "cpu": "mmq.kernels.cpu.backend",
    "triton": "mmq.kernels.triton.backend",
    "torch-table": "mmq.kernels.torch_table.backend",
    "reference": "mmq.kernels.reference.backend",
}

_NO_ERRORS = ErrorSums()

# Elements converted to F32 at a time: 256 KB of F32 stays in a core's cache.
_SLAB_ELEMENTS = 65536


def resolve_backend(name: str = "auto") -> str:
    """The backend that `name` stands for on this machine.

    Warns once when "auto" has to do without numba.

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
                f"numba cannot be used ({error}): torch gives the same bytes, slowly",
                RuntimeWarning,
                stacklevel=3,
            )
            return "torch-table"
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
    codes_OK, scale_OG = check_mxfp8(codes_OK, scale_OG)
    return _load(backend).mxfp8_amax(codes_OK, scale_OG)


def quantize_nvfp4_from_mxfp8(
    codes_OK: U8,
    scale_OG: U8,
    s2: np.float32,
    *,
    search: str = "max",
    importance: F32 | None = None,
    errors: bool = True,
    backend: str = "auto",
    running: ErrorSums = _NO_ERRORS,
) -> Nvfp4:
    """MXFP8 to NVFP4 under the global scale s2.

    Args:
        codes_OK: E4M3 codes, U8 [O, K], no NaN.
        scale_OG: E8M0 exponents, U8 [O, K/32], no NaN.
        s2: multiplier, a normal positive F32; for each search `mmq.quantize.global_scale` has the
            one that suits it.
        search: how block scales are chosen: "max", "mse" (least error of all codes) or
            "four-over-six".
        importance: F32 [K], what a squared error in each column counts; None: the same everywhere.
        errors: compute the error sums. They cost about as much as `max` scaling itself.
        running: error sums of the rows before these. Passing each chunk the sums of the last makes
            the total the same however a tensor is cut into chunks of rows.

    Returns:
        Packed codes, block scales, and `running` extended by these rows (unless errors=False).

    Raises:
        ValueError: shapes do not fit, s2 is not a normal positive F32, unknown search, or weights
            that are negative, not finite, of another length, or given with "max".
    """
    codes_OK, scale_OG = check_mxfp8(codes_OK, scale_OG)
    s2 = check_s2(s2)
    choice = check_choice(search, importance, errors, codes_OK.shape[1])
    packed, scale, rows = _load(backend).quantize_nvfp4_from_mxfp8(codes_OK, scale_OG, s2, choice)
    return Nvfp4(packed, scale, running.extended_by(rows))


def quantize_nvfp4_from_float(
    values_OK: AnyArray,
    dtype: str,
    s2: np.float32,
    *,
    search: str = "max",
    importance: F32 | None = None,
    errors: bool = True,
    backend: str = "auto",
    running: ErrorSums = _NO_ERRORS,
) -> Nvfp4:
    """BF16, F16 or F32 to NVFP4 under the global scale s2.

    Args:
        values_OK: [O, K], K a multiple of 16, finite. BF16 as U16 bits; F16 as float16 or U16 bits;
            F32 as float32.
        dtype: "BF16", "F16" or "F32".
        s2, search, importance, errors, running: as in `quantize_nvfp4_from_mxfp8`.

    Raises:
        ValueError: as there, or the dtype does not fit.
    """
    check_float(values_OK, dtype, NVFP4_BLOCK)
    s2 = check_s2(s2)
    choice = check_choice(search, importance, errors, values_OK.shape[1])
    kernels = _load(backend)
    pieces, error = [], running
    for slab in _slabs(values_OK, dtype):
        packed, scale, sums = kernels.quantize_nvfp4_from_f32(slab, s2, choice)
        pieces.append((packed, scale))
        error = error.extended_by(sums)
    return Nvfp4(*_joined(pieces), error)


def quantize_mxfp8(
    values_OK: AnyArray, dtype: str, *, backend: str = "auto", running: ErrorSums = _NO_ERRORS
) -> Mxfp8:
    """BF16, F16 or F32 to MXFP8: OCP floor exponent, elements saturating and to nearest even.

    Args:
        values_OK: [O, K], K a multiple of 32, finite; forms as in `quantize_nvfp4_from_float`.

    Raises:
        ValueError: shape or dtype do not fit.
    """
    check_float(values_OK, dtype, MXFP8_BLOCK)
    kernels = _load(backend)
    pieces, error = [], running
    for slab in _slabs(values_OK, dtype):
        codes, scale, sums = kernels.quantize_mxfp8_from_f32(slab)
        pieces.append((codes, scale))
        error = error.extended_by(sums)
    return Mxfp8(*_joined(pieces), error)


def dequantize_mxfp8(codes_OK: U8, scale_OG: U8, *, backend: str = "auto") -> U16:
    """MXFP8 to BF16 bits, U16 [O, K]: exact, but rounded below exponent 9 and inf from 2^128.

    Codes 0x7F and 0xFF and exponent 255 give NaN, 0x7FC0.
    """
    codes_OK, scale_OG = check_mxfp8(codes_OK, scale_OG)
    return _load(backend).dequantize_mxfp8_bf16(codes_OK, scale_OG)


def dequantize_mxfp8_f32(codes_OK: U8, scale_OG: U8, *, backend: str = "auto") -> F32:
    """MXFP8 to F32 [O, K]: exact, inf from 2^128, NaN as in `dequantize_mxfp8`."""
    codes_OK, scale_OG = check_mxfp8(codes_OK, scale_OG)
    return _load(backend).dequantize_mxfp8_f32(codes_OK, scale_OG)


def dequantize_nvfp4(packed_OP: U8, scale_OB: U8, s2: np.float32, *, backend: str = "auto") -> U16:
    """NVFP4 to BF16 bits, U16 [O, K]: `dequantize_nvfp4_f32`, rounded to nearest even.

    Args:
        packed_OP: U8 [O, K/2], even columns in the low nibbles.
        scale_OB: E4M3 codes, U8 [O, K/16].
        s2: multiplier, a normal positive F32.
    """
    packed_OP, scale_OB = check_nvfp4(packed_OP, scale_OB)
    return _load(backend).dequantize_nvfp4_bf16(packed_OP, scale_OB, check_s2(s2))


def dequantize_nvfp4_f32(
    packed_OP: U8, scale_OB: U8, s2: np.float32, *, backend: str = "auto"
) -> F32:
    """NVFP4 to F32 [O, K]: e2m1 · (e4m3 · s2), both products rounded to F32."""
    packed_OP, scale_OB = check_nvfp4(packed_OP, scale_OB)
    return _load(backend).dequantize_nvfp4_f32(packed_OP, scale_OB, check_s2(s2))


def _load(backend: str) -> Backend:
    return cast(Backend, importlib.import_module(BACKENDS[_resolve(backend)]))


def _slabs(values_OK: AnyArray, dtype: str) -> Iterator[F32 | U16]:
    """Runs of rows as contiguous F32 or BF16 bits; only F16 has to be widened, and so cut."""
    if dtype != "F16":
        yield frozen(values_OK)
        return
    step = max(1, _SLAB_ELEMENTS // values_OK.shape[1])
    for start in range(0, max(1, values_OK.shape[0]), step):
        halves = np.ascontiguousarray(values_OK[start : start + step]).view(np.float16)
        yield frozen(halves.astype(np.float32))


def _joined(pieces: list[tuple[U8, U8]]) -> tuple[U8, U8]:
    """Runs of rows put together again; one run is not copied."""
    if len(pieces) == 1:
        return pieces[0]
    elements, scales = zip(*pieces, strict=True)
    return np.concatenate(elements), np.concatenate(scales)

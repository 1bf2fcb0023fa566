"""What the operations refuse, and the one form in which they hand arrays to a backend.

No arithmetic here: a shape, a dtype or a scale that does not fit raises ValueError with what was
expected and what came. Dimensions: `mmq.kernels.results`.
"""

from __future__ import annotations

import numpy as np

from .results import F32, U8, AnyArray, ScaleChoice

MXFP8_BLOCK = 32
NVFP4_BLOCK = 16

#: How a block scale may be chosen: `docs/numerics.md`.
SEARCHES = ("max", "mse", "four-over-six")

_FLOAT_FORMS = {"BF16": ("uint16",), "F16": ("float16", "uint16"), "F32": ("float32",)}


def check_mxfp8(codes_OK: U8, scale_OG: U8) -> tuple[U8, U8]:
    """Codes and exponents, contiguous and read-only."""
    return _check_blocks(codes_OK, scale_OG, MXFP8_BLOCK, "MXFP8 codes")


def check_nvfp4(packed_OP: U8, scale_OB: U8) -> tuple[U8, U8]:
    """Packed codes and block scales, contiguous and read-only."""
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
    return frozen(elements), frozen(scale)


def frozen(array: AnyArray) -> AnyArray:
    """The array contiguous, aligned and read-only: in one form numba compiles each kernel once."""
    view = np.require(array, requirements=["C", "A"]).view()
    view.flags.writeable = False
    return view


def check_s2(s2: np.float32) -> np.float32:
    """The global scale as F32."""
    s2 = np.float32(s2)
    if not (np.isfinite(s2) and s2 >= np.finfo(np.float32).smallest_normal):
        raise ValueError(f"the global scale must be a normal positive F32, got {s2}")
    return s2


def check_float(values_OK: AnyArray, dtype: str, block: int) -> None:
    """Refuse what is not [O, n · block] of `dtype`."""
    if dtype not in _FLOAT_FORMS or values_OK.dtype.name not in _FLOAT_FORMS[dtype]:
        raise ValueError(f"an array of {values_OK.dtype} cannot be read as {dtype}")
    if values_OK.ndim != 2 or values_OK.shape[1] == 0 or values_OK.shape[1] % block:
        raise ValueError(f"shape {list(values_OK.shape)} does not fit: expected [O, n·{block}]")


def check_choice(search: str, importance: F32 | None, errors: bool, columns: int) -> ScaleChoice:
    """The rule for block scales; weights as F32 [K], contiguous and read-only."""
    if search not in SEARCHES:
        raise ValueError(f"unknown scale search {search!r}: expected {', '.join(SEARCHES)}")
    if importance is None:
        return ScaleChoice(search, None, errors)
    if search == "max":
        raise ValueError("importance weights need a search: with max scaling they decide nothing")
    if importance.dtype != np.float32 or importance.shape != (columns,):
        raise ValueError(
            f"importance weights are {importance.dtype} {list(importance.shape)}, "
            f"expected float32 [{columns}]"
        )
    if not (np.isfinite(importance).all() and (importance >= 0).all()):
        raise ValueError("importance weights must be finite and not negative")
    return ScaleChoice(search, frozen(importance), errors)

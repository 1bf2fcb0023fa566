"""Looking at floats without changing them: is every number finite, and how large is the largest?

Both read the bits as integers: a magnitude (bits without the sign) grows with the number, and NaN
and inf are the largest magnitudes, so a mask and a comparison decide. Four BF16 numbers: 0x3F80 (1)
and 0xC000 (−2) are finite, 0x7F80 (inf) and 0xFFC1 (NaN) have all eight exponent bits set. numpy
alone runs this at memory speed.
"""

from __future__ import annotations

import numpy as np

from .results import U8, AnyArray

#: Per dtype the little-endian integer of its width, the bits of a magnitude, and the smallest
#: magnitude that is no number.
_FLOATS: dict[str, tuple[str, int, int]] = {
    "F64": ("<u8", 0x7FFF_FFFF_FFFF_FFFF, 0x7FF0_0000_0000_0000),
    "F32": ("<u4", 0x7FFF_FFFF, 0x7F80_0000),
    "F16": ("<u2", 0x7FFF, 0x7C00),
    "BF16": ("<u2", 0x7FFF, 0x7F80),
    "F8_E5M2": ("u1", 0x7F, 0x7C),
    "F8_E4M3": ("u1", 0x7F, 0x7F),  # no infinity: NaN alone has all seven bits set
    "F8_E8M0": ("u1", 0xFF, 0xFF),
}

# Bytes looked at together: the temporaries of one step stay in cache. Measured best among 16 K … 1
# M.
_STEP = 262144

_WITH_AMAX = ("BF16", "F16", "F32")


def count_nonfinite(raw: U8, dtype: str) -> tuple[int, int]:
    """How many elements are NaN or infinite, and the index of the first.

    Args:
        raw: the tensor's little-endian bytes, U8 [n], at any alignment.
        dtype: F64, F32, F16, BF16, F8_E4M3, F8_E5M2 or F8_E8M0 (scale bytes: 255 is NaN).

    Returns:
        (count, index of the first in elements), or (0, −1).

    Raises:
        ValueError: `raw` is not bytes, not whole elements, or `dtype` has no NaN known here.
    """
    if dtype not in _FLOATS:
        raise ValueError(f"cannot scan {dtype}: expected one of {', '.join(_FLOATS)}")
    integer, mask, no_number = _FLOATS[dtype]
    width = np.dtype(integer).itemsize
    if raw.dtype != np.uint8 or raw.ndim != 1 or raw.size % width:
        raise ValueError(f"{raw.dtype} {list(raw.shape)} is not a run of {dtype} bytes")
    raw = np.ascontiguousarray(raw)
    count, first = 0, -1
    for start in range(0, raw.size, _STEP):
        bits = raw[start : start + _STEP].view(integer)
        magnitude = bits & bits.dtype.type(mask)
        # One pass to the maximum, and in a sound tensor that is all.
        if magnitude.max() < no_number:
            continue
        bad = magnitude >= no_number
        here = int(np.count_nonzero(bad))
        if here and first < 0:
            first = start // width + int(bad.argmax())
        count += here
    return count, first


def float_amax(values: AnyArray, dtype: str) -> np.float32:
    """The largest magnitude of a float array of any shape, exactly; inf or NaN if it holds one.

    Args:
        values: BF16 as U16 bits, F16 as float16 or U16 bits, F32 as float32.
        dtype: "BF16", "F16" or "F32".

    Raises:
        ValueError: dtype unknown, or the array's element size is another.
    """
    if dtype not in _WITH_AMAX:
        raise ValueError(f"no amax for {dtype}: expected one of {', '.join(_WITH_AMAX)}")
    integer, mask, _ = _FLOATS[dtype]
    if values.dtype.itemsize != np.dtype(integer).itemsize:
        raise ValueError(f"an array of {values.dtype} cannot be read as {dtype}")
    flat = np.ascontiguousarray(values).reshape(-1).view(integer)
    step = _STEP // flat.dtype.itemsize
    largest = 0
    for start in range(0, flat.size, step):
        largest = max(largest, int((flat[start : start + step] & flat.dtype.type(mask)).max()))
    if dtype == "F16":
        return np.float32(np.uint16(largest).view(np.float16))
    return np.uint32(largest << 16 if dtype == "BF16" else largest).view(np.float32)

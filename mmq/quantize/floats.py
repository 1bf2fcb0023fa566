"""Plain float tensors as NumPy arrays; NumPy has no bfloat16, so BF16 travels as its bits."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_STORAGE: dict[str, type[np.generic]] = {
    "BF16": np.uint16, "F16": np.float16, "F32": np.float32, "F64": np.float64,
}  # fmt: skip


def as_storage(raw: npt.NDArray[np.uint8], dtype: str) -> npt.NDArray[np.generic]:
    """Raw little-endian bytes as an array of the dtype's storage type (BF16: uint16 bits)."""
    return raw.view(np.dtype(_STORAGE[dtype]).newbyteorder("<"))


def to_float32(raw: npt.NDArray[np.uint8], dtype: str) -> npt.NDArray[np.float32]:
    """Exact values of BF16, F16 or F32 bytes, as float32."""
    stored = as_storage(raw, dtype)
    if dtype == "BF16":
        return (stored.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return stored.astype(np.float32)


def bf16_bits(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Float32 to BF16 bits, round to nearest even (finite values)."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (rounded >> np.uint32(16)).astype(np.uint16)

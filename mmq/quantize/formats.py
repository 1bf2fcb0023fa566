"""Number formats as data: safetensors dtypes, and the block formats built from them.

    value(MXFP8) = e4m3 · 2^(b − 127)            one E8M0 byte b per 32 inputs
    value(NVFP4) = e2m1 · e4m3_scale · s2        one E4M3 scale per 16 inputs, one F32 s2 per tensor

Source: OCP Microscaling Formats 1.0 §5; NVIDIA ModelOpt ``NVFP4QTensor``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

#: Bits per element of every dtype tag the safetensors format defines.
DTYPE_BITS: dict[str, int] = {
    "F64": 64, "I64": 64, "U64": 64, "C64": 64,
    "F32": 32, "I32": 32, "U32": 32,
    "F16": 16, "BF16": 16, "I16": 16, "U16": 16,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I8": 8, "U8": 8, "BOOL": 8,
    "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip

#: Float dtypes whose values can be NaN or infinite, so that they are scanned while streaming.
FLOAT_DTYPES = frozenset({"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"})


def tensor_nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a dense tensor.

    Raises:
        KeyError: unknown dtype.  ValueError: sub-byte elements that do not fill whole bytes.
    """
    bits = DTYPE_BITS[dtype] * math.prod(shape)
    if bits % 8:
        raise ValueError(f"{dtype} {list(shape)} does not fill whole bytes")
    return bits // 8


@dataclass(frozen=True)
class NumericFormat:
    """A weight format: how elements and their scales are stored.

    Attributes:
        name: the word users type and reports print.
        block: inputs that share one block scale; 0 when there is none.
        bits_per_weight: storage per weight with block scales, without the tensor scale.
    """

    name: str
    element_dtype: str
    block: int
    scale_dtype: str | None
    bits_per_weight: float


BF16 = NumericFormat("BF16", "BF16", 0, None, 16.0)
MXFP8 = NumericFormat("MXFP8", "F8_E4M3", 32, "U8", 8.25)
NVFP4 = NumericFormat("NVFP4", "U8", 16, "F8_E4M3", 4.5)

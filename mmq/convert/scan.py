"""NaN and Inf found as a tensor streams by, and told with count and place."""

from __future__ import annotations

import math

import numpy as np

from mmq.convert.safetensors_header import TensorInfo
from mmq.convert.stream import Bytes
from mmq.errors import BadInputError
from mmq.kernels import ops
from mmq.quantize.formats import FLOAT_DTYPES
from mmq.quantize.layouts import MXFP8_SCALE_NAMES


class Scan:
    """Counts NaN/Inf of a tensor as its pieces go by."""

    def __init__(self, tensor: TensorInfo, dtype: str) -> None:
        self.tensor, self.dtype = tensor, dtype
        self.count, self.first, self._seen = 0, -1, 0
        self._width = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}.get(dtype, 1)

    def add(self, raw: Bytes) -> None:
        """Look at the next piece."""
        flat = raw.reshape(-1)
        count, first = ops.count_nonfinite(flat, self.dtype)
        if count and self.first < 0:
            self.first = self._seen + first
        self.count += count
        self._seen += flat.nbytes // self._width

    def check(self) -> None:
        """Refuse the tensor if anything was found.

        Raises:
            BadInputError: with tensor, count and first index.
        """
        if not self.count:
            return
        index = np.unravel_index(self.first, self.tensor.shape) if self.tensor.shape else ()
        what = "scale bytes 255 (NaN)" if self.dtype == "F8_E8M0" else "NaN/Inf elements"
        raise BadInputError(
            "nonfinite",
            f"{self.tensor.name} has {self.count} {what}, the first at {[int(i) for i in index]}",
            where=f"{self.tensor.shard}: {self.tensor.name}",
            got=f"{self.count} of {math.prod(self.tensor.shape)}",
            expected="none",
        )


def scan_dtype(tensor: TensorInfo) -> str | None:
    """What a copied tensor's bytes are scanned as; None where no bytes are NaN or Inf."""
    if tensor.dtype in FLOAT_DTYPES:
        return tensor.dtype
    is_scale = tensor.name.rpartition(".")[2] in MXFP8_SCALE_NAMES
    return "F8_E8M0" if tensor.dtype == "F8_E8M0" or (is_scale and tensor.dtype == "U8") else None

"""A checkpoint's weights as tensors, whatever their format: floats, MXFP8, both NVFP4 layouts.

Every weight is read when it is asked for and decoded by the operations that conversion uses; the
caller drops it. Nothing is cached: the stream asks for each weight once.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mmq.convert.modules import MXFP8_FORMAT, NVFP4_LAYOUT_OF, Module
from mmq.convert.safetensors_header import TensorInfo
from mmq.convert.stream import Bytes, SourceReader
from mmq.errors import BadInputError
from mmq.kernels import ops
from mmq.kernels.reference.moe import Mxfp8Weight, Nvfp4Weight, Weight
from mmq.kernels.results import U16
from mmq.quantize.floats import to_float32
from mmq.quantize.global_scale import reciprocal_scale

_ORIGIN = "model"


class ModelWeights:
    """Reads one checkpoint.

    Args:
        location: what the user named, for errors.
        modules: as `mmq.convert.modules.group_modules` gives them.
        paths: shard name → file.
        dtype: of the matrices handed out, float32 or bfloat16; vectors are always float32.
    """

    def __init__(
        self, location: str, modules: Mapping[str, Module], paths: Mapping[str, Path],
        dtype: torch.dtype = torch.float32, device: torch.device | None = None,
    ) -> None:  # fmt: skip
        self.location = location
        self._bytes_read = 0
        self.dtype = dtype
        self.device = device or torch.device("cpu")
        self._modules = modules
        self._reader = SourceReader({_ORIGIN: paths})

    def close(self) -> None:
        self._reader.close()

    def take_bytes_read(self) -> int:
        """Bytes of tensor data read since the last call."""
        count, self._bytes_read = self._bytes_read, 0
        return count

    def module(self, name: str) -> Module:
        """The module `name`.

        Raises:
            BadInputError: it is not stored, or has no weight.
        """
        module = self._modules.get(name)
        if module is None or module.weight is None:
            raise BadInputError(
                "module-missing", f"{self.location} has no {name}.weight", where=name
            )
        return module

    def has(self, name: str) -> bool:
        return name in self._modules and self._modules[name].weight is not None

    def matrix(self, name: str, first: int = 0, count: int | None = None) -> Tensor:
        """Rows of a weight [O, K], decoded to `dtype`.

        Args:
            first, count: which rows; all by default.
        """
        module = self.module(name)
        rows = module.shape[0]
        count = rows - first if count is None else min(count, rows - first)
        if module.format == MXFP8_FORMAT:
            values = self._mxfp8(module, first, count)
        elif module.format in NVFP4_LAYOUT_OF:
            values = self._nvfp4(module, first, count)
        else:
            values = self._plain(module, first, count)
        return values.to(device=self.device, dtype=self.dtype)

    def stored(self, name: str) -> Weight:
        """A weight in the format it is stored in, for operations that decode it themselves."""
        module = self.module(name)
        if module.format != MXFP8_FORMAT and module.format not in NVFP4_LAYOUT_OF:
            return self.matrix(name)
        rows = module.shape[0]
        codes, scale = (
            torch.from_numpy(self._rows(tensor, rows, 0, rows)).to(self.device)
            for tensor in (module.weight, module.scale)
        )
        if module.format == MXFP8_FORMAT:
            return Mxfp8Weight(codes, scale)
        return Nvfp4Weight(codes, scale, float(self.multiplier(module)))

    def vector(self, name: str, suffix: str = "weight") -> Tensor:
        """A small tensor, F32: a norm, a router's weight or its bias; any shape."""
        module = self._modules.get(name)
        tensor = module.tensors.get(suffix) if module is not None else None
        if tensor is None:
            raise BadInputError(
                "module-missing", f"{self.location} has no {name}.{suffix}", where=name
            )
        raw = self._read(tensor, 0, tensor.nbytes)
        return torch.from_numpy(to_float32(raw, tensor.dtype)).reshape(tensor.shape).to(self.device)

    def scalar(self, name: str) -> float | None:
        """A stored F32 scalar by its full name, such as a KV scale; None where there is none."""
        module, _, suffix = name.rpartition(".")
        tensors = self._modules[module].tensors if module in self._modules else {}
        if suffix not in tensors:
            return None
        raw = self._read(tensors[suffix], 0, tensors[suffix].nbytes)
        return float(to_float32(raw, tensors[suffix].dtype)[0])

    def nbytes(self, name: str) -> int:
        """Stored bytes of a module's tensors."""
        return sum(t.nbytes for t in self.module(name).tensors.values())

    def _read(self, tensor: TensorInfo, start: int, nbytes: int) -> Bytes:
        data = self._reader.read(tensor, start, nbytes, _ORIGIN)
        self._bytes_read += nbytes
        return data

    def _rows(self, tensor: TensorInfo | None, rows: int, first: int, count: int) -> Bytes:
        assert tensor is not None
        width = tensor.nbytes // rows
        return self._read(tensor, first * width, count * width).reshape(count, width)

    def _mxfp8(self, module: Module, first: int, count: int) -> Tensor:
        rows = module.shape[0]
        codes = self._rows(module.weight, rows, first, count)
        scale = self._rows(module.scale, rows, first, count)
        if self.dtype == torch.bfloat16:
            return _bf16(ops.dequantize_mxfp8(codes, scale))
        return torch.from_numpy(ops.dequantize_mxfp8_f32(codes, scale))

    def _nvfp4(self, module: Module, first: int, count: int) -> Tensor:
        rows = module.shape[0]
        packed = self._rows(module.weight, rows, first, count)
        scale = self._rows(module.scale, rows, first, count)
        s2 = self.multiplier(module)
        if self.dtype == torch.bfloat16:
            return _bf16(ops.dequantize_nvfp4(packed, scale, s2))
        return torch.from_numpy(ops.dequantize_nvfp4_f32(packed, scale, s2))

    def multiplier(self, module: Module) -> np.float32:
        """A module's global scale as a multiplier, whichever way its layout stores it."""
        stored = module.global_scale
        assert stored is not None
        value = np.float32(self._read(stored, 0, stored.nbytes).view("<f4")[0])
        return reciprocal_scale(value) if NVFP4_LAYOUT_OF[module.format].divisor else value

    def _plain(self, module: Module, first: int, count: int) -> Tensor:
        weight = module.weight
        assert weight is not None
        raw = self._rows(weight, weight.shape[0], first, count)
        if weight.dtype == "BF16":
            return _bf16(raw.view(np.uint16))
        values = to_float32(raw.ravel(), weight.dtype)
        return torch.from_numpy(values).reshape(count, *weight.shape[1:])


def _bf16(bits: U16) -> Tensor:
    return torch.from_numpy(bits).view(torch.bfloat16)

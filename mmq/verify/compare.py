"""Bytes that a conversion would write, compared with the bytes OUT has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mmq.convert.safetensors_header import TensorInfo
from mmq.convert.stream import Bytes, SourceReader
from mmq.convert.work import (
    AnalyticKScale,
    AnalyticVScale,
    CopyTensor,
    Output,
    QuantizeNvfp4,
    RelayoutNvfp4,
    Task,
    WriteScalar,
)
from mmq.quantize.formats import DTYPE_BITS
from mmq.report.findings import Finding

#: Origin under which a `SourceReader` finds OUT's shards.
OUT = "out"

#: Bytes of one block's codes.
_BYTES_PER_BLOCK = 8


@dataclass
class Difference:
    """Where one tensor departs from what it should be: byte offsets within the tensor.

    Attributes:
        ulps: for an F32 scalar, how many floats lie between the two.
    """

    tensor: TensorInfo
    count: int
    first: int
    got: int
    expected: int
    ulps: int | None = None


class ByteComparer:
    """Takes a task's bytes, as a shard writer would, and compares them with OUT's."""

    def __init__(self, reader: SourceReader, tensors: dict[str, TensorInfo]) -> None:
        self._reader, self._tensors = reader, tensors
        self._queue: list[Output] = []
        self._position = 0
        self.differences: dict[str, Difference] = {}

    def begin(self, outputs: tuple[Output, ...]) -> None:
        """Expect these outputs next, back to back."""
        self._queue = [o for o in outputs if o.nbytes]
        self._position = 0
        self.differences = {}

    def emit(self, data: Any) -> None:
        """The next bytes."""
        expected = np.frombuffer(memoryview(data).cast("B"), np.uint8)
        while expected.size:
            output = self._queue[0]
            count = min(expected.size, output.nbytes - self._position)
            self._compare(self._tensors[output.name], expected[:count])
            expected = expected[count:]
            self._position += count
            if self._position == output.nbytes:
                self._queue.pop(0)
                self._position = 0

    def _compare(self, tensor: TensorInfo, expected: Bytes) -> None:
        got = self._reader.read(tensor, self._position, expected.size, OUT)
        if np.array_equal(got, expected):
            return
        bad = np.flatnonzero(got != expected)
        known = self.differences.get(tensor.name)
        if known is not None:
            known.count += len(bad)
            return
        first = int(bad[0])
        self.differences[tensor.name] = Difference(
            tensor, len(bad), self._position + first, int(got[first]), int(expected[first]),
            _ulps(got, expected) if tensor.nbytes == 4 else None,
        )  # fmt: skip


def _ulps(got: Bytes, expected: Bytes) -> int:
    """Distance of two F32 of one sign, counted in floats."""
    return abs(int(got.view("<i4")[0]) - int(expected.view("<i4")[0]))


def difference_finding(task: Task, difference: Difference) -> Finding:
    """A difference in the words of the format: tensor, row, block, bytes."""
    tensor = difference.tensor
    width = max(1, DTYPE_BITS[tensor.dtype] // 8)
    text = (
        f"{tensor.name}: {difference.count:,} of {tensor.nbytes:,} bytes are not what the source"
        f" gives, the first {_place(task, tensor, difference.first, width)}"
    )
    sides = {"got": f"{difference.got:#04x}", "expected": f"{difference.expected:#04x}"}
    if isinstance(task, CopyTensor):
        return Finding("passthrough-differs", "error", text, where=tensor.name, **sides)
    if isinstance(task, AnalyticKScale | AnalyticVScale | WriteScalar):
        return Finding("kv-scale-differs", "error", text, where=tensor.name, **sides)
    return Finding("conversion-differs", "error", text, where=tensor.name, **sides)


def part_of(task: QuantizeNvfp4 | RelayoutNvfp4, name: str) -> str:
    """Which part of an NVFP4 weight a tensor is."""
    for result in task.results if isinstance(task, QuantizeNvfp4) else (task.result,):
        parts = ("codes", "block-scales", "global-scales", "input-scales")
        for part, output in zip(parts, result, strict=True):
            if output is not None and output.name == name:
                return part
    raise KeyError(name)


def _place(task: Task, tensor: TensorInfo, offset: int, width: int) -> str:
    """Row and block of a byte offset."""
    if not tensor.shape or tensor.shape == (1,):
        return f"byte {offset}"
    if len(tensor.shape) == 1:
        return f"in element {offset // width}"
    row, within = divmod(offset, tensor.nbytes // tensor.shape[0])
    if isinstance(task, QuantizeNvfp4 | RelayoutNvfp4):
        packed = part_of(task, tensor.name) == "codes"
        return f"in row {row}, block {within // _BYTES_PER_BLOCK if packed else within}"
    return f"in row {row}, element {within // width}"

"""Block scales that no decoder survives: NaN bytes, negative ones, zeros that hide data.

Block scales are a ninth of the expert bytes: cheap on a small checkpoint, 26 GB on the release.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from mmq.convert.modules import MXFP8_FORMAT, NVFP4_LAYOUT_OF, Module
from mmq.convert.safetensors_header import TensorInfo
from mmq.convert.stream import CHUNK_BYTES, SourceReader
from mmq.report.findings import Finding

#: Block-scale bytes that the structure level reads without being asked for more.
STRUCTURE_LIMIT = 256 << 20

_E4M3_NAN, _E8M0_NAN = 0x7F, 0xFF
#: E2M1 magnitude bits of both nibbles.
_MAGNITUDES = np.uint8(0x77)
_BYTES_PER_BLOCK = 8

Mask = npt.NDArray[np.bool_]


def scan_bytes(modules: list[Module]) -> int:
    """Bytes that `scan_module` would read of these modules' scales."""
    return sum(m.scale.nbytes for m in modules if m.scale is not None)


def scan_module(module: Module, reader: SourceReader) -> Iterator[Finding]:
    """Scan one module's block scales; MXFP8 exponents only for NaN."""
    if module.scale is None or module.weight is None or module.scale.nbytes == 0:
        return
    if module.format == MXFP8_FORMAT:
        yield from _scan_mxfp8(module.scale, reader)
    elif module.format in NVFP4_LAYOUT_OF:
        yield from _scan_nvfp4(module, module.scale, reader)


def _scan_mxfp8(scale: TensorInfo, reader: SourceReader) -> Iterator[Finding]:
    nan = _Count()
    for first, piece in _rows(scale, reader):
        nan.add(first, piece == _E8M0_NAN)
    if nan.count:
        text = f"{scale.name} has {nan.count:,} bytes 255 (NaN), the first in {nan.place}"
        yield Finding("mxfp8-scale-nan", "error", text, where=scale.name, got=str(nan.count))


def _scan_nvfp4(module: Module, scale: TensorInfo, reader: SourceReader) -> Iterator[Finding]:
    nan, negative, hidden = _Count(), _Count(), _Count()
    for first, piece in _rows(scale, reader):
        nan.add(first, (piece & 0x7F) == _E4M3_NAN)
        negative.add(first, (piece > 0x80) & (piece < 0xFF))
        zero = (piece & 0x7F) == 0
        if zero.any():
            hidden.add(first, zero & _has_data(module, reader, first, piece.shape))
    name = scale.name
    if nan.count:
        text = f"{name} has {nan.count:,} NaN bytes (0x7F, 0xFF), the first in {nan.place}"
        yield Finding("scale-nan", "error", text, where=name, got=str(nan.count))
    if negative.count:
        text = f"{name} has {negative.count:,} negative bytes, the first in {negative.place}"
        yield Finding("scale-negative", "error", text, where=name, got=str(negative.count))
    if hidden.count:
        text = f"{name} is 0 over {hidden.count:,} blocks with data, the first in {hidden.place}"
        yield Finding("scale-zero-with-data", "error", text, where=name, got=str(hidden.count))


class _Count:
    """How many blocks are bad, and where the first is."""

    def __init__(self) -> None:
        self.count, self.place = 0, ""

    def add(self, row: int, bad: Mask) -> None:
        here = int(np.count_nonzero(bad))
        if here and not self.count:
            at, block = np.argwhere(bad)[0]
            self.place = f"row {row + int(at)}, block {int(block)}"
        self.count += here


def _rows(tensor: TensorInfo, reader: SourceReader) -> Iterator[tuple[int, npt.NDArray[np.uint8]]]:
    """(first row, bytes [rows, bytes per row]) of a matrix, in pieces."""
    rows = tensor.shape[0]
    width = tensor.nbytes // rows
    step = max(1, CHUNK_BYTES // max(width, 1))
    for first in range(0, rows, step):
        count = min(step, rows - first)
        yield first, reader.read(tensor, first * width, count * width).reshape(count, width)


def _has_data(module: Module, reader: SourceReader, first: int, shape: tuple[int, ...]) -> Any:
    """Which blocks have a non-zero code: bool [rows, blocks]."""
    assert module.weight is not None
    rows, blocks = shape
    width = blocks * _BYTES_PER_BLOCK
    codes = reader.read(module.weight, first * width, rows * width)
    return (codes.reshape(rows, blocks, _BYTES_PER_BLOCK) & _MAGNITUDES).any(-1)

"""Source bytes in bounded pieces.

Plain reads into our own buffers rather than memory maps: mapped pages would count as ours while
the kernel keeps them, and a file that shrinks under a map kills the process instead of raising.
"""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from mmq.convert.page_cache import drop_pages
from mmq.convert.safetensors_header import TensorInfo, unreadable
from mmq.convert.work import IMPORTANCE, SOURCE, WeightSource
from mmq.errors import BadInputError

Bytes: TypeAlias = npt.NDArray[np.uint8]

#: Size of a piece: large enough that an M3 expert projection (19 MB) is one, small enough that a
#: worker's buffers stay under 200 MB.
CHUNK_BYTES = 32 << 20
_MAX_OPEN_FILES = 16


class SourceReader:
    """Reads byte ranges of shards; keeps a few files open, and count of the seconds it takes.

    Args:
        paths: origin ("source", "experts") → shard name → path.
        drop_behind: what was read may leave the page cache at the next `forget`.
    """

    def __init__(
        self, paths: Mapping[str, Mapping[str, Path]], *, drop_behind: bool = False
    ) -> None:
        self._paths = paths
        self.seconds = 0.0
        self._drop_behind = drop_behind
        self._read: list[tuple[Path, int, int]] = []
        self._open: OrderedDict[Path, int] = OrderedDict()

    def close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])

    def _fd(self, path: Path) -> int:
        if path not in self._open:
            if len(self._open) >= _MAX_OPEN_FILES:
                os.close(self._open.popitem(last=False)[1])
            try:
                self._open[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise unreadable(path, error) from None
        self._open.move_to_end(path)
        return self._open[path]

    def read(self, tensor: TensorInfo, start: int, nbytes: int, origin: str = SOURCE) -> Bytes:
        """`nbytes` of a tensor from its byte `start`.

        Raises:
            BadInputError: the file cannot be read, or ends early: it changed since its header was
                checked.
        """
        started = time.perf_counter()
        buffer = np.empty(nbytes, np.uint8)
        view = buffer.data
        path = self._paths[origin][tensor.shard]
        fd = self._fd(path)
        done = 0
        while done < nbytes:
            try:
                got = os.preadv(fd, [view[done:]], tensor.offset + start + done)
            except OSError as error:
                raise unreadable(path, error) from None
            if got == 0:
                raise BadInputError(
                    "source-changed",
                    f"{tensor.shard} ended while {tensor.name} was being read",
                    where=tensor.shard,
                    got=f"{done} bytes",
                    expected=f"{nbytes} bytes",
                )
            done += got
        self.seconds += time.perf_counter() - started
        if self._drop_behind:
            self._read.append((path, tensor.offset + start, nbytes))
        return buffer

    def forget(self) -> None:
        """What was read so far is not read again: its pages may go."""
        for path, start, nbytes in self._read:
            if path in self._open:
                drop_pages(self._open[path], start, nbytes)
        self._read.clear()

    def whole(self, tensor: TensorInfo, origin: str = SOURCE) -> Bytes:
        """A small tensor at once."""
        return self.read(tensor, 0, tensor.nbytes, origin)

    def chunks(self, tensor: TensorInfo, origin: str = SOURCE) -> Iterator[Bytes]:
        """A tensor's bytes in order."""
        for start in range(0, tensor.nbytes, CHUNK_BYTES):
            yield self.read(tensor, start, min(CHUNK_BYTES, tensor.nbytes - start), origin)
            self.forget()


class WeightRows:
    """A weight's rows with the block scales that belong to them; iterable more than once.

    Pieces are kept for the second pass when the whole weight is at most one piece, as all of M3's
    experts are; larger weights are read again (from the page cache, as a rule).
    """

    def __init__(self, reader: SourceReader, weight: WeightSource) -> None:
        self._reader = reader
        self._weight = weight
        self._kept: tuple[Bytes, Bytes | None] | None = None

    def __iter__(self) -> Iterator[tuple[Bytes, Bytes | None]]:
        """Pieces (weight bytes [rows, bytes per row], scale bytes [rows, blocks] or None)."""
        if self._kept is not None:
            yield self._kept
            return
        rows = self._weight.shape[0]
        weight_row = self._weight.weight.nbytes // max(rows, 1)
        step = max(1, CHUNK_BYTES // max(weight_row, 1))
        for first in range(0, rows, step):
            count = min(step, rows - first)
            piece = self._piece(first, count, weight_row)
            if count == rows:
                self._kept = piece
            yield piece

    def _piece(self, first: int, count: int, weight_row: int) -> tuple[Bytes, Bytes | None]:
        read, origin = self._reader.read, self._weight.origin
        codes = read(self._weight.weight, first * weight_row, count * weight_row, origin)
        codes = codes.reshape(count, weight_row)
        scale = self._weight.scale
        if scale is None:
            return codes, None
        scale_row = scale.nbytes // self._weight.shape[0]
        block = read(scale, first * scale_row, count * scale_row, origin)
        return codes, block.reshape(count, scale_row)


def read_importance(reader: SourceReader, tensor: TensorInfo) -> npt.NDArray[np.float32]:
    """The weights, checked.

    Raises:
        BadInputError: negative or not finite.
    """
    weights = reader.whole(tensor, IMPORTANCE).view("<f4").astype(np.float32)
    bad = np.flatnonzero(~(np.isfinite(weights) & (weights >= 0)))
    if bad.size:
        raise BadInputError(
            "importance-value",
            f"{tensor.name} has {bad.size} weight(s) that are negative or not finite",
            where=f"{tensor.name}[{int(bad[0])}]",
            got=weights[bad[0]],
            expected="finite, at least 0",
        )
    return weights

"""huggingface_hub's additions, which tell how many of their bytes have been read to be sent."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, cast

from huggingface_hub import CommitOperationAdd

from mmq.console import Progress
from mmq.publish.upload_plan import Item


class Tally:
    """Bytes of items as they leave, from several threads; what is sent again counts once."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._reached: dict[str, int] = {}
        self._lock = threading.Lock()

    def at(self, name: str, position: int) -> None:
        """The file has been read up to here."""
        with self._lock:
            more = position - self._reached.get(name, 0)
            if more > 0:
                self._reached[name] = position
                self._progress.advance(more, name)

    def done(self, item: Item) -> None:
        """All of it has arrived, however much of that was seen to be read."""
        self.at(item.name, item.nbytes)


class Addition(CommitOperationAdd):
    """An item to upload or to commit."""

    def __init__(self, item: Item, tally: Tally) -> None:
        super().__init__(item.name, item.data if item.data is not None else str(item.path))
        # known already; else every file would be read once more
        self.upload_info.sha256 = bytes.fromhex(item.sha256)
        self._tally = tally

    @contextmanager
    def as_file(self, with_tqdm: bool = False) -> Iterator[BinaryIO]:
        """The bytes, counted as they are read (`with_tqdm` would show a bar of its own)."""
        if isinstance(self.path_or_fileobj, str):
            with _Counted(self.path_or_fileobj, self.path_in_repo, self._tally) as file:
                yield cast(BinaryIO, file)
        else:
            with super().as_file() as data:
                yield data


class _Counted(io.FileIO):
    def __init__(self, path: str, name: str, tally: Tally) -> None:
        super().__init__(path, "rb")
        self._label, self._tally = name, tally

    def read(self, size: int | None = -1) -> Any:
        data = super().read(-1 if size is None else size)
        self._tally.at(self._label, self.tell())
        return data

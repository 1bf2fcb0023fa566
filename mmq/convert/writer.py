"""Files that appear whole or not at all: written as `.partial`, hashed, synced, then renamed."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from mmq.convert.page_cache import drop_pages
from mmq.errors import MachineError, RefusedError

if TYPE_CHECKING:
    from typing_extensions import Buffer

PARTIAL = ".partial"
_HASH_CHUNK = 8 << 20
#: How often a large file's pages are let go, and how far back: writing them takes a while.
_DROP_STEP, _DROP_WINDOW = 16 << 20, 256 << 20


class FileRecord(NamedTuple):
    """A finished file's size and SHA-256."""

    size: int
    sha256: str


class AtomicFile:
    """A file written front to back; its final name appears only after everything is on disk.

    Use as a context manager and call `commit`; leaving without it removes the partial file.

    Args:
        expected: bytes that will be written, for the message when there is no room for them.
        drop_behind: write back at once and keep nothing in the page cache (see `page_cache`).

    Raises:
        MachineError: the disk is full, or a file-size limit was hit.
        RefusedError: another process is writing the same file.
    """

    def __init__(
        self, path: Path, expected: int | None = None, *, drop_behind: bool = False
    ) -> None:
        self.path = path
        self._drop_behind = drop_behind
        self._told = 0
        self.hash_seconds = self.write_seconds = 0.0
        self._expected = expected
        self.partial = path.with_name(path.name + PARTIAL)
        self._hash = hashlib.sha256()
        self._size = 0
        self._fd = -1
        self._mode: int | None = None

    def __enter__(self) -> AtomicFile:
        try:
            self._open()
        except OSError as error:
            raise disk_error(error, self.path, self._expected) from error
        except BaseException as stop:
            if not isinstance(stop, Exception):  # a signal, which is raised anywhere
                self._discard()
            raise
        return self

    def _open(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # 0666 & ~umask, and the mode of a file that is being replaced
        self._mode = self.path.stat().st_mode & 0o777 if self.path.exists() else None
        self._fd = os.open(self.partial, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            # an orphan of a killed run may still hold it for a moment
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._close()
            raise RefusedError(
                "locked",
                f"another process is writing {self.partial.name}",
                where=str(self.partial),
                hint="wait for the other run to end",
            ) from None
        os.ftruncate(self._fd, 0)

    def write(self, data: Buffer) -> None:
        """Append bytes."""
        view = memoryview(data).cast("B")
        started = time.perf_counter()
        self._hash.update(view)
        hashed = time.perf_counter()
        try:
            while view:
                written = os.write(self._fd, view)
                view = view[written:]
                self._size += written
        except OSError as error:
            raise disk_error(error, self.path, self._expected) from error
        if self._drop_behind and self._size - self._told >= _DROP_STEP:
            start = max(0, self._told - _DROP_WINDOW)
            drop_pages(self._fd, start, self._size - start)
            self._told = self._size
        self.hash_seconds += hashed - started
        self.write_seconds += time.perf_counter() - hashed

    def commit(self) -> FileRecord:
        """Sync, rename, and sync the folder, so that the name means the whole file."""
        started = time.perf_counter()
        try:
            os.fsync(self._fd)
            if self._drop_behind:
                drop_pages(self._fd, 0, 0)
            if self._mode is not None:
                os.fchmod(self._fd, self._mode)
            self.partial.replace(self.path)
            self._close()
            sync_folder(self.path.parent)
        except OSError as error:
            raise disk_error(error, self.path, self._expected) from error
        self.write_seconds += time.perf_counter() - started
        return FileRecord(self._size, self._hash.hexdigest())

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._fd >= 0:
            self._discard()

    def _discard(self) -> None:
        try:
            if self._fd >= 0:
                self._close()
        finally:
            self.partial.unlink(missing_ok=True)

    def _close(self) -> None:
        # forgotten first: a signal raised between the two must not let it be closed once more
        fd, self._fd = self._fd, -1
        os.close(fd)


def write_file(path: Path, data: Buffer) -> FileRecord:
    """Write a small file atomically."""
    with AtomicFile(path) as file:
        file.write(data)
        return file.commit()


def file_sha256(path: Path, advance: Callable[[int], None]) -> str:
    """SHA-256 of a file in bounded memory; `advance` is told of every piece."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_HASH_CHUNK):
            digest.update(chunk)
            advance(len(chunk))
    return digest.hexdigest()


def sync_folder(folder: Path) -> None:
    """Make renames in a folder durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def disk_error(error: OSError, path: Path, expected: int | None = None) -> MachineError:
    """A write that failed, told with what it needs and what is free."""
    try:
        stat = os.statvfs(path.parent)
        free = f"{stat.f_bavail * stat.f_frsize:,} bytes free"
    except OSError:
        free = "unknown"
    needed = None if expected is None else f"{expected:,} bytes for this file"
    hint = "free space, then run the same command again: finished shards are kept"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return MachineError(
            "disk-full", f"the disk is full: {path.name} could not be written",
            where=str(path), got=free, expected=needed, hint=hint,
        )  # fmt: skip
    if error.errno == errno.EFBIG:
        return MachineError(
            "file-size-limit", f"a file-size limit was hit: {path.name} could not be written",
            where=str(path), got=free, expected=needed,
            hint="ulimit -f unlimited, or a smaller --max-shard-size",
        )  # fmt: skip
    return MachineError(
        "write-failed", f"{path.name} could not be written: {error.strerror or error}",
        where=str(path), hint="check that the folder exists, may be written to and is sound",
    )  # fmt: skip


def json_bytes(value: Mapping[str, Any]) -> bytes:
    """Indented UTF-8 JSON with a final newline; bytes of a path that are no text are escaped."""
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    return text.encode("utf-8", "backslashreplace")

"""One file of a commit, whole and checked: ranges in parallel, written and hashed in order.

    NAME.partial      what has arrived without a gap; the next run goes on at its end
    NAME              appears when the digest is the one that the Hub lists

A digest that differs is given one more try from the start: a broken disk or proxy can be that.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Callable
from pathlib import Path

from mmq.errors import BadInputError, MachineError, MmqError, RefusedError
from mmq.hub.client import read_range
from mmq.hub.snapshot import HubFile, Snapshot
from mmq.hub.threads import in_order

PARTIAL = ".partial"
#: One request's share of a file, and how many are under way.
PART_BYTES = 32 << 20
CONNECTIONS = 4
#: What is in memory at most: these, and the one that is being written.
BUFFER_BYTES = (CONNECTIONS + 1) * PART_BYTES
_READ = 8 << 20

OnBytes = Callable[[int], None]


def nothing(nbytes: int) -> None:
    """For those who do not want to know."""


def download(
    snapshot: Snapshot, name: str, path: Path, stop: threading.Event, advance: OnBytes = nothing
) -> None:
    """Bring a file of the commit to `path`; one that is there with its size is taken as it is.

    `path` must be a place for this commit alone (`Snapshot.slug`): names and sizes are equal in
    many checkpoints.

    Args:
        advance: told of every byte that is there, those of an earlier run included; of a negative
            number when they have to be fetched again.

    Raises:
        BadInputError: refused, or of another digest twice.  IncompleteError: not reachable.
        MachineError: the disk.  RefusedError: another process is fetching it.  Stopped.
    """
    file = snapshot.files[name]
    if path.is_file() and path.stat().st_size == file.size:
        advance(file.size)
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(
            path.with_name(path.name + PARTIAL), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666
        )
        try:
            _lock(fd, path)
            for attempt in (1, 2):
                digest = _fill(snapshot, name, fd, stop, advance)
                if digest == file.digest:
                    break
                os.ftruncate(fd, 0)
                advance(-file.size)
                if attempt == 2:
                    raise other_bytes(snapshot, file, digest)
            os.fsync(fd)
            path.with_name(path.name + PARTIAL).replace(path)
        finally:
            os.close(fd)
    except OSError as error:
        raise _disk_error(error, path) from error


def _lock(fd: int, path: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise RefusedError(
            "locked", f"another process is downloading {path.name}", where=str(path),
            hint="wait for it, or choose another --download-dir",
        ) from None  # fmt: skip


def _fill(snapshot: Snapshot, name: str, fd: int, stop: threading.Event, advance: OnBytes) -> str:
    """Fetch what the partial file lacks; returns the digest of all of it."""
    file = snapshot.files[name]
    digest = file.hasher()
    here = os.fstat(fd).st_size
    if here > file.size:
        os.ftruncate(fd, 0)
        here = 0
    os.lseek(fd, 0, os.SEEK_SET)
    while piece := os.read(fd, _READ):
        digest.update(piece)
        advance(len(piece))
    remote = snapshot.remote(name)

    def fetch(start: int, stop: threading.Event) -> bytearray:
        return read_range(remote, start, min(PART_BYTES, file.size - start), stop)

    starts = range(here, file.size, PART_BYTES)
    for part in in_order(fetch, starts, CONNECTIONS, stop):
        digest.update(part)
        view = memoryview(part)
        while view:
            view = view[os.write(fd, view) :]
        advance(len(part))
    return digest.hexdigest()


def other_bytes(snapshot: Snapshot, file: HubFile, digest: str) -> BadInputError:
    """A file that is not what the Hub says it is."""
    return BadInputError(
        "hub-digest", f"{file.name} arrived twice with another digest than the Hub lists",
        where=f"{snapshot.location}: {file.name}", got=digest, expected=file.digest,
        hint="a proxy or disk in between alters data; or report it to the repository's owner",
    )  # fmt: skip


def _disk_error(error: OSError, path: Path) -> MmqError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return MachineError(
        "download-disk", f"{path.name} cannot be kept: "
        + ("the disk is full" if full else error.strerror or str(error)),
        where=str(path), hint="--download-dir on another disk; what has arrived is kept",
    )  # fmt: skip

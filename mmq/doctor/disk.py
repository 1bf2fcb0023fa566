"""Free space of a folder's disk and, when asked for, how fast it writes and reads.

256 MB of random bytes go into a nameless file (no name, so no run leaves one behind, however it
ends), piece by piece with fsync, and are read back. Before that the page cache is told to let them
go; whether it did is looked up (mincore), because a read from memory says nothing of the disk.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, NamedTuple

from mmq.convert.page_cache import drop_pages
from mmq.doctor.facts import Fact

NBYTES = 256_000_000
PIECE = 32_000_000
#: A disk that is slower than this allows is measured on what it managed.
LONGEST_SECONDS = 5.0
#: Pages that may stay in memory without making a read meaningless.
_RESIDENT = 0.05


class Speed(NamedTuple):
    """What was measured.

    Attributes:
        write / read: bytes per second.
        resident: part of the file that was still in memory when it was read; None if unknown.
    """

    nbytes: int
    write: float
    read: float
    resident: float | None


def disk_facts(folder: Path, *, measure: bool) -> list[Fact]:
    """Free space; with `measure` also the speed."""
    name = "disk"
    try:
        usage = shutil.disk_usage(folder)
    except OSError as error:
        return [Fact(name, False, f"{folder}: {error.strerror or error}", _other(folder))]
    text = f"{usage.free / 1e9:.1f} of {usage.total / 1e9:.1f} GB free"
    facts = [Fact(name, None, f"{text} in {folder}")]
    return [*facts, *_speed_facts(folder, usage.free)] if measure else facts


def _other(folder: Path) -> str:
    return f"a folder that you may write into, or: chmod u+rwx {folder}"


def _speed_facts(folder: Path, free: int) -> list[Fact]:
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            if free < 2 * NBYTES:
                text = f"not measured: less than {2 * NBYTES / 1e6:.0f} MB free"
                return [Fact("disk speed", False, text, "make room, or choose another folder")]
            return _told(measured(file))
    except OSError as error:
        text = f"nothing can be written there: {error.strerror or error}"
        return [Fact("disk speed", False, text, _other(folder))]


def measured(file: IO[bytes], clock: Callable[[], float] = time.perf_counter) -> Speed:
    """Fill an empty file and read it again.

    Raises:
        OSError: the disk is full, or fails.
    """
    data, fd = os.urandom(PIECE), file.fileno()
    nbytes, start = 0, clock()
    while nbytes < NBYTES and clock() - start < LONGEST_SECONDS:
        nbytes += os.write(fd, memoryview(data)[: NBYTES - nbytes])
        os.fsync(fd)
    write = clock() - start
    drop_pages(fd, 0, 0)
    resident = _resident(fd, nbytes)
    buffer = memoryview(bytearray(4 << 20))
    os.lseek(fd, 0, os.SEEK_SET)
    read, start = 0, clock()
    with io.FileIO(fd, closefd=False) as raw:
        while clock() - start < LONGEST_SECONDS and (got := raw.readinto(buffer)):
            read += got
    return Speed(nbytes, nbytes / write, read / (clock() - start), resident)


def _told(speed: Speed) -> list[Fact]:
    written = f"{speed.write / 1e6:,.0f} MB/s ({speed.nbytes / 1e6:.0f} MB in order, with fsync)"
    read = f"{speed.read / 1e6:,.0f} MB/s"
    if speed.resident is None:
        read += ", perhaps from memory: this system does not tell"
    elif speed.resident > _RESIDENT:
        read += ", from memory: the page cache could not be bypassed here"
    else:
        read += " (in order, not from the page cache)"
    return [Fact("disk write", None, written), Fact("disk read", None, read)]


def _resident(fd: int, nbytes: int) -> float | None:
    """Part of a file's pages that memory holds; None where the system does not tell."""
    with contextlib.suppress(OSError, AttributeError, ValueError, TypeError, BufferError):
        # a private mapping, because ctypes takes the address of writable memory only
        with mmap.mmap(fd, nbytes, access=mmap.ACCESS_COPY) as mapped:
            pages = (ctypes.c_ubyte * -(-nbytes // mmap.PAGESIZE))()
            window = ctypes.c_char.from_buffer(mapped)
            address = ctypes.c_void_p(ctypes.addressof(window))
            failed = ctypes.CDLL(None).mincore(address, ctypes.c_size_t(nbytes), pages)
            del window
        return None if failed else sum(page & 1 for page in pages) / len(pages)
    return None

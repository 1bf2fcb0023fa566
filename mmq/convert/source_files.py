"""Source shards from the Hub during a run: brought before a unit needs them, deleted after.

One thread downloads, in the order of the units, as far ahead as a budget of bytes allows. The
budget holds at least what the hungriest unit needs beside what later units still want (see
`download_plan`), and units run in order; so the unit at the head is always served sooner or later.
Workers see files only.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from mmq.convert.download_plan import DownloadPlan, Unit, present_files
from mmq.errors import MachineError, RefusedError
from mmq.hub.download import PARTIAL, download
from mmq.hub.retries import Stopped
from mmq.report.hub_lines import short_bytes

#: Seconds between looks at what the thread has done.
_TICK = 0.1


class SourceFiles:
    """The downloads of one run, between `start` and `stop`.

    Args:
        plan: units that are to run, and what they need.
        budget: bytes of shards that may lie here at a time.
        keep: delete nothing.
    """

    def __init__(self, plan: DownloadPlan[Any], budget: int, *, keep: bool = False) -> None:
        self._plan, self._budget, self._keep = plan, budget, keep
        self._uses = Counter(p for unit in plan.units for p in plan.needs[unit.index])
        self._state = threading.Condition()
        self._stop = threading.Event()
        self._here: set[Path] = set()
        self._counted = present_files(self._uses)
        self._held = self.peak = sum(plan.remote[p].nbytes for p in self._counted)
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._current: tuple[str, int, int] | None = None
        self.fetched_bytes = 0

    def start(self) -> None:
        """Begin to download."""
        if self._uses:
            self._thread = threading.Thread(target=self._bring_all, daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Download no more; what has arrived stays for the next run."""
        self._stop.set()
        with self._state:
            self._state.notify_all()
        if self._thread is not None:
            self._thread.join(5)

    def ready(self, unit: Unit) -> bool:
        """Whether everything a unit reads is here.

        Raises:
            MmqError: the downloads have failed.
        """
        with self._state:
            if self._error is not None:
                raise self._error
            return self._plan.needs[unit.index] <= self._here

    def wait(self, unit: Unit, tick: Callable[[], None]) -> None:
        """Return when a unit can run; `tick` is called meanwhile."""
        while not self.ready(unit):
            tick()
            with self._state:
                if self._error is None and not self._plan.needs[unit.index] <= self._here:
                    self._state.wait(_TICK)

    def release(self, unit: Unit) -> None:
        """A unit is recorded as done: what nobody else needs may go."""
        with self._state:
            for path in self._plan.needs[unit.index]:
                self._uses[path] -= 1
                if not self._uses[path] and not self._keep:
                    path.unlink(missing_ok=True)
                    self._here.discard(path)
                    self._held -= self._plan.remote[path].nbytes
            self._state.notify_all()

    def status(self) -> str:
        """What is being downloaded, for a progress line."""
        current = self._current
        if current is None:
            return ""
        name, done, total = current
        return f"downloading {name}: {short_bytes(done)} of {short_bytes(total)}"

    def _bring_all(self) -> None:
        try:
            for unit in self._plan.units:
                for path in sorted(self._plan.needs[unit.index]):
                    self._bring(path)
        except Stopped:
            pass
        except BaseException as error:
            with self._state:
                self._error = error
                self._state.notify_all()

    def _bring(self, path: Path) -> None:
        shard = self._plan.remote[path]
        with self._state:
            if path in self._here:
                return
            if path not in self._counted:
                self._state.wait_for(
                    lambda: self._stop.is_set() or self._held + shard.nbytes <= self._budget
                )
                self._counted.add(path)
                self._held += shard.nbytes
                self.peak = max(self.peak, self._held)
        if self._stop.is_set():
            raise Stopped
        done = 0

        def advance(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            self._current = shard.name, done, shard.nbytes

        download(shard.snapshot, shard.name, path, self._stop, advance)
        self._current = None
        with self._state:
            self._here.add(path)
            self._state.notify_all()


def fetch_extra(plan: DownloadPlan[Any], advance: Callable[[int], None]) -> None:
    """Tokenizer, templates and so on, before the weights: a run should fail early if it does."""
    stop = threading.Event()
    try:
        for path, file in plan.extra.items():
            download(file.snapshot, file.name, path, stop, advance)
    finally:
        stop.set()


def remove_others(folder: Path, wanted: Iterable[Path]) -> None:
    """Downloads of another run, below a folder that is this run's alone."""
    kept = {p for path in wanted for p in (path, path.with_name(path.name + PARTIAL))}
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_dir() and not path.is_symlink():
            with suppress(OSError):
                path.rmdir()
        elif path not in kept:
            path.unlink(missing_ok=True)


class FolderLock:
    """Two runs must not delete each other's downloads: one at a time below a folder.

    Attributes:
        path: the file that is locked.

    Raises:
        RefusedError: another process works there.  MachineError: it cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / ".mmq-lock"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise MachineError(
                "download-disk", f"{folder} cannot hold downloads: {error.strerror or error}",
                where=str(folder), hint="--download-dir on another disk",
            ) from error  # fmt: skip
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.fstat(self._fd).st_nlink:
                raise BlockingIOError  # the other run ended between our open and our lock
        except BlockingIOError:
            os.close(self._fd)
            raise RefusedError(
                "locked", f"another run downloads into {folder}", where=str(folder),
                hint="wait for it, or choose another --download-dir",
            ) from None  # fmt: skip

    def close(self) -> None:
        if self._fd >= 0:
            # forgotten first: a signal may be raised in between
            fd, self._fd = self._fd, -1
            self.path.unlink(missing_ok=True)
            os.close(fd)


def free_bytes(folder: Path) -> int:
    """Free bytes where a folder is, or will be."""
    return shutil.disk_usage(nearest(folder)).free


def nearest(folder: Path) -> Path:
    """The folder, or the first above it that exists."""
    folder = folder.absolute()
    return next(p for p in (folder, *folder.parents) if p.is_dir())

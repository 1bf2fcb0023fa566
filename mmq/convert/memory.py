"""Proportional set size: the memory a group of processes really occupies, shared pages split."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path


def pss_bytes(pid: int) -> int | None:
    """PSS of one process in bytes; None where the kernel does not tell."""
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text("ascii").splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        return None
    return None


class MemorySampler:
    """Peak of the summed PSS of this process and its workers, sampled at most twice a second."""

    def __init__(self) -> None:
        self.peak: int | None = None
        self._next = 0.0

    def sample(self, workers: Iterable[int] = (), *, now: bool = False) -> None:
        """Look, unless the last look was a moment ago (`now`: look all the same)."""
        time_now = time.monotonic()
        if time_now < self._next and not now:
            return
        self._next = time_now + 0.5
        sizes = [pss_bytes(pid) for pid in (os.getpid(), *workers)]
        known = [size for size in sizes if size is not None]
        if known:
            self.peak = max(self.peak or 0, sum(known))

"""Faults of a loopback Hub, scripted by path, and the log of what was asked of it."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass
class Fault:
    """What happens to requests whose `METHOD /path?query` the pattern is found in.

    Attributes:
        times: requests it happens to; None for all.
        skip: matching requests that pass before it begins.
        status / headers / message: answer with this instead.
        cut_after: close the connection after so many bytes: of the answer's body (GET), or of
            the request's (PUT, POST).
        delay: seconds before anything is answered.
        pause: seconds after every 64 KiB of an answer's body.
        corrupt: flip one bit of what is sent (GET), or of what is stored (PUT).
        lose: do what is asked, and close the connection instead of answering.
        before / after: called before the request is carried out, or once it has been.
    """

    pattern: str
    times: int | None = 1
    skip: int = 0
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    message: str = "scripted"
    cut_after: int | None = None
    delay: float = 0.0
    pause: float = 0.0
    corrupt: bool = False
    lose: bool = False
    before: Callable[[], object] | None = None
    after: Callable[[], object] | None = None
    met: int = 0

    def matches(self, request: str) -> bool:
        """Whether it happens to this request (counts it)."""
        if not re.search(self.pattern, request):
            return False
        self.met += 1
        at = self.met - self.skip
        return at > 0 and (self.times is None or at <= self.times)


class Request(NamedTuple):
    """One request, as it was answered."""

    method: str
    path: str
    status: int
    range: str | None
    authorized: bool
    sent: int
    received: int
    at: float


class Log:
    """Requests in the order in which they were answered."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self._lock = threading.Lock()

    def add(self, *values: object) -> None:
        with self._lock:
            self.requests.append(Request(*values, time.monotonic()))

    def clear(self) -> None:
        with self._lock:
            self.requests.clear()

    def of(self, pattern: str) -> list[Request]:
        """Requests whose `METHOD /path` the pattern is found in."""
        return [r for r in list(self.requests) if re.search(pattern, f"{r.method} {r.path}")]

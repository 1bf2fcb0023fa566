"""Bounded patience with a server: how long to wait before the next try, and when to stop trying.

A server that says when to come back (Retry-After, or the Hub's RateLimit header) is believed; else
waits double from a second. Bytes that arrive start the count anew.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping

from mmq.errors import IncompleteError

#: Seconds before the second try; the third waits twice as long, and so on.
FIRST_DELAY = 1.0
TRIES = 6
#: Tries of a first request: a mistyped path looks like a repository, and nobody may be online.
FIRST_TRIES = 3
#: A server that wants us to wait longer than this is asked again by the next run.
LONGEST_WAIT = 300.0
#: Statuses that may be gone at the next try.
RETRIED = frozenset({408, 425, 429, 500, 502, 503, 504})

_RESET = re.compile(r"\bt=(\d+)")


class PassingError(Exception):
    """A failure that may not happen again: a cut connection, a timeout, a busy server.

    Args:
        wait: seconds the server wants us to wait, None when it does not say.
    """

    def __init__(self, reason: str, wait: float | None = None) -> None:
        super().__init__(reason)
        self.reason, self.wait = reason, wait


class Stopped(Exception):  # noqa: N818  no error: the run ends for another reason
    """Somebody else failed, or the user has had enough."""


class Patience:
    """Counts the failures of one transfer.

    Args:
        what: named in the error when patience ends.
        stop: ends a wait at once.
        tries: `TRIES` unless given.
    """

    def __init__(
        self, what: str, where: str, stop: threading.Event, tries: int | None = None
    ) -> None:
        self._what, self._where, self._stop = what, where, stop
        self._tries = TRIES if tries is None else tries
        self._failures = 0

    def renew(self) -> None:
        """Something arrived."""
        self._failures = 0

    def wait(self, failure: PassingError) -> None:
        """Wait until the next try.

        Raises:
            IncompleteError: there is none.  Stopped.
        """
        self._failures += 1
        delay = FIRST_DELAY * 2.0 ** (self._failures - 1) if failure.wait is None else failure.wait
        if self._failures >= self._tries or delay > LONGEST_WAIT:
            raise IncompleteError(
                "hub-unreachable",
                f"{self._what} could not be fetched",
                where=self._where,
                got=f"{failure.reason}, {self._failures} time(s) in a row"
                + (f"; to be tried again in {delay:.0f} s" if delay > LONGEST_WAIT else ""),
                hint="run the same command again: what was fetched is kept",
            )
        if self._stop.wait(delay):
            raise Stopped


def told_wait(headers: Mapping[str, str]) -> float | None:
    """Seconds until the server wants to see us again; None when it does not say (or in a date)."""
    after = headers.get("retry-after", "").strip()
    if after.isdecimal():
        return float(after)
    reset = _RESET.search(headers.get("ratelimit", ""))
    return float(reset[1]) if reset else None

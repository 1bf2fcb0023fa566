"""A few threads that fetch ahead of one that uses the results in order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from mmq.hub.retries import Stopped

T = TypeVar("T")
R = TypeVar("R")


def in_order(
    work: Callable[[T, threading.Event], R], items: Sequence[T], threads: int,
    outer: threading.Event | None = None,
) -> Iterator[R]:  # fmt: skip
    """Results in the order of the items, while at most `threads` more are in the making.

    The threads are daemons: an interrupted process does not wait for a silent server.

    Args:
        work: called with an item and an event that says when its result is not wanted any more.
        outer: an event of the caller's that ends it all.

    Raises:
        Stopped: `outer` was set.  Whatever `work` raises, at its item's turn.
    """
    state = threading.Condition()
    stop = threading.Event()
    finished: dict[int, tuple[Any, BaseException | None]] = {}
    taken = used = 0

    def turn() -> bool:
        return stop.is_set() or taken >= len(items) or taken < used + threads

    def loop() -> None:
        nonlocal taken
        while True:
            with state:
                state.wait_for(turn)
                if stop.is_set() or taken >= len(items):
                    return
                index, taken = taken, taken + 1
            value: tuple[Any, BaseException | None]
            try:
                value = work(items[index], stop), None
            except BaseException as error:
                value = None, error
            with state:
                finished[index] = value
                state.notify_all()

    for _ in range(min(threads, len(items))):
        threading.Thread(target=loop, daemon=True).start()
    try:
        for index in range(len(items)):
            with state:
                while index not in finished:
                    state.wait(0.2)
                    if outer is not None and outer.is_set():
                        raise Stopped
                result, error = finished.pop(index)
                used = index + 1
                state.notify_all()
            if error is not None:
                raise error
            yield result
    finally:
        stop.set()
        with suppress(RuntimeError), state:
            state.notify_all()

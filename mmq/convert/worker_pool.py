"""Units of work side by side: in this process, or in N worker processes.

What a unit is and what is done with it is the caller's: `convert` writes output shards
(`executor`), `verify` holds them against the source (`verify.jobs`). Units, context and results
cross process boundaries, so they are plain data.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Generic, Protocol, TypeVar

from mmq.convert.download_plan import Unit
from mmq.convert.memory import MemorySampler
from mmq.errors import IncompleteError, MachineError, MmqError

#: Seconds between looks at a gate while a worker has nothing to do.
_WAITING = 0.05
_SINGLE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")

OnProgress = Callable[[int], None]


class NamedUnit(Unit, Protocol):
    """A unit, and the file that it is about."""

    @property
    def filename(self) -> str:
        """Of the output."""


U = TypeVar("U", bound=NamedUnit)
C = TypeVar("C")
R = TypeVar("R")


class Gate(Protocol):
    """Says when what a unit reads is there, where shards are downloaded during the run."""

    def ready(self, unit: Unit) -> bool:
        """Whether the unit can run.

        Raises:
            MmqError: it never will.
        """

    def wait(self, unit: Unit, tick: Callable[[], None]) -> None:
        """Return when it can; `tick` is called now and then."""

    def release(self, unit: Unit) -> None:
        """The unit is done, and recorded."""


@dataclass(frozen=True)
class Job(Generic[U, C, R]):
    """What is done with every unit.

    Attributes:
        run: a function of a module (it is found by name in a worker).
        context: what all units share.
        verb: "writing", for the message about a worker that died.
        discard: undoes what a unit that was stopped half-way left.
    """

    run: Callable[[U, C, OnProgress], R]
    context: C
    verb: str
    discard: Callable[[U], None] = lambda unit: None


def run_all(
    units: Sequence[U], job: Job[U, C, R], jobs: int, progress: OnProgress,
    memory: MemorySampler, gate: Gate | None = None,
) -> Iterator[tuple[U, R]]:  # fmt: skip
    """Run units and yield them with their results as they finish; stops at the first failure.

    Args:
        gate: units start in order, each when the gate says so; None: all can run.

    Raises:
        MmqError: the first failure of any unit.  IncompleteError: a worker process died.
    """
    if min(jobs, len(units)) <= 1:

        def watched(nbytes: int) -> None:
            memory.sample()
            progress(nbytes)

        for unit in units:
            if gate is not None:
                gate.wait(unit, lambda: progress(0))
            yield unit, job.run(unit, job.context, watched)
            if gate is not None:
                gate.release(unit)
            memory.sample(now=True)
        return
    pool = _Pool(job, min(jobs, len(units)), gate)
    try:
        yield from pool.run(units, progress, memory)
    finally:
        pool.stop()


class _Pool(Generic[U, C, R]):
    """Worker processes, each with a pipe.

    Started fresh, so that no lock, thread or GPU context is inherited: a fork cannot use CUDA.
    """

    def __init__(self, job: Job[U, C, R], jobs: int, gate: Gate | None = None) -> None:
        self._job = job
        self._gate = gate
        for name in _SINGLE_THREAD:
            os.environ.setdefault(name, "1")
        spawn = multiprocessing.get_context("spawn")
        self._workers: dict[Connection, BaseProcess] = {}
        self._busy: dict[Connection, U] = {}
        # a Ctrl-C while workers start must not reach them before they can ignore it; starting the
        # resource tracker would undo that, so it comes first
        resource_tracker.ensure_running()
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            for _ in range(jobs):
                ours, theirs = spawn.Pipe()
                process = spawn.Process(
                    target=_work, args=(theirs, job.run, job.context), daemon=True
                )
                process.start()
                theirs.close()
                self._workers[ours] = process
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    def run(
        self, units: Sequence[U], progress: OnProgress, memory: MemorySampler
    ) -> Iterator[tuple[U, R]]:
        queue = list(reversed(units))
        while self._hand_out(queue) or self._busy:
            waiting = bool(queue) and len(self._busy) < len(self._workers)
            ready = wait(list(self._busy), timeout=_WAITING if waiting else 0.5)
            if waiting:
                progress(0)
            memory.sample(p.pid for p in self._workers.values() if p.pid)
            for pipe in (p for p in self._busy.copy() if p in ready):
                kind, value = self._receive(pipe)
                if kind == "progress":
                    progress(value)
                elif kind == "done":
                    unit = self._busy.pop(pipe)
                    self._hand_out(queue)
                    yield unit, value
                    if self._gate is not None:
                        self._gate.release(unit)
                else:
                    raise value

    def _hand_out(self, queue: list[U]) -> bool:
        """Give idle workers what can run; whether anything is left to give."""
        for pipe in self._workers:
            if not queue or (self._gate is not None and not self._gate.ready(queue[-1])):
                break
            if pipe not in self._busy:
                unit = queue.pop()
                self._busy[pipe] = unit
                with suppress(BrokenPipeError):  # it died; reading from it says how
                    pipe.send(unit)
        return bool(queue)

    def _receive(self, pipe: Connection) -> tuple[str, Any]:
        try:
            message: tuple[str, Any] = pipe.recv()
            return message
        except (EOFError, ConnectionError):
            process = self._workers[pipe]
            process.join(5)
            raise IncompleteError(
                "worker-died",
                f"a worker died while {self._job.verb} {self._busy[pipe].filename}",
                where=self._busy[pipe].filename,
                got=f"exit status {process.exitcode}",
                hint="run the same command again; with less memory, use --jobs 1",
            ) from None

    def stop(self) -> None:
        """End all workers, and remove what they had not finished."""
        with _undisturbed():
            for pipe, process in self._workers.items():
                process.kill()
                pipe.close()
            for process in self._workers.values():
                process.join()
            for unit in self._busy.values():
                self._job.discard(unit)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Ignores signals: a second Ctrl-C must not interrupt the clean-up after the first."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python handles signals in the main thread only
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _work(pipe: Connection, run: Callable[[Any, Any, OnProgress], Any], context: Any) -> None:
    """A worker: one unit after another, until the pipe closes or the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    while True:
        try:
            unit = pipe.recv()
        except EOFError:
            return
        try:
            result = run(unit, context, lambda n: pipe.send(("progress", n)))
        except MmqError as error:
            message: tuple[str, Any] = ("error", error)
        except MemoryError:
            message = ("error", MachineError("out-of-memory", "not enough memory", hint="--jobs 1"))
        except Exception as error:
            message = ("error", RuntimeError(f"{unit.filename}: {type(error).__name__}: {error}"))
        else:
            message = ("done", result)
        with suppress(BrokenPipeError):
            pipe.send(message)


def _die_with_parent() -> None:
    """A parent killed with -9 cannot tell its workers; its end of this pipe closing does."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)

"""Running work units: in this process, or in N worker processes.

`run_unit` is the seam for other executors (a static share of a cluster, ray): a unit and a
`UnitContext` are plain data, and a result says all that the journal needs.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from mmq.convert.device import device_error
from mmq.convert.memory import MemorySampler
from mmq.convert.work import WorkUnit
from mmq.convert.writer import PARTIAL, AtomicFile
from mmq.errors import IncompleteError, MachineError, MmqError

#: Seconds between looks at a gate while a worker has nothing to do.
_WAITING = 0.05
#: Workers report progress after this many output bytes.
_PROGRESS_BYTES = 64 << 20
_SINGLE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")

OnProgress = Callable[[int], None]


class Gate(Protocol):
    """Says when what a unit reads is there, where shards are downloaded during the run."""

    def ready(self, unit: WorkUnit) -> bool:
        """Whether the unit can run.

        Raises:
            MmqError: it never will.
        """

    def wait(self, unit: WorkUnit, tick: Callable[[], None]) -> None:
        """Return when it can; `tick` is called now and then."""

    def release(self, unit: WorkUnit) -> None:
        """The unit is done, and recorded."""


@dataclass(frozen=True)
class UnitContext:
    """What every unit of a run shares.

    Attributes:
        out: output folder.
        paths: origin → shard name → path (see `stream.SourceReader`).
        drop_behind: leave nothing in the page cache (see `page_cache`).
        backend: what computes (`kernels.ops`); the bytes do not depend on it.
    """

    out: Path
    paths: dict[str, dict[str, Path]]
    allow_nonfinite: bool
    gemma_norm: bool
    drop_behind: bool = False
    backend: str = "auto"


class UnitResult(NamedTuple):
    """A finished shard.

    Attributes:
        unit: its number.
        rows: fields of `tasks.TensorRow`.
        spent: seconds of the worker by what they went into: compute, read, hash, write.
    """

    unit: int
    filename: str
    bytes: int
    sha256: str
    rows: list[tuple[Any, ...]]
    seconds: float
    spent: dict[str, float]


def run_unit(unit: WorkUnit, context: UnitContext, progress: OnProgress) -> UnitResult:
    """Write one shard; its final name appears only when it is whole.

    Raises:
        BadInputError: NaN/Inf or a source that changed.  MachineError: the disk, the GPU.
    """
    from mmq.convert.stream import SourceReader
    from mmq.convert.tasks import TaskContext, run_task

    started = time.monotonic()
    reader = SourceReader(context.paths, drop_behind=context.drop_behind)
    pending = 0
    try:
        path = context.out / unit.filename
        with AtomicFile(path, unit.file_bytes, drop_behind=context.drop_behind) as file:
            file.write(unit.header)

            def emit(data: Any) -> None:
                nonlocal pending
                file.write(data)
                pending += memoryview(data).nbytes
                if pending >= _PROGRESS_BYTES:
                    progress(pending)
                    pending = 0

            tasks = TaskContext(
                reader, context.allow_nonfinite, context.gemma_norm, emit, backend=context.backend
            )
            for task in unit.tasks:
                run_task(task, tasks)
                reader.forget()
            record = file.commit()
    except RuntimeError as error:
        known = device_error(error)
        if known is None:
            raise
        raise known from error
    finally:
        reader.close()
    progress(pending)
    rows = [tuple(row) for row in tasks.rows]
    seconds = time.monotonic() - started
    moved = {"read": reader.seconds, "hash": file.hash_seconds, "write": file.write_seconds}
    spent = {"compute": seconds - sum(moved.values()), **moved}
    return UnitResult(unit.index, unit.filename, record.size, record.sha256, rows, seconds, spent)


def run_units(
    units: list[WorkUnit], context: UnitContext, jobs: int, progress: OnProgress,
    memory: MemorySampler, gate: Gate | None = None,
) -> Iterator[UnitResult]:  # fmt: skip
    """Run units and yield results as they finish; stops everything at the first failure.

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
            yield run_unit(unit, context, watched)
            if gate is not None:
                gate.release(unit)
            memory.sample(now=True)
        return
    pool = _Pool(context, min(jobs, len(units)), gate)
    try:
        yield from pool.run(units, progress, memory)
    finally:
        pool.stop()


class _Pool:
    """Worker processes, each with a pipe.

    Started fresh, so that no lock, thread or GPU context is inherited: a fork cannot use CUDA.
    """

    def __init__(self, context: UnitContext, jobs: int, gate: Gate | None = None) -> None:
        self._context = context
        self._gate = gate
        for name in _SINGLE_THREAD:
            os.environ.setdefault(name, "1")
        spawn = multiprocessing.get_context("spawn")
        self._workers: dict[Connection, BaseProcess] = {}
        self._busy: dict[Connection, WorkUnit] = {}
        # a Ctrl-C while workers start must not reach them before they can ignore it; starting the
        # resource tracker would undo that, so it comes first
        resource_tracker.ensure_running()
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            for _ in range(jobs):
                ours, theirs = spawn.Pipe()
                process = spawn.Process(target=_work, args=(theirs, context), daemon=True)
                process.start()
                theirs.close()
                self._workers[ours] = process
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    def run(
        self, units: list[WorkUnit], progress: OnProgress, memory: MemorySampler
    ) -> Iterator[UnitResult]:
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
                    yield value
                    if self._gate is not None:
                        self._gate.release(unit)
                else:
                    raise value

    def _hand_out(self, queue: list[WorkUnit]) -> bool:
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
                f"a worker died while writing {self._busy[pipe].filename}",
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
                partial = self._context.out / (unit.filename + PARTIAL)
                partial.unlink(missing_ok=True)


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


def _work(pipe: Connection, context: UnitContext) -> None:
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
            result = run_unit(unit, context, lambda n: pipe.send(("progress", n)))
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

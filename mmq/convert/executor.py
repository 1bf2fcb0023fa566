"""Running work units: one output shard after another, in this process or in workers.

`run_unit` is the seam for other executors (a static share of a cluster, ray): a unit and a
`UnitContext` are plain data, and a result says all that the journal needs.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from mmq.convert.device import device_error
from mmq.convert.memory import MemorySampler
from mmq.convert.work import WorkUnit
from mmq.convert.worker_pool import Gate, Job, OnProgress, run_all
from mmq.convert.writer import PARTIAL, AtomicFile

#: Workers report progress after this many output bytes.
_PROGRESS_BYTES = 64 << 20


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
    """Write shards and yield results as they finish (see `worker_pool.run_all`)."""

    def discard(unit: WorkUnit) -> None:
        (context.out / (unit.filename + PARTIAL)).unlink(missing_ok=True)

    job = Job(run_unit, context, "writing", discard)
    for _, result in run_all(units, job, jobs, progress, memory, gate):
        yield result

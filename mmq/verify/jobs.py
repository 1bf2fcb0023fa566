"""The work of the weights level: one job per shard of OUT, plain data in, plain data out.

A job hashes its shard, scans its block scales, and compares the tasks whose results lie in it; so
each shard is read while it is still in the page cache. `convert.worker_pool` runs them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from mmq.convert.modules import Module
from mmq.convert.safetensors_header import TensorInfo
from mmq.convert.stream import SourceReader
from mmq.convert.tasks import TaskContext, TensorRow, run_task
from mmq.convert.work import (
    SOURCE,
    AnalyticKScale,
    AnalyticVScale,
    Output,
    QuantizeNvfp4,
    RelayoutNvfp4,
    Task,
)
from mmq.quantize.global_scale import reciprocal_scale
from mmq.report.findings import Finding
from mmq.verify.compare import OUT, ByteComparer, Difference, difference_finding
from mmq.verify.digests import hash_file
from mmq.verify.experts import is_usable
from mmq.verify.scan import scan_module
from mmq.verify.values import MIN_SQNR_DB, StoredNvfp4, ValueCheck, check_values

#: Room for another tool's rounding of the same bound.
_KV_SLACK = 1.01


@dataclass(frozen=True)
class ShardJob:
    """One shard of OUT.

    Attributes:
        index: its number among the shards.
        modules: modules whose block scales lie in it.
        by_bytes: tasks whose results lie in it; compared byte by byte.
        by_value: tasks whose results are compared by value.
        scalars: tasks whose results bound a foreign scale.
    """

    index: int
    filename: str
    path: Path
    file_bytes: int
    modules: tuple[Module, ...]
    by_bytes: tuple[Task, ...]
    by_value: tuple[QuantizeNvfp4, ...]
    scalars: tuple[AnalyticKScale | AnalyticVScale, ...]

    @property
    def tasks(self) -> tuple[Task, ...]:
        """All that read the source (see `download_plan.Unit`)."""
        return (*self.by_bytes, *self.by_value, *self.scalars)


@dataclass(frozen=True)
class JobContext:
    """What all jobs share: paths by origin, OUT's tensors, the kind of norms.

    Attributes:
        exact: whether OUT claims to be what this very mmq writes.
        unknown_inputs: activation scales came from a file that is gone: any value may be right.
    """

    paths: dict[str, dict[str, Path]]
    tensors: dict[str, TensorInfo]
    gemma_norm: bool
    exact: bool
    unknown_inputs: bool = False


@dataclass
class JobResult:
    """What a job found.

    Attributes:
        sqnr: dB per quantised tensor (inf for exact ones).
        compared / compared_bytes: tensors and bytes of OUT held against the source.
        adaptive: tensors that were not rounded to nearest.
    """

    name: str
    nbytes: int
    sha256: str
    findings: list[Finding] = field(default_factory=list)
    sqnr: list[tuple[str, float]] = field(default_factory=list)
    compared: int = 0
    compared_bytes: int = 0
    adaptive: list[str] = field(default_factory=list)
    kv_ratios: list[tuple[str, float]] = field(default_factory=list)


def run_job(job: ShardJob, context: JobContext, progress: Callable[[int], None]) -> JobResult:
    """Hash, scan and compare one shard.

    Raises:
        BadInputError: the source holds NaN/Inf, or changed while it was read.
    """
    result = JobResult(job.filename, job.file_bytes, hash_file(job.path))
    reader = SourceReader(context.paths)
    scanner = SourceReader({SOURCE: context.paths[OUT]})
    try:
        for module in job.modules:
            result.findings += scan_module(module, scanner)
        comparer = ByteComparer(reader, context.tensors)
        tasks = TaskContext(reader, True, context.gemma_norm, comparer.emit)
        for task in job.by_bytes:
            _by_bytes(task, comparer, tasks, context, result)
            progress(sum(o.nbytes for o in task.outputs))
        for task in job.by_value:
            _by_value(task, context, reader, result)
            progress(sum(o.nbytes for o in task.outputs))
        for scalar in job.scalars:
            _kv_ratio(scalar, context, reader, result)
    finally:
        scanner.close()
        reader.close()
    return result


def _by_bytes(
    task: Task, comparer: ByteComparer, tasks: TaskContext, context: JobContext, result: JobResult
) -> None:
    comparer.begin(task.outputs)
    before = len(tasks.rows)
    run_task(task, tasks)
    unknown = _input_scales(task) if context.unknown_inputs else frozenset()
    judged = [o for o in task.outputs if o.name not in unknown]
    differences = [d for name, d in comparer.differences.items() if name not in unknown]
    result.compared += len(judged)
    result.compared_bytes += sum(o.nbytes for o in judged)
    result.findings += [_judged(task, d, context) for d in differences]
    if not isinstance(task, QuantizeNvfp4):
        return
    if differences:
        # the recomputed rows say nothing about what is stored
        checks = {o.packed.name: _check(task, i, context, tasks.reader)
                  for i, o in enumerate(task.results)}  # fmt: skip
        result.sqnr += [(n, c.sqnr_db) for n, c in checks.items() if c is not None]
        return
    result.sqnr += [(row.name, _db(row)) for row in tasks.rows[before:]]


def _input_scales(task: Task) -> frozenset[str]:
    """Names of the activation scales among a task's results."""
    if not isinstance(task, QuantizeNvfp4 | RelayoutNvfp4):
        return frozenset()
    results = task.results if isinstance(task, QuantizeNvfp4) else (task.result,)
    return frozenset(r.input_scale.name for r in results if r.input_scale is not None)


def _judged(task: Task, difference: Difference, context: JobContext) -> Finding:
    """A foreign change of layout may differ in the last bit of a reciprocal."""
    finding = difference_finding(task, difference)
    foreign = isinstance(task, RelayoutNvfp4) and not context.exact
    return finding._replace(severity="note") if foreign and difference.ulps == 1 else finding


def _db(row: TensorRow) -> float:
    return 10 * math.log10(row.signal / row.noise) if row.noise > 0 else math.inf


def _check(
    task: QuantizeNvfp4, index: int, context: JobContext, reader: SourceReader
) -> ValueCheck | None:
    """Value comparison of one projection; None when its scalar decodes nothing."""
    outputs = task.results[index]
    s2 = stored_multiplier(outputs.global_scale, task.divisor, context, reader)
    if s2 is None:
        return None
    tensors = context.tensors
    stored = StoredNvfp4(tensors[outputs.packed.name], tensors[outputs.block_scale.name], s2)
    return check_values(task.weights[index], stored, reader, OUT)


def stored_multiplier(
    output: Output, divisor: bool, context: JobContext, reader: SourceReader
) -> np.float32 | None:
    """OUT's global scale as a multiplier; None when engines could not use it either."""
    value = np.float32(reader.whole(context.tensors[output.name], OUT).view("<f4")[0])
    if not is_usable(value):
        return None
    return reciprocal_scale(value) if divisor else value


def _by_value(
    task: QuantizeNvfp4, context: JobContext, reader: SourceReader, result: JobResult
) -> None:
    for index, outputs in enumerate(task.results):
        check = _check(task, index, context, reader)
        if check is None:
            continue  # its global scale is a finding of the structure level
        name = outputs.packed.name
        judged = (outputs.packed, outputs.block_scale, outputs.global_scale)
        result.compared += len(judged)
        result.compared_bytes += sum(o.nbytes for o in judged)
        result.sqnr.append((name, check.sqnr_db))
        if not check.sqnr_db >= MIN_SQNR_DB:
            result.findings.append(
                Finding("sqnr-low", "error", f"{name} is no NVFP4 form of the source's weight",
                        where=name, got=f"{check.sqnr_db:.2f} dB", expected=f"≥ {MIN_SQNR_DB} dB")
            )  # fmt: skip
        if check.faint:
            result.findings.append(
                Finding("blocks-subnormal", "warning",
                        f"{name}: {check.faint:,} blocks that need a subnormal block scale were"
                        " flushed or misrounded", where=name,
                        got=f"{check.faint:,} of {check.blocks:,} blocks", expected="none")
            )  # fmt: skip
        if check.adaptive:
            result.adaptive.append(name)
        if check.violations.first is not None:
            result.findings.append(_block_finding(name, check))


def _block_finding(name: str, check: ValueCheck) -> Finding:
    first = check.violations.first
    assert first is not None
    rule = "one E2M1 step" if check.adaptive else "the nearest E2M1 value"
    return Finding(
        "block-error", "error",
        f"{name}: {check.violations.count:,} of {check.blocks:,} blocks are further from the source"
        f" than {rule} under their own scale, the first in row {first.row}, block {first.block}",
        where=name, got=f"{first.stored:.6g}", expected=f"{first.value:.6g}",
    )  # fmt: skip


def _kv_ratio(
    task: AnalyticKScale | AnalyticVScale, context: JobContext, reader: SourceReader,
    result: JobResult,
) -> None:  # fmt: skip
    """A foreign KV scale as a share of the analytic bound, which no input can pass."""
    stored = np.float32(reader.whole(context.tensors[task.output.name], OUT).view("<f4")[0])
    bound: list[bytes] = []
    run_task(task, TaskContext(reader, True, context.gemma_norm, bound.append))
    ratio = float(stored) / float(np.frombuffer(b"".join(bound), "<f4")[0])
    if math.isfinite(ratio) and ratio > 0:
        result.kv_ratios.append((task.output.name, ratio))
        if ratio > _KV_SLACK:
            result.findings.append(
                Finding("kv-scale-above-bound", "note",
                        f"{task.output.name} is {ratio:.3g} times what any input can need: it"
                        " wastes range", where=task.output.name, got=str(stored),
                        expected=f"≤ {float(stored) / ratio:.6g}")
            )  # fmt: skip

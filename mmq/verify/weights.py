"""Level weights: every stored value against the source, and every file's SHA-256.

pass-through   byte by byte
mmq's own      requantised with the same operations and compared byte by byte
foreign        decoded and compared with the source's values (see `values`)
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mmq.console import Console
from mmq.convert.memory import MemorySampler
from mmq.convert.side_files import SideFile
from mmq.convert.summary import default_jobs
from mmq.convert.work import (
    AnalyticKScale,
    AnalyticVScale,
    CopyTensor,
    DequantizeBf16,
    QuantizeMxfp8,
    QuantizeNvfp4,
    RelayoutNvfp4,
    Task,
    WriteScalar,
)
from mmq.convert.worker_pool import Job, run_all
from mmq.report.findings import Finding
from mmq.report.schema import FileEntry
from mmq.verify.compare import OUT
from mmq.verify.digests import check_hashes, hash_file, hash_files
from mmq.verify.expectation import Expectation
from mmq.verify.files import check_side_contents, manifest_files, side_files_of
from mmq.verify.hub import DownloadPlace, source_downloads
from mmq.verify.jobs import JobContext, JobResult, ShardJob, run_job
from mmq.verify.log import LevelLog
from mmq.verify.plan_match import agrees
from mmq.verify.subject import Subject

if TYPE_CHECKING:
    from mmq.convert.downloads import Downloads

#: Bytes of OUT from which worker processes pay.
_WORTH_A_PROCESS = 1_000_000_000
_KV_VALUES = "values of foreign KV scales: calibration is the converter's choice"
_NOT_BY_VALUE = "a foreign conversion's {what}: mmq compares these only for its own output"


def check_weights(
    subject: Subject, expectation: Expectation, log: LevelLog, console: Console,
    place: DownloadPlace | None = None, workers: int | None = None,
) -> tuple[dict[str, float], list[FileEntry]]:  # fmt: skip
    """Run the level; returns (metrics, every file with its SHA-256).

    Args:
        place: where shards of a source on the Hub lie while they are read.
        workers: processes; None for as many as pay.

    Raises:
        BadInputError: the source cannot be read.  IncompleteError: the Hub cannot be reached.
        MachineError: no room for its shards.
    """
    for reason in expectation.skipped:
        log.skip(reason)
    jobs = _jobs(subject, expectation, log)
    sides = side_files_of(expectation.source)
    place = place or DownloadPlace(beside=subject.root)
    workers = min(workers or _workers(jobs), max(1, len(jobs)))
    with source_downloads(
        subject, expectation, jobs, sides, place, console, workers=workers
    ) as downloads:
        context = _context(subject, expectation, downloads.paths)
        results = _run(jobs, downloads, context, workers, log, console)
        if not sum(r.compared for r in results):
            log.add(Finding("nothing-compared", "error", "no tensor could be compared with the"
                            " source", where=subject.location, got="0 tensors"))  # fmt: skip
        _tell_adaptive(results, log)
        files = _files(subject, sides, downloads.sides, results, log)
        downloads.finish()
    return _metrics(results), files


def _workers(jobs: Sequence[ShardJob]) -> int:
    """Processes by default: starting one takes longer than verifying a small model."""
    return default_jobs() if sum(job.file_bytes for job in jobs) >= _WORTH_A_PROCESS else 1


def _run(
    jobs: Sequence[ShardJob], downloads: Downloads[ShardJob], context: JobContext, workers: int,
    log: LevelLog, console: Console,
) -> list[JobResult]:  # fmt: skip
    """Results in the order of the jobs, and told in it, whatever the order they end in."""
    done: dict[int, JobResult] = {}
    total = sum(o.nbytes for j in jobs for t in (*j.by_bytes, *j.by_value) for o in t.outputs)
    told, what = 0, Job(run_job, context, "verifying")
    with console.progress(total, "verifying weights") as progress:

        def advance(nbytes: int) -> None:
            progress.advance(nbytes, downloads.status())

        for job, result in run_all(
            downloads.units, what, workers, advance, MemorySampler(), downloads.gate
        ):
            done[job.index] = result
            while told in done:
                log.run("tensors compared", done[told].compared, done[told].findings)
                log.run("block scales scanned", len(jobs[told].modules))
                told += 1
    return [done[job.index] for job in jobs]


def _context(
    subject: Subject, expectation: Expectation, paths: dict[str, dict[str, Path]]
) -> JobContext:
    gemma = bool(expectation.source.text_config.get("use_gemma_norm", True))
    return JobContext(
        {**paths, OUT: subject.paths}, subject.tensors, gemma, expectation.exact,
        expectation.unknown_inputs,
    )  # fmt: skip


def _jobs(subject: Subject, expectation: Expectation, log: LevelLog) -> list[ShardJob]:
    """Tasks by the shard their first result lies in; none is lost silently."""
    by_bytes: dict[str, list[Task]] = defaultdict(list)
    by_value: dict[str, list[QuantizeNvfp4]] = defaultdict(list)
    scalars: dict[str, list[AnalyticKScale | AnalyticVScale]] = defaultdict(list)
    absent = 0
    for task in _tasks(expectation):
        if not _comparable(task, subject, expectation):
            absent += len(task.outputs)
            continue
        shard = subject.tensors[task.outputs[0].name].shard
        if isinstance(task, CopyTensor | RelayoutNvfp4) or _exact(task, expectation):
            by_bytes[shard].append(task)
        elif isinstance(task, QuantizeNvfp4):
            by_value[shard].append(task)
        elif isinstance(task, AnalyticKScale | AnalyticVScale):
            scalars[shard].append(task)
        else:
            log.skip(_reason(task))
    if scalars:
        log.skip(_KV_VALUES)
    if by_value and any(t.results[0].input_scale for ts in by_value.values() for t in ts):
        log.skip("values of foreign input scales: calibration is the converter's choice")
    if absent:
        log.skip(f"{absent:,} planned tensor(s) that OUT does not store as planned")
    modules = defaultdict(list)
    for module in subject.modules.values():
        if module.scale is not None:
            modules[module.scale.shard].append(module)
    return [
        ShardJob(
            index, name, shard.path, shard.file_bytes, tuple(modules[name]), tuple(by_bytes[name]),
            tuple(by_value[name]), tuple(scalars[name]),
        )
        for index, (name, shard) in enumerate(subject.shards.items())
    ]  # fmt: skip


def _tasks(expectation: Expectation) -> Iterator[Task]:
    if expectation.plan is not None:
        for unit in expectation.plan.units:
            yield from unit.tasks


def _exact(task: Task, expectation: Expectation) -> bool:
    """Whether OUT's bytes must be the ones this mmq would write."""
    if isinstance(task, WriteScalar):
        return expectation.own and not expectation.unknown_kv
    if isinstance(task, QuantizeNvfp4) and expectation.unknown_experts:
        return False
    return expectation.exact


def _comparable(task: Task, subject: Subject, expectation: Expectation) -> bool:
    stored = ((subject.tensors.get(o.name), o) for o in task.outputs)
    return all(t is not None and agrees(t, o, own=expectation.own) for t, o in stored)


def _reason(task: Task) -> str:
    if isinstance(task, WriteScalar | AnalyticKScale | AnalyticVScale):
        return _KV_VALUES
    if isinstance(task, QuantizeMxfp8):
        return _NOT_BY_VALUE.format(what="MXFP8 weights")
    assert isinstance(task, DequantizeBf16)
    return _NOT_BY_VALUE.format(what="BF16 weights")


def _tell_adaptive(results: list[JobResult], log: LevelLog) -> None:
    names = [name for r in results for name in r.adaptive]
    if names:
        log.add(
            Finding(
                "rounding-not-nearest", "note",
                f"{len(names):,} weight(s) were not rounded to nearest under their scales (another"
                " source than this one, or learned rounding): one E2M1 step is allowed there",
                where=names[0],
            )
        )  # fmt: skip


def _files(
    subject: Subject, sides: Sequence[SideFile], readable: Sequence[SideFile],
    results: list[JobResult], log: LevelLog,
) -> list[FileEntry]:  # fmt: skip
    """Every file of OUT with its hash, held against the manifest and the source's side files.

    Args:
        readable: those of the source's that are here; all that OUT has in the same size are.
    """
    assert subject.root is not None
    root, entries = subject.root, manifest_files(subject)
    hashes = {r.name: FileEntry(name=r.name, bytes=r.nbytes, sha256=r.sha256) for r in results}
    names = {*subject.json_files, *(s.name for s in sides), *(e.name for e in entries)}
    for finding in hash_files(root, names, hashes):
        log.add(finding)
    equal = [s for s in readable if s.name in hashes and hashes[s.name].bytes == s.nbytes]
    log.run("side files compared", len(equal), check_side_contents(
        equal, {n: e.sha256 for n, e in hashes.items()}, {s.name: hash_file(s.path) for s in equal}
    ))  # fmt: skip
    log.run("files hashed", len(hashes), check_hashes(entries, hashes))
    if not entries:
        log.skip("SHA-256 against a manifest: OUT has no mmq-manifest.json")
    return [hashes[name] for name in sorted(hashes)]


def _metrics(results: list[JobResult]) -> dict[str, float]:
    sums: Counter[str] = Counter()
    finite = [(db, name) for r in results for name, db in r.sqnr if math.isfinite(db)]
    for result in results:
        sums["compared_tensors"] += result.compared
        sums["compared_bytes"] += result.compared_bytes
        sums["quantised_tensors"] += len(result.sqnr)
    metrics: dict[str, float] = dict(sums)
    if finite:
        metrics["sqnr_db_mean"] = round(sum(db for db, _ in finite) / len(finite), 3)
        metrics["sqnr_db_min"] = round(min(finite)[0], 3)
    ratios = [ratio for r in results for _, ratio in r.kv_ratios]
    if ratios:
        metrics["kv_scale_share_of_bound_max"] = round(max(ratios), 4)
    return metrics

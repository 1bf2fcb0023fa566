"""`mmq convert`, from a source to a finished folder or a clear reason why not.

open ─► plan ─► may we write here? ─► run units (journalled) ─► everything else ─► the index
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmq.console import Console
from mmq.convert.checkpoint import Checkpoint, open_checkpoint
from mmq.convert.configs import build_configs
from mmq.convert.device import Place, find_place
from mmq.convert.downloads import (
    Downloads,
    DownloadSettings,
    conversion_downloads,
    read_pins,
    write_pins,
)
from mmq.convert.executor import UnitContext, run_units
from mmq.convert.finalize import (
    TABLE_NAME,
    ShardRecord,
    commit_index,
    row_from_json,
    write_everything_but_index,
)
from mmq.convert.journal import Journal, fingerprint
from mmq.convert.memory import MemorySampler
from mmq.convert.options import ConvertOptions
from mmq.convert.output_folder import prepare, refuse_overlap
from mmq.convert.page_cache import too_large_for_cache
from mmq.convert.plan import ConversionPlan, build_plan
from mmq.convert.relayout import MANIFEST_NAME
from mmq.convert.side_files import SideFile, list_side_files
from mmq.convert.tasks import TensorRow
from mmq.convert.work import WorkUnit
from mmq.convert.writer import file_sha256, json_bytes, write_file
from mmq.errors import BadInputError, MachineError, VerdictError
from mmq.hub.snapshot import pinned
from mmq.report.file_names import CONVERT_REPORT, VERIFY_REPORT
from mmq.report.findings import Finding

if TYPE_CHECKING:
    from mmq.report.schema import ConvertReport


@dataclass(frozen=True)
class RunSettings:
    """How to run; none of it changes output bytes."""

    jobs: int
    restart: bool = False
    overwrite: bool = False
    strict: bool = False
    hash_source: bool = False
    device: str = "cpu"
    downloads: DownloadSettings = field(default_factory=DownloadSettings)


def convert(
    source: str, out: Path, options: ConvertOptions, settings: RunSettings, console: Console
) -> ConvertReport | None:
    """Convert a checkpoint; returns the report, or None when the output was finished already.

    Raises:
        MmqError: with the exit code of docs/errors.md; finished shards are kept for a resume.
    """
    with pinned(read_pins(out, restart=settings.restart)) as pins:
        checkpoint = open_checkpoint(source)
        plan = build_plan(checkpoint, options)
    side_files, notes = list_side_files(checkpoint)
    refuse_overlap(plan, side_files, out)
    findings = [*plan.findings, *notes]
    for finding in findings:
        console.finding(finding, talk=True)
    _refuse_warnings(findings, settings.strict)
    place = find_place(settings.device)
    journal = Journal(out)
    writes = {u.filename for u in plan.units} | {s.name for s in side_files}
    writes |= {*build_configs(plan), TABLE_NAME, MANIFEST_NAME, CONVERT_REPORT}
    state = prepare(
        out, journal, fingerprint(plan), writes,
        restart=settings.restart, overwrite=settings.overwrite,
    )  # fmt: skip
    if state == "finished":
        journal.remove()
        console.note(
            f"{out} is finished already: same source, same options, every file there with its size;"
            " mmq verify checks bytes"
        )
        return None
    # what somebody's look at the unfinished folder found says nothing of the finished one
    (out / VERIFY_REPORT).unlink(missing_ok=True)
    try:
        write_pins(out, pins)
        return _run(plan, out, side_files, findings, journal, settings, place, console)
    except MachineError as error:
        if error.id == "disk-space" and state == "fresh":
            journal.remove()  # nothing was begun that another command would have to discard
        raise
    finally:
        journal.unlock()


def _refuse_warnings(findings: list[Finding], strict: bool) -> None:
    warnings = [f for f in findings if f.severity == "warning"]
    if strict and warnings:
        raise VerdictError(
            "strict-warning",
            f"--strict: {len(warnings)} warning(s), the first: {warnings[0].message}",
            where=warnings[0].where,
        )


def _run(
    plan: ConversionPlan, out: Path, side_files: list[SideFile], findings: list[Finding],
    journal: Journal, settings: RunSettings, place: Place, console: Console,
) -> ConvertReport:  # fmt: skip
    from mmq.convert.reporting import convert_report, run_timing, streaming_findings

    started = time.monotonic()
    memory = MemorySampler()
    memory.sample()
    done = _finished_shards(journal, plan, console)
    pending = [unit for unit in plan.units if unit.index not in done]
    if done:
        console.note(f"resuming: {len(done)} of {len(plan.units)} shards are done")
    hashes = _source_hashes(plan.source, console) if settings.hash_source else {}
    with conversion_downloads(
        plan, pending, side_files, out, settings.downloads, settings.jobs, console
    ) as downloads:
        spent = _run_units(plan, out, downloads, journal, done, settings, place, memory, console)
        _check_unchanged(plan)
        shards = [done[unit.index] for unit in plan.units]
        met = streaming_findings(shards)
        for finding in met:
            console.finding(finding, talk=True)
        _refuse_warnings(met, settings.strict)
        files = write_everything_but_index(plan, out, shards, downloads.sides, hashes)
        memory.sample(now=True)
        timing = run_timing(
            pending, seconds=time.monotonic() - started,
            jobs=max(1, min(settings.jobs, len(pending))),
            resumed=len(plan.units) - len(pending), peak_pss=memory.peak, place=place, spent=spent,
        )  # fmt: skip
        report = convert_report(plan, shards, files, side_files, [*findings, *met], timing)
        write_file(out / CONVERT_REPORT, json_bytes(report.model_dump()))
        commit_index(plan, out)
        downloads.finish()
        journal.remove()
    return report


def _run_units(
    plan: ConversionPlan, out: Path, downloads: Downloads[WorkUnit], journal: Journal,
    done: dict[int, ShardRecord], settings: RunSettings, place: Place, memory: MemorySampler,
    console: Console,
) -> Counter[str]:  # fmt: skip
    """Make the shards that are not done; returns seconds by what they were spent on."""
    spent: Counter[str] = Counter()
    units = downloads.units
    with console.progress(sum(u.file_bytes for u in units), "converting") as progress:
        for result in run_units(
            units, _context(plan, out, place, downloads.paths), settings.jobs,
            lambda n: progress.advance(n, downloads.status()), memory, downloads.gate,
        ):  # fmt: skip
            journal.record(result.unit, result._asdict())
            spent.update(result.spent)
            done[result.unit] = ShardRecord(
                result.unit, result.filename, result.bytes, result.sha256,
                [TensorRow(*row) for row in result.rows],
            )  # fmt: skip
    return spent


def _context(
    plan: ConversionPlan, out: Path, place: Place, paths: dict[str, dict[str, Path]]
) -> UnitContext:
    gemma = bool(plan.source.text_config.get("use_gemma_norm", True))
    drop = too_large_for_cache(plan.source.nbytes + plan.file_bytes)
    return UnitContext(out, paths, plan.options.allow_nonfinite, gemma, drop, place.backend)


def _from_json(record: Mapping[str, Any]) -> ShardRecord:
    rows = [row_from_json(r) for r in record["rows"]]
    return ShardRecord(record["unit"], record["filename"], record["bytes"], record["sha256"], rows)


def _finished_shards(
    journal: Journal, plan: ConversionPlan, console: Console
) -> dict[int, ShardRecord]:
    """Shards of an earlier run that still are what its records say, byte for byte."""
    done: dict[int, ShardRecord] = {}
    records = journal.done(plan)
    if not records:
        return done
    total = sum(record["bytes"] for record in records.values())
    with console.progress(total, "checking finished shards") as progress:
        for unit, record in records.items():
            shard = journal.folder.parent / record["filename"]
            if file_sha256(shard, progress.advance) == record["sha256"]:
                done[unit] = _from_json(record)
    return done


def _check_unchanged(plan: ConversionPlan) -> None:
    """A source that was rewritten while we read it gave a mixture; say so instead of finishing."""
    for checkpoint in (plan.source, *plan.others.values()):
        # the Hub's are pinned by commit, and checked by digest as they arrive
        for shard in () if checkpoint.hub else checkpoint.shards.values():
            try:
                stat = shard.path.stat()
            except FileNotFoundError:
                stat = None
            if not stat or (stat.st_size, stat.st_mtime_ns) != (shard.file_bytes, shard.mtime_ns):
                raise BadInputError(
                    "source-changed",
                    f"{shard.name} changed while it was being converted",
                    where=str(shard.path),
                    hint="make sure nothing writes to the source, then use --restart",
                )


def _source_hashes(source: Checkpoint, console: Console) -> dict[str, str]:
    """SHA-256 of every source shard, for provenance that can be compared with the Hub's."""
    hashes = {}
    total = sum(s.file_bytes for s in source.shards.values())
    with console.progress(total, "hashing the source") as progress:
        for name, shard in source.shards.items():
            if source.hub is not None and shard.sha256 is not None:
                hashes[name] = shard.sha256  # each is held against it on arrival
                continue
            hashes[name] = file_sha256(shard.path, progress.advance)
            if shard.sha256 and shard.sha256 != hashes[name]:
                raise BadInputError(
                    "shard-hash", f"{name} is not what the Hub's cache says it is", where=name,
                    got=hashes[name], expected=shard.sha256,
                )  # fmt: skip
    return hashes

"""`mmq verify`: open OUT and its source, run the levels, give a verdict, write the report."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mmq import __version__
from mmq.console import Console
from mmq.convert.checkpoint import INDEX_NAME
from mmq.convert.downloads import DownloadSettings
from mmq.convert.journal import refuse_unfinished
from mmq.convert.source_revision import source_revision
from mmq.errors import UsageError
from mmq.quantize.version import NUMERICS_VERSION
from mmq.report.file_names import VERIFY_REPORT
from mmq.report.findings import Finding
from mmq.report.schema import (
    Endpoint,
    FileEntry,
    LevelResult,
    LogitsReport,
    Measure,
    SourceShard,
    VerifyReport,
)
from mmq.verify.digests import hash_files
from mmq.verify.expectation import Expectation, open_source, plan_expectation
from mmq.verify.gates import Gate, gate_findings, judge, read_gates
from mmq.verify.hub import DownloadPlace, local_locations, needs_report_path
from mmq.verify.log import Level, LevelLog, Status, worst
from mmq.verify.logits.settings import LogitsSettings
from mmq.verify.report_file import write_report
from mmq.verify.structure import check_structure
from mmq.verify.subject import Subject, open_subject, refuse_same

LEVELS = ("structure", "weights", "logits")


def verify(
    out: str,
    against: str | None,
    level: str | None,
    *,
    strict: bool,
    report_path: Path | None,
    console: Console,
    logits: LogitsSettings | None = None,
    downloads: DownloadSettings | None = None,
    jobs: int | None = None,
) -> VerifyReport:
    """Judge OUT; defects of OUT are findings, never exceptions.

    Args:
        against: the checkpoint OUT was made from.
        level: highest level to run; weights by default where there is a source with weights.
        logits: what level logits is to do.
        strict: whether the caller lets warnings fail; the verdict says "warn" either way.
        report_path: where mmq-verify.json goes; by default into OUT, if that is a writable folder.
        downloads: where what is read of checkpoints on the Hub lies, and whether it stays.
        jobs: worker processes of level weights; None for as many as pay.

    Raises:
        UsageError: the level needs a source, or the source's weights.
        BadInputError: the source is damaged, or OUT is not there.
        IncompleteError: the conversion into OUT has not finished, or the Hub does not answer.
        ReportNotWrittenError: the report is nowhere.
    """
    settings = logits or LogitsSettings()
    _check_level(level, against)
    refuse_same(out, against)
    read_gates(settings.gates)
    if level == "logits":
        from mmq.verify.logits.tokens import check_files

        settings.check()
        _check_device(settings)
        check_files(settings.texts, settings.tokens)
    if not (Path(out) / INDEX_NAME).exists():
        refuse_unfinished(Path(out))  # its hundreds of findings would all say this
    remote = needs_report_path(out, level, report_path)
    fetch = downloads or DownloadSettings()
    out, against = local_locations(out, against, level, fetch.folder, console)
    expectation = open_source(against) if against is not None else None
    judged = _run_levels(
        out, expectation, _level(level, expectation), settings, report_path, fetch, console,
        writable=not remote, jobs=jobs,
    )  # fmt: skip
    report = build_report(
        judged.subject, expectation, judged.logs, judged.results, judged.metrics, judged.files,
        judged.figures,
    )  # fmt: skip
    if remote and report_path is None:
        console.note(f"{VERIFY_REPORT} was not written: OUT is on the Hub; use -o FILE")
    else:
        write_report(report, judged.subject.root, report_path, console)
    return report


@dataclass
class _Judged:
    """What the levels of one run left."""

    subject: Subject
    logs: list[LevelLog]
    results: list[LevelResult] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    files: list[FileEntry] = field(default_factory=list)
    figures: LogitsReport | None = None

    def begin(self, level: Level, console: Console) -> LevelLog:
        self.logs.append(LevelLog(level, console))
        return self.logs[-1]

    def end(self) -> None:
        """The last level begun is over."""
        self.results.append(self.logs[-1].result())


def _run_levels(
    out: str, expectation: Expectation | None, level: str, settings: LogitsSettings,
    report_path: Path | None, downloads: DownloadSettings, console: Console, *, writable: bool,
    jobs: int | None,
) -> _Judged:  # fmt: skip
    """Structure, and the levels above it up to `level`.

    Args:
        writable: whether OUT is a folder that may be written into.
    """
    log = LevelLog("structure", console)
    subject, findings = open_subject(out)
    judged = _Judged(subject, [log])
    log.run("opened", 1, findings)
    if expectation is not None:
        log.run("plan", 1, plan_expectation(expectation, subject))
    check_structure(subject, expectation, log, last_level=level == "structure")
    if level == "structure":
        judged.files = _small_files(subject, log)
    judged.end()
    if level == "structure":
        return judged
    assert expectation is not None
    gates = read_gates(settings.gates, searched=_searched(subject))
    log = judged.begin("weights", console)
    beside = report_path.parent if report_path else subject.root if writable else None
    place = DownloadPlace(downloads, beside)
    judged.metrics, judged.files = _weights(subject, expectation, log, console, place, jobs)
    _judge_weights(judged.metrics, subject, gates, log)
    judged.end()
    if level == "logits":
        log = judged.begin("logits", console)
        if judged.results[0].status == "fail":
            log.leave_out("logits: OUT's structure must be right before it can be run")
        else:
            judged.figures = _logits(
                subject, expectation, settings, gates, report_path, log, console
            )
        judged.end()
    return judged


def _check_level(level: str | None, against: str | None) -> None:
    if level is not None and level not in LEVELS:
        raise UsageError("option-value", f"--level {level} is unknown", got=level,
                         expected=", ".join(LEVELS))  # fmt: skip
    if level in ("weights", "logits") and against is None:
        raise UsageError(
            "level-needs-source", f"--level {level} compares with the source",
            hint="mmq verify OUT --against SRC",
        )  # fmt: skip


def _check_device(settings: LogitsSettings) -> None:
    """Before a weight is read.

    Raises:
        MachineError: the device is not there.
    """
    if settings.device != "cpu":
        from mmq.convert.device import find_place

        find_place(settings.device)


def _level(level: str | None, expectation: Expectation | None) -> str:
    has_weights = expectation is not None and expectation.source.root is not None
    if level in ("weights", "logits") and not has_weights:
        assert expectation is not None
        raise UsageError(
            "source-has-no-weights",
            f"{expectation.source.location} is a header manifest: it has no weights",
            where=expectation.source.location, hint="--level structure",
        )  # fmt: skip
    return level or ("weights" if has_weights else "structure")


def _weights(
    subject: Subject, expectation: Expectation, log: LevelLog, console: Console,
    place: DownloadPlace, jobs: int | None,
) -> tuple[dict[str, float], list[FileEntry]]:  # fmt: skip
    from mmq.verify.weights import check_weights

    if subject.root is None or not subject.shards:
        log.add(Finding("nothing-compared", "error", "OUT has no weights that could be read",
                        where=subject.location, got="0 tensors"))  # fmt: skip
        return {}, []
    return check_weights(subject, expectation, log, console, place, jobs)


def _searched(subject: Subject) -> bool:
    """Whether OUT's manifest says that block scales were chosen by least error."""
    options = (subject.manifest or {}).get("options")
    return isinstance(options, dict) and options.get("scale_search") == "mse"


def _judge_weights(
    metrics: Mapping[str, float], subject: Subject, gates: Mapping[str, Gate], log: LevelLog
) -> None:
    """The gates on what level weights measured; no sampling is involved, so no error either."""
    measures = {name: Measure(value=value) for name, value in metrics.items() if name in gates}
    results = judge(gates, measures)
    log.run("gates", len(results), gate_findings(results, subject.location))


def _logits(
    subject: Subject, expectation: Expectation, settings: LogitsSettings,
    gates: Mapping[str, Gate], report_path: Path | None, log: LevelLog, console: Console,
) -> LogitsReport | None:  # fmt: skip
    from mmq.verify.logits.run import check_logits

    folder = report_path.parent if report_path else subject.root
    assert folder is not None
    return check_logits(subject, expectation, settings, gates, folder, log, console)


def _small_files(subject: Subject, log: LevelLog) -> list[FileEntry]:
    """The JSON files that a structure check judged; shards are hashed by level weights."""
    hashes: dict[str, FileEntry] = {}
    if subject.root is not None:
        names = subject.json_files
        log.run("files hashed", len(names), hash_files(subject.root, names, hashes))
    return [hashes[name] for name in sorted(hashes)]


def build_report(
    subject: Subject, expectation: Expectation | None, logs: list[LevelLog],
    results: list[LevelResult], metrics: dict[str, float], files: list[FileEntry],
    logits: LogitsReport | None = None,
) -> VerifyReport:  # fmt: skip
    """The report of the levels that were run, and the verdict."""
    findings = [f for log in logs for f in log.findings]
    source = expectation.source if expectation else None
    against = None if source is None else Endpoint(
        location=source.location, tensors=len(source.tensors), shards=len(source.shards),
        payload_bytes=source.nbytes,
        file_bytes=sum(s.file_bytes for s in source.shards.values()) or None,
        **source_revision(source)._asdict(),
    )  # fmt: skip
    return VerifyReport(
        versions=_versions(),
        numerics_version=NUMERICS_VERSION,
        checkpoint=Endpoint(
            location=subject.location, tensors=len(subject.tensors), shards=len(subject.shards),
            payload_bytes=subject.payload_bytes,
            file_bytes=sum(s.file_bytes for s in subject.shards.values()) or None,
        ),
        against=against,
        verdict=_verdict(findings, results),
        levels=results,
        metrics=metrics,
        logits=logits,
        findings=[entry for log in logs for entry in log.entries],
        files=files,
        against_files=[] if source is None else [
            SourceShard(name=name, bytes=shard.file_bytes, header_sha256=shard.header_sha256,
                        sha256=shard.sha256)
            for name, shard in sorted(source.shards.items())
        ],
    )  # fmt: skip


def _verdict(findings: list[Finding], results: list[LevelResult]) -> Status:
    """The worst finding's; a level that was asked for and not run leaves it open."""
    status = worst(findings)
    skipped = any(result.status == "skipped" for result in results)
    return "inconclusive" if skipped and status != "fail" else status


def _versions() -> dict[str, str]:
    """Versions of what had a part in the verdict, without importing it."""
    found = {"mmq": __version__, "python": platform.python_version()}
    for name in ("numpy", "numba"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found

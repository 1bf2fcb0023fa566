"""Where a verification's report goes, and which one it may replace."""

from __future__ import annotations

import os
from pathlib import Path

from mmq.console import Console
from mmq.convert.writer import json_bytes, write_file
from mmq.errors import MachineError, MmqError
from mmq.report.file_names import VERIFY_REPORT
from mmq.report.load import read_report
from mmq.report.schema import VerifyReport

#: Levels in the order in which they include each other.
_LEVELS = ("structure", "weights", "logits")


class ReportNotWrittenError(MachineError):
    """A verification whose report is nowhere: what reads it next would read an older one, or none.

    Attributes:
        report: what was to be written.
    """

    def __init__(self, report: VerifyReport, path: Path, reason: str) -> None:
        super().__init__(
            "report-not-written", f"the report was not written: {reason}", where=str(path),
            hint="-o FILE on another disk",
        )  # fmt: skip
        self.report = report


def write_report(
    report: VerifyReport, root: Path | None, path: Path | None, console: Console
) -> None:
    """Write the report: to `path`, or into OUT's folder where that can be written into.

    In OUT a report of more levels stays, as long as it is about the same files and this run found
    nothing wrong: it took longer to get.

    Raises:
        ReportNotWrittenError: the disk is full, or an older report cannot be replaced.
    """
    target = path or (root / VERIFY_REPORT if root is not None and root.is_dir() else None)
    if target is None:
        return
    if path is None and (kept := _more(target, report)):
        console.note(
            f"{target.name} keeps its report of level {kept}, which is about the same files;"
            " use -o FILE for this run's"
        )
        return
    if path is None and not os.access(target.parent, os.W_OK) and not target.exists():
        console.note(f"{target.name} was not written: {target.parent} is read-only; use -o FILE")
        return
    try:
        if not os.access(target.parent, os.W_OK):
            raise PermissionError(f"{target.parent} is read-only")
        write_file(target, json_bytes(report.model_dump()))
    except (OSError, MmqError) as error:
        reason = error.message if isinstance(error, MmqError) else str(error)
        raise ReportNotWrittenError(report, target, reason) from error


def _more(target: Path, report: VerifyReport) -> str:
    """The highest level of the report that is there, if it should stay; else ""."""
    try:
        old = read_report(target)
    except MmqError:
        return ""
    if not isinstance(old, VerifyReport) or report.verdict not in ("pass", "warn"):
        return ""
    highest = max((level.level for level in old.levels), key=_rank, default="")
    if _rank(highest) <= max((_rank(level.level) for level in report.levels), default=0):
        return ""
    before = {file.name: file.sha256 for file in old.files}
    same = all(before.get(file.name) == file.sha256 for file in report.files)
    return highest if same else ""


def _rank(level: str) -> int:
    return _LEVELS.index(level) if level in _LEVELS else -1

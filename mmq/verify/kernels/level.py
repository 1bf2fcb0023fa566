"""`mmq verify --level kernels`: a level of its own, with or without a checkpoint."""

from __future__ import annotations

from pathlib import Path

from mmq.console import Console
from mmq.convert.writer import json_bytes, write_file
from mmq.errors import MachineError
from mmq.report.schema import VerifyReport
from mmq.verify.kernels.run import check_kernels, unmet
from mmq.verify.log import LevelLog
from mmq.verify.run import build_report
from mmq.verify.subject import Subject, open_subject

#: Stands for a checkpoint's location where there is none.
NO_CHECKPOINT = "no checkpoint"


def verify_kernels(
    out: str | None, *, device: str | None, require: str | None, report_path: Path | None,
    console: Console,
) -> tuple[VerifyReport, MachineError | None]:  # fmt: skip
    """Run the level; a report, and what the machine did not meet of what was asked for.

    The report is written where `report_path` says and nowhere else: OUT's own report speaks of OUT.

    Args:
        out: a checkpoint, one of whose layers each operation runs on too.
        device, require: see `mmq.verify.kernels.run`.

    Raises:
        MachineError: `device` is "cuda" and there is none.
    """
    log = LevelLog("kernels", console)
    subject = Subject(NO_CHECKPOINT, None)
    if out is not None:
        subject, findings = open_subject(out)
        log.run("opened", 1, findings)
    kernels = check_kernels(out if not log.named else None, device, log, console)
    report = build_report(subject, None, [log], [log.result()], {}, [])
    report = report.model_copy(update={"kernels": kernels})
    if report_path is not None:
        write_file(report_path, json_bytes(report.model_dump()))
    return report, unmet(kernels, require)

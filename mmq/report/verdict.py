"""A verification as lines of text: levels, what was skipped, metrics, logits, verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from mmq.report.escape import plain
from mmq.report.figures import number, plural
from mmq.report.kernel_lines import kernel_lines
from mmq.report.logits_text import logits_lines
from mmq.report.schema import KernelsReport, LogitsReport

SEVERITIES = ("error", "warning", "note")


def verify_lines(report: Mapping[str, Any]) -> list[str]:
    """What `mmq verify` prints after its findings; `report` is a VerifyReport as a dict."""
    lines = [_level_line(level) for level in report["levels"]]
    lines += [
        f"skipped  {plain(reason)}" for level in report["levels"] for reason in level["skipped"]
    ]
    lines += [f"metric   {plain(name)} {number(v)}" for name, v in report["metrics"].items()]
    if report.get("logits"):
        lines += logits_lines(LogitsReport.model_validate(report["logits"]))
    if report.get("kernels"):
        lines += kernel_lines(KernelsReport.model_validate(report["kernels"]))
    return [*lines, f"verdict  {report['verdict'].upper()}: {counted(report['findings'])}"]


def counted(findings: list[dict[str, Any]]) -> str:
    """`1 error, 0 warnings, 2 notes`."""
    count = Counter(finding["severity"] for finding in findings)
    return ", ".join(plural(count[severity], severity) for severity in SEVERITIES)


def _level_line(level: Mapping[str, Any]) -> str:
    things = sum(level["checks"].values())
    return (
        f"level    {level['level']}: {level['status']}, {plural(things, 'thing')} in"
        f" {plural(len(level['checks']), 'check')}, {level['seconds']:.1f} s"
    )

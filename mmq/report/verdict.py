"""A verification as lines of text: levels, what was skipped, metrics, verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

_SEVERITIES = ("error", "warning", "note")


def verify_lines(report: Mapping[str, Any]) -> list[str]:
    """What `mmq verify` prints after its findings; `report` is a VerifyReport as a dict."""
    count = Counter(finding["severity"] for finding in report["findings"])
    found = ", ".join(f"{count[s]} {s}{'s' if count[s] != 1 else ''}" for s in _SEVERITIES)
    lines = [_level_line(level) for level in report["levels"]]
    lines += [f"skipped  {reason}" for level in report["levels"] for reason in level["skipped"]]
    lines += [f"metric   {name} {_number(value)}" for name, value in report["metrics"].items()]
    return [*lines, f"verdict  {report['verdict'].upper()}: {found}"]


def _level_line(level: Mapping[str, Any]) -> str:
    things = sum(level["checks"].values())
    return (
        f"level    {level['level']}: {level['status']}, {things:,} things in"
        f" {len(level['checks'])} checks, {level['seconds']:.1f} s"
    )


def _number(value: float) -> str:
    """Counts as counts, measurements with three decimals."""
    return f"{int(value):,}" if value == int(value) else f"{value:.3f}"

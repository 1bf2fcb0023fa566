"""What a level of verification looked at, found, and left out."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from typing import Literal

from mmq.console import Console
from mmq.report.findings import Finding
from mmq.report.schema import FindingEntry, LevelResult

Status = Literal["pass", "warn", "inconclusive", "fail"]
Level = Literal["structure", "weights", "logits", "kernels"]

#: The finding of a figure too close to its limit to decide.
UNDECIDED = "gate-inconclusive"

#: Findings of one id told one by one; the rest become a number. A lost shard has 16,000 tensors.
MAX_PER_ID = 100


class LevelLog:
    """Collects one level's findings and says each to the console as it comes.

    Attributes:
        entries: the findings as the report holds them, with level and check.
        named: `where` of every error so far, so that a later, more general check can stay silent
            about a tensor that a sharper one has named.
    """

    def __init__(self, level: Level, console: Console) -> None:
        self.level = level
        self.findings: list[Finding] = []
        self.entries: list[FindingEntry] = []
        self.named: set[str] = set()
        self._console = console
        self._checks: Counter[str] = Counter()
        self._skipped: list[str] = []
        self._left_out = False
        self._counts: Counter[tuple[str, str]] = Counter()
        self._check_of: dict[tuple[str, str], str] = {}
        self._started = time.monotonic()

    def run(self, check: str, looked_at: int, findings: Iterable[Finding] = ()) -> None:
        """Count what a check looks at and take in what it finds."""
        self._checks[check] += looked_at
        for finding in findings:
            self.add(finding, check)

    def add(self, finding: Finding, check: str = "") -> None:
        """Take in a finding; without a check it is the level's as a whole."""
        if finding.severity == "error":
            self.named.add(finding.where)
        kind = (finding.id, finding.severity)
        self._counts[kind] += 1
        self._check_of.setdefault(kind, check)
        if self._counts[kind] <= MAX_PER_ID:
            self._tell(finding, check)

    def skip(self, reason: str) -> None:
        """Something this level does not say anything about, and why."""
        if reason not in self._skipped:
            self._skipped.append(reason)
            self._console.note(f"skipped: {reason}")

    def leave_out(self, reason: str) -> None:
        """The level as a whole says nothing: it counts as skipped, never as passed."""
        self._left_out = True
        self.skip(reason)

    def _tell(self, finding: Finding, check: str) -> None:
        self.findings.append(finding)
        self.entries.append(FindingEntry(**finding.as_dict(), level=self.level, check=check))
        self._console.finding(finding)

    def result(self) -> LevelResult:
        """The level's entry in the report; findings beyond `MAX_PER_ID` are summed up first."""
        for (id, severity), count in self._counts.items():
            if count > MAX_PER_ID:
                text = f"{count - MAX_PER_ID:,} more of {id}"
                check = self._check_of[id, severity]
                self._tell(Finding(id, severity, text, got=f"{count:,} in all"), check)
        seconds = round(time.monotonic() - self._started, 3)
        status = worst(self.findings)
        return LevelResult(
            level=self.level, checks=dict(self._checks),
            status="skipped" if self._left_out and status != "fail" else status,
            skipped=self._skipped, seconds=seconds,
        )  # fmt: skip


def worst(findings: Iterable[Finding]) -> Status:
    """fail on any error, else inconclusive on an undecided gate, warn on any warning, else pass."""
    kinds = {f.id if f.id == UNDECIDED else f.severity for f in findings}
    if "error" in kinds:
        return "fail"
    if UNDECIDED in kinds:
        return "inconclusive"
    return "warn" if "warning" in kinds else "pass"

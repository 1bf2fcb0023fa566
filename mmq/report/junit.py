"""A report as JUnit XML: a suite per level, a case per check, gate and group of layers.

A check that found nothing wrong is a passed case. What it found wrong is a failed case for each id
and group of ten layers: the finding's id is the case's class and the failure's type. Warnings and
notes stand in a suite's system-out. What was skipped is a skipped case. The verdict is a case too:
whatever made it, a verification that failed has a failure.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from mmq.report.escape import shortened, xml
from mmq.report.figures import fixed, plural, significant, with_error
from mmq.report.kernel_sections import within_bound
from mmq.report.layers import LayerFigures, layer_figures
from mmq.report.load import Reports
from mmq.report.logits_text import gate_status
from mmq.report.schema import (
    ConvertReport,
    FindingEntry,
    GateResult,
    KernelResult,
    LevelResult,
    LogitsReport,
    VerifyReport,
)
from mmq.report.verdict import counted

#: Layers of one case.
GROUP = 10
_LAYER = re.compile(r"\blayers?[. ](\d{1,6})\b")
_MOST_CHARACTERS = 2000


class Case(NamedTuple):
    """One test case.

    Attributes:
        outcome: "" for passed, "failure" or "skipped".
        kind / message / text: of a failure or a skip; `text` alone is the output of a passed case.
    """

    group: str
    name: str
    outcome: str = ""
    kind: str = ""
    message: str = ""
    text: str = ""
    seconds: float = 0.0


class Suite(NamedTuple):
    """Cases under a name; `output` is text that belongs to no case."""

    name: str
    cases: Sequence[Case]
    seconds: float
    output: str = ""


def junit_text(reports: Reports) -> str:
    """The XML document."""
    suites: list[Suite] = []
    if reports.verify is not None:
        suites += verify_suites(reports.verify)
    if reports.convert is not None:
        suites.append(convert_suite(reports.convert))
    cases = [case for suite in suites for case in suite.cases]
    seconds = sum(suite.seconds for suite in suites)
    head = f'<testsuites name="mmq" {_counts(cases)} time="{_time(seconds)}">'
    lines = ['<?xml version="1.0" encoding="UTF-8"?>', head]
    for suite in suites:
        lines += _suite_lines(suite)
    return "\n".join([*lines, "</testsuites>"]) + "\n"


def verify_suites(report: VerifyReport) -> list[Suite]:
    """A suite per level, the verdict's, and one of findings that name no level of the report."""
    levels = {level.level for level in report.levels}
    by_level: dict[str, list[FindingEntry]] = defaultdict(list)
    for finding in report.findings:
        if _is_told_by_its_case(finding, report, levels):
            continue
        by_level[finding.level if finding.level in levels else ""].append(finding)
    suites = [_level_suite(level, by_level[level.level], report) for level in report.levels]
    if by_level[""]:
        cases = _failures(by_level[""], "findings")
        suites.append(Suite("mmq.findings", cases, 0.0, _remarks(by_level[""])))
    return [*suites, Suite("mmq.verdict", [_verdict_case(report)], 0.0)]


def _verdict_case(report: VerifyReport) -> Case:
    """It fails where `mmq verify` exits 3."""
    text = f"{report.verdict}: {counted([f.model_dump() for f in report.findings])}"
    if report.verdict in ("pass", "warn"):
        return Case("mmq.verdict", "verdict", text=text)
    kind = f"verdict-{report.verdict}"
    return Case("mmq.verdict", "verdict", "failure", kind, f"the verdict is {report.verdict}", text)


def _is_told_by_its_case(
    finding: FindingEntry, report: VerifyReport, levels: Collection[str]
) -> bool:
    """Gates and kernels are cases of their own; a finding about one would be told twice."""
    kernels = report.kernels.results if report.kernels and "kernels" in levels else ()
    gates = report.logits.gates if report.logits and "logits" in levels else ()
    return (
        finding.severity == "error"
        and any(finding.id == _kernel_failure(r) and _is_about(finding, r) for r in kernels)
    ) or any(
        finding.id == f"gate-{g.status}" and finding.message.startswith(f"{g.gate} ") for g in gates
    )


def _kernel_failure(result: KernelResult) -> str:
    """The id of what is wrong with an operation; "" where nothing is."""
    if result.status == "crashed":
        return "kernel-crashed"
    return "" if result.status == "skipped" or within_bound(result) else "kernel-differs"


def _is_about(finding: FindingEntry, result: KernelResult) -> bool:
    """Whether its place is this operation: `moe`, or `moe; 7 tokens`, and not `moe_router`."""
    return finding.where.partition(";")[0] == result.op


def convert_suite(report: ConvertReport) -> Suite:
    """A conversion that ended has no errors; its warnings and notes are told."""
    written = f"{plural(len(report.files), 'file')} written"
    cases = [Case("mmq.convert", "written", text=written, seconds=report.timing.seconds)]
    cases += _failures(report.findings, "convert")
    return Suite("mmq.convert", cases, report.timing.seconds, _remarks(report.findings))


def _level_suite(
    level: LevelResult, findings: Sequence[FindingEntry], report: VerifyReport
) -> Suite:
    group = f"mmq.{level.level}"
    kernels = report.kernels.results if report.kernels and level.level == "kernels" else ()
    logits = report.logits if level.level == "logits" else None
    gates = () if logits is None else logits.gates
    failed = {f.check for f in findings if f.severity == "error"}
    # a finding need not name its level: then no check of a failed level counts as passed
    unattributed = not failed and not any(g.status == "fail" for g in gates) and not kernels
    unknown = level.status == "fail" and unattributed
    cases = []
    with_cases = {"gates"} if gates else {k.op for k in kernels}
    for check, things in level.checks.items():
        if check in with_cases:
            continue
        text = f"{things:,} looked at"
        if unknown:
            reason = f"the level is {level.status}; what failed it names no level"
            cases.append(Case(group, check, "skipped", "", reason, text))
        elif check not in failed:
            cases.append(Case(group, check, text=text))
    cases += [Case(group, reason, "skipped", "", reason) for reason in level.skipped]
    cases += _failures(findings, level.level)
    cases += [_kernel_case(group, result, report.findings) for result in kernels]
    if logits is not None:
        cases += [_gate_case(group, gate) for gate in gates]
        cases += _layer_cases(group, logits)
    if not cases:
        cases = [Case(group, level.level, "skipped", "", "nothing was looked at")]
    return Suite(group, cases, level.seconds, _remarks(findings))


def _failures(findings: Iterable[FindingEntry], fallback: str) -> list[Case]:
    groups: dict[tuple[str, str, str], list[FindingEntry]] = defaultdict(list)
    for finding in findings:
        if finding.severity == "error":
            groups[finding.id, finding.check or fallback, _layers_of(finding)].append(finding)
    cases = []
    for (id, check, layers), found in groups.items():
        name = " ".join(filter(None, (check, layers or shortened(found[0].where, 120))))
        more = f" (and {len(found) - 1:,} more)" if len(found) > 1 else ""
        text = "\n".join(map(_finding_text, found))
        cases.append(Case(id, name, "failure", id, found[0].message + more, text))
    return cases


def _layers_of(finding: FindingEntry) -> str:
    """The group of layers that a finding is about; "" when it names no layer."""
    match = _LAYER.search(finding.where)
    if match is None:
        return ""
    first = int(match.group(1)) // GROUP * GROUP
    return f"layers {first}–{first + GROUP - 1}"


def _gate_case(group: str, gate: GateResult) -> Case:
    text = (
        f"{with_error(gate.value, gate.se)}, target {gate.target:g}, limit {gate.fail:g}:"
        f" {gate_status(gate)}"
    )
    name = f"gate {gate.gate}"
    if gate.status in ("pass", "warn"):
        return Case(group, name, text=text)
    return Case(f"gate-{gate.status}", name, "failure", f"gate-{gate.status}", text, text)


def _kernel_case(group: str, result: KernelResult, findings: Sequence[FindingEntry]) -> Case:
    """An operation's case; its findings, with each case that differs, are the failure's text."""
    worst = "not finite" if result.worst is None else significant(result.worst, 3)
    text = (
        f"{result.status} on {result.target}, {result.path}: {result.cases:,} cases,"
        f" {result.values:,} values, worst {worst}, allowed {significant(result.bound, 3)}"
    )
    name, seconds = f"kernel {result.op}", result.seconds
    if result.status == "skipped":
        return Case(group, name, "skipped", "", result.reason, seconds=seconds)
    kind = _kernel_failure(result)
    if not kind:
        return Case(group, name, text=text, seconds=seconds)
    found = [f for f in findings if f.id == kind and _is_about(f, result)]
    message = result.reason if result.status == "crashed" else text
    told = "\n".join([text, *map(_finding_text, found)])
    return Case(kind, name, "failure", kind, message, told, seconds)


def _layer_cases(group: str, logits: LogitsReport) -> list[Case]:
    """What each group of layers did; it has no limits of its own, so it passes by having run."""
    figures = layer_figures(logits, logits.judged)
    groups: dict[int, list[LayerFigures]] = defaultdict(list)
    for layer in figures:
        groups[layer.layer // GROUP].append(layer)
    return [
        Case(
            group, f"layers {found[0].layer}–{found[-1].layer}",
            text="\n".join(map(_layer_text, found)),
        )
        for found in groups.values()
    ]  # fmt: skip


def _layer_text(f: LayerFigures) -> str:
    parts = [f"layer {f.layer}"]
    if f.cosine is not None:
        parts.append(f"cosine {fixed(f.cosine, 6)}")
    if f.routing is not None:
        parts.append(f"same experts {fixed(f.routing, 4)}")
    if f.overlap is not None:
        parts.append(f"blocks in common {fixed(f.overlap, 4)}")
    return ", ".join(parts)


def _remarks(findings: Iterable[FindingEntry]) -> str:
    return "\n".join(_finding_text(f) for f in findings if f.severity != "error")


def _finding_text(finding: FindingEntry) -> str:
    text = f"{finding.severity}[{finding.id}] {finding.message}"
    for head, value in (
        ("where", finding.where), ("got", finding.got), ("expected", finding.expected),
    ):  # fmt: skip
        text += f"; {head}: {value}" if value else ""
    return shortened(text, _MOST_CHARACTERS)


def _suite_lines(suite: Suite) -> list[str]:
    head = (
        f'<testsuite name="{xml(suite.name)}" {_counts(suite.cases)} time="{_time(suite.seconds)}">'
    )
    lines = [f"  {head}"]
    for case in suite.cases:
        lines += _case_lines(case)
    if suite.output:
        lines.append(f"    <system-out>{_block(suite.output)}</system-out>")
    return [*lines, "  </testsuite>"]


def _case_lines(case: Case) -> list[str]:
    head = (
        f'    <testcase classname="{xml(case.group)}" name="{xml(case.name)}"'
        f' time="{_time(case.seconds)}"'
    )
    if not case.outcome:
        return [f"{head}><system-out>{_block(case.text)}</system-out></testcase>"]
    kind = f' type="{xml(case.kind)}"' if case.kind else ""
    message = xml(shortened(case.message, 500))
    body = f'<{case.outcome}{kind} message="{message}">{_block(case.text)}</{case.outcome}>'
    return [f"{head}>{body}</testcase>"]


def _block(text: str) -> str:
    """Text of several lines: each escaped, the line ends kept."""
    return "\n".join(map(xml, text.split("\n")))


def _time(seconds: float) -> str:
    """Readers of JUnit take numbers alone: what is none is no time."""
    return f"{seconds:.3f}" if 0 <= seconds < 1e9 else "0.000"


def _counts(cases: Sequence[Case]) -> str:
    failures = sum(c.outcome == "failure" for c in cases)
    skipped = sum(c.outcome == "skipped" for c in cases)
    return f'tests="{len(cases)}" failures="{failures}" errors="0" skipped="{skipped}"'

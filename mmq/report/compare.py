"""Two reports of a kind side by side: settings, figures, findings and files that differ.

Two figures with standard errors a and b differ beyond 2 SE when |A − B| > 2·√(a² + b²). That takes
them as independent; over the same tokens they are not, and the true error is smaller.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable
from typing import Any

from mmq.errors import UsageError
from mmq.report import document as doc
from mmq.report.document import Cell, Column, Document, Section, Table
from mmq.report.figures import measure, significant
from mmq.report.load import Report, Reports
from mmq.report.schema import ConvertReport, FindingEntry, Measure, VerifyReport
from mmq.report.sections import finding_pairs, findings_section
from mmq.report.settings import flat

#: Rows of a table of differences.
MOST_ROWS = 200
_SAME = "the same"
_WITHOUT = "no SE"


def compare_documents(first: Reports, second: Reports) -> Document:
    """What differs between two reports of one kind (the verification's where there are two).

    Raises:
        UsageError: they have no kind in common.
    """
    if first.verify is not None and second.verify is not None:
        return _compare(first.verify, second.verify)
    if first.convert is not None and second.convert is not None:
        return _compare(first.convert, second.convert)
    kinds = (first.found[0].kind, second.found[0].kind)
    raise UsageError(
        "reports-differ-in-kind", "a conversion and a verification have nothing to compare",
        got=" and ".join(kinds), expected="two reports of one kind",
    )  # fmt: skip


def _compare(a: Report, b: Report) -> Document:
    facts = [("A", _about(a)), ("B", _about(b))]
    if isinstance(a, VerifyReport) and isinstance(b, VerifyReport):
        a, b, alone = _common(a, b)
        facts += alone
    sections = [_new_and_gone(a, b), _settings(a, b), _figures(a, b), _files(a, b)]
    return Document("mmq report: A and B", "", facts, sections)


def _common(
    a: VerifyReport, b: VerifyReport
) -> tuple[VerifyReport, VerifyReport, list[tuple[str, str]]]:
    """Both without the levels that only one of them ran, and which those are."""
    alone = []
    for level in ("logits", "kernels"):
        has = getattr(a, level) is not None, getattr(b, level) is not None
        if has[0] != has[1]:
            alone.append(("only in", f"{'A' if has[0] else 'B'}: level {level}"))
            a = a.model_copy(update={level: None})
            b = b.model_copy(update={level: None})
    return a, b, alone


def _about(report: Report) -> str:
    if isinstance(report, VerifyReport):
        return f"verify, {report.verdict}: {report.checkpoint.location}, mmq {_version(report)}"
    return f"convert of {report.source.location}, mmq {_version(report)}"


def _version(report: Report) -> str:
    return f"{report.versions.get('mmq', '?')}, numerics {report.numerics_version}"


def _new_and_gone(a: Report, b: Report) -> Section:
    """Findings by id, place and words; what both have is only counted."""
    ours = {_identity(f, a): (f"gone in B, {origin}", f) for origin, f in finding_pairs(a)}
    theirs = {_identity(f, b): (f"new in B, {origin}", f) for origin, f in finding_pairs(b)}
    new = [pair for key, pair in theirs.items() if key not in ours]
    gone = [pair for key, pair in ours.items() if key not in theirs]
    section = findings_section([*new, *gone])
    both = len(ours.keys() & theirs.keys())
    counts = f"{len(new):,} new in B, {len(gone):,} gone in B, {both:,} in both."
    return Section("findings", "Findings", [counts], section.tables)


def _identity(finding: FindingEntry, report: Report) -> tuple[str, ...]:
    """Its id, words and place; a checkpoint as a whole is the same place under another name."""
    whole = report.checkpoint if isinstance(report, VerifyReport) else report.output
    where = "" if finding.where == whole.location else finding.where
    return finding.id, finding.severity, where, finding.message


def _settings(a: Report, b: Report) -> Section:
    ours, theirs = dict(flat(_setting_values(a))), dict(flat(_setting_values(b)))
    rows = [
        [doc.name(key), doc.words(ours.get(key, "–")), doc.words(theirs.get(key, "–"))]
        for key in dict.fromkeys([*ours, *theirs])
        if ours.get(key) != theirs.get(key)
    ]
    table = Table("Settings that differ", [Column(t, False) for t in ("setting", "A", "B")],
                  rows[:MOST_ROWS], len(rows))  # fmt: skip
    same = sum(theirs.get(key) == value for key, value in ours.items())
    return Section("settings", "Settings", [f"{len(rows):,} differ, {same:,} are {_SAME}."],
                   [table])  # fmt: skip


def _setting_values(report: Report) -> dict[str, Any]:
    values: dict[str, Any] = {"versions": report.versions,
                              "numerics_version": report.numerics_version}  # fmt: skip
    if isinstance(report, ConvertReport):
        return {
            **values, "options": report.options, "calibration": report.calibration,
            "source": report.source.model_dump(exclude={"file_bytes"}),
            "config_edits": report.config_edits, "dropped": report.dropped,
            "timing": report.timing.model_dump(include={"jobs", "device", "backend"}),
        }  # fmt: skip
    values["levels"] = [level.level for level in report.levels]
    for name, end in (("checkpoint", report.checkpoint), ("against", report.against)):
        if end is not None:
            values[name] = end.model_dump()
    if report.kernels is not None:
        values["kernels"] = report.kernels.model_dump(exclude={"results"})
    if (logits := report.logits) is not None:
        values["logits"] = {
            **logits.settings, "convention": logits.convention, "judged": logits.judged,
            "tokens_sha256": logits.tokens_sha256, "scored": logits.scored,
        }  # fmt: skip
        values["gates"] = {g.gate: {"target": g.target, "limit": g.fail} for g in logits.gates}
    return values


def _figures(a: Report, b: Report) -> Section:
    counted = dict(_counts(a)), dict(_counts(b))
    ours, theirs = counted[0] | dict(_measures(a)), counted[1] | dict(_measures(b))
    keys = dict.fromkeys([*ours, *theirs])
    rows = [
        _figure_row(k, ours.get(k), theirs.get(k), {*counted[0], *counted[1]})
        for k in keys if _other(ours.get(k), theirs.get(k))
    ]  # fmt: skip
    columns = [Column("figure", False), *map(Column, ("A", "B", "B − A", "2 SE")),
               Column("differs", False)]  # fmt: skip
    lines = []
    if isinstance(a, VerifyReport) and isinstance(b, VerifyReport):
        lines.append(f"Verdict: {a.verdict} in A, {b.verdict} in B.")
        if a.logits and b.logits:
            same = a.logits.tokens_sha256 == b.logits.tokens_sha256
            lines.append(
                "Both scored the same tokens; 2 SE, which takes them as independent, is on the safe"
                " side." if same else "They scored other tokens: perplexities are not comparable."
            )  # fmt: skip
    verdicts = [row[-1].text for row in rows]
    lines.append(
        f"{len(rows):,} differ ({verdicts.count('beyond'):,} beyond two standard errors,"
        f" {verdicts.count(_WITHOUT):,} without one), {len(keys) - len(rows):,} are {_SAME}."
    )
    table = Table("Figures", columns, rows[:MOST_ROWS], len(rows))
    return Section("figures", "Figures", lines, [table])


def _figure_row(
    key: str, a: Measure | None, b: Measure | None, exact: Container[str]
) -> list[Cell]:
    """What differs, and whether that is more than chance; of a largest value nobody can say."""
    cells = [doc.name(key), *(_measure_cell(m) for m in (a, b))]
    if a is None or b is None:
        return [*cells, doc.words(""), doc.words(""), doc.words("only in " + ("A" if a else "B"))]
    difference = b.value - a.value
    error = None
    if key in exact:
        verdict = "exact"
    elif a.se is None or b.se is None:
        verdict = _WITHOUT
    else:
        error = 2 * math.hypot(a.se, b.se)
        # not "greater": a difference that is no number is beyond everything
        verdict = "within" if abs(difference) <= error else "beyond"
    return [
        *cells, doc.figure(significant(difference, 3, signed=True), difference),
        doc.figure("" if error is None else significant(error, 2), error), doc.words(verdict),
    ]  # fmt: skip


def _other(a: Measure | None, b: Measure | None) -> bool:
    """Whether they differ; what is no number in both does not."""
    if a is None or b is None:
        return a is not b
    return repr(a) != repr(b)


def _measure_cell(found: Measure | None) -> Cell:
    return doc.words("–") if found is None else doc.figure(measure(found), found.value)


def _counts(report: Report) -> Iterable[tuple[str, Measure]]:
    """Sizes, counts, and errors over all weights, by name: nothing about them is sampled."""
    if isinstance(report, ConvertReport):
        yield "output.payload_bytes", Measure(value=report.output.payload_bytes)
        yield "reduction", Measure(value=report.reduction)
        quality = report.quality.model_dump(exclude={"by_module", "histogram"})
        for key, value in quality.items():
            if isinstance(value, int | float):
                yield f"quality.{key}", Measure(value=value)
        for size in report.components:
            yield f"bytes.{size.component}", Measure(value=size.after_bytes)
        return
    for key, value in report.metrics.items():
        yield key, Measure(value=value)


def _measures(report: Report) -> Iterable[tuple[str, Measure]]:
    """Figures of forwards and kernels, by name: of the tokens and values that were tried."""
    if isinstance(report, ConvertReport):
        return
    if report.kernels is not None:
        for result in report.kernels.results:
            if result.worst is not None:
                yield f"kernels.{result.op}.worst", Measure(value=result.worst)
    if report.logits is None:
        return
    yield "source.perplexity", report.logits.source_perplexity
    for arm, figures in report.logits.arms.items():
        for key in type(figures).model_fields:
            yield f"{arm}.{key}", getattr(figures, key)


def _files(a: Report, b: Report) -> Section:
    ours = {f.name: f for f in a.files}
    theirs = {f.name: f for f in b.files}
    rows, same = [], 0
    for name in sorted({*ours, *theirs}):
        one, other = ours.get(name), theirs.get(name)
        if one and other and one.sha256 == other.sha256:
            same += 1
            continue
        how = "other bytes" if one and other else f"only in {'A' if one else 'B'}"
        shown = [doc.name(f.sha256[:16] if f else "–") for f in (one, other)]
        rows.append([doc.name(name), doc.words(how), *shown])
    columns = [Column(t, False) for t in ("file", "how", "SHA-256 in A", "SHA-256 in B")]
    table = Table("Files that differ", columns, rows[:MOST_ROWS], len(rows))
    return Section("files", "Files", [f"{len(rows):,} differ, {same:,} are {_SAME}."], [table])

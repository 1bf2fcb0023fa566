"""A verification or a conversion as a `Document`: findings first, then what they rest on."""

from __future__ import annotations

from collections.abc import Sequence

from mmq.report import document as doc
from mmq.report.convert_sections import conversion_section, quality_section, sizes_section
from mmq.report.document import Cell, Column, Document, Section, Table
from mmq.report.figures import number, plural
from mmq.report.kernel_sections import kernels_section
from mmq.report.load import Report, Reports
from mmq.report.logits_sections import gate_rows, logits_sections
from mmq.report.schema import ConvertReport, FileEntry, FindingEntry, VerifyReport
from mmq.report.tables import percent_change, percent_text, short_size, size_text
from mmq.report.verdict import SEVERITIES, counted

#: Findings and files shown; the JSON has all of them.
MOST_FINDINGS, MOST_FILES = 150, 300


def build_document(reports: Reports) -> Document:
    """One document of what there is: a verification, a conversion, or both."""
    verify, convert = reports.verify, reports.convert
    sections = [findings_section([pair for r in reports.found for pair in finding_pairs(r)])]
    if verify is not None:
        sections += [_verdict_section(verify)]
    if convert is not None:
        sections += [sizes_section(convert), quality_section(convert.quality)]
    elif verify is not None and verify.against is not None:
        sections.append(_size_section(verify))
    if verify is not None and verify.logits is not None:
        sections += logits_sections(verify.logits)
    if verify is not None and verify.kernels is not None:
        sections.append(kernels_section(verify.kernels))
    if convert is not None:
        sections.append(conversion_section(convert))
    sections.append(_files_section(reports))
    return Document(
        title=_title(reports), status=verify.verdict if verify else "", facts=_facts(reports),
        sections=sections,
    )  # fmt: skip


def _title(reports: Reports) -> str:
    if reports.verify is not None:
        return f"mmq verify: {reports.verify.verdict}"
    return "mmq convert"


def _facts(reports: Reports) -> list[tuple[str, str]]:
    facts = []
    verify, convert = reports.verify, reports.convert
    if verify is not None:
        facts.append(("checkpoint", f"{verify.checkpoint.location}, {_holds(verify)}"))
        if verify.against is not None:
            facts.append(("against", verify.against.location))
    elif convert is not None:
        facts.append(("source", f"{convert.source.location}, {_holds(convert)}"))
    if convert is not None:
        weights = convert.output.payload_bytes - convert.kv_scale_bytes
        before = convert.source.payload_bytes
        change = percent_text(percent_change(before, weights))
        facts.append(("weights", f"{short_size(before)} → {short_size(weights)} ({change})"))
    one = reports.found[0]
    versions = ", ".join(f"{name} {version}" for name, version in one.versions.items())
    return [*facts, ("made by", f"{versions}; numerics {one.numerics_version}"),
            *_disagreement(reports)]  # fmt: skip


def _holds(report: Report) -> str:
    end = report.checkpoint if isinstance(report, VerifyReport) else report.source
    return f"{plural(end.tensors, 'tensor')} in {plural(end.shards, 'shard')}"


def _disagreement(reports: Reports) -> list[tuple[str, str]]:
    """Both reports of a folder should tell of the same files."""
    if reports.verify is None or reports.convert is None:
        return []
    written = {f.name: f.sha256 for f in reports.convert.files}
    other = [f.name for f in reports.verify.files if written.get(f.name, f.sha256) != f.sha256]
    if not other:
        return []
    more = f" and {plural(len(other) - 1, 'more file')}" if len(other) > 1 else ""
    return [("careful", f"not the bytes that the conversion wrote: {other[0]}{more}")]


def findings_section(findings: Sequence[tuple[str, FindingEntry]]) -> Section:
    """Errors first, then warnings, then notes; `findings` come with what found them."""
    rank = {severity: n for n, severity in enumerate(SEVERITIES)}
    ordered = sorted(findings, key=lambda pair: rank[pair[1].severity])
    summary = counted([f.model_dump() for _, f in ordered])
    if not ordered:
        return Section("findings", "Findings", ["None."])
    titles = ("severity", "id", "message", "where", "got", "expected", "from")
    table = Table(
        "Findings, errors first", [Column(t, figures=False) for t in titles],
        [_finding_row(origin, f) for origin, f in ordered[:MOST_FINDINGS]], len(ordered),
    )  # fmt: skip
    return Section("findings", "Findings", [summary + "."], [table])


def _finding_row(origin: str, finding: FindingEntry) -> list[Cell]:
    return [
        doc.status(finding.severity), doc.name(finding.id), doc.words(finding.message),
        doc.name(finding.where), doc.words(finding.got), doc.words(finding.expected),
        doc.words(origin),
    ]  # fmt: skip


def _verdict_section(report: VerifyReport) -> Section:
    levels = [
        [doc.words(level.level), doc.status(level.status), _count(len(level.checks)),
         _count(sum(level.checks.values())), doc.figure(f"{level.seconds:.1f}", level.seconds)]
        for level in report.levels
    ]  # fmt: skip
    tables = [
        Table(
            "Levels",
            [Column("level", False), Column("status", False), Column("checks"), Column("things"),
             Column("seconds")],
            levels,
        )
    ]  # fmt: skip
    if report.logits is not None and report.logits.gates:
        titles = [Column("gate", False), Column("status", False), Column("value"),
                  Column("target"), Column("limit")]  # fmt: skip
        tables.append(Table("Gates", titles, gate_rows(report.logits.gates)))
    if report.metrics:
        rows = [[doc.words(name), doc.figure(number(v), v)] for name, v in report.metrics.items()]
        tables.append(Table("Metrics of level weights", [Column("metric", False),
                                                         Column("value")], rows))  # fmt: skip
    lines = [f"Verdict: {report.verdict}."]
    lines += [f"Skipped: {reason}" for level in report.levels for reason in level.skipped]
    return Section("verdict", "Verdict", lines, tables)


def _size_section(report: VerifyReport) -> Section:
    against = report.against
    assert against is not None
    before, after = against.payload_bytes, report.checkpoint.payload_bytes
    change = percent_text(percent_change(before, after))
    return Section(
        "sizes", "Size", [f"Payload {size_text(before)} → {size_text(after)} ({change})."]
    )


def _files_section(reports: Reports) -> Section:
    report = reports.found[0]
    columns = [Column("file", False), Column("bytes"), Column("SHA-256", False)]
    verb = "judged" if isinstance(report, VerifyReport) else "written"
    table = Table(
        f"Files {verb}", columns, [_file_row(f) for f in report.files[:MOST_FILES]],
        len(report.files),
    )  # fmt: skip
    return Section("files", "Files", [], [table], detail=True)


def _file_row(file: FileEntry) -> list[Cell]:
    return [doc.name(file.name), _count(file.bytes), doc.name(file.sha256)]


def _count(value: int) -> Cell:
    return doc.figure(f"{value:,}", value)


def finding_pairs(report: Report) -> list[tuple[str, FindingEntry]]:
    """A report's findings with what found them."""
    origin = "convert" if isinstance(report, ConvertReport) else "verify"
    return [(f.level or origin, f) for f in report.findings]

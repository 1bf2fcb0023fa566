"""A report as plain text for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from mmq.report.document import Cell, Document, Table
from mmq.report.escape import plain, shortened
from mmq.report.load import Reports
from mmq.report.logits_text import WIDTH
from mmq.report.schema import FindingEntry
from mmq.report.tables import columns, convert_lines
from mmq.report.verdict import SEVERITIES, verify_lines

#: A cell's least share where its table would be too wide.
_NARROW = 16


def report_text(reports: Reports) -> str:
    """What `mmq verify` and `mmq convert` print: findings first, then their figures."""
    blocks = []
    for report in reports.found:
        data = report.model_dump()
        if report.kind == "verify":
            lines = verify_lines(data)
        else:
            where = plain(report.source.location)
            if report.output.file_bytes is None:
                shards = (f.bytes for f in report.files if f.name.endswith(".safetensors"))
                data["output"]["file_bytes"] = sum(shards)
            lines = convert_lines(_plain_values(data), where, "OUT")
        blocks.append([*finding_lines(report.findings), *lines])
    return "\n".join("\n".join([*block, ""]) for block in blocks)


def finding_lines(findings: Iterable[FindingEntry]) -> list[str]:
    """Findings, errors first, with where, got and expected on lines of their own."""
    lines = []
    for finding in sorted(findings, key=lambda f: SEVERITIES.index(f.severity)):
        lines.append(f"{finding.severity}[{plain(finding.id)}]: {plain(finding.message)}")
        fields = (("where", finding.where), ("got", finding.got), ("expected", finding.expected))
        lines += [f"  {name + ':':<10}{plain(value)}" for name, value in fields if value]
    return [*lines, ""] if lines else []


def document_text(document: Document) -> str:
    """A document as lines, its tables aligned."""
    lines = [plain(document.title)]
    lines += [f"  {plain(name):<10} {plain(value)}" for name, value in document.facts]
    for section in document.sections:
        lines += ["", plain(section.title), *(f"  {plain(line)}" for line in section.lines)]
        for table in section.tables:
            if table.rows and section.name == "findings":
                lines += ["", *(line for row in table.rows for line in _finding_row(row))]
            elif table.rows:
                lines += ["", *(f"  {line}" for line in _table(table))]
    return "\n".join(lines) + "\n"


def _finding_row(row: Sequence[Cell]) -> list[str]:
    """A finding of `sections.findings_section`, its words in full: they do not fit a column."""
    severity, id, message, *places, origin = (plain(cell.text) for cell in row)
    lines = [f"  {origin}: {severity}[{id}]: {message}"]
    told = zip(("where", "got", "expected"), places, strict=True)
    return lines + [f"    {name + ':':<10}{text}" for name, text in told if text]


def _table(table: Table) -> list[str]:
    """Words before figures, as `columns` aligns them; words are shortened until lines fit."""
    left = next((n for n, c in enumerate(table.columns) if c.figures), len(table.columns))
    titles = [plain(column.title) for column in table.columns]
    rows: list[str] = []
    for limit in (60, 40, 32, 24, 20, _NARROW):
        cells = [
            [
                plain(c.text) if k.figures else shortened(c.text, limit)
                for c, k in zip(row, table.columns, strict=True)
            ]
            for row in table.rows
        ]
        rows = columns([titles, *cells], left=left)
        if max(map(len, rows)) <= WIDTH - 2:
            break
    return rows + ([f"… and {table.left_out:,} more"] if table.left_out else [])


def _plain_values(value: Any) -> Any:
    """The value with every text in it harmless."""
    if isinstance(value, dict):
        return {plain(k): _plain_values(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_plain_values(v) for v in value]
    return plain(value) if isinstance(value, str) else value

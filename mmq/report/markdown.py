"""A report as GitHub's Markdown: a section for a model card, a pull request or a step summary."""

from __future__ import annotations

from mmq.report.document import Cell, Document, Section, Table
from mmq.report.escape import markdown, markdown_code

#: Rows of a table; more make a comment unreadable, and GitHub takes 64 kB of one.
MOST_ROWS = 40

_MARKS = {
    "pass": "✅ pass", "warn": "⚠️ warn", "inconclusive": "❔ inconclusive", "fail": "❌ fail",
    "skipped": "⏭️ skipped", "error": "❌ error", "warning": "⚠️ warning", "note": "ℹ️ note",
}  # fmt: skip


def markdown_text(document: Document, level: int = 2) -> str:
    """The document under a heading of this level; of what is detail, only the sentences."""
    head = "#" * level
    parts = [f"{head} {_title(document)}"]
    if document.facts:
        parts.append("\n".join(f"- **{markdown(k)}** {markdown(v)}" for k, v in document.facts))
    for section in document.sections:
        if section.lines or not section.detail:
            parts += _section(section, f"{head}#")
    return "\n\n".join(parts) + "\n"


def _title(document: Document) -> str:
    return markdown(document.title.removesuffix(f": {document.status}")) + (
        f": {_MARKS.get(document.status, markdown(document.status))}" if document.status else ""
    )


def _section(section: Section, head: str) -> list[str]:
    parts = [f"{head} {markdown(section.title)}"]
    if section.lines:
        parts.append("\n".join(f"- {markdown(line)}" for line in section.lines))
    if not section.detail:
        parts += [_table(table) for table in section.tables if table.rows]
    return parts


def _table(table: Table) -> str:
    rows = [
        "| " + " | ".join(markdown(c.title) for c in table.columns) + " |",
        "|" + "|".join("---:" if c.figures else "---" for c in table.columns) + "|",
    ]
    shown = table.rows[:MOST_ROWS]
    rows += ["| " + " | ".join(map(_cell, row)) + " |" for row in shown]
    left_out = table.left_out + len(table.rows) - len(shown)
    more = f"\n\n… and {left_out:,} more in the report" if left_out else ""
    return f"**{markdown(table.caption)}**\n\n" + "\n".join(rows) + more


def _cell(cell: Cell) -> str:
    if cell.status:
        mark = _MARKS.get(cell.status, "")
        return mark if cell.text == cell.status else f"{mark}{markdown(_rest(cell))}"
    return markdown_code(cell.text) if cell.code else markdown(cell.text)


def _rest(cell: Cell) -> str:
    """What a status cell says beyond its status."""
    return cell.text.removeprefix(cell.status)

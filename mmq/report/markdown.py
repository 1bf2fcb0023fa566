"""A report as GitHub's Markdown: a section for a model card, a pull request or a step summary."""

from __future__ import annotations

from mmq.report.document import Cell, Document, Section, Table
from mmq.report.escape import markdown, markdown_code, shortened
from mmq.report.room import Room, left_out_line

#: Rows of a table and lines of a section; more make a comment unreadable.
MOST_ROWS, MOST_LINES = 40, 40
#: GitHub takes 64 kB of a comment; of that a table or a section's lines, in escaped bytes.
MOST_BYTES, _MOST_TABLE, _MOST_LINES = 62_000, 24_000, 8_000
#: Longest text of a cell and of a sentence.
_MOST_TITLE, _MOST_CELL, _MOST_LINE = 120, 400, 1000

_MARKS = {
    "pass": "✅ pass", "warn": "⚠️ warn", "inconclusive": "❔ inconclusive", "fail": "❌ fail",
    "skipped": "⏭️ skipped", "error": "❌ error", "warning": "⚠️ warning", "note": "ℹ️ note",
}  # fmt: skip


def markdown_text(document: Document, level: int = 2) -> str:
    """The document under a heading of this level; of what is detail, only the sentences."""
    head = "#" * level
    room = Room(MOST_BYTES)
    parts = [f"{head} {_title(document)}"]
    if document.facts:
        facts = [f"- **{markdown(k)}** {_sentence(v)}" for k, v in document.facts]
        parts.append("\n".join(room.first(zip(facts, facts, strict=True), _MOST_LINES)))
    for section in document.sections:
        if section.lines or not section.detail:
            parts += _section(section, f"{head}#", room)
    return "\n\n".join(parts) + "\n"


def _title(document: Document) -> str:
    return markdown(document.title.removesuffix(f": {document.status}")) + (
        f": {_MARKS.get(document.status, markdown(document.status))}" if document.status else ""
    )


def _section(section: Section, head: str, room: Room) -> list[str]:
    parts = [f"{head} {markdown(section.title)}"]
    if section.lines:
        lines = [f"- {_sentence(line)}" for line in section.lines[:MOST_LINES]]
        shown = room.first(zip(lines, lines, strict=True), _MOST_LINES)
        parts.append("\n".join([*shown, *left_out_line(section.lines, shown)]))
    if not section.detail:
        parts += [_table(table, room) for table in section.tables if table.rows]
    return parts


def _sentence(text: str) -> str:
    return markdown(shortened(text, _MOST_LINE))


def _table(table: Table, room: Room) -> str:
    rows = [
        "| " + " | ".join(markdown(shortened(c.title, _MOST_TITLE)) for c in table.columns) + " |",
        "|" + "|".join("---:" if c.figures else "---" for c in table.columns) + "|",
    ]
    drawn = ["| " + " | ".join(map(_cell, row)) + " |" for row in table.rows[:MOST_ROWS]]
    shown = room.first(zip(drawn, drawn, strict=True), _MOST_TABLE)
    rows += shown
    left_out = table.left_out + len(table.rows) - len(shown)
    more = f"\n\n… and {left_out:,} more in the report" if left_out else ""
    return f"**{markdown(shortened(table.caption, _MOST_TITLE))}**\n\n" + "\n".join(rows) + more


def _cell(cell: Cell) -> str:
    if cell.status:
        mark = _MARKS.get(cell.status, "")
        return mark if cell.text == cell.status else f"{mark}{markdown(_rest(cell))}"
    text = shortened(cell.text, _MOST_CELL)
    return markdown_code(text) if cell.code else markdown(text)


def _rest(cell: Cell) -> str:
    """What a status cell says beyond its status."""
    return cell.text.removeprefix(cell.status)

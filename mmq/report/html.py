"""A report as one HTML file that needs nothing else: no network, no font, no other file.

The page works without script; the script only sorts tables. A content security policy names the
script's hash and allows nothing else, so that even markup smuggled into a report could load or run
nothing.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from mmq.report.document import Cell, Document, Section, Table
from mmq.report.escape import plain, shortened
from mmq.report.room import Room, left_out_line
from mmq.report.svg import draw

#: The page stays under 500 kB whatever a report holds: what all of it may have beside style,
#: script and markup that is always there, and of that a table, a section's lines, and the facts.
MOST_BYTES, _MOST_TABLE, _MOST_LINES, _MOST_FACTS = 460_000, 130_000, 20_000, 12_000
#: Longest text of a title, a cell and a sentence.
_MOST_TITLE, _MOST_CELL, _MOST_LINE = 120, 300, 2000
#: Rows beyond which a table is folded up; findings never are.
_FOLDED = 16
_TEMPLATE = "report.html.jinja"


def html_text(document: Document) -> str:
    """The page."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup, escape

    style, script = _data("report.css"), _data("report.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    room = Room(MOST_BYTES)
    facts = [(plain(k), shortened(v, _MOST_LINE)) for k, v in document.facts]
    page = environment.from_string(_data(_TEMPLATE)).render(
        title=plain(document.title),
        status=plain(document.status),
        facts=room.first(((fact, escape(" ".join(fact))) for fact in facts), _MOST_FACTS),
        sections=[_section(section, room) for section in document.sections],
        style=Markup(style),
        script=Markup(script),
        script_hash=digest,
    )
    return page.strip() + "\n"


def _section(section: Section, room: Room) -> dict[str, Any]:
    from markupsafe import Markup, escape

    lines = [shortened(line, _MOST_LINE) for line in section.lines]
    lines = room.first(((line, f"<p>{escape(line)}</p>") for line in lines), _MOST_LINES)
    lines += left_out_line(section.lines, lines)
    charts = []
    for number, chart in enumerate(section.charts):
        title, svg = shortened(chart.title, _MOST_TITLE), draw(chart, f"{section.name}-{number}")
        if room.take(svg):
            charts.append((title, Markup(svg)))
        else:
            lines.append(f"{title}: the page has no room for this chart.")
    return {
        "name": section.name,
        "title": plain(section.title),
        "lines": lines,
        "charts": charts,
        "tables": [
            _table(table, section.name != "findings", room)
            for table in section.tables
            if table.rows
        ],
    }


def _table(table: Table, foldable: bool, room: Room) -> dict[str, Any]:
    figures = [c.figures for c in table.columns]
    drawn = (_row(row, figures) for row in table.rows)
    rows = room.first(((row, _markup(row)) for row in drawn), _MOST_TABLE)
    return {
        "caption": shortened(table.caption, _MOST_TITLE),
        "columns": [(shortened(c.title, _MOST_TITLE), c.figures) for c in table.columns],
        "rows": rows,
        "left_out": table.left_out + len(table.rows) - len(rows),
        "folded": foldable and len(rows) > _FOLDED,
        "sortable": len(rows) > 1,
    }


def _markup(row: Sequence[Mapping[str, Any]]) -> str:
    """A row about as the template writes it, for its size."""
    from markupsafe import escape

    text = "<tr>\n\n"
    for cell in row:
        text += f'<td class="{cell["kind"]}">{escape(cell["text"])}'
        text += "" if cell["order"] is None else f' data-o="{cell["order"]}"'
        text += f'<span class="status {cell["status"]}"></span>' if cell["status"] else ""
        text += "<code></code>" if cell["code"] else ""
    return text


def _row(row: Sequence[Cell], figures: Sequence[bool]) -> list[Mapping[str, Any]]:
    return [
        {
            "text": shortened(cell.text, _MOST_CELL),
            "order": None if cell.order is None else f"{cell.order:.10g}",
            "code": cell.code,
            "status": plain(cell.status),
            "kind": _kind(cell, figure),
        }
        for cell, figure in zip(row, figures, strict=True)
    ]


def _kind(cell: Cell, figure: bool) -> str:
    """The style of a cell: figures, names, words, long words; "" for short ones."""
    if figure:
        return "n"
    one_word = len(cell.text) <= 28 and cell.text.isidentifier()
    if len(cell.text) <= 14 or one_word or cell.status:
        return ""
    if cell.code:
        return "c"
    return "w" if len(cell.text) <= 60 else "l"


def _data(name: str) -> str:
    return (resources.files("mmq.report") / "data" / name).read_text("utf-8")

"""A report as one HTML file that needs nothing else: no network, no font, no other file.

The page works without script; the script only sorts tables. A content security policy names the
script's hash and allows nothing else, so that even markup smuggled into a report could load or run
nothing.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib import resources
from typing import Any

from mmq.report.document import Cell, Document, Section, Table
from mmq.report.escape import plain, shortened
from mmq.report.svg import draw

#: Longest text of a cell and of a sentence: the page stays under 500 kB whatever a report holds.
_MOST_CELL, _MOST_LINE = 300, 2000
#: Rows beyond which a table is folded up; findings never are.
_FOLDED = 16
_TEMPLATE = "report.html.jinja"


def html_text(document: Document) -> str:
    """The page."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    style, script = _data("report.css"), _data("report.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    page = environment.from_string(_data(_TEMPLATE)).render(
        title=plain(document.title),
        status=plain(document.status),
        facts=[(plain(k), shortened(v, _MOST_LINE)) for k, v in document.facts],
        sections=[_section(section) for section in document.sections],
        style=Markup(style),
        script=Markup(script),
        script_hash=digest,
    )
    return page.strip() + "\n"


def _section(section: Section) -> dict[str, Any]:
    from markupsafe import Markup

    charts = [
        (chart.title, Markup(draw(chart, f"{section.name}-{number}")))
        for number, chart in enumerate(section.charts)
    ]
    return {
        "name": section.name,
        "title": plain(section.title),
        "lines": [shortened(line, _MOST_LINE) for line in section.lines],
        "charts": charts,
        "tables": [
            _table(table, section.name != "findings") for table in section.tables if table.rows
        ],
    }


def _table(table: Table, foldable: bool) -> dict[str, Any]:
    return {
        "caption": plain(table.caption),
        "columns": [(plain(c.title), c.figures) for c in table.columns],
        "rows": [_row(row, [c.figures for c in table.columns]) for row in table.rows],
        "left_out": table.left_out,
        "folded": foldable and len(table.rows) > _FOLDED,
        "sortable": len(table.rows) > 1,
    }


def _row(row: Sequence[Cell], figures: Sequence[bool]) -> list[dict[str, Any]]:
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
    if len(cell.text) <= 14 or cell.status:
        return ""
    if cell.code:
        return "c"
    return "w" if len(cell.text) <= 60 else "l"


def _data(name: str) -> str:
    return (resources.files("mmq.report") / "data" / name).read_text("utf-8")

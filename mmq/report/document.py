"""A report as sections of text, tables and charts, which text, Markdown and HTML all render."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mmq.report.charts import Chart


@dataclass(frozen=True)
class Cell:
    """A table's cell.

    Attributes:
        text: as shown; may hold anything, renderers escape it.
        order: what sorting goes by; the text when None.
        code: whether it is a name rather than words.
        status: pass, warn, inconclusive, fail, error, warning, note or skipped: shown as such.
    """

    text: str
    order: float | None = None
    code: bool = False
    status: str = ""


@dataclass(frozen=True)
class Column:
    """A table's column; figures are flush right."""

    title: str
    figures: bool = True


@dataclass(frozen=True)
class Table:
    """Rows of cells under a caption.

    Attributes:
        total: rows there were, where only the first are shown.
    """

    caption: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    total: int | None = None

    @property
    def left_out(self) -> int:
        """How many rows there were beyond those of the table."""
        return 0 if self.total is None else self.total - len(self.rows)


@dataclass(frozen=True)
class Section:
    """A part of a report.

    Attributes:
        name: a stable word, the anchor in HTML.
        lines: sentences of plain text.
        detail: left out of summaries (Markdown); HTML has all of it.
    """

    name: str
    title: str
    lines: Sequence[str] = ()
    tables: Sequence[Table] = ()
    charts: Sequence[Chart] = ()
    detail: bool = False


@dataclass(frozen=True)
class Document:
    """A whole report.

    Attributes:
        status: the verdict, "" where there is none (a conversion).
        facts: name and value, shown at the top.
    """

    title: str
    status: str
    facts: Sequence[tuple[str, str]]
    sections: Sequence[Section] = field(default_factory=tuple)


def words(text: object) -> Cell:
    """A cell of words."""
    return Cell(str(text))


def name(text: object) -> Cell:
    """A cell with a name of the checkpoint's."""
    return Cell(str(text), code=True)


def figure(text: str, order: float | None) -> Cell:
    """A cell with a figure."""
    return Cell(text, order)


def status(text: str, kind: str = "") -> Cell:
    """A cell with a status, which sorts the worst first; `kind` where the text says more."""
    return Cell(text, _RANK.get(kind or text), status=kind or text)


_RANK = {
    "error": 0.0, "fail": 0.0, "inconclusive": 1.0, "warning": 2.0, "warn": 2.0, "skipped": 3.0,
    "note": 4.0, "pass": 5.0,
}  # fmt: skip

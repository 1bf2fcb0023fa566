"""What a chart shows, as data; `mmq.report.svg` draws it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Line:
    """A named line of points (x, y)."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class LineChart:
    """Lines over one x axis.

    Attributes:
        logarithmic: whether y is; points at or below zero are left out then.
        from_zero: whether y begins there, so that noise looks as small as it is.
        marks: (label, x) of vertical lines, such as percentiles.
        says: what the picture tells, for those who do not see it.
    """

    title: str
    x_title: str
    y_title: str
    lines: Sequence[Line]
    says: str
    logarithmic: bool = False
    from_zero: bool = False
    marks: Sequence[tuple[str, float]] = ()


@dataclass(frozen=True)
class BarChart:
    """Horizontal bars of bytes in groups, such as before and after.

    Attributes:
        groups: (label, one value per name of `names`), in bytes.
        unit / scale: what they are shown in, and its bytes; far smaller ones in their own unit.
    """

    title: str
    names: Sequence[str]
    groups: Sequence[tuple[str, Sequence[float]]]
    unit: str
    scale: float
    says: str


@dataclass(frozen=True)
class HistogramChart:
    """counts[i] values in [edges[i], edges[i + 1])."""

    title: str
    x_title: str
    edges: Sequence[float]
    counts: Sequence[int]
    says: str


@dataclass(frozen=True)
class HeatMap:
    """Values by row and column; None where there is none.

    Attributes:
        places: decimals of the legend's figures.
        cut: from here on all values have the last shade, so that a single large one does not
            leave the others without a difference; None for the largest value.
        zero: what a value of 0 is called, which then has a colour of its own; "" where 0 is a
            value like others.
    """

    title: str
    row_title: str
    column_title: str
    rows: Sequence[str]
    columns: Sequence[str]
    values: Sequence[Sequence[float | None]]
    unit: str
    places: int
    says: str
    cut: float | None = None
    zero: str = ""


Chart = LineChart | BarChart | HistogramChart | HeatMap

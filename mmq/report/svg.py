"""Charts as inline SVG: no script, no font, no colour of their own (classes that the page styles).

A heat map has one path per shade instead of one rectangle per cell: 60 layers × 128 experts fit
into some 100 kB that way.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from mmq.report.charts import BarChart, Chart, HeatMap, HistogramChart, LineChart
from mmq.report.escape import shortened, xml
from mmq.report.figures import fixed, significant
from mmq.report.tables import short_size

WIDTH = 600
#: Shades of a heat map; the page has a colour for each, from few to many, and one for none.
SHADES = 9
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 16, 12, 44
_PLOT = 240
#: Figures from here on are no figures: their differences would overflow.
_HUGE = 1e30


def draw(chart: Chart, identity: str) -> str:
    """The chart as an `<svg>` element; `identity` is its id in the page."""
    match chart:
        case LineChart():
            height, body = _line_chart(chart)
        case BarChart():
            height, body = _bar_chart(chart)
        case HistogramChart():
            height, body = _histogram(chart)
        case HeatMap():
            height, body = _heat_map(chart)
    return (
        f'<svg class="chart" id="{identity}" role="img" viewBox="0 0 {WIDTH} {height}"'
        f' aria-labelledby="{identity}-t {identity}-d"><title id="{identity}-t">'
        f'{xml(chart.title)}</title><desc id="{identity}-d">{xml(chart.says)}</desc>{body}</svg>'
    )


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round values that cover [low, high], about `count` of them."""
    if not high > low:
        return [low]
    raw = (high - low) / count
    if not raw > 1e-300:
        return [low]
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [n * step for n in range(first, math.floor(high / step + 1e-9) + 1)]


class _Axes:
    """Maps values to coordinates of the plot."""

    def __init__(
        self, x: tuple[float, float], y: tuple[float, float], logarithmic: bool = False
    ) -> None:
        self._x, self._y, self._log = x, _apart(*y, logarithmic), logarithmic

    def x(self, value: float) -> float:
        """The coordinate from the left."""
        low, high = self._x
        share = (value - low) / (high - low) if high > low else 0.5
        return round(_LEFT + share * (WIDTH - _LEFT - _RIGHT), 1)

    def y(self, value: float) -> float:
        """The coordinate from the top, where larger values are."""
        low, high = self._y
        if self._log:
            low, high, value = math.log10(low), math.log10(high), math.log10(value)
        return round(_TOP + (1 - (value - low) / (high - low)) * _PLOT, 1)

    def frame(self, x_title: str, y_title: str, x_ticks: Iterable[float]) -> str:
        """Grid, tick labels and titles."""
        low, high = self._y
        values = _decades(low, high) if self._log else ticks(low, high)
        right, bottom = WIDTH - _RIGHT, _TOP + _PLOT
        parts = []
        for value in values:
            y = self.y(value)
            parts.append(f'<path class="grid" d="M{_LEFT} {y}H{right}"/>')
            parts.append(_text(_LEFT - 6, y + 4, _short(value), "end"))
        for value in x_ticks:
            x = self.x(value)
            parts.append(f'<path class="axis" d="M{x} {bottom}v4"/>')
            parts.append(_text(x, bottom + 18, _short(value), "middle"))
        parts.append(f'<path class="axis" d="M{_LEFT} {bottom}H{right}"/>')
        middle = (_LEFT + right) / 2
        parts.append(_text(middle, bottom + 36, x_title, "middle"))
        turn = f'transform="rotate(-90 14 {_TOP + _PLOT / 2})"'
        parts.append(_text(14, _TOP + _PLOT / 2, y_title, "middle", turn))
        return "".join(parts)


def _line_chart(chart: LineChart) -> tuple[int, str]:
    lines = [
        [(x, y) for x, y in line.points if _fits(x, y, chart.logarithmic)] for line in chart.lines
    ]
    points = [p for line in lines for p in line]
    legend = _TOP + _PLOT + _BOTTOM + 8
    if not points:
        return 60, _text(WIDTH / 2, 30, "no figures", "middle")
    xs, ys = [x for x, _ in points], [y for _, y in points]
    bottom = min(0.0, *ys) if chart.from_zero else min(ys)
    axes = _Axes((min(xs), max(xs)), (bottom, max(ys)), chart.logarithmic)
    # layers, positions, percent: there is nothing between whole numbers
    whole = [x for x in ticks(min(xs), max(xs), 8) if x == round(x)]
    body = axes.frame(chart.x_title, chart.y_title, whole)
    for number, (label, x) in enumerate(chart.marks):
        if min(xs) <= x <= max(xs):
            at = axes.x(x)
            body += f'<path class="mark" d="M{at} {_TOP}v{_PLOT}"/>'
            # each label below the one before it: lines may stand close together
            up = 6 + 15 * (len(chart.marks) - 1 - number)
            body += _text(at - 4, _TOP + _PLOT - up, label, "end")
    for number, line in enumerate(lines):
        if not line:
            continue
        path = "L".join(f"{axes.x(x)} {axes.y(y)}" for x, y in line)
        body += f'<path class="line l{number % 6}" d="M{path}"/>'
        if len(line) == 1:
            x, y = line[0]
            body += f'<circle class="dot l{number % 6}" cx="{axes.x(x)}" cy="{axes.y(y)}" r="3"/>'
    if len(lines) < 2:
        return legend - 4, body
    below, names = _legend([line.name for line in chart.lines], legend, "line l")
    return int(below), body + names


def _bar_chart(chart: BarChart) -> tuple[int, str]:
    left, bar, gap = 200, 12, 10
    most = max((v for _, values in chart.groups for v in values if v < _HUGE), default=0.0) or 1.0
    room = WIDTH - left - 90
    y, body = float(_TOP), ""
    for label, values in chart.groups:
        middle = y + bar * len(values) / 2 + 4
        body += _text(left - 8, middle, shortened(label, 30), "end")
        for number, value in enumerate(values):
            length = round(room * value / most, 1) if 0 <= value < _HUGE else 0.0
            body += f'<rect class="bar b{number}" x="{left}" y="{y}" width="{length}"'
            body += f' height="{bar - 1}"/>'
            shown = f"{fixed(value / chart.scale, 3)} {chart.unit}" if value else ""
            if 0 < value < chart.scale / 1000:
                shown = short_size(round(value))
            body += _text(left + length + 5, y + bar - 2, shown, "start")
            y += bar
        y += gap
    below, names = _legend(chart.names, y + 8, "bar b")
    return int(below), body + names


def _histogram(chart: HistogramChart) -> tuple[int, str]:
    counts = list(zip(chart.edges, chart.edges[1:], chart.counts, strict=False))
    if not counts or not all(-_HUGE < low < high < _HUGE for low, high, _ in counts):
        return 60, _text(WIDTH / 2, 30, "no figures", "middle")
    axes = _Axes((chart.edges[0], chart.edges[-1]), (0.0, max(1.0, *map(float, chart.counts))))
    body = axes.frame(chart.x_title, "tensors", ticks(chart.edges[0], chart.edges[-1], 8))
    for low, high, count in counts:
        if not count:
            continue
        x, top = axes.x(low), axes.y(count)
        width = max(1.0, round(axes.x(high) - x - 1, 1))
        height = round(_TOP + _PLOT - top, 1)
        body += f'<rect class="bar b1" x="{x}" y="{top}" width="{width}" height="{height}">'
        body += f"<title>{_short(low)} to {_short(high)}: {count:,}</title></rect>"
    return _TOP + _PLOT + _BOTTOM, body


def _heat_map(chart: HeatMap) -> tuple[int, str]:
    """Rows downwards; a cell's size is what the width leaves, 24 units at most."""
    values = [[v if v is not None and abs(v) < _HUGE else None for v in row]
              for row in chart.values]  # fmt: skip
    known = [v for row in values for v in row if v is not None]
    if not known:
        return 60, _text(WIDTH / 2, 30, "no figures", "middle")
    apart = bool(chart.zero) and 0 in known
    known = [v for v in known if v or not apart] or known
    low, high = min(known), max(known) if chart.cut is None else chart.cut
    left, top = 64, 34 if len(chart.columns) > 8 else 58
    wide = (WIDTH - left - 16) / max(1, len(chart.columns))
    wide = min(wide, 110.0 if len(chart.columns) <= 8 else 24.0)
    tall = 13.0 if len(chart.rows) > 12 else 20.0
    grid = [
        [None if v is None else SHADES if apart and not v else _shade(v, low, high) for v in row]
        for row in values
    ]
    scaled = f'transform="translate({left} {top}) scale({wide:.4f} {tall:.4f})"'
    body = f"<g {scaled}>{_cells(grid)}</g>"
    for number, label in enumerate(chart.rows):
        body += _text(left - 6, top + (number + 0.5) * tall + 4, shortened(label, 8), "end")
    body += _column_labels(chart, left, top, wide)
    body += _text(left - 6, top - 6, shortened(chart.row_title, 9), "end")
    bottom = top + len(chart.rows) * tall + 14
    body += _scale(chart, low, high, left, bottom)
    if apart:
        bottom += 20
        body += f'<rect class="s{SHADES}" x="{left}" y="{bottom}" width="22" height="14"/>'
        body += _text(left + 28, bottom + 11, chart.zero, "start")
    return int(bottom) + 34, body


def _column_labels(chart: HeatMap, left: float, top: float, wide: float) -> str:
    count = len(chart.columns)
    if count <= 8:
        # long names in few columns: one line each, where two words would not fit beside each other
        body = ""
        for number, label in enumerate(chart.columns):
            x = left + (number + 0.5) * wide
            for row, word in enumerate(_two_lines(label, int(wide / 6.8))):
                body += _text(x, top - 18 + 13 * row, word, "middle")
        return body
    step = next(s for s in (1, 2, 4, 8, 16, 32, 64, count) if s * wide >= 26)
    labels = [
        _text(left + (n + 0.5) * wide, top - 6, shortened(chart.columns[n], 8), "middle")
        for n in range(0, count, step)
    ]
    return "".join(labels) + _text(left, top - 20, chart.column_title, "start")


def _two_lines(label: str, limit: int) -> tuple[str, str]:
    first, _, second = label.rpartition(" ")
    return shortened(first, limit), shortened(second, limit)


def _cells(grid: Sequence[Sequence[int | None]]) -> str:
    """One path per shade; cells of one shade beside each other are one rectangle."""
    paths: dict[int, list[str]] = {}
    for y, row in enumerate(grid):
        x = 0
        while x < len(row):
            shade, start = row[x], x
            while x < len(row) and row[x] == shade:
                x += 1
            if shade is not None:
                run = x - start
                paths.setdefault(shade, []).append(f"M{start} {y}h{run}v1h-{run}z")
    return "".join(f'<path class="s{s}" d="{"".join(p)}"/>' for s, p in sorted(paths.items()))


def _shade(value: float, low: float, high: float) -> int:
    if high <= low:
        return SHADES // 2
    return max(0, min(SHADES - 1, int(SHADES * (value - low) / (high - low))))


def _scale(chart: HeatMap, low: float, high: float, left: float, top: float) -> str:
    """The legend of a heat map: its shades, and what the first and the last stand for."""
    shades = range(SHADES) if high > low else [SHADES // 2]
    before = f"{fixed(low, chart.places)} {chart.unit}".strip()
    start = left + 8 * len(before) + 6
    body = _text(start - 6, top + 11, before, "end")
    for number, shade in enumerate(shades):
        body += f'<rect class="s{shade}" x="{start + 22 * number}" y="{top}" width="22"'
        body += ' height="14"/>'
    if high > low:
        after = f"{fixed(high, chart.places)} {chart.unit}".strip()
        after += " or more" if chart.cut is not None else ""
        body += _text(start + 22 * SHADES + 6, top + 11, after, "start")
    return body


def _legend(names: Sequence[str], top: float, classes: str) -> tuple[float, str]:
    """Where it ends, and its rows: as many names in each as fit."""
    body, x = "", float(_LEFT)
    for number, label in enumerate(names):
        text = shortened(label, 24)
        if x > _LEFT and x + 34 + 7.2 * len(text) > WIDTH:
            x, top = float(_LEFT), top + 18
        if classes.startswith("line"):
            body += f'<path class="{classes}{number % 6}" d="M{x} {top}h28"/>'
        else:
            body += f'<rect class="{classes}{number}" x="{x}" y="{top - 6}" width="28"'
            body += ' height="11"/>'
        body += _text(x + 34, top + 4, text, "start")
        x += 34 + 7.2 * len(text) + 22
    return top + 16, body


def _text(x: float, y: float, text: str, anchor: str, more: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" {more}>{xml(text)}</text>'


def _short(value: float) -> str:
    """A tick's figure without zeros at its end: 0.05, 21.8, 1e−5."""
    head, e, power = significant(float(f"{value:.6g}"), 4).partition("e")
    sign, digits = (power[:1], power[1:].lstrip("0")) if e else ("", "")
    head = head.rstrip("0").rstrip(".") if "." in head else head
    return f"{head}{e}{sign.replace('+', '')}{digits}"


def _fits(x: float, y: float, logarithmic: bool) -> bool:
    """Whether the axes have a place for the point."""
    return abs(x) < _HUGE and abs(y) < _HUGE and (y > 1 / _HUGE or not logarithmic)


def _decades(low: float, high: float) -> list[float]:
    """Powers of ten inside [low, high], with 2 and 5 between them where there are few."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    step = max(1, (last - first) // 8)
    powers = [10.0**n for n in range(first, last + 1, step)]
    values = powers if len(powers) > 4 else [m * p for p in powers for m in (1, 2, 5)]
    return [v for v in values if low * 0.999 <= v <= high * 1.001]


def _apart(low: float, high: float, logarithmic: bool) -> tuple[float, float]:
    """A range that is one: values all equal get some room around them."""
    if high > low:
        return low, high
    if logarithmic:
        return low / 2, low * 2
    room = abs(low) / 10 or 1.0
    return low - room, low + room

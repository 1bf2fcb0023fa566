"""Charts read back: where things stand in an SVG, as the figures its axes say."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from mmq.report.charts import Chart
from mmq.report.svg import draw

#: Coordinates are rounded to a tenth.
PIXEL = 0.11


class Scale(NamedTuple):
    """A straight line from coordinates to figures, or to their logarithms."""

    start: float
    step: float
    logarithmic: bool

    def figure(self, coordinate: float) -> float:
        value = self.start + self.step * coordinate
        return 10.0**value if self.logarithmic else value

    def slack(self, coordinate: float) -> float:
        """How far off a figure may be for the rounding of its coordinate."""
        return abs(self.figure(coordinate + PIXEL) - self.figure(coordinate - PIXEL))


def read(chart: Chart) -> ET.Element:
    return ET.fromstring(draw(chart, "c"))


def number(text: str) -> float:
    return float(text.replace(",", "").replace("−", "-").split()[0])


def words(root: ET.Element) -> list[str]:
    return [e.text or "" for e in root.iter("text")]


def scales(root: ET.Element, logarithmic: bool = False) -> tuple[Scale, Scale]:
    """The x and the y axis by their ticks, all of which must lie on one line."""
    parts = list(root)
    found: dict[str, list[tuple[float, float]]] = {"x": [], "y": []}
    for part, label in pairwise(parts):
        place = re.match(r"M([\d.]+) ([\d.]+)", part.get("d", ""))
        if place and part.get("class") == "grid":
            found["y"].append((float(place[2]), number(label.text or "")))
        elif place and part.get("class") == "axis" and part.get("d", "").endswith("v4"):
            found["x"].append((float(place[1]), number(label.text or "")))
    return _scale(found["x"], False), _scale(found["y"], logarithmic)


def _scale(ticks: Sequence[tuple[float, float]], logarithmic: bool) -> Scale:
    assert len(ticks) >= 2, ticks
    known = [(at, math.log10(value) if logarithmic else value) for at, value in ticks]
    (first, low), (last, high) = known[0], known[-1]
    step = (high - low) / (last - first)
    scale = Scale(low - step * first, step, logarithmic)
    for at, value in known:
        assert abs((value - scale.start) / step - at) <= 2 * PIXEL, "a tick is not on the axis"
    return scale


def points(root: ET.Element, line: int = 0) -> list[tuple[float, float]]:
    """Coordinates of a line."""
    (path,) = [p for p in root.iter("path") if p.get("class") == f"line l{line}" and "L" in
               p.get("d", "")]  # fmt: skip
    pairs = [pair.split() for pair in path.get("d", "").removeprefix("M").split("L")]
    return [(float(x), float(y)) for x, y in pairs]


def cells(root: ET.Element) -> dict[tuple[int, int], int]:
    """(column, row) → shade of a heat map; each cell is drawn once."""
    found: dict[tuple[int, int], int] = {}
    for path in root.iter("path"):
        for x, y, run in re.findall(r"M(\d+) (\d+)h(\d+)v1h-\3z", path.get("d", "")):
            for n in range(int(run)):
                assert (int(x) + n, int(y)) not in found
                found[int(x) + n, int(y)] = int(path.get("class", "").removeprefix("s"))
    return found

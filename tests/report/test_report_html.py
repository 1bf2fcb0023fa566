"""The HTML page as a file: self-contained, escaped, accessible by its markup, small."""

from __future__ import annotations

import base64
import hashlib
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from itertools import product
from pathlib import Path

import pytest
from report_samples import (
    HOSTILE,
    convert_report,
    hostile_reports,
    kernels_report,
    logits,
    release_reports,
    verify_report,
)

import mmq.report
from mmq.report.charts import BarChart, HeatMap, HistogramChart, Line, LineChart
from mmq.report.compare import compare_documents
from mmq.report.escape import plain
from mmq.report.html import html_text
from mmq.report.load import Reports, reports_of
from mmq.report.sections import build_document
from mmq.report.svg import draw, ticks

DATA = Path(mmq.report.__file__).parent / "data"
PAGES = {
    "both": Reports(verify_report(), convert_report()),
    "verify": reports_of(verify_report()),
    "structure": reports_of(verify_report(logits=None, against=None, findings=[], files=[])),
    "convert": reports_of(convert_report()),
    "kernels": reports_of(kernels_report()),
    "release": Reports(*release_reports()),
    "hostile": Reports(*hostile_reports()),
}


class Page(HTMLParser):
    """Elements in order, with their attributes; text by element."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    found = {name: html_text(build_document(reports)) for name, reports in PAGES.items()}
    two = reports_of(verify_report()), reports_of(verify_report(metrics={"sqnr_db_mean": 20.0}))
    return {**found, "compare": html_text(compare_documents(*two))}


def test_small_enough(pages):
    assert {name: len(text) for name, text in pages.items() if len(text.encode()) >= 500_000} == {}


def test_nothing_is_loaded(pages):
    for text in pages.values():
        page = Page(text)
        tags = {tag for tag, _ in page.elements}
        assert not tags & {"link", "img", "iframe", "object", "embed", "base", "form", "image"}
        for tag, attributes in page.elements:
            assert not {"src", "srcset", "style"} & set(attributes), (tag, attributes)
            assert not any(name.startswith("on") for name in attributes), (tag, attributes)
            assert (attributes.get("href") or "#").startswith("#")
        assert "url(" not in text and "@import" not in text


def test_the_policy_allows_the_one_script(pages):
    for text in pages.values():
        (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert (
            f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'" in text
        )
        assert len(Page(text).all("script")) == 1


def test_hostile_text_is_text(pages):
    page = Page(pages["hostile"])
    assert "<script>alert(1)</script>" in page.text
    assert "\x1b" not in pages["hostile"] and "\u202e" not in pages["hostile"]
    assert "{{ 1337*7 }}" in page.text and "9359" not in page.text, "text is no template"


def test_markup_says_what_things_are(pages):
    for name, text in pages.items():
        page = Page(text)
        assert page.all("html")[0]["lang"] == "en" and len(page.all("main")) == 1
        ids = [a["id"] for _, a in page.elements if "id" in a]
        assert len(ids) == len(set(ids)), name
        for _, attributes in page.elements:
            for key in ("aria-labelledby", "href"):
                for target in (attributes.get(key) or "").replace("#", "").split():
                    assert target in ids, (name, target)
        assert len(page.all("caption")) == len(page.all("table")) >= 1
        assert all(th.get("scope") == "col" for th in page.all("th"))
        assert all(svg.get("role") == "img" for svg in page.all("svg"))
        assert len(page.all("title")) >= 1 + len(page.all("svg"))


def test_every_part_is_there(pages):
    order = re.findall(r'<section id="(\w+)"', pages["both"])
    assert order == ["findings", "verdict", "sizes", "quality", "logits", "tokens", "layers",
                     "experts", "settings", "files"]  # fmt: skip
    titles = re.findall(r"<figcaption>(.*?)</figcaption>", pages["both"])
    assert titles == [
        "Size before and after", "SQNR by layer and module", "SQNR of each tensor",
        "KLD of every token, sorted (both)", "KLD by position in the window",
        "Top-1 agreement by position in the window (chance alone: ±2.4)",
        "Distance of hidden states by layer",
        "Routing and block selection like the source&#39;s (both)", "Tokens of each expert",
    ]  # fmt: skip
    assert "compare" in pages and "kernels" in re.findall(r'<section id="(\w+)"', pages["kernels"])


def test_cells_sort_by_their_figures(pages):
    """A figure with its error, with thousands or in percent sorts by the number it shows."""
    found = 0
    for order, text in re.findall(r'<td class="n" data-o="([^"]*)">([^<\n]+)', pages["both"]):
        shown = re.match(r"[+−\d][\d,.]*(?:e[−+]?\d+)?", text)
        assert shown, text
        value, by = float(shown.group().replace(",", "").replace("−", "-")), float(order)
        # shares are shown in percent, bytes in MB
        assert any(abs(value - by * scale) <= 0.006 * abs(value) + 1e-9
                   for scale in (1, 100, 1e-6)), (text, order)  # fmt: skip
        found += "±" in text
    assert found > 40
    figures = re.findall(r'<td class="n"[^>]*>([^<\n]*±[^<\n]*)', pages["both"])
    assert len(figures) == found, "a figure with an error cannot be sorted by its text"


def test_a_heat_map_shows_every_cell_once(pages):
    """Cells of one shade beside each other are one rectangle; together they cover the map."""
    entry = logits().layers[2]["expert_tokens"]
    svg = re.search(r'<svg[^>]*id="experts-0".*?</svg>', pages["both"], re.DOTALL)
    assert svg
    cells: dict[tuple[int, int], int] = {}
    for shade, path in re.findall(r'<path class="s(\d)" d="([^"]*)"', svg.group()):
        for x, y, run in re.findall(r"M(\d+) (\d+)h(\d+)v1h-\3z", path):
            for n in range(int(run)):
                assert (int(x) + n, int(y)) not in cells
                cells[int(x) + n, int(y)] = int(shade)
    assert set(cells) == set(product(range(8), range(3)))
    row = [cells[n, 1] for n in range(8)]
    assert sorted(range(8), key=entry.__getitem__)[0] == row.index(min(row))
    assert cells[entry.index(max(entry)), 1] == max(row)


SAYS = f"says {HOSTILE}"
CHARTS = [
    LineChart(HOSTILE, HOSTILE, HOSTILE, [Line(HOSTILE, [(0, 1), (1, 2)])] * 2, SAYS,
              marks=[(HOSTILE, 0.5)]),
    BarChart(HOSTILE, (HOSTILE, HOSTILE), [(HOSTILE, (1.0, 2.0))], HOSTILE, 1.0, SAYS),
    HistogramChart(HOSTILE, HOSTILE, [0.0, 1.0], [3], SAYS),
    HeatMap(HOSTILE, HOSTILE, HOSTILE, [HOSTILE], [HOSTILE], [[1.0]], HOSTILE, 1, SAYS),
    HeatMap(HOSTILE, HOSTILE, HOSTILE, [HOSTILE], [HOSTILE] * 9, [[1.0] * 8 + [2.0]], "", 1, SAYS),
]  # fmt: skip


@pytest.mark.parametrize("chart", CHARTS, ids=lambda c: type(c).__name__)
def test_a_chart_is_xml_with_its_words_as_text(chart):
    root = ET.fromstring(draw(chart, "c"))
    assert root.findtext("title") == plain(HOSTILE) and root.findtext("desc") == plain(SAYS)
    assert {e.tag for e in root.iter()} <= {"svg", "title", "desc", "text", "path", "rect", "g"}
    assert any("</code>" in (e.text or "") for e in root.iter("text"))


@pytest.mark.parametrize("strange", [0.0, -1.0, 1e308, float("nan"), float("inf"), 5e-324])
def test_strange_figures_draw_no_strange_coordinates(strange):
    odd = logits().model_copy(update={"kld_curve": [strange] * 3 + [0.1, strange]})
    text = html_text(build_document(reports_of(verify_report(logits=odd))))
    drawn = "".join(re.findall(r'\b(?:d|x|y|width|height|viewBox|transform)="([^"]*)"', text))
    assert "nan" not in drawn and "inf" not in drawn and "e+" not in drawn


@pytest.mark.parametrize(
    ("low", "high"), [(0, 1), (-0.3, 0.31), (21.676, 21.9), (1e-9, 3e-9), (5, 5), (0, 2040)]
)
def test_ticks_lie_inside_and_are_round(low, high):
    found = ticks(low, high)
    assert 1 <= len(found) <= 8
    assert all(low - 1e-12 <= t <= high + 1e-12 for t in found)


def luminance(colour: str) -> float:
    value = colour.lstrip("#")
    value = "".join(c * 2 for c in value) if len(value) == 3 else value
    parts = [int(value[n : n + 2], 16) / 255 for n in (0, 2, 4)]
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_colours_can_be_told_apart():
    """WCAG 2.2: 4.5 for text, 3 for lines and bars; in light, dark and print."""
    blocks = re.findall(r":root \{(.*?)\}", (DATA / "report.css").read_text("utf-8"), re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        colours = dict(re.findall(r"--(\w+): (#\w+)", block))
        for name in ("text", "faint", "link", "good", "bad", "careful", "open"):
            for back in ("back", "head"):
                assert contrast(colours[name], colours[back]) >= 4.5, (name, colours[name])
        for name in ("b0", "b1", "l0", "l1", "l2", "l3", "l4", "l5"):
            assert contrast(colours[name], colours["back"]) >= 3, (name, colours[name])
        shades = [luminance(colours[f"s{n}"]) for n in range(9)]
        assert shades in (sorted(shades), sorted(shades, reverse=True))

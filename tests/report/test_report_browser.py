"""The HTML page in a real browser: no complaint, no overflow, sorting by mouse and keyboard."""

from __future__ import annotations

import pytest
from chromium import Browser, find_chromium
from report_samples import (
    convert_report,
    hostile_reports,
    kernels_report,
    release_reports,
    verify_report,
)

from mmq.report.compare import compare_documents
from mmq.report.html import html_text
from mmq.report.load import Reports, reports_of
from mmq.report.sections import build_document

PROGRAM = find_chromium()
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no Chromium on this machine")
PAGES = ("small", "release", "hostile", "kernels", "compare")
#: The first column's words of the levels' table, in the order shown.
COLUMN = (
    "[...document.querySelectorAll('#verdict table')[0].tBodies[0].rows]"
    ".map(r => r.cells[{}].textContent.trim())"
)
SORT = "[...document.querySelectorAll('#verdict table')[0].tHead.rows[0].cells]" + (
    ".map(c => c.getAttribute('aria-sort'))"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("pages")
    documents = {
        "small": build_document(Reports(verify_report(), convert_report())),
        "release": build_document(Reports(*release_reports())),
        "hostile": build_document(Reports(*hostile_reports())),
        "kernels": build_document(reports_of(kernels_report())),
        "compare": compare_documents(*map(reports_of, (verify_report(), hostile_reports()[0]))),
    }
    for name, document in documents.items():
        (root / f"{name}.html").write_text(html_text(document), "utf-8")
    return root


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    assert PROGRAM is not None
    try:
        one = Browser(PROGRAM, tmp_path_factory.mktemp("profile"))
    except RuntimeError as error:
        pytest.skip(f"{PROGRAM} does not start here: {error}")
    with one:
        yield one


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1200, 375])
@pytest.mark.parametrize("page", PAGES)
def test_no_complaint_and_no_overflow(browser, folder, page, width, dark):
    browser.open(folder / f"{page}.html", width=width, dark=dark)
    browser.value("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert browser.value("document.documentElement.scrollWidth") <= width
    assert browser.complaints == []
    background = browser.value("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(15, 20, 25)" if dark else "rgb(255, 255, 255)")


def test_cells_do_not_overlap(browser, folder):
    """Each cell's text stays inside its cell, in hostile and in large tables."""
    for page in ("hostile", "release"):
        browser.open(folder / f"{page}.html")
        browser.value("document.querySelectorAll('details').forEach(d => d.open = true)")
        over = "[...document.querySelectorAll('td')].filter(c => c.scrollWidth > c.clientWidth + 1)"
        assert browser.value(f"{over}.map(c => c.textContent.slice(0, 60))") == []


def test_sorting_by_mouse(browser, folder):
    browser.open(folder / "small.html")
    assert browser.value(COLUMN.format(0)) == ["structure", "weights", "logits"]
    click = "document.querySelectorAll('#verdict th button')[{}].click()"
    browser.value(click.format(0))
    assert browser.value(COLUMN.format(0)) == ["logits", "structure", "weights"]
    assert browser.value(SORT) == ["ascending", None, None, None, None]
    browser.value(click.format(0))
    assert browser.value(COLUMN.format(0)) == ["weights", "structure", "logits"]
    browser.value(click.format(3))
    assert browser.value(COLUMN.format(3)) == ["4", "23", "726"], "figures sort as figures"
    assert browser.value(SORT) == [None, None, None, "ascending", None]
    browser.value(click.format(1))
    assert browser.value(COLUMN.format(1)) == ["fail", "pass", "pass"], "worst first"
    assert browser.complaints == []


def test_sorting_by_keyboard(browser, folder):
    browser.open(folder / "small.html")
    browser.value("document.querySelectorAll('#verdict th button')[0].focus()")
    browser.press("Enter", 13, "\r")
    assert browser.value(COLUMN.format(0)) == ["logits", "structure", "weights"]
    browser.press(" ", 32, " ")
    assert browser.value(COLUMN.format(0)) == ["weights", "structure", "logits"]


def test_the_keyboard_reaches_everything_and_focus_is_seen(browser, folder):
    browser.open(folder / "small.html")
    browser.press("Tab", 9)
    assert browser.value("document.activeElement.className") == "skip"
    seen = set()
    for _ in range(40):
        browser.press("Tab", 9)
        seen.add(browser.value("document.activeElement.tagName"))
        assert browser.value("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    assert {"A", "BUTTON", "DIV"} <= seen


def test_figures_of_all_sizes_sort(browser, folder):
    """Signs, thousands, ± and missing figures: by their numbers, what is missing last."""
    browser.open(folder / "release.html")
    values = (
        "(() => { const t = document.querySelectorAll('#layers table')[0];"
        " t.querySelectorAll('th button')[3].click();"
        " return [...t.tBodies[0].rows].map(r => r.cells[3].textContent.trim()) })()"
    )
    column = browser.value(values)
    figures = [float(v) for v in column[:-1]]
    assert figures == sorted(figures) and column[-1] == "–"
    column = browser.value(values)
    figures = [float(v) for v in column[:-1]]
    assert figures == sorted(figures, reverse=True) and column[-1] == "–"


def test_it_works_without_script(browser, folder):
    browser.open(folder / "small.html", script=False)
    shown = browser.call("DOM.getDocument", depth=-1, pierce=True)
    text = str(shown)
    assert "gate-fail" in text and "BUTTON" not in text and browser.complaints == []


def test_it_prints_in_light_colours_with_every_row(browser, folder, tmp_path):
    browser.open(folder / "release.html", dark=True)
    browser.pdf(tmp_path / "page.pdf")
    assert (tmp_path / "page.pdf").read_bytes().startswith(b"%PDF")
    browser.call("Emulation.setEmulatedMedia", media="print",
                 features=[{"name": "prefers-color-scheme", "value": "dark"}])  # fmt: skip
    ink = browser.value("getComputedStyle(document.body).color")
    paper = browser.value("getComputedStyle(document.body).backgroundColor")
    assert (ink, paper) == ("rgb(0, 0, 0)", "rgb(255, 255, 255)")
    heights = "[...document.querySelectorAll('.wide')].map(e => e.scrollHeight - e.clientHeight)"
    assert max(browser.value(heights)) <= 1, "a scrolled table would print cut off"

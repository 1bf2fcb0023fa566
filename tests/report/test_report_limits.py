"""Renderings keep to their size whatever a report holds, and say what they leave out."""

from __future__ import annotations

import re

import pytest
from report_samples import convert_report, files, finding, logits, quality, verify_report

from mmq.report.charts import BarChart
from mmq.report.document import Column, Document, Section, Table, words
from mmq.report.html import html_text
from mmq.report.load import Report, Reports
from mmq.report.markdown import markdown_text
from mmq.report.room import Room
from mmq.report.schema import LevelResult, VerifyReport
from mmq.report.sections import build_document

#: What docs/reports.md promises, in bytes.
MOST_HTML, MOST_MARKDOWN = 500_000, 64_000


def flooded(text: str) -> VerifyReport:
    """Every free text of a verification is this long, and there are many of each."""
    many = range(400)
    found = [
        finding(f"x{n}{text}", message=text, where=text, got=text, expected=text) for n in many
    ]
    levels = [LevelResult(level="weights", status="fail", seconds=1, skipped=[text] * 500,
                          checks={f"{text}{n}": 1 for n in many})]  # fmt: skip
    big = logits(60, 128, tuple(f"{text}-{n}" for n in range(200)))
    arms = {f"{text}{n}": big.arms["both"] for n in range(150)}
    gates = [g.model_copy(update={"gate": text}) for g in big.gates * 99]
    big = big.model_copy(update={
        "arms": {**big.arms, **arms}, "settings": {text: text}, "convention": {text: text},
        "judged": f"{text}0", "gates": gates,
        "by_position": big.by_position * 300, "kld_curve": big.kld_curve * 300,
    })  # fmt: skip
    return verify_report(
        findings=found, levels=levels, logits=big, files=files(500), versions={text: text * 9},
        metrics={f"{text}{n}": float(n) for n in range(900)},
    )  # fmt: skip


def flooded_conversion(text: str) -> Report:
    many = range(900)
    modules = [m.model_copy(update={"module": f"{text}{n}"}) for n in range(40)
               for m in quality(60).by_module]  # fmt: skip
    return convert_report(
        findings=[], options={f"{text}{n}": text for n in many}, config_edits=[text] * 900,
        dropped={f"{text}{n}": 1 for n in many}, side_folder_bytes={f"{text}{n}": 1 for n in many},
        quality=quality().model_copy(update={"by_module": modules}),
    )  # fmt: skip


REPORTS = {
    "markup": Reports(flooded('<"&' * 120), None),
    "quotes": Reports(flooded("'" * 400), flooded_conversion("'" * 400)),
    "wide": Reports(flooded("語" * 400), flooded_conversion("語" * 400)),
    "control": Reports(flooded("\u202e|" * 200), None),
    "plain": Reports(flooded("m" * 400), flooded_conversion("m" * 400)),
    "conversion": Reports(None, flooded_conversion("`*_" * 99)),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", REPORTS)
def test_no_report_makes_a_rendering_too_large(name):
    document = build_document(REPORTS[name])
    page = html_text(document)
    assert len(page.encode()) < MOST_HTML
    assert len(markdown_text(document).encode()) < MOST_MARKDOWN
    assert page.rstrip().endswith("</html>") and 'id="files"' in page, "cut in the middle"


def test_what_is_left_out_is_counted():
    lines = [f"line {n} " + "x" * 1000 for n in range(100)]
    rows = [[words(f"row {n} " + "y" * 290)] for n in range(1000)]
    table = Table("Things", [Column("thing", False)], rows, 1500)
    document = Document("t", "", [], [Section("s", "S", lines, [table])])
    for text in (html_text(document), markdown_text(document)):
        shown_lines, shown_rows = len(set(re.findall(r"line \d+", text))), text.count("row ")
        assert 0 < shown_lines < 100 and 0 < shown_rows < 1000
        assert f"… and {100 - shown_lines} more in the report" in text
        assert f"… and {1500 - shown_rows:,} more in the report" in text


def test_facts_and_titles_have_a_limit_too():
    table = Table("t", [Column("thing", False)], [[words("y" * 290)]] * 4000)
    chart = BarChart("'" * 90_000, (), [], "GB", 1e9, "")
    sections = [Section(f"s{n}", "S", [], [table], [chart]) for n in range(5)]
    facts = [("name", "'" * 2000)] * 60
    assert len(html_text(Document("t", "", facts, sections)).encode()) < MOST_HTML
    assert len(markdown_text(Document("t", "", facts, sections)).encode()) < MOST_MARKDOWN


def test_a_chart_without_room_is_named():
    page = html_text(build_document(REPORTS["plain"]))
    assert "the page has no room for this chart" in page


def test_a_large_but_honest_report_is_complete():
    """A release's findings, files and charts all fit; only rows beyond the documented are left."""
    found = [finding(f"x{n}", message="m" * 150, where="w" * 90, got="g" * 150, expected="e" * 150)
             for n in range(149)]  # fmt: skip
    page = html_text(build_document(Reports(verify_report(
        findings=found, logits=logits(60, 128)), convert_report(quality=quality(60)))))  # fmt: skip
    assert "more in the report" not in page and "no room" not in page


def test_room():
    room = Room(10)
    assert room.take("語" * 3) and not room.take("ab") and room.left == 1
    room = Room(10)
    assert room.first([(n, "abc") for n in range(9)], 7) == [0, 1] and room.left == 4
    assert room.first([(n, "abc") for n in range(9)], 7) == [0]

"""Markdown: complete, of well-formed tables, and without markup from the outside."""

from __future__ import annotations

import re

from report_samples import convert_report, hostile_reports, release_reports, verify_report

from mmq.report.load import Reports, reports_of
from mmq.report.markdown import MOST_ROWS, markdown_text
from mmq.report.sections import build_document


def text_of(*reports) -> str:
    return markdown_text(build_document(Reports(*reports)))


def tables(text: str) -> list[list[str]]:
    """Runs of lines that begin with a pipe."""
    return [block.splitlines() for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)]


def test_what_a_card_needs_is_there():
    text = text_of(verify_report(), convert_report())
    for part in (
        "## mmq verify: ❌ fail", "### Findings", "| ❌ error | `gate-fail` |",
        "| structure | ✅ pass | 2 | 4 | 0.1 |", "❔ inconclusive (needs 6 more windows)",
        "| routed_experts | MXFP8 | 4,866,048 | 4.866 | 0 | 0.000 | −100.0 % |",
        "perplexity is 8.10 ± 0.20", "| both (judged) | 9.76 ± 0.21 |", "| `a.txt` |",
    ):  # fmt: skip
        assert part in text, part
    assert "KLD quantiles" not in text, "details are left to the other formats"


def test_findings_stand_before_everything_else():
    text = text_of(verify_report(), convert_report())
    assert re.findall(r"^### (\w+)", text, re.MULTILINE)[:3] == ["Findings", "Verdict", "Size"]


def test_tables_are_well_formed():
    for reports in ((verify_report(), convert_report()), release_reports(), hostile_reports()):
        text = text_of(*reports)
        found = tables(text)
        assert len(found) > 5
        for table in found:
            # a pipe inside a cell is an entity, so pipes count columns
            assert len({line.count("|") for line in table}) == 1, table
            assert set(table[1]) <= set("|-:")
            assert len(table) <= MOST_ROWS + 2


def test_hostile_text_is_text():
    text = text_of(*hostile_reports())
    assert "<script" not in text and "<img" not in text and "\x1b" not in text
    assert not re.search(r"^::", text, re.MULTILINE)
    assert not re.search(r"@(?!\u2060)\w", text)
    assert set(re.findall(r"</?(\w+)", text)) <= {"code"}


def test_long_reports_say_what_they_leave_out():
    text = text_of(*release_reports())
    assert "… and 1,961 more in the report" in text
    assert len(text.encode()) < 64_000, "GitHub takes 64 kB of a comment"


def test_a_conversion_alone():
    text = markdown_text(build_document(reports_of(convert_report())))
    assert text.startswith("## mmq convert\n") and "mmq verify" not in text

"""GitHub: at most ten annotations that cannot be forged, and a summary that is appended."""

from __future__ import annotations

import re

import pytest
from report_samples import HOSTILE, finding, hostile_reports, release_reports, verify_report

from mmq.errors import BadInputError
from mmq.report import github
from mmq.report.github import (
    append_outputs,
    append_summary,
    error_command,
    summary_path,
    summary_text,
    workflow_commands,
)
from mmq.report.load import Reports, reports_of

COMMAND = re.compile(r"::(error|warning|notice) title=([^:,\n]*)::([^\n]*)")


def test_errors_come_first():
    found = [finding("a", "note"), finding("b", "warning"), finding("c", where="w", got="1",
                                                                     expected="2, 3")]  # fmt: skip
    assert workflow_commands(found) == [
        "::error title=c::c!; where: w; got: 1; expected: 2, 3",
        "::warning title=b::b!",
        "::notice title=a::a!",
    ]


@pytest.mark.parametrize("count", [0, 1, 10, 11, 2000])
def test_at_most_ten(count):
    lines = workflow_commands([finding(f"id-{n}") for n in range(count)])
    assert len(lines) == min(count, 10)
    if count > 10:
        assert lines[-1] == (
            f"::error title=mmq::{count - 9:,} more findings: see the summary or the report"
        )


def test_nothing_can_be_forged():
    (line,) = workflow_commands(hostile_reports()[0].findings)
    match = COMMAND.fullmatch(line)
    assert match, line
    assert "\n" not in line and not re.search(r"%(?!25|3A|2C)", line)


def test_a_line_end_is_caught(monkeypatch):
    """Mutant: messages as they are."""
    monkeypatch.setattr(github, "workflow_data", str)
    monkeypatch.setattr(github, "shortened", lambda text, limit: text)
    (line,) = workflow_commands([finding("a", message=HOSTILE)])
    assert not COMMAND.fullmatch(line)


def test_the_summary_is_appended(tmp_path):
    path = tmp_path / "summary.md"
    path.write_text("before\n", "utf-8")
    append_summary(path, summary_text(reports_of(verify_report())))
    append_summary(path, "last\n")
    text = path.read_text("utf-8")
    assert text.startswith("before\n## mmq verify: ❌ fail\n") and text.endswith("\nlast\n\n")
    assert text.count("# mmq verify") == 1


def test_the_summary_stays_below_githubs_limit(tmp_path):
    reports = Reports(*release_reports())
    append_summary(tmp_path / "s.md", summary_text(reports))
    assert (tmp_path / "s.md").stat().st_size < github.MOST_BYTES
    append_summary(tmp_path / "long.md", "ä line\n" * 200_000)
    data = (tmp_path / "long.md").read_bytes()
    assert len(data) < github.MOST_BYTES and b"The rest is in the report" in data[-100:]
    assert data.decode("utf-8")


def test_where_the_summary_goes():
    assert summary_path({}) is None and summary_path({"GITHUB_STEP_SUMMARY": ""}) is None
    assert str(summary_path({"GITHUB_STEP_SUMMARY": "/x/y"})) == "/x/y"


def test_an_output_cannot_begin_another(tmp_path):
    path = tmp_path / "output"
    path.write_text("before=1\n")
    append_outputs(path, {"verdict": "fail", "source": "a\nverdict=pass", "url": "x=ä"})
    assert path.read_text("utf-8").splitlines() == [
        "before=1", "verdict=fail", "source=a\\x0averdict=pass", "url=x=ä"
    ]  # fmt: skip


def test_an_error_is_annotated_with_its_hint():
    error = BadInputError("shard-missing", f"gone{HOSTILE}", where="a,b", hint="hf download")
    line = error_command(error)
    assert COMMAND.fullmatch(line), line
    assert line.startswith("::error title=shard-missing::gone")
    assert line.endswith("; where: a,b; hint: hf download")

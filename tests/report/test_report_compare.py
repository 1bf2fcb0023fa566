"""Two runs side by side: only what differs, and whether it differs beyond its error."""

from __future__ import annotations

import pytest
from report_samples import (
    HOSTILE,
    convert_report,
    endpoint,
    files,
    finding,
    hostile_reports,
    kernels_report,
    logits,
    measure,
    quality,
    verify_report,
)

from mmq.errors import UsageError
from mmq.report.compare import compare_documents
from mmq.report.html import html_text
from mmq.report.load import Reports, reports_of
from mmq.report.markdown import markdown_text
from mmq.report.text import document_text


def compared(a, b):
    document = compare_documents(reports_of(a), reports_of(b))
    return {s.name: s for s in document.sections}, document


def rows(section) -> dict[str, list[str]]:
    (table,) = section.tables
    return {row[0].text: [cell.text for cell in row[1:]] for row in table.rows}


@pytest.mark.parametrize("report", [verify_report(), convert_report(), kernels_report()])
def test_a_report_beside_itself_has_no_differences(report):
    sections, _ = compared(report, report)
    assert not any(t.rows for s in sections.values() for t in s.tables)
    assert sections["findings"].lines[0].startswith("0 new in B, 0 gone in B,")


def with_both(**figures):
    found = logits()
    arms = {**found.arms, "both": found.arms["both"].model_copy(update=figures)}
    return verify_report(logits=found.model_copy(update={"arms": arms}))


@pytest.mark.parametrize(
    ("a", "b", "difference", "verdict"),
    [
        (measure(0.95, 0.01), measure(0.98, 0.01), "+0.0300", "beyond"),
        (measure(0.95, 0.01), measure(0.975, 0.01), "+0.0250", "within"),
        (measure(0.95), measure(0.96), "+0.0100", "no SE"),
        (measure(0.95, 0.01), measure(0.96), "+0.0100", "no SE"),
        (measure(0.95, 0.01), measure(float("nan"), 0.01), "nan", "beyond"),
    ],
)
def test_figures(a, b, difference, verdict):
    sections, _ = compared(with_both(top1=a), with_both(top1=b))
    found = rows(sections["figures"])
    assert list(found) == ["both.top1"]
    assert found["both.top1"][2] == difference and found["both.top1"][4] == verdict


def test_only_what_is_not_sampled_is_exact():
    """A largest value is of these tokens alone, and has no error that says so."""
    changes = {"kld_max": measure(0.3), "top1": measure(0.7, 0.001)}
    one = with_both(**changes).model_copy(update={"metrics": {"compared_tensors": 720.0}})
    sections, _ = compared(verify_report(), one)
    found = rows(sections["figures"])
    assert {key: row[-1] for key, row in found.items()} == {
        "compared_tensors": "exact", "sqnr_db_mean": "only in A", "both.kld_max": "no SE",
        "both.top1": "beyond",
    }  # fmt: skip
    total = len(verify_report().metrics) + 1 + 4 * 13
    assert sections["figures"].lines[-1] == (
        f"4 differ (1 beyond two standard errors, 1 without one), {total - 4} are the same."
    )


def test_what_is_no_number_in_both_is_the_same():
    one, other = (with_both(top1=measure(float("nan"), float("nan"))) for _ in range(2))
    sections, _ = compared(one, other)
    assert not any(t.rows for t in sections["figures"].tables)


def test_two_standard_errors_add_in_squares():
    sections, _ = compared(with_both(top1=measure(0.9, 0.03)), with_both(top1=measure(0.8, 0.04)))
    assert rows(sections["figures"])["both.top1"][3:] == ["0.10", "within"]


def test_findings_new_and_gone():
    a = verify_report(findings=[finding("x", where="1"), finding("y", "note")])
    b = verify_report(findings=[finding("x", where="2"), finding("y", "note")])
    sections, _ = compared(a, b)
    assert sections["findings"].lines == ["1 new in B, 1 gone in B, 1 in both."]
    (table,) = sections["findings"].tables
    text = document_text(compared(a, b)[1])
    assert "  new in B, verify: error[x]: x!\n    where:    2\n" in text
    assert [(r[3].text, r[6].text) for r in table.rows] == [("2", "new in B, verify"),
                                                            ("1", "gone in B, verify")]  # fmt: skip


def test_a_checkpoint_may_have_another_name():
    a, b = (verify_report(checkpoint=endpoint(n, 1), findings=[finding("gate-warn", where=n)])
            for n in ("one", "two"))  # fmt: skip
    sections, _ = compared(a, b)
    assert sections["findings"].lines == ["0 new in B, 0 gone in B, 1 in both."]


def test_settings_and_files():
    a = convert_report(files=files(3))
    options = {"to": "nvfp4", "layout": "minimax", "ignore": ["a", "b"]}
    changed = files(1, salt="x") + files(4)[1:]
    b = convert_report(files=changed, numerics_version=3, options=options)
    sections, _ = compared(a, b)
    assert rows(sections["settings"]) == {
        "numerics_version": ["2", "3"], "options.layout": ["modelopt", "minimax"],
        "options.ignore": ["none", "a, b"], "options.importance": ["none", "–"],
    }  # fmt: skip
    listed = rows(sections["files"])
    assert [r[0] for r in listed.values()] == ["other bytes", "only in B"]
    assert list(listed) == ["model-00000.safetensors", "model-00003.safetensors"]
    assert sections["files"].lines == ["2 differ, 2 are the same."]


def test_quality_of_two_conversions():
    worse = quality().model_copy(update={"sqnr_db": 20.4})
    sections, _ = compared(convert_report(), convert_report(quality=worse))
    assert rows(sections["figures"])["quality.sqnr_db"] == [
        "21.88", "20.40", "−1.48", "", "exact"
    ]  # fmt: skip


def test_other_tokens_are_named():
    other = logits().model_copy(update={"tokens_sha256": "cd" * 32})
    sections, _ = compared(verify_report(), verify_report(logits=other))
    assert any("other tokens" in line for line in sections["figures"].lines)
    assert "logits.tokens_sha256" in rows(sections["settings"])


def test_a_level_that_only_one_has():
    sections, document = compared(verify_report(), verify_report(logits=None))
    assert ("only in", "A: level logits") in document.facts
    assert not any(t.rows for s in sections.values() for t in s.tables)


def test_a_forward_that_only_one_has():
    found = logits()
    fewer = found.model_copy(update={"arms": {"both": found.arms["both"]}})
    sections, _ = compared(verify_report(), verify_report(logits=fewer))
    assert rows(sections["figures"])["kv.top1"][-1] == "only in A"


def test_two_kinds_have_nothing_in_common():
    with pytest.raises(UsageError) as caught:
        compared(verify_report(), convert_report())
    assert caught.value.id == "reports-differ-in-kind" and caught.value.exit_code == 2
    both = Reports(verify_report(), convert_report())
    assert compare_documents(both, reports_of(convert_report())).facts[0][1].startswith("convert")


def test_every_rendering_escapes_and_fits():
    a, b = hostile_reports()[0], verify_report()
    _, document = compared(a, b)
    text = document_text(document)
    assert "\x1b" not in text and HOSTILE.splitlines()[0][:20] in text
    _, plain = compared(verify_report(), with_both(top1=measure(0.9, 0.03)))
    assert max(map(len, document_text(plain).splitlines())) <= 100
    assert "<script" not in markdown_text(document) and "<script>alert" not in html_text(document)

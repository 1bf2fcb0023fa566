"""JUnit XML: suites, cases, failures with the findings' ids, and XML that always parses."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from report_samples import (
    convert_report,
    finding,
    hostile_reports,
    kernels_report,
    release_reports,
    verify_report,
)

from mmq.report.junit import junit_text
from mmq.report.load import Reports, reports_of
from mmq.report.schema import LevelResult, VerifyReport

LAYER = "language_model.model.layers.{}.block_sparse_moe.experts.7.w1.weight"


def tree(reports: Reports) -> ET.Element:
    """The document, its counts checked against its cases."""
    root = ET.fromstring(junit_text(reports).encode())
    for part in (root, *root):
        cases = list(part.iter("testcase"))
        counts = {
            "tests": len(cases), "errors": 0,
            "failures": sum(c.find("failure") is not None for c in cases),
            "skipped": sum(c.find("skipped") is not None for c in cases),
        }  # fmt: skip
        assert {k: int(part.get(k, "")) for k in counts} == counts
    return root


def cases(root: ET.Element, outcome: str = "failure") -> dict[tuple[str, str], ET.Element]:
    """Cases of this outcome; the verdict's, which fails with any other, has tests of its own."""
    return {
        (c.get("classname", ""), c.get("name", "")): found
        for c in root.iter("testcase")
        if (found := c.find(outcome)) is not None and c.get("name") != "verdict"
    }


def verdict_case(report: VerifyReport) -> ET.Element:
    (found,) = [c for c in tree(reports_of(report)).iter("testcase") if c.get("name") == "verdict"]
    return found


def weights(findings, **checks: int):
    level = LevelResult(level="weights", status="fail", seconds=1.0, checks=checks)
    return reports_of(verify_report(levels=[level], findings=findings, logits=None))


def test_a_suite_for_each_level_and_a_case_for_each_check():
    root = tree(reports_of(verify_report()))
    assert [s.get("name") for s in root] == ["mmq.structure", "mmq.weights", "mmq.logits",
                                             "mmq.findings", "mmq.verdict"]  # fmt: skip
    names = {c.get("name") for c in root[0]}
    assert {"opened", "kv scales"} <= names
    assert ("mmq.weights", "input scales: calibrated elsewhere") in cases(root, "skipped")
    # of the gates' finding there is one case, the gate's own
    assert set(cases(root)) == {
        ("gate-fail", "gate top1"), ("gate-inconclusive", "gate kv_delta_ppl_percent"),
    }  # fmt: skip
    assert {c.get("name") for c in root[2]} == {
        "layers run", "gate kld_mean", "gate top1", "gate kv_delta_ppl_percent", "layers 0–3",
    }  # fmt: skip
    assert "note[kv-scale-sparse-layers]" in root[3].findtext("system-out", "")


def test_findings_fail_their_check_by_id_and_group_of_layers():
    found = [
        finding("block-error", where=LAYER.format(n), level="weights", check="tensors compared")
        for n in (0, 9, 10, 31)
    ]
    found.append(finding("file-hash", where="a.bin", level="weights", check="files hashed"))
    found.append(finding("sqnr-low", "warning", level="weights", check="tensors compared"))
    root = tree(weights(found, **{"tensors compared": 4, "files hashed": 2, "gates": 2}))
    failed = cases(root)
    assert set(failed) == {
        ("block-error", "tensors compared layers 0–9"),
        ("block-error", "tensors compared layers 10–19"),
        ("block-error", "tensors compared layers 30–39"),
        ("file-hash", "files hashed a.bin"),
    }
    two = failed["block-error", "tensors compared layers 0–9"]
    assert two.get("type") == "block-error" and two.get("message") == "block-error! (and 1 more)"
    assert len((two.text or "").splitlines()) == 2
    passed = {c.get("name") for c in root.iter("testcase") if c.find("system-out") is not None}
    assert passed == {"gates"}, "a check with a finding has not passed"
    assert "sqnr-low" in root[0].findtext("system-out", "")


def test_a_finding_of_the_level_as_a_whole():
    found = [finding("nothing-compared", where="out", level="weights")]
    root = tree(weights(found, **{"files hashed": 2}))
    assert list(cases(root)) == [("nothing-compared", "weights out")]
    assert not cases(root, "skipped"), "the checks that ran found nothing"


def test_findings_without_a_level_have_a_suite_of_their_own():
    root = tree(weights([finding("file-hash", where="a.bin")], **{"files hashed": 2}))
    assert [s.get("name") for s in root] == ["mmq.weights", "mmq.findings", "mmq.verdict"]
    assert list(cases(root)) == [("file-hash", "findings a.bin")]
    assert list(cases(root, "skipped")) == [("mmq.weights", "files hashed")]


def test_a_level_that_was_left_out_is_skipped():
    level = LevelResult(level="logits", status="skipped", seconds=0, checks={}, skipped=["no time"])
    root = tree(reports_of(verify_report(levels=[level], logits=None, findings=[])))
    assert list(cases(root, "skipped")) == [("mmq.logits", "no time")] and not cases(root)
    level = level.model_copy(update={"skipped": []})
    root = tree(reports_of(verify_report(levels=[level], logits=None, findings=[])))
    assert cases(root, "skipped"), "a level without a case would look passed"


def test_kernels_are_cases():
    root = tree(reports_of(kernels_report()))
    assert set(cases(root)) == {("kernel-differs", "kernel router"),
                                ("kernel-crashed", "kernel qkv")}  # fmt: skip
    assert "router; 7 tokens" in (cases(root)["kernel-differs", "kernel router"].text or "")
    assert list(cases(root, "skipped")) == [("mmq.kernels", "kernel selection")]
    assert [s.get("name") for s in root] == ["mmq.kernels", "mmq.verdict"]


@pytest.mark.parametrize("verdict", ["pass", "warn", "inconclusive", "fail"])
def test_a_verdict_that_no_finding_explains_still_fails(verdict):
    """CI must not be green where `mmq verify` exits 3, whatever the report lacks."""
    level = LevelResult(level="weights", status=verdict, seconds=1, checks={"a": 1})
    report = verify_report(levels=[level], verdict=verdict, findings=[], logits=None)
    failed = verdict_case(report).find("failure")
    assert (failed is not None) == (verdict in ("inconclusive", "fail"))
    if failed is not None:
        assert failed.get("type") == f"verdict-{verdict}"
    failures = int(tree(reports_of(report)).get("failures", ""))
    assert failures == (1 if failed is not None else 0)


def kernels_with(*findings, worst: float = 0.4):
    """Operations moe and moe_router, both beyond their bound unless `worst` is less."""
    report = kernels_report()
    assert report.kernels is not None
    one = report.kernels.results[1]
    results = [one.model_copy(update={"op": op, "worst": worst}) for op in ("moe", "moe_router")]
    kernels = report.kernels.model_copy(update={"results": results})
    return tree(reports_of(report.model_copy(update={
        "kernels": kernels, "findings": list(findings)})))  # fmt: skip


def test_a_kernels_case_has_its_own_findings_alone():
    root = kernels_with(finding("kernel-differs", where="moe_router; 7 tokens"))
    failed = cases(root)
    assert "7 tokens" in (failed["kernel-differs", "kernel moe_router"].text or "")
    assert "7 tokens" not in (failed["kernel-differs", "kernel moe"].text or "")


@pytest.mark.parametrize(
    ("found", "worst"),
    [
        (finding("kernel-differs", where="mo; 7 tokens"), 0.4),
        (finding("kernel-differs", where="moe; 7 tokens"), 0.001),
        (finding("kernel-crashed", where="moe"), 0.4),
        (finding("kernel-path", "note", where="moe"), 0.4),
        (finding("kernel-differs", "note", where="moe"), 0.4),
    ],
)
def test_a_finding_that_no_case_tells_is_told(found, worst):
    """Another operation's, one whose operation passed, and every note."""
    root = kernels_with(found, worst=worst)
    text = ET.tostring(root[-2], encoding="unicode")
    assert root[-2].get("name") == "mmq.findings" and f"[{found.id}]" in text


@pytest.mark.parametrize("id", ["gate-note", "gate-fail"])
def test_what_is_no_gates_own_finding_is_told(id):
    """kld_mean passed: a finding that says otherwise is not in its case."""
    found = finding(id, message="kld_mean is odd", level="logits", check="gates")
    root = tree(reports_of(verify_report(findings=[found])))
    assert (id, "gates") in cases(root)


def test_times_are_numbers():
    level = LevelResult(level="weights", status="pass", seconds=float("nan"), checks={"a": 1})
    root = tree(reports_of(verify_report(levels=[level], findings=[], logits=None)))
    assert {e.get("time") for e in root.iter() if "time" in e.attrib} == {"0.000"}


def test_a_conversion_is_one_suite():
    root = tree(reports_of(convert_report()))
    assert [s.get("name") for s in root] == ["mmq.convert"] and not cases(root)


def test_hostile_text_and_a_release_are_valid_xml():
    root = tree(Reports(*hostile_reports()))
    assert "<script>alert(1)</script>" in "".join(root.itertext())
    assert len(cases(tree(Reports(*release_reports())))) > 20


def test_it_obeys_the_common_form_of_junit(tmp_path: Path):
    """What Jenkins, GitLab and GitHub's readers take: these elements, in this nesting."""
    allowed = {
        "testsuites": {"testsuite"}, "testsuite": {"testcase", "system-out"},
        "testcase": {"failure", "skipped", "system-out"}, "failure": set(), "skipped": set(),
        "system-out": set(),
    }  # fmt: skip
    for element in tree(Reports(verify_report(), convert_report())).iter():
        assert {child.tag for child in element} <= allowed[element.tag]
        if element.tag in ("testsuite", "testcase"):
            assert element.get("name") and float(element.get("time", "")) >= 0

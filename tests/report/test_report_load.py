"""Reports read back: what is one, and which error what is none gives."""

from __future__ import annotations

import json

import pytest
from report_samples import convert_report, kernels_report, verify_report

from mmq.errors import BadInputError
from mmq.report.load import as_json, read_report, read_reports

REPORTS = [verify_report(), convert_report(), kernels_report()]


@pytest.mark.parametrize("report", REPORTS, ids=["verify", "convert", "kernels"])
def test_a_report_comes_back_as_it_was(report, tmp_path):
    path = tmp_path / "r.json"
    path.write_text(as_json(report), "utf-8")
    assert read_report(path) == report
    assert json.loads(as_json(report)) == report.model_dump()


def test_figures_that_are_no_numbers_come_back(tmp_path):
    report = verify_report(metrics={"a": float("nan"), "b": float("-inf")})
    text = as_json(report)
    assert "NaN" not in text and json.loads(text)["metrics"] == {"a": "nan", "b": "-inf"}
    for written in (text, json.dumps(report.model_dump())):
        (tmp_path / "r.json").write_text(written, "utf-8")
        again = read_report(tmp_path / "r.json")
        assert again.metrics["a"] != again.metrics["a"] and again.metrics["b"] == float("-inf")


def test_a_folder_gives_both_reports(tmp_path):
    (tmp_path / "mmq-convert.json").write_text(as_json(convert_report()), "utf-8")
    assert [r.kind for r in read_reports(tmp_path).found] == ["convert"]
    (tmp_path / "mmq-verify.json").write_text(as_json(verify_report()), "utf-8")
    assert [r.kind for r in read_reports(tmp_path).found] == ["verify", "convert"]


def test_a_report_of_the_first_version_has_no_newer_figures(tmp_path):
    data = convert_report().model_dump()
    for key in ("sizes", "calibration"):
        del data[key]
    for key in ("device", "backend", "spent"):
        del data["timing"][key]
    for key in ("by_module", "histogram"):
        del data["quality"][key]
    for finding in data["findings"]:
        del finding["level"], finding["check"]
    (tmp_path / "r.json").write_text(json.dumps(data), "utf-8")
    assert read_report(tmp_path / "r.json").quality.histogram is None


def damaged(**changes: object) -> bytes:
    return json.dumps({**verify_report().model_dump(), **changes}).encode()


@pytest.mark.parametrize(
    ("data", "id", "says"),
    [
        (b"", "report-not-json", "not JSON"),
        (b"\xff\xfe{", "report-not-json", "not JSON"),
        (b"[" * 100_000, "report-not-json", "not JSON"),
        (b"9" * 5000, "report-not-json", "not JSON"),
        (b"[]", "report-foreign", "not a report of mmq's"),
        (b'{"architectures": []}', "report-foreign", "not a report of mmq's"),
        (damaged(kind="bench"), "report-foreign", "not a report of mmq's"),
        (damaged(kind=["verify"]), "report-foreign", "not a report of mmq's"),
        (damaged(schema_version=None), "report-foreign", "not a report of mmq's"),
        (damaged(schema_version=2), "report-version", "schema_version 2"),
        (damaged(schema_version="1"), "report-version", "schema_version 1"),
        (damaged(schema_version=True), "report-version", "schema_version True"),
        (damaged(levels="none"), "report-invalid", "levels"),
        (damaged(extra=1), "report-invalid", "extra"),
        (damaged(findings=[{"id": "x"}]), "report-invalid", "findings.0.severity"),
        (damaged(verdict="\ud800"), "report-invalid", "verdict"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.startswith("report") else "",
)  # fmt: skip
def test_what_is_no_report(data, id, says, tmp_path):
    path = tmp_path / "r.json"
    path.write_bytes(data)
    with pytest.raises(BadInputError) as caught:
        read_report(path)
    assert caught.value.id == id and caught.value.exit_code == 4
    assert says in caught.value.message and str(path) in caught.value.message


def test_nothing_there(tmp_path):
    for path in (tmp_path / "absent.json", tmp_path):
        with pytest.raises(BadInputError) as caught:
            read_reports(path)
        assert caught.value.id == "report-not-found"


def test_a_file_that_cannot_be_read(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(BadInputError) as caught:
        read_report(tmp_path / "file" / "r.json")
    assert caught.value.id in ("report-unreadable", "report-not-found")

"""Findings say which level and check made them, and conversions where their error is."""

from __future__ import annotations

import shutil
import xml.etree.ElementTree as ET

import pytest
from in_process import run_mmq

from mmq.console import Console
from mmq.report.findings import Finding
from mmq.report.junit import junit_text
from mmq.report.load import read_reports
from mmq.verify.log import MAX_PER_ID, LevelLog


@pytest.fixture
def log() -> LevelLog:
    return LevelLog("weights", Console("quiet"))


def test_a_finding_knows_its_level_and_check(log):
    log.run("files hashed", 1, [Finding("file-hash", "error", "x")])
    log.add(Finding("nothing-compared", "error", "y"))
    assert [(e.id, e.level, e.check) for e in log.entries] == [
        ("file-hash", "weights", "files hashed"), ("nothing-compared", "weights", ""),
    ]  # fmt: skip


def test_so_does_the_sum_of_the_rest(log):
    log.run("files hashed", 1, [Finding("file-hash", "error", "x")] * (MAX_PER_ID + 5))
    log.result()
    assert log.entries[-1].message == "5 more of file-hash"
    assert log.entries[-1].check == "files hashed"


def test_a_planted_fault_is_a_red_case_of_its_check(good_output, good_folder, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(good_output.out, out)
    shard = next(out.glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    assert run_mmq("verify", out, "--against", good_folder)[0] == 3
    root = ET.fromstring(junit_text(read_reports(out)).encode())
    red = [c for c in root.iter("testcase") if c.find("failure") is not None]
    failed = {c.get("classname"): c.get("name") for c in red}
    assert failed["file-hash"] == f"files hashed {shard.name}"
    assert "mmq.findings" not in {s.get("name") for s in root}
    passed = {c.get("name") for c in root.iter("testcase") if len(c) and c[0].tag == "system-out"}
    assert "block scales scanned" in passed and "files hashed" not in passed


def test_a_conversion_says_where_its_error_is(good_output):
    report = good_output.json("mmq-convert.json")
    modules = report["quality"]["by_module"]
    assert sum(m["tensors"] for m in modules) == report["quality"]["tensors"]
    assert sum(report["quality"]["histogram"]["counts"]) == report["quality"]["tensors"]
    assert {m["module"] for m in modules} == {f"routed_experts w{n}" for n in (1, 2, 3)}
    for side in ("before_bytes", "after_bytes"):
        assert sum(s[side] for s in report["sizes"]) == sum(c[side] for c in report["components"])

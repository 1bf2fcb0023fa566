"""The report: which one it replaces, and what happens when it cannot be written."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from in_process import run_mmq

from mmq.demo.bundled import bundled_model
from mmq.errors import MachineError
from mmq.verify import report_file

REPORT = "mmq-verify.json"


@pytest.fixture
def output(good_output, tmp_path):
    """A copy of the good output that a test may change."""
    out = tmp_path / "out"
    out.mkdir()
    for path in good_output.out.rglob("*"):
        if path.is_file():
            target = out / path.relative_to(good_output.out)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    return out


def levels(out):
    return [level["level"] for level in json.loads((out / REPORT).read_bytes())["levels"]]


def test_a_shorter_look_does_not_replace_a_longer_one(output, good_folder):
    assert run_mmq("verify", output, "--against", good_folder)[0] == 0
    before = (output / REPORT).read_bytes()
    code, events, _ = run_mmq("verify", output)
    assert code == 0 and (output / REPORT).read_bytes() == before
    assert any("keeps its report of level weights" in e.get("message", "") for e in events)
    assert run_mmq("verify", output, "--against", good_folder)[0] == 0
    assert (output / REPORT).read_bytes() != before, "the same level does"


def test_a_look_that_finds_something_replaces_it(output, good_folder):
    assert run_mmq("verify", output, "--against", good_folder)[0] == 0
    config = json.loads((output / "config.json").read_bytes())
    config["quantization_config"]["quant_method"] = "gguf"
    (output / "config.json").write_text(json.dumps(config))
    assert run_mmq("verify", output)[0] == 3
    assert levels(output) == ["structure"]


def test_a_report_about_other_files_is_replaced(output, good_folder):
    assert run_mmq("verify", output, "--against", good_folder)[0] == 0
    report = json.loads((output / REPORT).read_bytes())
    for file in report["files"]:
        file["sha256"] = "0" * 64
    (output / REPORT).write_text(json.dumps(report))
    assert run_mmq("verify", output)[0] == 0
    assert levels(output) == ["structure"]


def test_a_damaged_report_is_replaced(output):
    (output / REPORT).write_text("{")
    assert run_mmq("verify", output)[0] == 0
    assert levels(output) == ["structure"]


@pytest.mark.parametrize("option", [(), ("-o", "else.json")])
def test_a_full_disk_is_no_pass(output, tmp_path, monkeypatch, option):
    def full(path, data):
        raise MachineError("disk-full", "the disk is full", where=str(path))

    monkeypatch.setattr(report_file, "write_file", full)
    monkeypatch.chdir(tmp_path)
    code, events, _ = run_mmq("verify", output, *option)
    assert code == 6
    (error,) = [e for e in events if e["event"] == "error"]
    assert error["id"] == "report-not-written" and "the disk is full" in error["message"]
    assert any(e["event"] == "result" for e in events), "the answer is told all the same"


def test_an_old_report_that_cannot_be_replaced_is_no_pass(output, monkeypatch):
    (output / REPORT).write_text("{}")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    code, events, _ = run_mmq("verify", output)
    assert code == 6 and events[-1]["event"] != "finding"


def test_a_failure_stays_one_without_a_report(output, tmp_path, monkeypatch):
    monkeypatch.setattr(
        report_file, "write_file", lambda *_: (_ for _ in ()).throw(OSError("no room"))
    )
    (output / "config.json").unlink()
    code, events, _ = run_mmq("verify", output)
    assert code == 3
    assert any("report was not written" in e.get("message", "") for e in events)


@pytest.mark.parametrize(
    "words",
    [
        ("verify", "{out}", "-o", "{src}/model.safetensors.index.json"),
        ("verify", "{out}", "-o", "{out}/config.json"),
        ("report", "{out}", "--format", "html", "-o", "{out}/model-00001-of-00001.safetensors"),
        ("calibrate", "{src}", "-o", "{src}/config.json", "--text", "{src}/LICENSE"),
    ],
)
def test_a_model_file_is_never_replaced(output, tmp_path, words):
    (tmp_path / "src").symlink_to(bundled_model())
    names = {"out": output, "src": tmp_path / "src"}
    words = [word.format(**names) for word in words]
    target = Path(words[words.index("-o") + 1])
    before = target.read_bytes()
    code, events, _ = run_mmq(*words)
    (error,) = [e for e in events if e["event"] == "error"]
    assert (code, error["id"]) == (7, "output-is-model-file")
    assert target.read_bytes() == before


@pytest.mark.parametrize(
    "option",
    [("--text", "nope.txt"), ("--tokens", "nope.npy"), ("--windows", "1"), ("--kv", "fp8"),
     ("--no-replay",), ("--layers", "1")],
)  # fmt: skip
def test_options_of_logits_without_it_are_refused(output, good_folder, option):
    code, events, _ = run_mmq("verify", output, "--against", good_folder, *option)
    (error,) = [e for e in events if e["event"] == "error"]
    assert (code, error["id"]) == (2, "option-conflict")
    assert "add --level logits" in error["hint"]


@pytest.mark.parametrize(
    ("options", "id"),
    [
        (("--level", "logits", "--text", "nope.txt"), "text-unreadable"),
        (("--level", "logits", "--tokens", "nope.npy"), "tokens-unreadable"),
        (("--gates", "nope.yaml"), "gates-unreadable"),
    ],
)
def test_what_cannot_be_read_is_told_before_the_weights_are(
    output, good_folder, monkeypatch, options, id
):
    monkeypatch.setattr("mmq.verify.run.open_source", lambda *_: pytest.fail("too late"))
    code, events, _ = run_mmq("verify", output, "--against", good_folder, *options)
    (error,) = [e for e in events if e["event"] == "error"]
    assert (code, error["id"]) == (2, id)

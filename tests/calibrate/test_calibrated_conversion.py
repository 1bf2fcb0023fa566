"""`mmq convert --kv-scales calibrate`: both steps, the file that stays, and what is told of it."""

from __future__ import annotations

import json

import numpy as np
import pytest
from in_process import run_mmq
from m3_source import read_folder

from mmq.demo.bundled import bundled_model, bundled_texts


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "train.txt"
    path.write_text(bundled_texts()[2].read_text("utf-8")[:3000], "utf-8")
    return path


def convert(out, *options):
    return run_mmq("convert", bundled_model(), out, "--jobs", "1", *options)[:2]


def notes(events):
    return [e["message"] for e in events if e["event"] == "note"]


def error_id(events):
    return next(e["id"] for e in events if e["event"] == "error")


def test_both_in_one_command(tmp_path, text):
    out = tmp_path / "out"
    code, events = convert(out, "--kv-scales", "calibrate", "--text", text)
    assert code == 0, events
    file = tmp_path / "out.kv-scales.json"
    assert any(f"KV scales kept in {file}" in note for note in notes(events))
    data = json.loads(file.read_text())
    stored = read_folder(out)
    assert len(data["scales"]) == 8
    for name, value in data["scales"].items():
        assert stored[name].bytes_as("<f4") == np.float32(value)
    for report in ("mmq-manifest.json", "mmq-convert.json"):
        told = json.loads((out / report).read_text())["calibration"]["kv_scales"]
        assert told["observer"] == "max" and "train.txt" in told["text_sha256"]
        assert told["tokens"] == data["calibration"]["tokens"] > 500

    # once more: neither of the two has anything to do
    before = file.stat().st_mtime_ns
    code, events = convert(out, "--kv-scales", "calibrate", "--text", text)
    assert code == 0 and any("as calibrated before" in note for note in notes(events))
    assert file.stat().st_mtime_ns == before and any("finished already" in n for n in notes(events))

    code, events = run_mmq("verify", out, "--against", bundled_model())[:2]
    assert code == 0
    file.unlink()
    code, events = run_mmq("verify", out, "--against", bundled_model())[:2]
    skipped = [s for level in events[-1]["levels"] for s in level["skipped"]]
    assert code == 0 and any("KV scales" in s for s in skipped)


def test_another_text_is_another_calibration(tmp_path, text):
    out = tmp_path / "out"
    assert convert(out, "--kv-scales", "calibrate", "--text", text)[0] == 0
    first = json.loads((tmp_path / "out.kv-scales.json").read_text())["scales"]
    text.write_text(bundled_texts()[0].read_text("utf-8")[:3000], "utf-8")
    code, _ = convert(out, "--kv-scales", "calibrate", "--text", text, "--overwrite")
    assert code == 0
    assert json.loads((tmp_path / "out.kv-scales.json").read_text())["scales"] != first


def test_a_plan_needs_no_forward(tmp_path, text):
    code, events = convert(tmp_path / "out", "--kv-scales", "calibrate", "--text", text,
                           "--dry-run")  # fmt: skip
    assert code == 0 and events[-1]["output"]["kv_scales"] == 8
    assert list(tmp_path.iterdir()) == [text]


@pytest.mark.parametrize("options, id, code", [
    (("--kv-scales", "calibrate"), "text-needed", 2),
    (("--text", "TEXT"), "option-conflict", 2),
    (("--kv-scales", "unit", "--text", "TEXT"), "option-conflict", 2),
    (("--kv-scales", "calibrate", "--text", "TEXT", "--layout", "minimax"), "option-conflict", 2),
    (("--kv-scales", "calibrate", "--text", "TEXT", "--to", "bf16"), "option-conflict", 2),
    (("--kv-scales", "calibrate", "--text", "no such file"), "text-unreadable", 2),
])  # fmt: skip
@pytest.mark.parametrize("dry", [(), ("--dry-run",)])
def test_what_is_refused_before_any_work(tmp_path, text, options, id, code, dry):
    words = [text if word == "TEXT" else word for word in options]
    if dry and "no such file" in options:
        return  # a plan reads no text
    got, events = convert(tmp_path / "out", *words, *dry)
    assert (got, error_id(events)) == (code, id)
    assert list(tmp_path.iterdir()) == [text]


def test_a_file_of_somebodys_is_not_overwritten(tmp_path, text):
    file = tmp_path / "out.kv-scales.json"
    file.write_text('{"my": "notes"}')
    code, events = convert(tmp_path / "out", "--kv-scales", "calibrate", "--text", text)
    assert (code, error_id(events)) == (7, "calibration-not-ours")
    assert file.read_text() == '{"my": "notes"}'

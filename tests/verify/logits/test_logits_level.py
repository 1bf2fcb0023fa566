"""`mmq verify --level logits` from the outside: report, verdicts, exit codes, resuming."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from in_process import run_mmq

from mmq.demo.small_model import build_small_model

#: Random weights miss every default gate but never these.
LOOSE = (
    "gates:\n  delta_ppl_percent: {target: 99, fail: 100}\n  kld_mean: {target: 9, fail: 10}\n"
    "  top1: {target: 0.02, fail: 0.01}\n  kv_delta_ppl_percent: {target: 99, fail: 100}\n"
)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A small model with random weights, its conversion, ids and gates; not to be changed."""
    root = tmp_path_factory.mktemp("pair")
    source, out = build_small_model(root / "source"), root / "out"
    assert run_mmq("convert", source, out, "--jobs", "1")[0] == 0
    np.save(root / "ids.npy", np.random.default_rng(6).integers(0, 512, (4, 96)))
    (root / "loose.yaml").write_text(LOOSE)
    return root


def verify(pair, tmp_path, *options, out=None):
    """(exit code, report) of a logits run whose files go to tmp_path."""
    code, events = run_mmq(
        "verify", out or pair / "out", "--against", pair / "source", "--level", "logits",
        "--tokens", pair / "ids.npy", "-o", tmp_path / "report.json", *options,
    )[:2]  # fmt: skip
    path = tmp_path / "report.json"
    return code, json.loads(path.read_text()) if path.exists() else events


def test_a_sound_conversion_passes_its_gates(pair, tmp_path):
    code, report = verify(pair, tmp_path, "--gates", pair / "loose.yaml")
    assert code == 0 and report["verdict"] == "pass"
    logits = report["logits"]
    assert [level["level"] for level in report["levels"]] == ["structure", "weights", "logits"]
    assert set(logits["arms"]) == {"weights", "kv", "both", "replay"}
    assert logits["judged"] == "both" and logits["scored"] == 4 * 95
    assert len(logits["layers"]) == 4 and len(logits["kld_curve"]) == 201
    assert (np.load(tmp_path / logits["tokens_file"]) == np.load(pair / "ids.npy")).all()
    assert not (tmp_path / ".mmq-verify").exists()
    replayed = [layer["arms"]["replay"] for layer in logits["layers"]]
    assert all(arm["routing"]["flips"] == 0 for arm in replayed if "routing" in arm)
    assert all(arm["selection"]["exact"] == 1 for arm in replayed if arm.get("selection"))


def test_defaults_fail_a_model_of_random_weights(pair, tmp_path):
    code, report = verify(pair, tmp_path, "--no-replay", "--kv", "exact")
    assert code == 3 and report["verdict"] == "fail"
    assert set(report["logits"]["arms"]) == {"weights"} and report["logits"]["judged"] == "weights"
    assert "gate-fail" in {f["id"] for f in report["findings"]}


def test_too_close_to_say(pair, tmp_path):
    found = verify(pair, tmp_path, "--no-replay", "--kv", "exact")[1]
    kld = found["logits"]["arms"]["weights"]["kld_mean"]["value"]
    gates = tmp_path / "close.yaml"
    gates.write_text(LOOSE.replace("target: 9, fail: 10", f"target: {kld:.6f}, fail: 10"))
    options = ("--no-replay", "--kv", "exact", "--gates", gates)
    code, report = verify(pair, tmp_path, *options)
    assert code == 3 and report["verdict"] == "inconclusive"
    (result,) = (g for g in report["logits"]["gates"] if g["status"] == "inconclusive")
    assert result["gate"] == "kld_mean" and result["more_windows"] >= 1
    assert verify(pair, tmp_path, *options, "--allow-inconclusive")[0] == 0


def test_a_part_of_the_model_passes_nothing(pair, tmp_path):
    code, report = verify(pair, tmp_path, "--layers", "2")
    assert code == 3 and report["verdict"] == "inconclusive" and report["logits"] is None
    level = report["levels"][2]
    assert level["status"] == "skipped" and "--layers 2 of 4" in level["skipped"][0]


def test_what_it_needs_is_said(pair, tmp_path):
    code = run_mmq("verify", pair / "out", "--against", pair / "source", "--level", "logits")[0]
    assert code == 2  # no text
    code = run_mmq("verify", pair / "out", "--level", "logits", "--tokens", pair / "ids.npy")[0]
    assert code == 2  # no source
    np.save(tmp_path / "big.npy", np.full((1, 8), 512))
    code = run_mmq(
        "verify", pair / "out", "--against", pair / "source", "--level", "logits",
        "--tokens", tmp_path / "big.npy",
    )[0]  # fmt: skip
    assert code == 2


def test_short_windows_do_not_test_the_indexer(pair, tmp_path):
    np.save(tmp_path / "short.npy", np.arange(32)[None])
    code, report = verify(pair, tmp_path, "--gates", pair / "loose.yaml")
    assert "selection-never-binds" not in {f["id"] for f in report["findings"]}
    options = "--tokens", tmp_path / "short.npy", "--gates", pair / "loose.yaml"
    code, report = verify(pair, tmp_path, *options)
    assert code in (0, 3) and "selection-never-binds" in {f["id"] for f in report["findings"]}


def with_config(pair, tmp_path, change):
    """A copy of OUT with another text_config."""
    out = tmp_path / "changed"
    shutil.copytree(pair / "out", out)
    config = json.loads((out / "config.json").read_text())
    change(config["text_config"])
    (out / "config.json").write_text(json.dumps(config))
    return out


@pytest.mark.parametrize("key", ["swiglu_limit", "rope_theta", "routed_scaling_factor"])
def test_another_function_is_not_compared(pair, tmp_path, key):
    out = with_config(pair, tmp_path, lambda text: text.update({key: 5.0}))
    code, report = verify(pair, tmp_path, out=out)
    assert code == 3 and report["verdict"] == "fail"
    assert not report["logits"]


def test_nan_is_named_by_its_layer(pair, tmp_path, monkeypatch):
    from mmq.verify.model import layer

    attend = layer.Layer.attend

    def broken(self, hidden_TM, mode, selection_GTC=None):
        found = attend(self, hidden_TM, mode, selection_GTC)
        if self.number == 2 and self._weights.location.endswith("out"):
            found.added_TM[7, 3] = float("nan")
        return found

    monkeypatch.setattr(layer.Layer, "attend", broken)
    code, report = verify(pair, tmp_path, "--no-replay", "--kv", "exact")
    assert code == 3
    (finding,) = (f for f in report["findings"] if f["id"] == "forward-nonfinite")
    assert finding["where"] == "layer 2" and "window 0, position 7" in finding["message"]


def without_times(report):
    report["logits"].pop("timing")
    for level in report["levels"]:
        level.pop("seconds")
    return report


def test_killed_half_way_and_rerun_gives_the_same_report(pair, tmp_path):
    expected = without_times(verify(pair, tmp_path, "--gates", pair / "loose.yaml")[1])
    (tmp_path / "report.json").unlink()
    command = [
        sys.executable, "-m", "mmq", "verify", pair / "out", "--against", pair / "source",
        "--level", "logits", "--tokens", pair / "ids.npy", "-o", tmp_path / "report.json",
        "--gates", pair / "loose.yaml", "--quiet",
    ]  # fmt: skip
    child = subprocess.Popen([str(word) for word in command], env={**os.environ})
    state = tmp_path / ".mmq-verify" / "state.json"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and child.poll() is None:
        if state.exists() and json.loads(state.read_text())["layer"] >= 1:
            break
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert state.exists(), "the run was over before it could be killed"
    done = json.loads(state.read_text())["layer"]
    assert 1 <= done <= 4 and not (tmp_path / "report.json").exists()
    code, report = verify(pair, tmp_path, "--gates", pair / "loose.yaml")
    assert code == 0 and without_times(report) == expected


def test_another_runs_state_is_not_taken_over(pair, tmp_path):
    verify(pair, tmp_path, "--layers", "1")
    work = tmp_path / "work"
    work.mkdir()
    (work / "state.json").write_text('{"fingerprint": {}, "layer": 3, "record": []}')
    code, report = verify(pair, tmp_path, "--gates", pair / "loose.yaml", "--work-dir", work)
    assert code == 0 and len(report["logits"]["layers"]) == 4

"""Figures against limits: pass, warn, fail, and too close to say."""

from __future__ import annotations

import math

import pytest

from mmq.errors import UsageError
from mmq.report.schema import Measure
from mmq.verify.gates import DEFAULT_GATES, Gate, gate_findings, judge, read_gates

LOW = Gate("kld_mean", 0.05, 0.07, False, "low is good")
HIGH = Gate("top1", 0.95, 0.90, True, "high is good")


@pytest.mark.parametrize(
    ("gate", "value", "se", "status"),
    [
        (LOW, 0.02, 0.001, "pass"),
        (LOW, 0.05, 0.0, "pass"),
        (LOW, 0.06, 0.001, "warn"),
        (LOW, 0.07, None, "warn"),
        (LOW, 0.08, 0.001, "fail"),
        (LOW, 0.049, 0.001, "inconclusive"),
        (LOW, 0.051, 0.001, "inconclusive"),
        (LOW, 0.069, 0.001, "inconclusive"),
        (LOW, 0.071, 0.001, "inconclusive"),
        (LOW, math.nan, 0.001, "fail"),
        (LOW, math.inf, None, "fail"),
        (HIGH, 0.99, 0.01, "pass"),
        (HIGH, 0.93, 0.005, "warn"),
        (HIGH, 0.80, 0.01, "fail"),
        (HIGH, 0.94, 0.01, "inconclusive"),
    ],
)
def test_status(gate, value, se, status):
    assert gate.judge(Measure(value=value, se=se)).status == status


def test_more_windows_shrink_the_error_to_what_decides():
    """Two standard errors must fit in the distance: ±.002 at .001 needs 16 times as many."""
    result = LOW.judge(Measure(value=0.049, se=0.002), windows=10)
    assert result.more_windows == 10 * 16 - 10
    assert LOW.judge(Measure(value=0.05, se=0.002), windows=10).more_windows == 1_000_000


def test_only_what_was_measured_is_judged():
    results = judge(DEFAULT_GATES, {"top1": Measure(value=0.99), "other": Measure(value=0)})
    assert [r.gate for r in results] == ["top1"]


def test_findings_say_figure_and_limits():
    results = judge({"kld_mean": LOW}, {"kld_mean": Measure(value=0.1, se=0.001)})
    (finding,) = gate_findings(results, "out")
    assert (finding.id, finding.severity, finding.where) == ("gate-fail", "error", "out")
    assert finding.got == "0.1 ± 0.001" and "0.07" in finding.expected
    passed = judge({"kld_mean": LOW}, {"kld_mean": Measure(value=0.01)})
    assert not list(gate_findings(passed, "out"))


def test_a_file_changes_what_it_names(tmp_path):
    path = tmp_path / "gates.yaml"
    path.write_text("gates:\n  kld_mean: {target: 0.1, fail: 0.2}\n  top1: {fail: 0.5}\n")
    gates = read_gates(path)
    assert (gates["kld_mean"].target, gates["kld_mean"].fail) == (0.1, 0.2)
    assert (gates["top1"].target, gates["top1"].fail) == (0.95, 0.5)
    assert gates["delta_ppl_percent"] == DEFAULT_GATES["delta_ppl_percent"]


def test_searched_scales_are_held_to_more():
    assert read_gates(None)["sqnr_db_mean"].target == 20.3
    assert read_gates(None, searched=True)["sqnr_db_mean"].target == 21.5


@pytest.mark.parametrize(
    ("text", "id"),
    [
        ("gates: [", "gates-unreadable"),
        ("kld_mean: {target: 1}", "gates-invalid"),
        ("gates: {kld: {target: 1}}", "gates-invalid"),
        ("gates: {kld_mean: {limit: 1}}", "gates-invalid"),
        ("gates: {kld_mean: {target: yes}}", "gates-invalid"),
        ("gates: {kld_mean: {target: 0.5, fail: 0.1}}", "gates-invalid"),
        ("gates: {top1: {target: 0.5, fail: 0.9}}", "gates-invalid"),
    ],
)
def test_files_that_are_no_gates(tmp_path, text, id):
    path = tmp_path / "gates.yaml"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        read_gates(path)
    assert caught.value.id == id


@pytest.mark.parametrize(
    ("text", "why", "got"),
    [
        ("", "has no `gates:`", "an empty file"),
        ("# nothing\n", "has no `gates:`", "an empty file"),
        ("kld_mean: {target: 0.1, fail: 0.2}", "has no `gates:`", "{'kld_mean': "),
        ("gates:\n", "has nothing under `gates:`", "{'gates': None}"),
    ],
)
def test_a_file_without_gates(tmp_path, text, why, got):
    path = tmp_path / "gates.yaml"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        read_gates(path)
    error = caught.value
    assert (error.id, error.exit_code, error.where) == ("gates-invalid", 2, str(path))
    assert error.message == f"{path} {why}" and error.got.startswith(got)
    example = error.expected.removeprefix("such as ")
    path.write_text(example)
    assert read_gates(path)["kld_mean"].target == 0.05


def test_broken_yaml_is_told_by_its_line(tmp_path):
    path = tmp_path / "gates.yaml"
    path.write_text("gates:\n  top1: {fail: 0.5}\n  kld_mean: {target: 0.1\n  more: 1\n")
    with pytest.raises(UsageError) as caught:
        read_gates(path)
    assert caught.value.id == "gates-unreadable" and caught.value.where == f"{path}:4"
    assert "unicode string" not in caught.value.message


def test_a_file_that_is_not_there(tmp_path):
    path = tmp_path / "absent.yaml"
    with pytest.raises(UsageError) as caught:
        read_gates(path)
    assert caught.value.message == f"--gates {path}: No such file or directory"

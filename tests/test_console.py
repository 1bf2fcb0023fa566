"""What each of the three output modes says, side by side."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mmq.console import LINE_INTERVAL, Console
from mmq.errors import BadInputError
from mmq.report.findings import Finding

ERROR = BadInputError(
    "shard-truncated", "a.safetensors ends early", where="a.safetensors", got="3 bytes",
    expected="9 bytes", hint="hf download ORG/NAME",
)  # fmt: skip
WARNING = Finding("kv-one-sided", "warning", "only v_scale", "layers.0", "v", "k and v")
NOTE = Finding("mtp-absent", "note", "no MTP tensors")


class Terminal(io.StringIO):
    """A text stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


class Clock:
    """Seconds under the test's control."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def make(mode: str = "human", **kwargs: Any) -> tuple[Console, io.StringIO, io.StringIO]:
    out, err = kwargs.pop("out", io.StringIO()), kwargs.pop("err", io.StringIO())
    return (
        Console(mode, stdout=out, stderr=err, environ=kwargs.pop("environ", {}), **kwargs),
        out,
        err,
    )


def say_everything(console: Console) -> None:
    console.note("a note")
    console.warn("a warning")
    console.finding(NOTE)
    console.finding(WARNING)
    console.event("stage", "stage one", shards=3)
    console.error(ERROR)
    console.result("the answer", {"verdict": "pass"})
    console.finish(0)


ERROR_TEXT = """\
error[shard-truncated]: a.safetensors ends early
  where:    a.safetensors
  got:      3 bytes
  expected: 9 bytes
  hint:     hf download ORG/NAME
"""
WARNING_TEXT = """\
warning[kv-one-sided]: only v_scale
  where:    layers.0
  got:      v
  expected: k and v
"""


def test_human_answers_on_stdout_and_talks_on_stderr() -> None:
    console, out, err = make("human")
    say_everything(console)
    assert out.getvalue() == (
        "note[mtp-absent]: no MTP tensors\n" + WARNING_TEXT + "stage one\nthe answer\n"
    )
    assert err.getvalue() == "note: a note\nwarning: a warning\n" + ERROR_TEXT


def test_quiet_keeps_warnings_and_errors_on_stderr() -> None:
    console, out, err = make("quiet")
    say_everything(console)
    assert out.getvalue() == ""
    assert err.getvalue() == "warning: a warning\n" + WARNING_TEXT + ERROR_TEXT


def test_json_is_lines_that_end_in_a_result() -> None:
    console, out, err = make("json")
    say_everything(console)
    events = [json.loads(line) for line in out.getvalue().splitlines()]
    assert events == [
        {"event": "note", "message": "a note"},
        {"event": "warning", "message": "a warning"},
        {"event": "finding", **NOTE.as_dict()},
        {"event": "finding", **WARNING.as_dict()},
        {"event": "stage", "shards": 3},
        {"event": "error", **ERROR.as_dict()},
        {"event": "result", "verdict": "pass", "ok": True, "exit_code": 0},
    ]
    assert err.getvalue() == ""


def test_findings_about_the_work_are_talk() -> None:
    console, out, err = make("human")
    console.finding(WARNING, talk=True)
    assert (out.getvalue(), err.getvalue()) == ("", WARNING_TEXT)


@pytest.mark.parametrize("code", [0, 3, 130])
def test_json_ends_in_a_result_even_without_an_answer(code: int) -> None:
    console, out, _ = make("json")
    console.finish(code)
    assert json.loads(out.getvalue()) == {"event": "result", "ok": code == 0, "exit_code": code}


def test_json_results_before_the_last_are_steps() -> None:
    console, out, _ = make("json")
    console.result("", {"command": "inspect"})
    console.result("", {"command": "verify", "event": "mine", "exit_code": 99})
    console.finish(3)
    assert [json.loads(line) for line in out.getvalue().splitlines()] == [
        {"event": "step", "command": "inspect"},
        {"event": "result", "command": "verify", "exit_code": 3, "ok": False},
    ]


def test_json_has_no_nan_and_keeps_undecodable_names() -> None:
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding="ascii")
    console = Console("json", stdout=out, stderr=io.StringIO(), environ={})
    console.result("", {"sqnr": float("inf"), "list": [float("nan")], "name": "w\udcff", "n": 0.5})
    console.finish(0)
    line = raw.getvalue().decode("ascii")
    assert "NaN" not in line and "Infinity" not in line
    result = json.loads(line, parse_constant=pytest.fail)
    assert (result["sqnr"], result["list"], result["n"]) == ("inf", ["nan"], 0.5)
    assert result["name"] == "w\udcff"


def test_text_is_utf8_whatever_the_stream_says() -> None:
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding="ascii")
    Console(stdout=out, stderr=io.StringIO(), environ={}).result("−43.6 % \udcff", {})
    assert raw.getvalue() == "−43.6 % \\udcff\n".encode()


def test_names_cannot_drive_the_terminal() -> None:
    console, out, err = make()
    console.warn("tensor \x1b[2J\rx\x9b1m")
    console.result("a\tb\nc\x07", {})
    assert err.getvalue() == "warning: tensor \\x1b[2J\\x0dx\\x9b1m\n"
    assert out.getvalue() == "a\tb\nc\\x07\n"


@pytest.mark.parametrize(
    ("environ", "terminal", "coloured"),
    [
        ({}, True, True),
        ({"NO_COLOR": ""}, True, True),  # no-color.org: an empty value does not count
        ({"NO_COLOR": "1"}, True, False),
        ({"TERM": "dumb"}, True, False),
        ({}, False, False),
    ],
)
def test_colour_needs_a_terminal_and_consent(
    environ: dict[str, str], terminal: bool, coloured: bool
) -> None:
    stream = Terminal if terminal else io.StringIO
    console, out, err = make(environ=environ, out=stream(), err=stream())
    console.error(ERROR)
    console.finding(WARNING)
    assert [("\x1b[" in s.getvalue()) for s in (out, err)] == [coloured, coloured]


def test_colour_is_decided_per_stream() -> None:
    console, out, err = make(err=Terminal())
    console.finding(WARNING)
    console.warn("w")
    assert "\x1b[" not in out.getvalue() and "\x1b[" in err.getvalue()


@pytest.mark.parametrize("mode", ["human", "json"])
def test_progress_in_a_log_is_a_line_every_30_seconds(mode: str) -> None:
    clock = Clock()
    console, out, err = make(mode, clock=clock)
    with console.progress(4_000_000_000, "converting") as progress:
        for _ in range(70):
            clock.now += 1
            progress.advance(50_000_000, "model-1")
    start = "converting: "
    assert LINE_INTERVAL == 30
    assert err.getvalue().splitlines() == [
        f"{start}1.50 of 4.00 GB (37.5 %), 0.05 GB/s, 0:30 elapsed, about 0:50 left, model-1",
        f"{start}3.00 of 4.00 GB (75.0 %), 0.05 GB/s, 1:00 elapsed, about 0:20 left, model-1",
        f"{start}3.50 of 4.00 GB (87.5 %), 0.05 GB/s, 1:10 elapsed, about 0:10 left",
    ]
    assert "\r" not in err.getvalue() and out.getvalue() == ""


def test_short_work_leaves_no_progress_in_a_log() -> None:
    clock = Clock()
    console, _, err = make(clock=clock)
    with console.progress(100, "converting") as progress:
        clock.now = 29.9
        progress.advance(100)
    assert err.getvalue() == ""


def test_progress_of_nothing_does_not_divide_by_zero() -> None:
    clock = Clock()
    console, _, err = make(clock=clock)
    with console.progress(0, "converting") as progress:
        clock.now = 31
        progress.advance(0)
    assert "(100.0 %)" in err.getvalue()


def test_quiet_has_no_progress() -> None:
    clock = Clock()
    console, out, err = make("quiet", clock=clock, err=Terminal())
    with console.progress(100, "converting") as progress:
        clock.now = 100
        progress.advance(100)
    assert (out.getvalue(), err.getvalue()) == ("", "")


@pytest.mark.parametrize("mode", ["human", "json"])
def test_progress_on_a_terminal_is_a_bar_on_stderr(mode: str) -> None:
    console, out, err = make(mode, err=Terminal())
    with console.progress(1000, "converting") as progress:
        progress.advance(1000, "model\x1b1")
    assert "converting: 100%" in err.getvalue() and "model\\x1b1" in err.getvalue()
    assert out.getvalue() == ""


def run_python(code: str, **kwargs: Any) -> subprocess.CompletedProcess[bytes]:
    # unbuffered streams have nothing left to flush, and so to fail on, when Python exits
    env = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    return subprocess.run(
        [sys.executable, "-c", code], stderr=subprocess.PIPE, timeout=60, check=False,
        env={**env, **kwargs.pop("env", {})}, **kwargs,
    )  # fmt: skip


TALKATIVE = """
from mmq.console import Console
console = Console()
for _ in range(3):
    console.result("−" * SIZE, {})
console.warn("still at work")
console.finish(0)
"""


@pytest.mark.parametrize("size", [10, 70_000], ids=["buffered", "beyond the buffer"])
def test_a_closed_pipe_ends_output_and_nothing_else(size: int) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        done = run_python(TALKATIVE.replace("SIZE", str(size)), stdout=write)
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (0, b"warning: still at work\n")


def test_a_full_disk_under_stdout_is_an_error() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    with Path("/dev/full").open("w") as full:
        done = run_python(TALKATIVE.replace("SIZE", "10"), stdout=full)
    assert done.returncode == 1
    assert done.stderr.count(b"OSError") == 1 and b"Exception ignored" not in done.stderr


def test_the_c_locale_still_writes_utf8() -> None:
    env = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    code = r"from mmq.console import Console; Console().result('451.5 \u2192 250.1 GB', {})"
    done = run_python(code, stdout=subprocess.PIPE, env=env)
    assert done.stdout == "451.5 → 250.1 GB\n".encode()

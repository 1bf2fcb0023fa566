"""How runs end: exit codes, signals, closed pipes and full disks, in every mode."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest

from mmq import errors
from mmq.invocation import Run, global_options, invoke

RELEASE = "minimax-m3-mxfp8"
#: What the installed `mmq` script does.
RUN_MAIN = "import sys; from mmq.cli import main; sys.exit(main())"


def events(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


@click.group()
@global_options
def failing() -> None:
    """Commands that fail on purpose."""


@failing.command()
@click.argument("name")
@click.option("--restart", is_flag=True)
@click.option("--dry-run", is_flag=True)
@global_options
@click.pass_obj
def convert(run: Run, name: str, restart: bool, dry_run: bool) -> None:
    if name == "SIGTERM":
        os.kill(os.getpid(), signal.SIGTERM)
        run.console.note("still running")
    raise FAILURES[name]


FAILURES: dict[str, BaseException] = {
    **{c.__name__: c("some-id", "said why") for c in (
        errors.MmqError, errors.UsageError, errors.VerdictError, errors.BadInputError,
        errors.IncompleteError, errors.MachineError, errors.RefusedError)},
    "ctrl-c": KeyboardInterrupt(),
    "SIGTERM": AssertionError("not terminated"),
    "bug": ValueError("a bug"),
    "memory": MemoryError(),
    "full": OSError(errno.ENOSPC, "No space left on device", "x.safetensors"),
    "forbidden": PermissionError(errno.EACCES, "Permission denied", "x.safetensors"),
    "pipe": BrokenPipeError(errno.EPIPE, "Broken pipe"),
}  # fmt: skip

ENDINGS = [
    ("MmqError", 1, "some-id"), ("UsageError", 2, "some-id"), ("VerdictError", 3, "some-id"),
    ("BadInputError", 4, "some-id"), ("IncompleteError", 5, "some-id"),
    ("MachineError", 6, "some-id"), ("RefusedError", 7, "some-id"),
    ("ctrl-c", 130, "interrupted"), ("SIGTERM", 143, "terminated"), ("bug", 1, "unexpected"),
    ("memory", 6, "out-of-memory"), ("full", 6, "os-error"), ("forbidden", 1, "os-error"),
    ("pipe", 1, "os-error"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "code", "id"), ENDINGS)
def test_every_end_has_its_exit_code_in_every_mode(
    name: str, code: int, id: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke(failing, ["convert", name]) == code
    human = capsys.readouterr()
    assert invoke(failing, ["--quiet", "convert", name]) == code
    quiet = capsys.readouterr()
    assert invoke(failing, ["--json", "convert", name]) == code
    as_json = capsys.readouterr()

    assert human.out == "" and human.err.startswith(f"error[{id}]: ")
    assert "Traceback" not in human.err and "still running" not in human.err
    assert (quiet.out, quiet.err.splitlines()[0]) == ("", human.err.splitlines()[0])
    error, result = events(as_json.out)
    assert (error["id"], error["exit_code"]) == (id, code)
    assert result == {"event": "result", "ok": False, "exit_code": code}
    assert as_json.err == ""
    assert code in errors.EXIT_CODES


def test_a_bug_is_one_line_until_debug_asks_for_more(capsys: pytest.CaptureFixture[str]) -> None:
    invoke(failing, ["convert", "bug"])
    assert capsys.readouterr().err == (
        "error[unexpected]: ValueError: a bug\n"
        "  hint:     run the same command with --debug for the traceback\n"
    )
    for arguments in (["--debug", "convert", "bug"], ["convert", "bug", "--debug"]):
        invoke(failing, arguments)
        assert "Traceback (most recent call last)" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "how"), [("ctrl-c", "interrupted"), ("SIGTERM", "terminated")])
def test_a_stopped_conversion_says_how_to_resume(
    name: str, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    invoke(failing, ["convert", name, "--restart"])
    err = capsys.readouterr().err
    # --restart would throw away the shards that are finished
    assert err.endswith(f"  hint:     resume with: mmq convert {name}\n") and how in err
    invoke(failing, ["convert", name, "--dry-run"])
    assert "hint" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "resumes"),
    [
        (["verify", "out", "--level", "logits"], True),
        (["verify", "out", "--level", "weights"], False),
        (["calibrate", "src"], True),
        (["calibrate", "--merge", "a.json"], False),
        (["report", "convert.json"], False),
    ],
)
def test_what_goes_on_where_it_was_stopped(
    arguments: list[str], resumes: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    @click.group()
    def stopped() -> None:
        pass

    def stop(words: tuple[str, ...]) -> None:
        raise KeyboardInterrupt

    for name in ("verify", "calibrate", "report"):
        words = click.Argument(["words"], nargs=-1, type=click.UNPROCESSED)
        stopped.add_command(
            click.Command(name, callback=stop, params=[words],
                          context_settings={"ignore_unknown_options": True})
        )  # fmt: skip
    assert invoke(stopped, arguments) == 130
    told = f"resume with: mmq {' '.join(arguments)}" in capsys.readouterr().err
    assert told == resumes


def test_sigterm_is_given_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    invoke(failing, ["convert", "SIGTERM"])
    assert signal.getsignal(signal.SIGTERM) is before


def run_onto(stdout: int, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    """mmq with buffered streams, as users have them; Python flushes them once more at its exit."""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    return subprocess.run(
        [sys.executable, "-c", RUN_MAIN, *arguments], stdout=stdout, stderr=subprocess.PIPE,
        check=False, timeout=60, env=env,
    )  # fmt: skip


@pytest.mark.parametrize(
    "arguments", [["--help"], ["inspect", RELEASE], ["--json", "inspect", RELEASE]]
)
def test_a_closed_pipe_ends_quietly(arguments: list[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        done = run_onto(write, *arguments)
    finally:
        os.close(write)
    assert done.returncode == 0
    assert b"Traceback" not in done.stderr and b"Exception ignored" not in done.stderr


@pytest.mark.parametrize("mode", ["--json", "--debug"])
def test_a_full_disk_under_the_answer_is_an_error(mode: str) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    with Path("/dev/full").open("w") as full:
        # a source without findings: the result is then the first JSON line to be written
        done = run_onto(full.fileno(), mode, "inspect", RELEASE + "-mtp")
    assert done.returncode == 6
    assert b"error[os-error]: No space left on device" in done.stderr
    assert b"Exception ignored" not in done.stderr


@pytest.mark.parametrize("runner", ["-m", "-c"])
def test_the_process_ends_with_the_exit_code(runner: str) -> None:
    how = ["-m", "mmq"] if runner == "-m" else ["-c", RUN_MAIN]
    done = subprocess.run(
        [sys.executable, *how, "inspect", "nowhere"], capture_output=True, check=False, timeout=60
    )
    assert done.returncode == 4

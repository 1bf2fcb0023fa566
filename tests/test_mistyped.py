"""Command lines as people get them wrong: the message names the word, the hint the way out."""

from __future__ import annotations

import pytest
from in_process import failed, run_mmq

RELEASE = "minimax-m3-mxfp8"


# ---- variables that are not set


@pytest.mark.parametrize(
    ("command", "place"),
    [
        (["convert", "", "out"], "SRC"),
        (["convert", "src", ""], "OUT"),
        (["convert", "src", "out", "--kv-scales", ""], "--kv-scales"),
        (["convert", "src", "out", "--kv-scales", "calibrate", "--text", "a", "--text", ""],
         "--text"),
        (["inspect", ""], "SRC"),
        (["calibrate", "src", "-o", ""], "--output"),
        (["verify", ""], "OUT"),
        (["verify", "out", "--against", ""], "--against"),
        (["report", ""], "FILE"),
    ],
)  # fmt: skip
def test_an_empty_word_is_named(command, place):
    code, error = failed(*command)
    assert (code, error["id"]) == (2, "option-value")
    assert error["message"] == f"{place} is empty: is a shell variable unset?"


@pytest.mark.parametrize(
    ("command", "option", "value"),
    [
        (["verify", "out", "--against", "--level", "weights"], "--against", "--level"),
        (["verify", "out", "--against", "--level=x", "y"], "--against", "--level=x"),
        (["verify", "out", "--against", "--strict"], "--against", "--strict"),
        (["convert", "a", "b", "--to", "--jobs", "3"], "--to", "--jobs"),
        (["report", "f", "-o", "--format", "md", "x"], "-o", "--format"),
    ],
)
def test_an_option_in_a_values_place_is_named(command, option, value):
    code, error = failed(*command)
    assert (code, error["id"]) == (2, "usage")
    assert error["message"] == f"{option} took '{value}' as its value: is a shell variable unset?"
    assert error["hint"] == f"give {option} a value, or leave it out"


def test_a_value_that_is_no_option_is_not_blamed():
    code, error = failed("verify", "out", "--against", "--else", "x", "y")
    assert code == 2 and "took" not in error["message"]


# ---- words too many


@pytest.mark.parametrize(
    ("command", "hint"),
    [
        (["verify", "out", "src"], "mmq verify out --against src"),
        (["verify", "out", "my src", "--strict"], "mmq verify out --strict --against 'my src'"),
        (["verify", "--level", "weights", "out", "src"],
         "mmq verify --level weights out --against src"),
        (["verify", "out", "src", "--against", "src"], "mmq verify --help"),
        (["convert", "a", "b", "c"], "mmq convert --help"),
    ],
)  # fmt: skip
def test_a_word_too_many_has_a_place(command, hint):
    code, error = failed(*command)
    assert (code, error["id"], error["hint"].replace(" --json", "")) == (2, "usage", hint)
    assert "unexpected extra argument" in error["message"]


@pytest.mark.parametrize(
    "command",
    [
        ["verify", "out", "--against", "s", "--level", "logits", "--text", "a", "b", "c"],
        ["convert", "s", "out", "--kv-scales", "calibrate", "--text", "a", "b"],
    ],
)
def test_every_text_has_an_option_of_its_own(command):
    code, error = failed(*command)
    assert (code, error["id"]) == (2, "usage")
    assert error["message"].endswith("--text takes one file")
    assert error["hint"] == "--text once for each file: --text a --text b"


# ---- help


@pytest.mark.parametrize(
    ("command", "help"),
    [
        (["convert", "a", "b", "--jobs"], "mmq convert --help"),
        (["verify", "out", "--against"], "mmq verify --help"),
        (["--quiet", "calibrate", "s", "--output"], "mmq calibrate --help"),
        (["--jobs"], "mmq --help"),
        (["nonsense"], "mmq --help"),
    ],
)
def test_help_is_the_commands_own(command, help, capsys):
    from mmq.cli import main

    assert main(command) == 2
    assert capsys.readouterr().err.endswith(f"  hint:     {help}\n")


# ---- words as people write them


@pytest.mark.parametrize("to", ["NVFP4", "Nvfp4"])
def test_formats_in_any_case(to):
    code, events, _ = run_mmq("inspect", RELEASE, "--to", to, "--layout", "ModelOpt")
    assert code == 0 and events[-1]["convert"]["target"] == "NVFP4, modelopt layout"


def test_a_size_without_its_unit(tmp_path):
    code, error = failed("convert", RELEASE, tmp_path / "o", "--dry-run", "--max-shard-size", "5")
    assert (code, error["id"], error["hint"]) == (2, "option-value", "5GB")
    assert error["message"] == "5 bytes? A size has a unit"

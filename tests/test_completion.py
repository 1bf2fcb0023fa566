"""Completion: the scripts, what is offered after Tab, and a real bash that asks."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys

import click
import pytest
from in_process import run_mmq

from mmq.cli import cli, main
from mmq.commands.completing import BUILTIN_SOURCES

SHELLS = ("bash", "zsh", "fish")


@pytest.fixture
def offered(tmp_path, monkeypatch, capfdbinary):
    """Items that are offered for the last of some words, in a folder with files."""
    (tmp_path / "minimax-m3").mkdir()
    for name in ("minimax notes.txt", "model.json", ".hidden"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)

    def ask(line: str) -> list[str]:
        monkeypatch.setenv("_MMQ_COMPLETE", "bash_complete")
        monkeypatch.setenv("COMP_WORDS", line)
        monkeypatch.setenv("COMP_CWORD", str(line.count(" ")))
        assert main() == 0
        return capfdbinary.readouterr().out.decode().splitlines()

    return ask


def plain(*words: str) -> list[str]:
    return [f"plain,{word}" for word in words]


# ---- what is offered


def test_commands_and_options(offered):
    assert set(offered("mmq ")) == set(plain(*cli.commands))
    assert offered("mmq ins") == plain("inspect")
    assert "plain,--kv-scales" in offered("mmq convert --")
    assert offered("mmq completion ") == plain(*SHELLS)
    assert offered("mmq verify x --level ") == plain("structure", "weights", "logits", "kernels")
    assert offered("mmq convert a b --scale-search m") == plain("mse", "max")


@pytest.mark.parametrize("before", ["--json ", "--json --quiet ", "--debug "])
def test_global_options_do_not_disturb(offered, before):
    assert offered(f"mmq {before}ins") == plain("inspect")


@pytest.mark.parametrize(
    "command",
    ["inspect", "convert", "calibrate -o x", "verify out --against", "convert a b --experts-from"],
)
def test_a_source_is_a_built_in_name_or_a_path(offered, command):
    everything = plain(*BUILTIN_SOURCES, "minimax-m3/", "model.json")
    assert offered(f"mmq {command} ") == everything
    assert offered(f"mmq {command} mini") == everything[:3]
    assert offered(f"mmq {command} minimax-m3-") == everything[:2]
    assert offered(f"mmq {command} mo") == ["file,mo"], "the shell's own completion"
    assert offered(f"mmq {command} ../") == ["file,../"]


def test_words_or_a_file(offered):
    assert offered("mmq convert a b --kv-scales a") == plain("analytic")
    assert offered("mmq convert a b --kv-scales ./") == ["file,./"]
    assert offered("mmq convert a b --input-scales u") == plain("unit")


def test_built_in_names_are_the_packages():
    from mmq.convert.header_manifest import BUILTIN

    assert tuple(BUILTIN) == BUILTIN_SOURCES


@pytest.mark.parametrize(
    ("command", "parameter"),
    [
        pytest.param(command, parameter, id=f"{name} {parameter.opts[0]}")
        for name, command in cli.commands.items()
        for parameter in command.params
        if set(re.split(r"[|\W]+", parameter.metavar or "")) & {"FILE", "OUT", "DIR"}
        or (parameter.param_type_name == "argument" and parameter.name in ("src", "out", "path"))
    ],
)
def test_every_path_is_completed(command, parameter):
    """No option that takes a path is without completion, and it hands over to the shell's."""
    items = parameter.shell_complete(click.Context(command), "./some")
    folder = parameter.metavar == "DIR" or parameter.name == "path"
    folder |= command.name in ("convert", "publish") and parameter.name == "out"
    assert [(i.value, i.type) for i in items] == [("./some", "dir" if folder else "file")]


# ---- the scripts


@pytest.mark.parametrize("shell", SHELLS)
def test_script(shell, capsys):
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert f"_MMQ_COMPLETE={shell}_complete" in script
    code, events, err = run_mmq("completion", shell)
    assert (code, err) == (0, "")
    assert events[-1]["script"] == script
    if shutil.which(shell):
        done = subprocess.run([shell, "-n"], input=script, text=True, capture_output=True)
        assert (done.returncode, done.stderr) == (0, "")


def test_another_shell(capsys):
    assert main(["completion", "tcsh"]) == 2
    assert "tcsh" in capsys.readouterr().err


def test_the_help_says_what_to_put_where(capsys):
    main(["completion", "--help"])
    text = capsys.readouterr().out
    for line in ('eval "$(mmq completion bash)"', 'eval "$(mmq completion zsh)"',
                 "mmq completion fish | source"):  # fmt: skip
        assert line in text


BASH = r"""
eval "$(mmq completion bash)"
compopt() { echo compopt "$@"; }
tab() {
    COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) COMPREPLY=()
    "$(complete -p mmq | sed 's/.*-F \([^ ]*\).*/\1/')" mmq "${COMP_WORDS[COMP_CWORD]}"
    echo "${COMPREPLY[*]}"
}
tab mmq insp
tab mmq convert minimax-m3-mxfp8-
tab mmq convert minimax-m3-mxfp8 out --layout m
tab mmq verify --gates ga
tab mmq convert src ou
"""


def bash_version() -> tuple[int, ...]:
    bash = shutil.which("bash")
    if bash is None:
        return (0,)
    words = ["-c", 'echo "${BASH_VERSINFO[0]} ${BASH_VERSINFO[1]}"']
    done = subprocess.run([bash, *words], capture_output=True, text=True)
    return tuple(map(int, done.stdout.split()))


@pytest.mark.skipif(bash_version() < (4, 4), reason="completion needs bash 4.4")
def test_a_real_bash(tmp_path):
    (tmp_path / "mmq").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m mmq "$@"\n')
    (tmp_path / "mmq").chmod(0o755)
    done = subprocess.run(
        ["bash", "--norc", "-c", BASH], capture_output=True, text=True, timeout=60, cwd=tmp_path,
        env={**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "inspect", "minimax-m3-mxfp8-mtp", "modelopt minimax", "compopt -o default", "",
        "compopt -o dirnames", "",
    ]  # fmt: skip

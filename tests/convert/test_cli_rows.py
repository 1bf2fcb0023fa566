"""The command as a process: status, streams and locale. Rows C2 to C4 of the case list."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from hostile import add_mtp, bf16, first, good, lfs_pointer, lose_shards, on_disk, poke
from in_process import run_mmq
from m3_source import INDEX, hashes, read_folder

MMQ = Path(sys.executable).with_name("mmq")


def mmq(*arguments, env=None, **more):
    """The installed command, both streams captured as bytes."""
    more = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **more}
    return subprocess.run(
        [MMQ, *map(str, arguments)], env={**os.environ, **(env or {})}, timeout=60, **more
    )


def _with(change):
    source = good()
    change(source)
    return source


FAILURES = {
    "absent shard": (lambda s: lose_shards(s, first(s)), 4, "shard-missing"),
    "LFS pointer": (lambda s: on_disk(s, first(s), lambda raw: lfs_pointer()), 4, "lfs-pointer"),
    "NaN": (lambda s: poke(s, next(n for n in s.all() if ".experts.0.w1.w" in n), ((0, 0), 127)),
            4, "nonfinite"),
}  # fmt: skip


@pytest.mark.parametrize("name, how", [
    ("absent shard", (MMQ,)), ("absent shard", (sys.executable, "-m", "mmq")),
    ("LFS pointer", (MMQ,)), ("NaN", (MMQ,)),
])  # fmt: skip
def test_C2_failures_have_a_status(tmp_path, name, how):
    change, code, id = FAILURES[name]
    source = _with(change).write(tmp_path / "src")
    done = subprocess.run([*how, "convert", source, tmp_path / "out"], capture_output=True)
    assert done.returncode == code
    assert f"error[{id}]".encode() in done.stderr
    assert done.stdout == b""
    assert not (tmp_path / "out" / INDEX).exists()


USAGE = [
    (),
    ("{src}", "out", "--to", "int4"),
    ("{src}", "out", "--to", "bf16", "--kv-scales", "unit"),
    ("{src}", "out", "--to", "bf16", "--layout", "modelopt"),
    ("{src}", "out", "--to", "mxfp8", "--mtp", "drop"),
    ("{src}", "out", "--to", "bf16", "--scale-search", "mse", "--dry-run"),
    ("{src}", "out", "--to", "mxfp8", "--importance", "weights.safetensors"),
    ("{src}", "out", "--max-shard-size", "0"),
    ("{src}", "out", "--layout", "minimax", "--input-scales", "none"),
    ("{src}", "out", "--kv-scales", "no-such-file.json"),
    ("minimax-m3-mxfp8", "out"),
]


@pytest.mark.parametrize("arguments", USAGE, ids=" ".join)
def test_C2_usage_errors_are_status_2(good_folder, tmp_path, arguments, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, events, _ = run_mmq("convert", *(a.replace("{src}", str(good_folder)) for a in arguments))
    assert code == 2
    assert [e for e in events if e["event"] == "error"]
    assert not (tmp_path / "out").exists()


def test_C3_a_log_gets_no_carriage_return(tmp_path, good_folder):
    """stdout on a terminal, stderr in a log: a bar belongs to neither."""
    ours, theirs = pty.openpty()
    log = tmp_path / "log"
    with log.open("wb") as stderr:
        done = mmq("convert", good_folder, tmp_path / "out", stdout=theirs, stderr=stderr)
    os.close(theirs)
    shown = b""
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:  # the end of a terminal nobody holds any more
            break
        if not piece:
            break
        shown += piece
    os.close(ours)
    assert done.returncode == 0
    assert b"\r" not in log.read_bytes()
    assert b"\r" not in shown.replace(b"\r\n", b"\n")
    assert b"it/s" not in shown and b"B/s]" not in shown


def test_C3_a_terminal_gets_a_bar(tmp_path, good_folder):
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    done = mmq("convert", good_folder, tmp_path / "out", stderr=theirs)
    os.close(theirs)
    shown = os.read(ours, 65536)
    os.close(ours)
    assert done.returncode == 0
    assert b"converting" in shown and b"\r" in shown


def test_C3_stdout_is_the_answer_alone(tmp_path):
    source = good()
    add_mtp(source)
    source.total_size = 1
    folder = source.write(tmp_path / "src")
    done = mmq("convert", folder, tmp_path / "out", "--ignore", "nothing")
    assert done.returncode == 0
    for id in (b"index-total-size", b"ignore-matches-nothing"):
        assert b"warning[" + id in done.stderr
        assert id not in done.stdout
    assert b"warning" not in done.stdout and b"note[" not in done.stdout
    quiet = mmq("convert", folder, tmp_path / "out2", "--quiet")
    assert quiet.stdout == b"" and b"warning[index-total-size]" in quiet.stderr


LOCALES = {
    "C": {"LC_ALL": "C", "PYTHONUTF8": "0"},
    "ascii": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"},
    "POSIX": {"LC_ALL": "POSIX"},
}


@pytest.mark.parametrize("locale, jobs", [("C", "1"), ("ascii", "2"), ("POSIX", "1")])
def test_C4_text_is_utf8_whatever_the_locale(tmp_path, locale, jobs):
    source = good()
    name = "附加.权重😀." + "x" * 300 + ".weight"
    odd = 'with "quotes", \\ and\ttab.weight'
    for tensor_name in (name, odd):
        source.shards[first(source)][tensor_name] = bf16([[1.0, 2.0]])
    source.shards["片 1.safetensors"] = source.shards.pop(first(source))
    source.config["_name_or_path"] = "模型"
    folder = source.write(tmp_path / "路径 源")
    options = ("--max-shard-size", "300KB", "--jobs", jobs)
    assert run_mmq("convert", folder, tmp_path / "plain", *options)[0] == 0
    done = mmq("convert", folder, tmp_path / "出 1", *options, env=LOCALES[locale])
    assert done.returncode == 0, done.stderr
    assert hashes(tmp_path / "出 1") == hashes(tmp_path / "plain")
    assert {n: t for n, t in read_folder(tmp_path / "出 1").items() if n in (name, odd)} == {
        name: bf16([[1.0, 2.0]]), odd: bf16([[1.0, 2.0]]),
    }  # fmt: skip
    for side, data in source.files.items():
        assert (tmp_path / "出 1" / side).read_bytes() == data
    assert "出 1".encode() in done.stdout

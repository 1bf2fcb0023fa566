"""The disk of a folder: what is measured, that nothing is left there, and folders that are none."""

from __future__ import annotations

import errno
import itertools
import os
import sys
import tempfile

import pytest
from in_process import run_mmq

from mmq.cli import main
from mmq.doctor import disk


@pytest.fixture(autouse=True)
def little(monkeypatch):
    """A few megabytes instead of 256."""
    monkeypatch.setattr(disk, "NBYTES", 2_500_000)
    monkeypatch.setattr(disk, "PIECE", 1_000_000)


def told(*arguments):
    code, events, _ = run_mmq("doctor", *arguments, "--no-network")
    assert code == 0, events
    return {f["name"]: f for f in events[-1]["sections"]["machine"]}


def test_a_folder_is_measured_and_left_as_it_was(tmp_path, monkeypatch):
    folders, temporary = [], tempfile.TemporaryFile

    def watched(*, dir):
        folders.append(dir)
        return temporary(dir=dir)

    monkeypatch.setattr(tempfile, "TemporaryFile", watched)
    found = told(tmp_path)
    assert folders == [tmp_path]
    assert found["disk"]["text"].endswith(f"GB free in {tmp_path}")
    assert "MB/s (2 MB in order, with fsync)" in found["disk write"]["text"]
    assert "MB/s" in found["disk read"]["text"]
    assert not list(tmp_path.iterdir())


def test_every_byte_is_written_synced_and_read(tmp_path, monkeypatch):
    written, synced = [], []
    write, fsync = os.write, os.fsync

    def count(fd, data):
        written.append(len(data))
        return write(fd, data)

    monkeypatch.setattr(os, "write", count)
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(sum(written)), fsync(fd)))
    ticks = itertools.count()
    with (tmp_path / "file").open("w+b") as file:
        speed = disk.measured(file, clock=lambda: next(ticks) / 1000)
        assert file.tell() == 2_500_000
    assert written == [1_000_000, 1_000_000, 500_000]
    assert synced == [1_000_000, 2_000_000, 2_500_000], "each piece, and the last one too"
    data = (tmp_path / "file").read_bytes()
    assert len(data) == speed.nbytes == 2_500_000
    assert len(set(data)) == 256, "not zeros, which some disks do not store"
    assert speed.write == pytest.approx(2_500_000 / 0.004), "start, three looks, end"
    assert speed.read == pytest.approx(2_500_000 / 0.003), "start, two looks, end"


def test_a_slow_disk_is_given_up_on(tmp_path):
    ticks = itertools.count(0, 2)
    with (tmp_path / "file").open("w+b") as file:
        speed = disk.measured(file, clock=lambda: next(ticks))
    assert speed.nbytes == 2_000_000
    assert speed.read > 0


def test_pages_are_dropped_before_the_read(tmp_path, monkeypatch):
    steps = []
    monkeypatch.setattr(os, "fsync", lambda fd: steps.append("fsync"))
    monkeypatch.setattr(disk, "drop_pages", lambda fd, *span: steps.append(("drop", *span)))
    monkeypatch.setattr(disk, "_resident", lambda fd, nbytes: steps.append("look"))
    with (tmp_path / "file").open("w+b") as file:
        disk.measured(file)
    assert steps == ["fsync", "fsync", "fsync", ("drop", 0, 0), "look"]


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for a file's pages")
def test_pages_in_memory_are_counted(tmp_path):
    with (tmp_path / "file").open("w+b") as file:
        file.truncate(1 << 20)
        assert disk._resident(file.fileno(), 1 << 20) == 0.0
        file.write(bytes(1 << 19))
        file.flush()
        assert disk._resident(file.fileno(), 1 << 20) == 0.5


@pytest.mark.parametrize(
    ("resident", "said"),
    [(0.0, "(in order, not from the page cache)"), (1.0, "the page cache could not be bypassed"),
     (None, "perhaps from memory: this system does not tell")],
)  # fmt: skip
def test_where_the_read_came_from(tmp_path, monkeypatch, resident, said):
    monkeypatch.setattr(disk, "_resident", lambda *_: resident)
    assert said in told(tmp_path)["disk read"]["text"]


@pytest.mark.parametrize("stop", [KeyboardInterrupt, OSError(errno.ENOSPC, "disk full")])
def test_nothing_is_left_however_it_ends(tmp_path, monkeypatch, capsys, stop):
    def fsync(fd):
        raise stop

    monkeypatch.setattr(os, "fsync", fsync)
    code = main(["doctor", str(tmp_path), "--no-network"])
    assert code == (130 if stop is KeyboardInterrupt else 0)
    assert not list(tmp_path.iterdir())
    if code == 0:
        assert "nothing can be written there: disk full" in capsys.readouterr().out


@pytest.mark.parametrize("by", ["mode", "system"])
def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch, by):
    if by == "mode":
        if os.geteuid() == 0:
            pytest.skip("root may write everywhere")
        tmp_path.chmod(0o555)
    else:

        def refuse(**_):
            raise PermissionError(errno.EACCES, "Permission denied")

        monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    fact = told(tmp_path)["disk speed"]
    assert (fact["ok"], fact["text"]) == (False, "nothing can be written there: Permission denied")
    assert str(tmp_path) in fact["remedy"]


def test_a_disk_that_is_nearly_full(tmp_path, monkeypatch):
    usage = type("usage", (), {"total": 10**12, "free": 4_999_999})
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    monkeypatch.setattr(disk, "measured", None)
    fact = told(tmp_path)["disk speed"]
    assert (fact["ok"], fact["text"]) == (False, "not measured: less than 5 MB free")
    assert fact["remedy"]


@pytest.mark.parametrize("name", ["absent", "file"])
def test_a_path_that_is_no_folder(tmp_path, name):
    (tmp_path / "file").touch()
    code, events, _ = run_mmq("doctor", tmp_path / name)
    assert (code, events[-2]["id"]) == (2, "doctor-path")
    assert events[-2]["got"] == str(tmp_path / name)


def test_an_empty_path():
    code, events, _ = run_mmq("doctor", "")
    assert (code, events[-2]["id"]) == (2, "option-value")

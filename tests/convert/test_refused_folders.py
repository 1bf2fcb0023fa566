"""Folders that hold something else: whose it is, what differs, and the command that fits it."""

from __future__ import annotations

import json
import shlex

import pytest
from hostile import good
from in_process import run_mmq
from m3_source import hashes

REAL = "mmq.convert.run.write_everything_but_index"


@pytest.fixture
def sources(tmp_path):
    """Two folders with the same files but for one value of the config."""
    first, other = good(), good()
    other.config["text_config"]["rope_theta"] = 1
    return first.write(tmp_path / "first"), other.write(tmp_path / "other")


def run(source, out, *options):
    code, events, _ = run_mmq("convert", source, out, "--jobs", "1", *options)
    errors = [e for e in events if e["event"] == "error"]
    return code, errors[0] if errors else None


@pytest.fixture
def unfinished(sources, tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(REAL, interrupted)
    assert run(sources[0], tmp_path / "my out")[0] == 130
    monkeypatch.undo()
    return tmp_path / "my out"


def test_another_sources_run_is_told_with_the_command_that_goes_on(sources, unfinished):
    first, other = sources
    code, error = run(other, unfinished)
    assert (code, error["id"]) == (7, "run-differs")
    assert error["message"] == (
        f"{unfinished} holds an unfinished run from {first}, this is {other}"
    )
    assert (error["got"], error["expected"]) == (str(other), str(first))
    assert "--restart" in error["hint"]
    # the command of the hint does go on
    command = shlex.split(error["hint"].partition(" goes on")[0])
    assert command == ["mmq", "convert", str(first), str(unfinished)]
    assert run(*command[2:])[0] == 0


def test_a_source_named_from_another_folder_is_the_same(sources, unfinished, monkeypatch):
    monkeypatch.chdir(sources[0])
    assert run("../first", unfinished)[0] == 0


def test_a_source_that_moved_is_the_same(sources, unfinished, tmp_path):
    moved = sources[0].rename(tmp_path / "moved")
    assert run(moved, unfinished)[0] == 0


def test_other_options_as_well_are_told_one_by_one(sources, unfinished):
    first, other = sources
    code, error = run(other, unfinished, "--kv-scales", "unit")
    assert (code, error["id"]) == (7, "run-differs")
    assert error["got"].startswith(f"location: {first} → {other}; config_sha256: ")
    assert "options.kv_scales: analytic → unit" in error["got"]


def test_a_journal_that_does_not_tell_where(sources, unfinished):
    """As earlier versions wrote them."""
    path = unfinished / ".mmq" / "journal.json"
    value = json.loads(path.read_bytes())
    del value["location"]
    path.write_text(json.dumps(value))
    code, error = run(sources[1], unfinished)
    assert (code, error["id"]) == (7, "run-differs") and "config_sha256" in error["got"]
    assert run(sources[0], unfinished)[0] == 0


def test_places_are_in_no_manifest(sources, tmp_path):
    first, _ = sources
    again = tmp_path / "elsewhere"
    assert run(first, tmp_path / "a")[0] == 0
    assert run(first.rename(again), tmp_path / "b")[0] == 0
    names = ("mmq-convert.json",)
    assert hashes(tmp_path / "a", leave_out=names) == hashes(tmp_path / "b", leave_out=names)
    assert (
        "location"
        not in json.loads((tmp_path / "a" / "mmq-manifest.json").read_bytes())["fingerprint"]
    )


def test_a_finished_folder_of_another_source(sources, tmp_path):
    first, other = sources
    assert run(first, tmp_path / "out")[0] == 0
    code, error = run(other, tmp_path / "out")
    assert (code, error["id"]) == (7, "output-not-empty")
    assert error["message"] == (
        f"{tmp_path / 'out'} holds a finished checkpoint, made from {first}; this is {other}"
    )


def test_a_file_of_another_size_is_told_with_both(sources, tmp_path):
    out = tmp_path / "out"
    assert run(sources[0], out)[0] == 0
    size = (out / "config.json").stat().st_size
    with (out / "config.json").open("a") as file:
        file.write("\n")
    (out / "LICENSE").unlink()
    code, error = run(sources[0], out)
    assert (code, error["id"]) == (7, "output-not-empty")
    assert f"config.json: {size + 1:,} bytes, {size:,} when written" in error["got"]
    assert "LICENSE: absent, " in error["got"]
    assert "made from" not in error["message"]

"""Fixtures shared by all tests: source checkpoints on disk, and mmq run in this process."""

from __future__ import annotations

import contextlib
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hostile import good
from m3_source import INDEX, Source, hashes, read_folder, snapshot

from mmq.cli import main


@dataclass(frozen=True)
class Outcome:
    """What a run of mmq left behind: exit code, JSON events, and the output folder."""

    code: int
    events: list[dict[str, Any]]
    stderr: str
    out: Path

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [e for e in self.events if e["event"] == kind]

    @property
    def error(self) -> dict[str, Any]:
        (error,) = self.of("error")
        return error

    @property
    def findings(self) -> dict[str, dict[str, Any]]:
        return {e["id"]: e for e in self.of("finding")}

    @property
    def finished(self) -> bool:
        return (self.out / INDEX).exists()

    @property
    def tensors(self):
        assert self.code == 0, self.events
        return read_folder(self.out)

    @property
    def hashes(self):
        assert self.code == 0, self.events
        return hashes(self.out)

    def json(self, name: str) -> dict[str, Any]:
        return json.loads((self.out / name).read_bytes())


def run_mmq(*arguments: str | Path) -> tuple[int, list[dict[str, Any]], str]:
    """mmq in this process: exit code, JSON events, stderr."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([*map(str, arguments), "--json"])
    return code, [json.loads(line) for line in out.getvalue().splitlines()], err.getvalue()


@pytest.fixture
def convert(tmp_path):
    """Converts a source (a `Source`, or a folder) into tmp_path/out; it must stay as it was."""

    def run(source: Source | Path, *options: str | Path, out: Path | None = None) -> Outcome:
        if isinstance(source, Source):
            source = source.write(tmp_path / "src")
        out = out or tmp_path / "out"
        before = snapshot(source) if source.is_dir() else None
        jobs = () if "--jobs" in options else ("--jobs", "1")
        outcome = Outcome(*run_mmq("convert", source, out, *jobs, *options), out)
        if before is not None:
            assert snapshot(source) == before, "the source was touched"
        return outcome

    return run


@pytest.fixture(scope="session")
def good_folder(tmp_path_factory):
    """The good source on disk; tests must not change it."""
    return good().write(tmp_path_factory.mktemp("good") / "src")


@pytest.fixture(scope="session")
def good_output(good_folder, tmp_path_factory):
    """The good source converted with default options; tests must not change it."""
    out = tmp_path_factory.mktemp("good") / "out"
    outcome = Outcome(*run_mmq("convert", good_folder, out, "--jobs", "1"), out)
    assert outcome.code == 0, outcome.events
    return outcome

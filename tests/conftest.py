"""Fixtures shared by all tests: source checkpoints on disk, and mmq run in this process."""

from __future__ import annotations

from pathlib import Path

import pytest
from hostile import good
from in_process import Outcome, run_mmq
from m3_source import Source, snapshot


@pytest.fixture(autouse=True)
def no_github_step(monkeypatch):
    """Under GitHub Actions mmq tells the step's summary and outputs; a test run's are not its."""
    for name in ("GITHUB_STEP_SUMMARY", "GITHUB_OUTPUT"):
        monkeypatch.delenv(name, raising=False)


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

"""A loopback Hub, and verified outputs to publish to it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from in_process import Outcome, run_mmq
from loopback_hub.hub_server import LoopbackHub
from sent_files import CARD_OPTIONS, REPO


@pytest.fixture
def waits(monkeypatch) -> list[float]:
    """Seconds that were to be waited; nobody waits."""
    seconds: list[float] = []
    monkeypatch.setattr("time.sleep", seconds.append)
    return seconds


@pytest.fixture
def hub(monkeypatch, waits) -> Iterator[LoopbackHub]:
    """A Hub that this process's huggingface_hub talks to, without waiting between tries."""
    with LoopbackHub(part_bytes=300_000) as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
        # read as huggingface_hub is imported; changed there, its addresses would not fit together
        monkeypatch.setattr("mmq.publish.hub.endpoint", lambda: server.endpoint)
        yield server


@pytest.fixture(scope="session")
def verified(good_folder, tmp_path_factory) -> Path:
    """The good source in several shards, verified; tests copy it."""
    out = tmp_path_factory.mktemp("verified") / "out"
    code, events, _ = run_mmq(
        "convert", good_folder, out, "--jobs", "1", "--max-shard-size", "300KB"
    )
    assert code == 0, events
    code, events, _ = run_mmq("verify", out, "--against", good_folder)
    assert code == 0, events
    return out


@pytest.fixture
def output(verified, tmp_path) -> Path:
    """A copy of it that a test may change."""
    return Path(shutil.copytree(verified, tmp_path / "out"))


@pytest.fixture
def publish(hub, output) -> Callable[..., Outcome]:
    """`mmq publish` in this process."""

    def run(*options: Any, repo: str = REPO, card: bool = True) -> Outcome:
        words = (*(CARD_OPTIONS if card else ()), *options)
        return Outcome(*run_mmq("publish", output, repo, *words), output)

    return run

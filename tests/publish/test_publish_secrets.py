"""Access: what 401 and 403 do, and that the token is in nothing that anybody could read."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from in_process import run_mmq

REPO = "org/model-NVFP4"
BASE = ("--base-model", "org/base", "--license-name", "minimax", "--license-link", "LICENSE")


def everything_written(folder) -> bytes:
    return b"".join(p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file())


def run(hub, output, *options: str, **environment: str):
    """mmq publish in a process of its own, as a terminal shows it."""
    return subprocess.run(
        [sys.executable, "-m", "mmq", "publish", str(output), REPO, *BASE, *options],
        env={**os.environ, **hub.environment, **environment}, capture_output=True, timeout=120,
    )  # fmt: skip


@pytest.mark.parametrize("status", [401, 403])
@pytest.mark.parametrize(
    "where",
    ["repos/create", "preupload", "objects/batch", "PUT /lfs", "/commit/", "GET /api/models"],
)
def test_no_access_stops_at_once(publish, hub, waits, status, where):
    hub.fault(where, times=None, status=status, message="not for you")
    outcome = publish()
    assert (outcome.code, outcome.error["id"]) == (6, "publish-access")
    assert str(status) in outcome.error["message"]
    assert "not for you" in outcome.error["got"]
    assert "HF_TOKEN" in outcome.error["hint"]
    assert not waits
    assert len(hub.log.of(where)) <= 5, "uploads side by side fail once each"
    files = hub.files(REPO) if REPO in hub.store.repos else {}
    assert "config.json" not in files


def test_a_token_the_hub_does_not_know(publish, hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    outcome = publish()
    assert (outcome.code, outcome.error["id"]) == (6, "publish-access")
    assert "does not know the token" in outcome.error["message"]


def test_a_token_that_may_only_read(publish, hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", hub.read_token)
    outcome = publish()
    assert (outcome.code, outcome.error["id"]) == (6, "publish-access")
    assert not hub.store.repos


def test_no_token_is_said_before_anything_is_read(publish, hub, monkeypatch, tmp_path):
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    outcome = publish()
    assert (outcome.code, outcome.error["id"]) == (6, "publish-no-token")
    assert not hub.log.requests


def test_the_token_is_nowhere_after_success(hub, output):
    done = run(hub, output, "--debug", HF_DEBUG="1")
    assert done.returncode == 0, done.stderr
    assert hub.token.encode() not in done.stdout + done.stderr
    assert hub.token.encode() not in everything_written(output)
    assert not [n for n, data in hub.files(REPO).items() if hub.token.encode() in data]
    assert hub.token not in "".join(message for _, _, message in hub.commits(REPO))


@pytest.mark.parametrize("mode", [(), ("--json",), ("--quiet",)], ids=["human", "json", "quiet"])
def test_the_token_is_in_no_error_and_no_traceback(hub, output, mode):
    # a proxy that tells what it was sent
    told = f"{'x' * 260} authorization: Bearer {hub.token}"
    hub.fault("preupload", times=None, status=403, message=told)
    done = run(hub, output, "--debug", *mode)
    assert done.returncode == 6
    assert b"Traceback" in done.stderr
    assert hub.token[:9].encode() not in done.stdout + done.stderr, "nor a part of it"
    if not mode:
        assert b"Bearer ***" in done.stderr, "the rest of the message is there"


def test_the_token_is_in_no_traceback_of_what_was_not_foreseen(hub, output, monkeypatch, capsys):
    def burst(*_: object, **__: object) -> None:
        raise RuntimeError(f"surprise: {hub.token}")

    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", burst)
    code, events, err = run_mmq("publish", output, REPO, *BASE, "--debug")
    assert code == 1
    assert "surprise: ***" in events[-2]["message"]
    assert "Traceback" in err
    assert hub.token not in err
    assert hub.token not in str(events)


def test_signed_addresses_are_not_shown(hub, output):
    hub.fault("PUT /lfs", times=None, status=404)
    done = run(hub, output, "--debug")
    assert done.returncode == 4
    assert b"s3cret" not in done.stdout + done.stderr

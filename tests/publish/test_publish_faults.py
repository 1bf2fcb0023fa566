"""Faults of the network and of the Hub, and what is visible meanwhile."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from m3_source import INDEX
from sent_files import CARD_OPTIONS, COMMIT, PUT, REPO, is_model, sha256, shards_of


def test_429_is_waited_for_as_told_on_every_call(publish, hub, waits):
    for pattern in ("PUT /lfs/part", COMMIT, "GET /api/models/org/[^/]+/tree", "validate-yaml",
                    "repos/create", "preupload", "objects/batch", "models/org"):  # fmt: skip
        hub.fault(pattern, times=2, status=429, headers={"Retry-After": "1"})
    outcome = publish()
    assert outcome.code == 0, outcome.events
    assert INDEX in hub.files(REPO)
    assert len(waits) == 16
    # huggingface_hub adds a second where it waits itself
    assert set(waits) == {1.0, 2.0}
    told = [e["message"] for e in outcome.of("note") if "429" in e["message"]]
    assert len(told) == 16
    assert all("asks to wait 1 s" in message for message in told)


@pytest.mark.parametrize(
    ("status", "headers", "wait"),
    [
        (429, {"RateLimit": '"api";r=0;t=7'}, 7.0),
        (503, {"RateLimit": '"api";r=400;t=250'}, 1.0),
        (503, {"Retry-After": "4"}, 4.0),
        (429, {"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}, 1.0),
        (500, {}, 1.0),
    ],
)
def test_how_the_hub_says_when_to_come_back(publish, hub, waits, status, headers, wait):
    hub.fault(COMMIT, status=status, headers=headers)
    assert publish().code == 0
    assert waits == [wait]


def test_the_wait_is_a_real_one(hub, output):
    hub.fault("validate-yaml", status=429, headers={"Retry-After": "1"})
    done = subprocess.run(
        [sys.executable, "-m", "mmq", "publish", output, REPO, *CARD_OPTIONS],
        env={**os.environ, **hub.environment}, capture_output=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, second, *_ = hub.log.of("validate-yaml")
    assert 1.0 <= second.at - first.at < 30


def test_a_wait_of_hours_is_left_to_the_next_run(publish, hub, waits):
    hub.fault(COMMIT, status=429, headers={"Retry-After": "7200"})
    outcome = publish()
    assert (outcome.code, outcome.error["id"]) == (5, "publish-rate-limit")
    assert "7,200 s" in outcome.error["message"]
    assert not waits


@pytest.mark.parametrize("pattern", [r"PUT /lfs/", COMMIT], ids=["upload", "commit"])
def test_tries_are_bounded(publish, hub, pattern, waits):
    hub.fault(pattern, times=None, status=503)
    outcome = publish()
    assert (outcome.code, outcome.error["id"]) == (5, "publish-failed")
    # five waits of one request; three more requests may be under way beside it
    assert 5 <= len(waits) <= 5 * 5
    assert max(waits) <= 32


def test_one_shard_that_fails_for_ever_leaves_no_model(publish, output, hub):
    bad = shards_of(output)[1]
    hub.fault(f"PUT /lfs/.*{sha256(output / bad)}", times=None, status=500)
    outcome = publish()
    assert (outcome.code, outcome.error["id"]) == (5, "publish-failed")
    assert bad in outcome.error["message"]
    assert "same command again" in outcome.error["hint"]
    assert not is_model(hub.files(REPO))
    assert not outcome.of("result")[0]["ok"]


@pytest.mark.parametrize("where", [PUT, "preupload", COMMIT], ids=["upload", "question", "commit"])
def test_a_cut_connection_is_taken_up_again(publish, output, hub, where):
    hub.fault(where, times=1, cut_after=100)
    outcome = publish()
    assert outcome.code == 0, outcome.events
    assert set(hub.files(REPO)) >= set(shards_of(output))


def test_an_unreachable_hub(publish, hub, monkeypatch):
    monkeypatch.setattr("mmq.publish.hub.endpoint", lambda: "http://127.0.0.1:9")
    outcome = publish()
    assert (outcome.code, outcome.error["id"]) == (5, "publish-unreachable")


def test_a_silent_hub_is_given_up_on(publish, hub, monkeypatch):
    monkeypatch.setattr("mmq.publish.hub.READ_TIMEOUT", 0.2)
    fault = hub.fault("repos/create", times=1, delay=1.0)
    outcome = publish()
    assert outcome.code == 0, outcome.events
    assert fault.met == 2, "asked once more"


def test_a_wrong_digest_is_named_and_no_index_follows(publish, output, hub):
    bad = shards_of(output)[0]
    hub.fault(f"(PUT|POST) /lfs/(upload|complete)/{sha256(output / bad)}", corrupt=True)
    outcome = publish()
    assert (outcome.code, outcome.error["id"]) == (3, "publish-digest")
    assert outcome.error["where"] == bad
    assert not is_model(hub.files(REPO))


def test_a_file_that_a_gitignore_there_swallows_is_named(publish, output, hub):
    bad = shards_of(output)[0]
    hub.add(REPO, {".gitignore": f"{bad}\n".encode()})
    outcome = publish()
    assert (outcome.code, outcome.error["id"]) == (3, "publish-digest")
    assert not is_model(hub.files(REPO))

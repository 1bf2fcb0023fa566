"""The client: waits, limits, what is left behind in huggingface_hub, and progress."""

from __future__ import annotations

import re
from dataclasses import replace

import httpx2
import pytest
from sent_files import COMMIT, PUT, REPO

from mmq.console import Console
from mmq.errors import UsageError
from mmq.publish import hub as hub_module
from mmq.publish.hub import Hub
from mmq.publish.upload_plan import made, plan_upload


def test_waits_are_doubled_where_the_hub_asks_for_none(publish, hub, waits):
    hub.fault(COMMIT, times=4, status=500)
    assert publish().code == 0
    assert waits == [1.0, 2.0, 4.0, 8.0]


@pytest.mark.parametrize(("seconds", "code"), [(600, 0), (601, 5)])
def test_ten_minutes_are_waited_and_no_more(publish, hub, waits, seconds, code):
    hub.fault(COMMIT, status=429, headers={"Retry-After": str(seconds)})
    assert publish().code == code
    assert waits == ([600.0] if code == 0 else [])


def test_another_try_is_promised_only_where_there_is_one(publish, hub, waits):
    hub.fault("validate-yaml", times=None, status=503)
    outcome = publish()
    assert (outcome.code, outcome.error["id"]) == (5, "publish-failed")
    told = [e["message"] for e in outcome.of("note")]
    answers = [m for m in told if "answers 503" in m]
    tries = [m for m in told if re.search(r"try \d of 6", m)]
    assert len(answers) == 6
    assert len(tries) == len(waits) == 5
    assert tries[-1] == "checking the card: try 6 of 6 in 16 s"
    assert not [m for m in told if "again" in m]


def test_every_request_has_its_timeouts():
    request = httpx2.Request("GET", "http://x")
    hub_module._limit_patience(request)
    assert request.extensions["timeout"] == {
        "connect": 30.0, "read": 300.0, "write": 300.0, "pool": 300.0,
    }  # fmt: skip


def test_the_session_gives_back_what_it_found(hub):
    from huggingface_hub import get_session, set_client_factory
    from huggingface_hub.utils import _http

    made_by_them = []

    def theirs() -> httpx2.Client:
        made_by_them.append(httpx2.Client(headers={"X-Theirs": "1"}, follow_redirects=True))
        return made_by_them[-1]

    set_client_factory(theirs)
    try:
        with Hub(REPO, Console("quiet")).session() as client:
            assert get_session().headers["X-Theirs"] == "1", "their proxies and certificates count"
            assert not client.state("main").exists
        assert _http._GLOBAL_CLIENT_FACTORY is theirs
        assert get_session() is made_by_them[-1]
        assert not get_session().event_hooks["response"]
    finally:
        set_client_factory(_http.default_client_factory)


def test_batches_end_at_25_gb_and_at_50_files(monkeypatch):
    from mmq.publish import upload_plan

    assert (upload_plan.BATCH_BYTES, upload_plan.BATCH_FILES) == (25_000_000_000, 50)
    monkeypatch.setattr(upload_plan, "BATCH_BYTES", 10)
    items = [
        replace(made(f"{size}.safetensors", b"x" * size), weights=True)
        for size in (4, 6, 1, 9, 12, 3)
    ]
    plan = plan_upload(items, {}, (), pr=False)
    assert [[i.nbytes for i in batch] for batch in plan.batches] == [[4, 6], [1, 9], [12], [3]]


def test_a_config_alone_makes_it_a_model_that_is_there():
    file = hub_module.RemoteFile("config.json", 2, "", None)
    item = replace(made("a.safetensors", b"x"), weights=True)
    assert plan_upload([item], {"config.json": file}, (), pr=False).at_once
    assert not plan_upload([item], {"notes.json": file}, (), pr=False).at_once


def steps(monkeypatch) -> list[tuple[int, str]]:
    """What the bar of the upload is told."""
    told: list[tuple[int, str]] = []
    progress = Console.progress

    def counted(self, total, title):
        bar = progress(self, total, title)
        advance = bar.advance
        if title == "uploading":
            bar.advance = lambda n, label="": (told.append((n, label)), advance(n, label))
        return bar

    monkeypatch.setattr(Console, "progress", counted)
    return told


def total_of(outcome) -> int:
    return sum(i["bytes"] for batch in outcome.of("result")[0]["batches"] for i in batch)


@pytest.mark.parametrize("parts", [300_000, None], ids=["parts", "whole"])
def test_progress_moves_while_a_file_is_sent(publish, hub, monkeypatch, parts):
    hub.part_bytes = parts
    told = steps(monkeypatch)
    seen: list[int] = []
    hub.fault(COMMIT, before=lambda: seen.append(len(told)))
    outcome = publish()
    assert outcome.code == 0, outcome.events
    assert sum(n for n, _ in told) == total_of(outcome)
    weights = [n for n, name in told if name.endswith(".safetensors")]
    assert len(weights) > 2 * len({name for _, name in told if name.endswith(".safetensors")})
    assert max(weights) <= 1 << 16, "as the bytes are read, not a file at a time"
    assert seen[0] >= len(weights)


def test_what_is_sent_twice_counts_once(publish, hub, monkeypatch):
    told = steps(monkeypatch)
    hub.fault(PUT, times=3, status=500)
    hub.fault(COMMIT, times=1, status=500)
    outcome = publish()
    assert outcome.code == 0, outcome.events
    assert sum(n for n, _ in told) == total_of(outcome)


def test_through_xet_files_go_one_by_one(publish, hub, monkeypatch):
    # the loopback Hub has no Xet: this only settles how many files a call is given
    calls: list[int] = []
    upload = Hub.upload

    def counted(self, additions, revision, *, pr):
        calls.append(len(additions))
        upload(self, additions, revision, pr=pr)

    monkeypatch.setattr(Hub, "upload", counted)
    monkeypatch.setattr(Hub, "by_xet", property(lambda self: True))
    outcome = publish()
    assert outcome.code == 0, outcome.events
    assert set(calls) == {1}
    assert len(hub.commits(REPO)) == 3, "still one commit for the batch"
    calls.clear()
    monkeypatch.setattr(Hub, "by_xet", property(lambda self: False))
    hub.store.repos.clear()
    assert publish().code == 0
    assert len(calls) == 1


def test_an_address_without_its_scheme_is_usage(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "127.0.0.1:42")
    with pytest.raises(UsageError) as caught:
        Hub(REPO, Console("quiet"))
    assert caught.value.id == "hub-endpoint"

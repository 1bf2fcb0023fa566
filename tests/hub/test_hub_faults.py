"""What goes wrong between here and the Hub: retried as told, given up in bounded time, named."""

from __future__ import annotations

import socket

import huggingface_hub.constants as constants
import pytest
from hub_runs import REPO, converted, refused, shard_gets, without_origin
from in_process import run_mmq

from mmq.hub import download, retries, stand_in

SHARD = "model-00002-of-00003.safetensors"


@pytest.fixture(scope="session")
def wanted(hub_source, tmp_path_factory):
    return converted(hub_source, tmp_path_factory.mktemp("wanted") / "out")


@pytest.fixture(autouse=True)
def short_first_read(monkeypatch):
    monkeypatch.setattr(stand_in, "FIRST_READ", 16 << 10)


def test_cut_connections_go_on_where_they_were_cut(hub, repo, wanted, tmp_path):
    hub.fault("GET /cdn/", skip=4, times=6, cut_after=20_000)
    assert converted(REPO, tmp_path / "out") == wanted
    starts = [int(r.range[6:].split("-")[0]) for r in hub.log.of("GET /cdn/")]
    assert any(start % download.PART_BYTES == 20_000 for start in starts)


def test_a_connection_that_is_cut_for_ever(hub, repo, wanted, tmp_path):
    hub.fault("GET /cdn/", skip=3, times=None, cut_after=0)
    code, id, error = refused("convert", REPO, tmp_path / "out")
    assert (code, id) == (5, "hub-unreachable")
    assert f"{retries.TRIES} time(s)" in error["got"]
    hub.heal()
    assert converted(REPO, tmp_path / "out2") == wanted


@pytest.mark.parametrize("status", [429, 503])
def test_P3_waits_as_told(hub, repo, wanted, tmp_path, monkeypatch, status):
    monkeypatch.setattr(download, "CONNECTIONS", 1)
    hub.fault(f"GET .*/{SHARD}", skip=1, times=2, status=status, headers={"Retry-After": "1"})
    assert converted(REPO, tmp_path / "out") == wanted
    _, first, second, third = shard_gets(hub, "00002")
    assert [r.status for r in (first, second, third)] == [status, status, 302]
    assert second.at - first.at >= 1.0 and third.at - second.at >= 1.0


def test_rate_limit_header_is_a_time_to_wait(hub, repo):
    hub.fault("GET /api/models", status=429, headers={"RateLimit": '"api";r=0;t=1'})
    assert run_mmq("inspect", REPO)[0] == 0
    first, second = hub.log.of("GET /api/models")
    assert second.at - first.at >= 1.0


def test_a_wait_that_is_too_long_is_for_the_next_run(hub, repo):
    hub.fault("GET /api/models", times=None, status=429, headers={"Retry-After": "7200"})
    code, id, error = refused("inspect", REPO)
    assert (code, id) == (5, "hub-unreachable") and "7200 s" in error["got"]
    assert len(hub.log.of("GET /api/models")) == 1


@pytest.mark.parametrize("status", [500, 502, 503, 429])
def test_server_errors_for_ever_end_in_a_rerun(hub, repo, wanted, tmp_path, status):
    hub.fault(f"GET .*/{SHARD}", skip=1, times=None, status=status)
    out = tmp_path / "out"
    code, id, error = refused("convert", REPO, out, "--max-shard-size", "100KB", "--jobs", "1")
    assert (code, id) == (5, "hub-unreachable")
    assert SHARD in error["message"] and f"HTTP {status}" in error["got"]
    assert "run the same command again" in error["hint"]
    gets = [r for r in shard_gets(hub, "00002") if r.status == status]
    # four connections side by side, each with its tries
    assert retries.TRIES <= len(gets) <= retries.TRIES * download.CONNECTIONS
    assert not (out / "model.safetensors.index.json").exists()
    hub.heal()
    assert run_mmq("convert", REPO, out, "--max-shard-size", "100KB", "--jobs", "1")[0] == 0
    assert without_origin(out) == wanted


@pytest.mark.parametrize(
    ("status", "headers", "id"),
    [
        (401, {}, "hub-login"),
        (401, {"X-Error-Code": "RepoNotFound"}, "hub-login"),
        (403, {}, "hub-forbidden"),
        (403, {"X-Error-Code": "GatedRepo"}, "hub-gated"),
        (404, {"X-Error-Code": "RepoNotFound"}, "hub-repo-not-found"),
        (404, {"X-Error-Code": "RevisionNotFound"}, "hub-revision-not-found"),
        (400, {}, "hub-refused"),
    ],
)
def test_refusals_stop_at_once_and_say_what_to_do(hub, repo, status, headers, id):
    hub.fault("GET /api/models", times=None, status=status, headers=headers)
    code, found, error = refused("inspect", REPO)
    assert (code, found) == (4, id)
    assert REPO in error["message"] and str(status) in error["got"]
    assert len(hub.log.requests) == 1
    if status in (401, 403):
        assert "hf auth login" in error["hint"]


@pytest.mark.parametrize(("status", "id"), [(401, "hub-login"), (403, "hub-forbidden"),
                                            (404, "hub-file-not-found")])  # fmt: skip
def test_a_shard_that_is_refused_in_the_middle(hub, repo, tmp_path, status, id):
    hub.fault(f"GET .*/{SHARD}", skip=1, times=None, status=status)
    code, found, _ = refused("convert", REPO, tmp_path / "out", "--jobs", "1")
    assert (code, found) == (4, id)


def test_the_hubs_own_answers(hub, repo, monkeypatch):
    assert refused("inspect", "org/nothing")[:2] == (4, "hub-repo-not-found")
    assert refused("inspect", f"{REPO}@nothing")[:2] == (4, "hub-revision-not-found")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert refused("inspect", REPO)[:2] == (4, "hub-login")
    monkeypatch.delenv("HF_TOKEN")
    assert refused("inspect", "org/nothing")[:2] == (4, "hub-login")
    assert run_mmq("inspect", REPO)[0] == 0


def test_private_repositories_need_the_token(hub, hub_source, monkeypatch):
    hub.add_folder("org/private", hub_source, private=True)
    assert run_mmq("inspect", "org/private")[0] == 0
    monkeypatch.delenv("HF_TOKEN")
    assert refused("inspect", "org/private")[:2] == (4, "hub-login")


def test_wrong_bytes_once_are_fetched_again(hub, repo, wanted, tmp_path):
    hub.fault("GET /cdn/", skip=3, times=1, corrupt=True)
    assert converted(REPO, tmp_path / "out") == wanted


def test_wrong_bytes_twice_are_an_error(hub, repo, tmp_path):
    hub.fault("GET /cdn/", skip=3, times=None, corrupt=True)
    code, id, error = refused("convert", REPO, tmp_path / "out", "--jobs", "1")
    assert (code, id) == (4, "hub-digest")
    assert "safetensors" in error["where"] and error["got"] != error["expected"]
    # nothing of it stays: neither as a file nor as the beginning of one
    assert not [p for p in (tmp_path / "out").rglob("*.safetensors*") if p.stat().st_size]


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_wrong_bytes_of_small_files(hub, repo, wanted, tmp_path, name):
    fault = hub.fault(f"GET .*/{name}", times=1, corrupt=True)
    assert converted(REPO, tmp_path / "out") == wanted
    assert fault.met >= 2
    hub.fault(f"GET .*/{name}", times=None, corrupt=True)
    code, id, error = refused("convert", REPO, tmp_path / "out2", "--jobs", "1")
    assert (code, id) == (4, "hub-digest") and name in error["message"]


def test_slow_is_no_failure(hub, repo, wanted, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.3)
    hub.fault("GET /cdn/", skip=3, times=4, pause=0.15)
    monkeypatch.setattr(download, "PART_BYTES", 256 << 10)
    assert converted(REPO, tmp_path / "out") == wanted


def test_silence_is_a_failure_that_may_pass(hub, repo, wanted, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.2)
    hub.fault("GET /cdn/", skip=3, times=2, delay=0.6)
    assert converted(REPO, tmp_path / "out") == wanted


def test_nobody_there(hub, repo, monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{free.getsockname()[1]}")
        code, id, error = refused("inspect", REPO)
    assert (code, id) == (5, "hub-unreachable")
    assert "refused" in error["got"] and f"{retries.FIRST_TRIES} time(s)" in error["got"]


def test_a_signed_address_that_expired_is_asked_for_again(hub, repo, wanted, tmp_path):
    fault = hub.fault("GET /cdn/", skip=4, times=2, status=403)
    assert converted(REPO, tmp_path / "out") == wanted
    assert fault.met > 6


def test_a_listing_that_is_none(hub, repo):
    hub.fault("GET /api/models", times=None, status=200)
    assert refused("inspect", REPO)[:2] == (4, "hub-listing")


def test_token_is_never_shown(hub, repo, tmp_path, monkeypatch, capsys):
    from mmq.cli import main

    for word in ("hf_secret\x07bell", "hf_secrét", "hf_secret"):
        monkeypatch.setenv("HF_TOKEN", word)
        assert main(["inspect", REPO, "--debug"]) == 4
        said = "".join(capsys.readouterr())
        assert "hf_secr" not in said and "Bearer" not in said
    monkeypatch.setenv("HF_TOKEN", hub.read_token)
    hub.fault("GET /cdn/", skip=3, times=None, cut_after=10)
    assert main(["convert", REPO, str(tmp_path / "out"), "--debug", "--jobs", "1"]) == 5
    said = "".join(capsys.readouterr())
    assert hub.read_token not in said and "s3cret" not in said

"""Locations that lead nowhere: how far they lead, and how they are written."""

from __future__ import annotations

import socket

import huggingface_hub.constants as constants
import pytest
from in_process import failed
from loopback_hub.hub_server import LoopbackHub

from mmq.hub import retries

RELEASE = "minimax-m3-mxfp8"


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The current folder; nobody answers for the Hub, and no token is there."""
    monkeypatch.chdir(tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://me:s3cret@127.0.0.1:{free.getsockname()[1]}"
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
        monkeypatch.setattr(retries, "FIRST_DELAY", 0.01)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_OIDC_RESOURCE"):
            monkeypatch.delenv(name, raising=False)
        yield tmp_path


# ---- paths


def test_how_far_a_path_leads(here):
    (here / "data" / "m3").mkdir(parents=True)
    code, error = failed("inspect", here / "data" / "elsewhere" / "x")
    assert (code, error["id"]) == (4, "source-not-found")
    assert (error["got"], error["hint"]) == (
        f"{here / 'data'} holds no elsewhere", f"ls {here / 'data'}",
    )  # fmt: skip
    _, error = failed("inspect", "./dta/m3")
    assert (error["got"], error["hint"]) == (
        f"{here} holds no dta", f"did you mean {here / 'data'}?",
    )  # fmt: skip
    (here / "file").touch()
    _, error = failed("inspect", here / "file" / "a" / "b")
    assert error["got"] == f"{here / 'file'} is a file"


@pytest.mark.parametrize("command", [["inspect"], ["convert", "--dry-run"]])
def test_the_option_at_fault_is_named(here, command):
    rest = [here / "out"] if command[0] == "convert" else []
    code, error = failed(*command, RELEASE, *rest, "--experts-from", "nope")
    assert (code, error["id"]) == (4, "source-not-found")
    assert error["message"].startswith("--experts-from nope is neither a folder")


def test_an_out_that_is_not_there_is_no_verdict(here):
    code, error = failed("verify", "./nope/out")
    assert (code, error["id"], error["got"]) == (4, "out-not-found", f"{here} holds no nope")


# ---- addresses


@pytest.mark.parametrize(
    ("address", "hint"),
    [
        ("https://huggingface.co/acme/small-m3", "write acme/small-m3"),
        ("https://huggingface.co/acme/small-m3/", "write acme/small-m3"),
        ("https://huggingface.co/acme/small-m3/tree/v1", "write acme/small-m3@v1"),
        ("https://hf.co/acme/small-m3/tree/refs%2Fpr%2F1?x#y", "write acme/small-m3@refs/pr/1"),
        ("http://hub.local/acme/small-m3/blob/main/config.json", "write acme/small-m3"),
    ],
)
def test_a_page_is_told_as_a_repository(here, address, hint):
    code, error = failed("inspect", address)
    assert (code, error["id"], error["hint"]) == (4, "source-not-found", hint)


@pytest.mark.parametrize("address", ["https://huggingface.co", "https://huggingface.co/acme",
                                     "https://huggingface.co//x"])  # fmt: skip
def test_a_page_of_something_else(here, address):
    code, error = failed("inspect", address)
    assert (code, error["id"]) == (4, "source-not-found")
    assert not error["hint"].startswith("write")


def test_a_folder_with_one_slash_may_be_a_repository(here):
    (here / "t").mkdir()
    code, error = failed("inspect", "t/OUT")
    assert (code, error["id"]) == (5, "hub-unreachable")
    assert error["message"].startswith("there is no folder t/OUT, and the Hub could not be asked")
    port = constants.ENDPOINT.rpartition(":")[2]
    assert error["where"] == f"http://127.0.0.1:{port}/api/models/t/OUT/revision/main"
    assert "ls t;" in error["hint"] and "s3cret" not in str(error)


@pytest.mark.parametrize(
    ("address", "hint"),
    [
        ("127.0.0.1:42", "export HF_ENDPOINT=http://127.0.0.1:42"),
        ("localhost:42", "export HF_ENDPOINT=http://localhost:42"),
        ("me:s3cret@hub", "export HF_ENDPOINT=http://hub"),
        ("ftp://hub", "unset HF_ENDPOINT"),
        ("", "unset HF_ENDPOINT"),
    ],
)
def test_an_endpoint_that_is_no_address(here, monkeypatch, address, hint):
    monkeypatch.setattr(constants, "ENDPOINT", address)
    code, error = failed("inspect", "acme/small-m3")
    assert (code, error["id"], error["where"]) == (2, "hub-endpoint", "HF_ENDPOINT")
    assert error["hint"] == hint and "s3cret" not in str(error)


# ---- tokens


@pytest.fixture
def hub(here, monkeypatch):
    with LoopbackHub() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.endpoint)
        yield server


def test_a_wrong_token_is_told_by_where_it_is_from(hub, here, monkeypatch):
    (here / "token").write_text("hf_wrong")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(here / "token"))
    code, error = failed("inspect", "acme/small-m3")
    assert (code, error["id"], error["hint"]) == (4, "hub-login", "hf auth login")
    assert error["message"].startswith(f"the Hub does not know the token in {here / 'token'}")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    _, error = failed("inspect", "acme/small-m3")
    assert error["message"].startswith("the Hub does not know the token in HF_TOKEN")
    # hf auth login alone would change nothing: the variable wins
    assert error["hint"].startswith("correct HF_TOKEN; or unset it")
    assert "hf_wrong" not in str(error)


def test_without_a_token_none_is_blamed(hub):
    code, error = failed("inspect", "acme/small-m3")
    assert (code, error["id"]) == (4, "hub-login")
    assert "to nobody without a valid token" in error["message"]

"""The Hub, as `mmq doctor` finds it; the token is in nothing that it says."""

from __future__ import annotations

import json
import os
import socket
import ssl
import subprocess
import sys

import huggingface_hub.constants as constants
import pytest
from in_process import run_mmq
from loopback_hub.hub_server import LoopbackHub

from mmq.cli import main
from mmq.doctor import hub as doctor_hub

LOGIN = "hf auth login"
#: An environment variable wins over what is stored.
UNSET = f"or unset it, since it wins over the token of {LOGIN}"


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A Hub; no token, and a token file that is not there."""
    with LoopbackHub() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.endpoint)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", False)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_OIDC_RESOURCE"):
            monkeypatch.delenv(name, raising=False)
        yield server


def told(*options):
    """(ok, text, remedy) of address and token; nothing said holds a token of the loopback Hub."""
    code, events, err = run_mmq("doctor", *options)
    assert code == 0, events
    assert LoopbackHub.token[:9] not in f"{events}{err}", "nor a part of it"
    found = {f["name"]: f for f in events[-1]["sections"]["Hugging Face Hub"]}
    assert set(found) == {"address", "token"}
    assert all(f["remedy"] for f in found.values() if f["ok"] is False)
    return [(f["ok"], f["text"], f["remedy"]) for f in (found["address"], found["token"])]


def asked(hub):
    return [(r.method, r.path, r.authorized) for r in hub.log.requests]


def test_a_token_that_the_hub_knows(hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", hub.token)
    address, token = told()
    assert address == (True, f"{hub.endpoint} answers", None)
    assert token == (True, "from HF_TOKEN; the Hub knows it as loopback", None)
    assert asked(hub) == [("GET", "/api/whoami-v2", False), ("GET", "/api/whoami-v2", True)]


def test_a_stored_token(hub, tmp_path):
    (tmp_path / "token").write_text(f"{hub.token}\n")
    _, token = told()
    assert token == (True, f"from {tmp_path / 'token'}; the Hub knows it as loopback", None)


def test_a_stored_token_that_is_empty(hub, tmp_path):
    (tmp_path / "token").write_text("\n")
    _, token = told()
    assert token[1].startswith("none: ")


def test_no_token(hub):
    address, token = told()
    assert address[0] is True
    assert token[0] is None
    assert token[1].startswith("none: ")
    assert token[2] == LOGIN
    assert asked(hub) == [("GET", "/api/whoami-v2", False)]


def test_a_token_that_the_hub_does_not_know(hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_loopbackwrong")
    _, token = told()
    assert token == (False, "from HF_TOKEN; the Hub does not know it", f"correct HF_TOKEN; {UNSET}")


def test_a_stored_token_that_the_hub_does_not_know(hub, tmp_path):
    (tmp_path / "token").write_text("hf_loopbackwrong\n")
    _, token = told()
    assert token[0] is False
    assert token[2] == LOGIN


@pytest.mark.parametrize(
    "address", ["127.0.0.1:42", "localhost:42", "someone:secret@hub", "http://"]
)
def test_an_endpoint_that_is_no_address(hub, monkeypatch, address):
    monkeypatch.setattr(constants, "ENDPOINT", address)
    (ok, text, remedy), _ = told()
    assert ok is False
    assert text.startswith("HF_ENDPOINT is ")
    assert "secret" not in text + remedy


def test_a_token_that_is_none(hub, monkeypatch):
    """The HTTP library would quote it in its complaint."""
    monkeypatch.setenv("HF_TOKEN", f"{hub.token}\N{ZERO WIDTH SPACE}")
    _, token = told()
    assert token == (
        False,
        "from HF_TOKEN; holds characters that no token has",
        f"correct HF_TOKEN; {UNSET}",
    )
    assert len(hub.log.requests) == 1


def test_a_token_that_cannot_be_had(hub, monkeypatch):
    def get_token():
        raise RuntimeError(f"no exchange for {hub.token}")

    monkeypatch.setenv("HF_OIDC_RESOURCE", "org/name")
    monkeypatch.setattr("huggingface_hub.get_token", get_token)
    _, token = told()
    assert token[:2] == (False, "from HF_OIDC_RESOURCE; cannot be had: RuntimeError")
    assert token[2] == f"correct HF_OIDC_RESOURCE; {UNSET}"


def test_a_token_that_is_not_to_be_sent(hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", hub.token)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", True)
    _, token = told()
    assert token[0] is None
    assert "HF_HUB_DISABLE_IMPLICIT_TOKEN is set" in token[1]
    assert len(hub.log.requests) == 1


@pytest.mark.parametrize("body", [b"[]", b'{"name": null}', b"<html>"])
def test_an_answer_that_names_nobody(hub, monkeypatch, body):
    from loopback_hub import hub_server

    monkeypatch.setenv("HF_TOKEN", hub.token)
    monkeypatch.setattr(hub_server, "answer", lambda *_: hub_server.Answer(200, body))
    _, token = told()
    assert token[0] is None
    assert "the Hub did not say whose it is" in token[1]


def test_a_redirect_does_not_take_the_token_along(hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", hub.token)
    hub.fault("whoami", skip=1, status=302, headers={"Location": f"{hub.storage}/api/whoami-v2"})
    _, token = told()
    assert token[0] is None
    assert "HTTP 302" in token[1]
    assert len(hub.log.of("whoami")) == 2


def test_a_hub_that_is_ill(hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", hub.token)
    hub.fault("whoami", status=503)
    address, token = told()
    assert address[:2] == (False, f"{hub.endpoint} answers HTTP 503")
    assert "status.huggingface.co" in address[2]
    assert token == (None, "from HF_TOKEN; the Hub was not asked about it", None)


@pytest.mark.parametrize("status", [302, 403, 404, 407])
def test_another_server_answers(hub, monkeypatch, status):
    """It is not shown the token."""
    monkeypatch.setenv("HF_TOKEN", hub.token)
    hub.fault("whoami", status=status)
    address, token = told()
    assert address[0] is False
    assert f"answers HTTP {status}, as a Hub would not" in address[1]
    assert token[1] == "from HF_TOKEN; the Hub was not asked about it"
    assert [r.authorized for r in hub.log.requests] == [False]


def test_a_hub_that_does_not_answer(hub, monkeypatch):
    monkeypatch.setattr(doctor_hub, "SECONDS", 0.3)
    hub.fault("whoami", delay=20)
    address, _ = told()
    assert address[0] is False
    assert "HF_ENDPOINT" in address[2]


def test_nobody_listens(hub, monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{taken.getsockname()[1]}"
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        address, _ = told()
    assert address[:2] == (False, f"{endpoint}: ConnectError: Connection refused")
    assert "HTTPS_PROXY" in address[2]


def test_an_address_with_a_password(hub, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint.replace("//", "//me:s3cret@"))
    address, _ = told()
    assert address[1] == f"{hub.endpoint} answers"


def test_an_address_that_is_none(hub, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "huggingface.co")
    address, _ = told()
    assert address == (
        False, "HF_ENDPOINT is 'huggingface.co', which is no address",
        "export HF_ENDPOINT=http://huggingface.co",
    )  # fmt: skip


def test_a_certificate_that_is_not_trusted(hub, monkeypatch):
    def request(*_, **__):
        raise RuntimeError("failed") from ssl.SSLCertVerificationError("self-signed")

    monkeypatch.setattr("huggingface_hub.get_session", lambda: type("S", (), {"get": request}))
    address, _ = told()
    assert address[:2] == (False, f"{hub.endpoint}: its certificate is not trusted")
    assert "SSL_CERT_FILE" in address[2]


@pytest.mark.parametrize("how", ["offline", "--no-network"])
def test_the_hub_is_not_asked(hub, monkeypatch, how):
    monkeypatch.setenv("HF_TOKEN", hub.token)
    if how == "offline":
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    address, token = told(*([how] if how != "offline" else []))
    assert address[0] is None
    assert ("HF_HUB_OFFLINE is set" if how == "offline" else "not asked") in address[1]
    assert token == (None, "from HF_TOKEN; the Hub was not asked about it", None)
    assert not hub.log.requests


def test_as_a_terminal_shows_it(hub, tmp_path):
    """In a process of its own, with everything logged that huggingface_hub can log."""
    for status, said in ((None, b"the Hub knows it as loopback"), (401, b"does not know it")):
        if status:
            hub.fault("whoami", skip=1, status=status, message=f"no: Bearer {hub.token}")
        done = subprocess.run(
            [sys.executable, "-m", "mmq", "doctor", "--debug"], capture_output=True, timeout=120,
            env={**os.environ, **hub.environment, "HF_DEBUG": "1"}, cwd=tmp_path,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert said in done.stdout
        assert hub.token[:9].encode() not in done.stdout + done.stderr


def test_offline_in_the_environment(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "mmq", "doctor", "--json"], capture_output=True, timeout=120,
        env={**os.environ, "HF_HUB_OFFLINE": "1"}, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0
    facts = json.loads(done.stdout.splitlines()[-1])["sections"]["Hugging Face Hub"]
    assert "HF_HUB_OFFLINE is set" in facts[0]["text"]


def test_the_text_mode_says_the_same(hub, monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", "hf_loopbackwrong")
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "no  from HF_TOKEN; the Hub does not know it\n    remedy: correct HF_TOKEN; " in out
    assert "hf_loop" not in out

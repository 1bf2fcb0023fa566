"""Whether the Hub answers, whether a token is there, and whether the Hub knows it.

Two requests at most, each given up on after `SECONDS`: `api/whoami-v2` without a token, which the
Hub answers with 401 and a proxy in between does not, then with the token, where there is one. The
token itself, or a part of it, is in no fact.
"""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from mmq import __version__
from mmq.doctor.facts import Fact, first_line, load
from mmq.doctor.libraries import remedy_for
from mmq.errors import UsageError
from mmq.hub.client import endpoint, is_offline, shown_address
from mmq.hub.token_place import LOGIN, token_place, token_remedy

SECONDS = 5.0
#: What api/whoami-v2 may answer to somebody without a token.
_OF_A_HUB = (200, 401)
_NETWORK = (
    "see network and proxy (HTTPS_PROXY); HF_ENDPOINT names another address, local folders need"
    " no Hub"
)


class _Answer(NamedTuple):
    """A status, or why there is none; `body` is the JSON of a 200."""

    status: int | None
    why: str = ""
    remedy: str = _NETWORK
    body: Any = None


def hub_facts(*, ask: bool) -> list[Fact]:
    """Address and token; with `ask` the Hub is asked.

    Does not wait longer than twice `SECONDS`.
    """
    try:
        load("huggingface_hub")
    except Exception as error:
        text = f"huggingface_hub: {first_line(error)}"
        return [Fact("address", False, text, remedy_for("huggingface_hub"))]
    address, reached = _address(ask)
    return [address, _token(reached)]


def _address(ask: bool) -> tuple[Fact, bool]:
    """The Hub's address, and whether it answered."""
    try:
        shown = shown_address(endpoint())
    except UsageError as error:
        return Fact("address", False, error.message, error.hint), False
    if is_offline():
        text = f"HF_HUB_OFFLINE is set: {shown} is not asked, only its cache is read"
        return Fact("address", None, text), False
    if not ask:
        return Fact("address", None, f"{shown}, not asked"), False
    answer = _asked(None)
    if answer.status is None:
        return Fact("address", False, f"{shown}: {answer.why}", answer.remedy), False
    if answer.status >= 500:
        text = f"{shown} answers HTTP {answer.status}"
        return Fact("address", False, text, "try again later; https://status.huggingface.co"), False
    if answer.status not in _OF_A_HUB:
        text = f"{shown} answers HTTP {answer.status}, as a Hub would not: a proxy, or a mirror"
        return Fact("address", False, text, _NETWORK), False
    return Fact("address", True, f"{shown} answers"), True


def _token(reached: bool) -> Fact:
    """Where the token is from, and whose it is as far as the Hub could be asked."""
    source = token_place()
    if source is None:
        text = "none: enough for public repositories, not for gated ones and publish"
        return Fact("token", None, text, LOGIN)
    said = f"from {source}"
    if not reached:
        return Fact("token", None, f"{said}; the Hub was not asked about it")
    if load("huggingface_hub.constants").HF_HUB_DISABLE_IMPLICIT_TOKEN:
        return Fact("token", None, f"{said}; not sent: HF_HUB_DISABLE_IMPLICIT_TOKEN is set")
    try:
        token = load("huggingface_hub").get_token() or ""
    except Exception as error:
        # its text may quote what it was given
        return Fact(
            "token", False, f"{said}; cannot be had: {type(error).__name__}", token_remedy()
        )
    if not (token.isascii() and token.isprintable()):
        text = f"{said}; holds characters that no token has"
        return Fact("token", False, text, token_remedy())
    return _judged(said, _asked(token))


def _judged(said: str, answer: _Answer) -> Fact:
    if answer.status == 401:
        return Fact("token", False, f"{said}; the Hub does not know it", token_remedy())
    name = answer.body.get("name") if isinstance(answer.body, dict) else None
    if isinstance(name, str):
        return Fact("token", True, f"{said}; the Hub knows it as {name}")
    why = answer.why or f"HTTP {answer.status}"
    return Fact("token", None, f"{said}; the Hub did not say whose it is ({why})")


def _asked(token: str | None) -> _Answer:
    """Who we are; without redirects, so that a token goes to this address alone."""
    headers = {"User-Agent": f"mmq/{__version__}"}
    if token:
        headers["Authorization"] = f"Bearer {token}"

    def ask() -> _Answer:
        session = load("huggingface_hub").get_session()
        response = session.get(
            f"{endpoint()}/api/whoami-v2", headers=headers, follow_redirects=False,
            timeout=SECONDS,
        )  # fmt: skip
        body = response.json() if token and response.status_code == 200 else None
        return _Answer(response.status_code, body=body)

    try:
        return _within(SECONDS, ask)
    except TimeoutError:
        return _Answer(None, f"no answer within {SECONDS:.0f} s")
    except Exception as error:
        return _failure(error)


def _within(seconds: float, function: Callable[[], _Answer]) -> _Answer:
    """A call's result; name servers and lists of addresses know no timeout of the HTTP library's.

    Raises:
        TimeoutError: it lasts; it is left to itself, in a thread that ends with the process.
        Exception: what the call raises.
    """
    found: list[_Answer | Exception] = []

    def call() -> None:
        try:
            found.append(function())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    if not found:
        raise TimeoutError
    (result,) = found
    if isinstance(result, Exception):
        raise result
    return result


def _failure(error: Exception) -> _Answer:
    """The kind of failure and the system's word for it; the library's may quote headers."""
    causes = list(_causes(error))
    if any(isinstance(cause, ssl.SSLCertVerificationError) for cause in causes):
        remedy = "SSL_CERT_FILE=FILE with the certificates that your network uses"
        return _Answer(None, "its certificate is not trusted", remedy)
    said = [c.strerror for c in causes if isinstance(c, OSError) and c.strerror]
    why = f"{type(error).__name__}: {said[0]}" if said else type(error).__name__
    return _Answer(None, why)


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__

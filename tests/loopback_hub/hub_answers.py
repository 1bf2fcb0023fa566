"""What every answer of a loopback Hub is made of: its form, refusals, and who may ask."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from loopback_hub.hub_store import Repo


class Answer(NamedTuple):
    """Status, body and headers."""

    status: int
    body: bytes = b""
    headers: dict[str, str] = {}  # noqa: RUF012  never changed


class Refusal(Exception):  # noqa: N818
    """An answer that ends the request."""

    def __init__(self, status: int, message: str, code: str = "") -> None:
        super().__init__(message)
        headers = {"X-Error-Message": message, **({"X-Error-Code": code} if code else {})}
        self.answer = Answer(status, json.dumps({"error": message}).encode(), headers)


def reply(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Answer:
    return Answer(status, json.dumps(value).encode(), headers or {})


def may_write(hub: Any, request: dict[str, Any]) -> None:
    known(hub, request)
    if request["token"] is None:
        raise Refusal(401, "Invalid username or password.")
    if request["token"] != hub.token:
        raise Refusal(403, "you don't have the rights to write here")


def known(hub: Any, request: dict[str, Any]) -> None:
    if request["token"] not in (None, hub.token, hub.read_token):
        raise Refusal(401, "Invalid credentials in Authorization header")


def find_repo(hub: Any, request: dict[str, Any], name: str) -> Repo:
    known(hub, request)
    repo = hub.store.repos.get(name)
    if repo is None or (repo.private and request["token"] is None):
        # without a token the Hub does not tell whether it is there
        status = 404 if request["token"] else 401
        raise Refusal(status, "Repository not found", "RepoNotFound")
    return repo


def commit_of(repo: Repo, revision: str) -> str:
    commit = repo.resolve(revision)
    if commit is None:
        raise Refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")
    return commit

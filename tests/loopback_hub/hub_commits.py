"""Branches, commits and pull requests of a loopback Hub."""

from __future__ import annotations

import base64
import json
import re
from typing import Any

from loopback_hub.hub_answers import Answer, Refusal, commit_of, find_repo, may_write, reply
from loopback_hub.hub_store import Content, File, PullRequest, content_of

_DATE = "2026-01-01T00:00:00.000Z"
#: git-check-ref-format(1); the Hub takes refs/… for no branch, and a commit's id for no name.
_NO_BRANCH = re.compile(
    r"[\s~^:?*\[\\\x00-\x1f\x7f]|\.\.|@\{|//|^[-/.]|/\.|[/.]$|\.lock(/|$)|^@$|^refs/|^[0-9a-f]{40}$"
)


def branch(hub: Any, request: dict[str, Any], name: str, new: str) -> Answer:
    may_write(hub, request)
    repo = find_repo(hub, request, name)
    if _NO_BRANCH.search(new):
        raise Refusal(400, f"Invalid reference for a branch: {new}")
    if new in repo.refs:
        raise Refusal(409, "Reference already exists")
    start = json.loads(request["body"] or b"{}").get("startingPoint") or "main"
    repo.refs[new] = commit_of(repo, start)
    return reply({})


def history(hub: Any, request: dict[str, Any], name: str, revision: str) -> Answer:
    repo = find_repo(hub, request, name)
    titles = {commit: message for _, commit, message in repo.messages}
    return reply(
        [{"id": commit, "title": titles[commit], "message": "", "date": _DATE, "authors": []}
         for commit in repo.history(commit_of(repo, revision))]
    )  # fmt: skip


def commit(hub: Any, request: dict[str, Any], name: str, revision: str) -> Answer:
    may_write(hub, request)
    repo = find_repo(hub, request, name)
    if revision not in repo.refs:
        # a commit's id can be read, and nothing can be put on top of it
        raise Refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")
    lines = [json.loads(line) for line in request["body"].splitlines() if line]
    header = next(line["value"] for line in lines if line["key"] == "header")
    head, parent = repo.refs[revision], header.get("parentCommit")
    opens = "create_pr" in request["query"]
    if parent and opens:
        # huggingface_hub: "the pull request will be created from parent_commit"
        head = commit_of(repo, parent)
    elif parent and not head.startswith(parent):
        raise Refusal(412, "A commit has happened since. Please refresh and try again.")
    tree = dict(repo.commits[head])
    for line in lines:
        _apply(hub, tree, line["key"], line["value"])
    page, ref, url = f"{hub.endpoint}/{name}", revision, None
    if opens:
        number = hub.store.next_pull_request()
        repo.pulls.append(PullRequest(number, header["summary"]))
        ref, url = f"refs/pr/{number}", f"{page}/discussions/{number}"
    made = repo.commit(ref, tree, header["summary"], parent=head)
    return reply(
        {"success": True, "commitOid": made, "commitUrl": f"{page}/commit/{made}",
         "hookOutput": "", "pullRequestUrl": url}
    )  # fmt: skip


def _apply(hub: Any, tree: dict[str, File], key: str, value: dict[str, Any]) -> None:
    path = value.get("path", "")
    if {"", ".", "..", ".git"} & set(path.rstrip("/").split("/")) and key != "header":
        raise Refusal(400, f"Invalid path: {path}")
    if key == "file":
        tree[path] = File(content_of(base64.b64decode(value["content"])), False)
    elif key == "lfsFile":
        stored: Content | None = hub.store.contents.get(value["oid"])
        if stored is None:
            raise Refusal(400, f"LFS object {value['oid']} was not uploaded")
        tree[path] = File(stored, True)
    elif key == "deletedFile":
        if tree.pop(path, None) is None:
            raise Refusal(404, "A file with this name doesn't exist", "EntryNotFound")
    elif key == "deletedFolder":
        for name in [n for n in tree if n.startswith(path.rstrip("/") + "/")]:
            del tree[name]


def discussions(hub: Any, request: dict[str, Any], name: str) -> Answer:
    """Pull requests, the latest first (nobody discusses anything here)."""
    repo = find_repo(hub, request, name)
    query = request["query"]
    found = [] if query.get("type") == "discussion" else repo.pulls[::-1]
    found = [p for p in found if query.get("status", "all") in ("all", p.status)]
    found = [p for p in found if query.get("author", p.author) == p.author]
    start = int(query.get("p", "0")) * hub.page
    shown = [
        {"num": p.number, "title": p.title, "status": p.status, "author": {"name": p.author},
         "isPullRequest": True, "createdAt": _DATE, "repo": {"name": name, "type": "model"}}
        for p in found[start : start + hub.page]
    ]  # fmt: skip
    return reply({"discussions": shown, "count": len(found), "start": start})

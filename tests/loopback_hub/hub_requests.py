"""The answers of a loopback Hub, request by request."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote

import yaml
from loopback_hub.hub_answers import Answer, Refusal, commit_of, find_repo, known, may_write, reply
from loopback_hub.hub_commits import branch, commit, discussions, history
from loopback_hub.hub_store import Content, File, content_of

_RANGE = re.compile(r"bytes=(\d*)-(\d*)")


def answer(hub: Any, request: dict[str, Any]) -> Answer:
    """Find what a request asks for."""
    line = f"{request['method']} {request['raw_path']}"
    for pattern, function in _ROUTES:
        if match := re.fullmatch(pattern, line):
            return function(hub, request, *map(unquote, match.groups()))
    raise Refusal(404, f"the loopback Hub does not speak {line}")


def _entry(name: str, file: File) -> dict[str, Any]:
    entry = {"type": "file", "path": name, "size": file.content.size, "oid": file.blob}
    if file.lfs:
        entry["lfs"] = {"oid": file.content.sha256, "size": file.content.size, "pointerSize": 134}
    return entry


def _info(hub: Any, request: dict[str, Any], name: str, revision: str = "main") -> Answer:
    repo = find_repo(hub, request, name)
    sha = commit_of(repo, revision)
    siblings = []
    for path, file in sorted(repo.commits[sha].items()):
        sibling: dict[str, Any] = {"rfilename": path}
        if "blobs" in request["query"]:
            sibling |= {"size": file.content.size, "blobId": file.blob}
            if file.lfs:
                size = file.content.size
                sibling["lfs"] = {"sha256": file.content.sha256, "size": size, "pointerSize": 134}
        siblings.append(sibling)
    return reply(
        {"_id": "0", "id": name, "modelId": name, "sha": sha, "private": repo.private,
         "tags": [], "downloads": 0, "likes": 0, "siblings": siblings}
    )  # fmt: skip


def _tree(hub: Any, request: dict[str, Any], name: str, revision: str, path: str = "") -> Answer:
    repo = find_repo(hub, request, name)
    tree = repo.commits[commit_of(repo, revision)]
    start = int(request["query"].get("cursor", "0"))
    below = [n for n in sorted(tree) if not path or n.startswith(f"{path}/")]
    page, headers = below[start : start + hub.page], {}
    if start + hub.page < len(below):
        link = f"{hub.endpoint}{request['raw_path']}?recursive=true&cursor={start + hub.page}"
        headers["Link"] = f'<{link}>; rel="next"'
    return reply([_entry(n, tree[n]) for n in page], headers=headers)


def _paths(hub: Any, request: dict[str, Any], name: str, revision: str) -> Answer:
    repo = find_repo(hub, request, name)
    tree = repo.commits[commit_of(repo, revision)]
    body = json.loads(request["body"])
    return reply([_entry(n, tree[n]) for n in body["paths"] if n in tree])


def _refs(hub: Any, request: dict[str, Any], name: str) -> Answer:
    repo = find_repo(hub, request, name)
    branches = [
        {"name": ref, "ref": f"refs/heads/{ref}", "targetCommit": commit}
        for ref, commit in repo.refs.items() if not ref.startswith("refs/")
    ]  # fmt: skip
    return reply({"branches": branches, "tags": [], "converts": []})


def _create(hub: Any, request: dict[str, Any]) -> Answer:
    may_write(hub, request)
    body = json.loads(request["body"])
    name = f"{body['organization']}/{body['name']}" if body.get("organization") else body["name"]
    url = f"{hub.endpoint}/{name}"
    if name in hub.store.repos:
        return reply({"error": "You already created this model repo", "url": url}, 409)
    told = body["visibility"] == "private" if "visibility" in body else body.get("private")
    hub.store.create(name, hub.private_by_default if told is None else bool(told))
    return reply({"url": url, "name": name, "id": "0"})


def _validate(hub: Any, request: dict[str, Any]) -> Answer:
    text = json.loads(request["body"])["content"]
    match = re.match(r"\s*---\n(.*?)\n?---(\n|\Z)", text, re.S)
    front = (yaml.safe_load(match[1]) if match else None) or {}
    errors = []
    if not isinstance(front.get("license", ""), str):
        errors.append({"message": '"license" must be a string'})
    if None in (front.get("datasets") or []):
        errors.append({"message": '"datasets[0]" must be a string'})
    warnings = [] if front else [{"message": "empty or missing yaml metadata in repo card"}]
    return reply({"errors": errors, "warnings": warnings}, 400 if errors else 200)


def _preupload(hub: Any, request: dict[str, Any], name: str, revision: str) -> Answer:
    may_write(hub, request)
    repo = find_repo(hub, request, name)
    tree = repo.commits[commit_of(repo, revision)]
    body = json.loads(request["body"])
    ignored = tree[".gitignore"].content.read().decode().split() if ".gitignore" in tree else []
    files = []
    for file in body["files"]:
        old = tree.get(file["path"])
        lfs = hub.store.is_lfs(file["path"], file["size"])
        files.append(
            {"path": file["path"], "uploadMode": "lfs" if lfs else "regular",
             "shouldIgnore": file["path"] in ignored, "oid": old.etag if old else None}
        )  # fmt: skip
    return reply({"files": files})


def _batch(hub: Any, request: dict[str, Any], name: str) -> Answer:
    may_write(hub, request)
    objects = []
    for wanted in json.loads(request["body"])["objects"]:
        oid, size = wanted["oid"], wanted["size"]
        entry = {"oid": oid, "size": size}
        if oid not in hub.store.contents:
            # parts go to storage; completion and verification are the Hub's
            base, storage = f"{hub.endpoint}/lfs", f"{hub.storage}/lfs"
            upload: dict[str, Any] = {"href": f"{storage}/upload/{oid}?signature=s3cret"}
            if hub.part_bytes and size > hub.part_bytes:
                count = -(-size // hub.part_bytes)
                parts = {str(n): f"{storage}/part/{oid}/{n}" for n in range(1, count + 1)}
                upload["href"] = f"{base}/complete/{oid}"
                upload["header"] = {"chunk_size": str(hub.part_bytes), **parts}
            entry["actions"] = {"upload": upload, "verify": {"href": f"{base}/verify/{oid}"}}
        objects.append(entry)
    return reply({"transfer": "multipart" if hub.part_bytes else "basic", "objects": objects})


def _upload(hub: Any, request: dict[str, Any], oid: str) -> Answer:
    return _store(hub, oid, request["body"], request["corrupt"])


def _store(hub: Any, oid: str, data: bytes, corrupt: bool) -> Answer:
    if corrupt:
        data = bytes([data[0] ^ 1]) + data[1:]
        hub.store.contents[oid] = content_of(data)
        return Answer(200)
    if hashlib.sha256(data).hexdigest() != oid:
        raise Refusal(400, "the bytes do not have this SHA-256")
    hub.store.contents[oid] = content_of(data, oid)
    return Answer(200)


def _part(hub: Any, request: dict[str, Any], oid: str, number: str) -> Answer:
    hub.store.parts.setdefault(oid, {})[int(number)] = request["body"]
    return Answer(200, headers={"ETag": f'"{oid[:8]}-{number}"'})


def _complete(hub: Any, request: dict[str, Any], oid: str) -> Answer:
    parts = hub.store.parts.get(oid, {})
    listed = [part["partNumber"] for part in json.loads(request["body"])["parts"]]
    if sorted(parts) != listed:
        raise Refusal(400, "parts are missing")
    return _store(hub, oid, b"".join(parts[n] for n in listed), request["corrupt"])


def _verify(hub: Any, request: dict[str, Any], oid: str) -> Answer:
    found = hub.store.contents.get(oid)
    if found is None or found.size != json.loads(request["body"])["size"]:
        raise Refusal(404, "object not found or of another size")
    return reply({})


def _resolve(hub: Any, request: dict[str, Any], name: str, revision: str, path: str) -> Answer:
    repo = find_repo(hub, request, name)
    sha = commit_of(repo, revision)
    file = repo.commits[sha].get(path)
    if file is None:
        raise Refusal(404, "Entry not found", "EntryNotFound")
    headers = {"X-Repo-Commit": sha, "ETag": f'"{file.etag}"', "Accept-Ranges": "bytes"}
    if not file.lfs:
        return _bytes(file.content, request, headers)
    size = file.content.size
    headers |= {"X-Linked-Etag": f'"{file.content.sha256}"', "X-Linked-Size": str(size)}
    headers["Location"] = f"{hub.storage}/cdn/{file.content.sha256}?signature=s3cret"
    hub.store.contents.setdefault(file.content.sha256, file.content)
    return Answer(302, b"", headers)


def _cdn(hub: Any, request: dict[str, Any], sha256: str) -> Answer:
    if request["token"]:
        raise Refusal(400, "Only one auth mechanism allowed")
    if request["query"].get("signature") != "s3cret":
        raise Refusal(403, "signature missing or too old")
    content = hub.store.contents.get(sha256)
    if content is None:
        raise Refusal(404, "no such object")
    return _bytes(content, request, {"ETag": f'"{sha256}"', "Accept-Ranges": "bytes"})


def _bytes(content: Content, request: dict[str, Any], headers: dict[str, str]) -> Answer:
    headers = {**headers, "Content-Type": "application/octet-stream"}
    match = _RANGE.fullmatch(request["range"] or "")
    start, stop, status = 0, content.size, 200
    if match and any(match.groups()):
        first, last = match.groups()
        start = int(first) if first else max(0, content.size - int(last))
        stop = min(content.size, int(last) + 1) if first and last else content.size
        if start >= content.size:
            total = {"Content-Range": f"bytes */{content.size}"}
            return Answer(416, b"", {**headers, **total})
        status = 206
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{content.size}"
    if request["method"] == "HEAD":
        return Answer(status, b"", {**headers, "Content-Length": str(stop - start)})
    return Answer(status, content.read(start, stop), headers)


def _whoami(hub: Any, request: dict[str, Any]) -> Answer:
    known(hub, request)
    if request["token"] is None:
        raise Refusal(401, "Invalid username or password.")
    return reply({"type": "user", "name": "loopback", "orgs": []})


_NAME = r"([^/]+/[^/]+)"
_MODEL = rf"/api/models/{_NAME}"
_ROUTES: list[tuple[str, Callable[..., Answer]]] = [
    (r"POST /api/repos/create", _create),
    (r"POST /api/validate-yaml", _validate),
    (r"GET /api/whoami-v2", _whoami),
    (rf"GET {_MODEL}", _info),
    (rf"GET {_MODEL}/revision/([^/]+)", _info),
    (rf"GET {_MODEL}/tree/([^/]+)", _tree),
    (rf"GET {_MODEL}/tree/([^/]+)/(.+)", _tree),
    (rf"POST {_MODEL}/paths-info/([^/]+)", _paths),
    (rf"GET {_MODEL}/refs", _refs),
    (rf"POST {_MODEL}/branch/([^/]+)", branch),
    (rf"GET {_MODEL}/commits/([^/]+)", history),
    (rf"GET {_MODEL}/discussions", discussions),
    (rf"POST {_MODEL}/preupload/([^/]+)", _preupload),
    (rf"POST {_MODEL}/commit/([^/]+)", commit),
    (rf"POST /{_NAME}\.git/info/lfs/objects/batch", _batch),
    (r"PUT /lfs/upload/(\w+)", _upload),
    (r"PUT /lfs/part/(\w+)/(\d+)", _part),
    (r"POST /lfs/complete/(\w+)", _complete),
    (r"POST /lfs/verify/(\w+)", _verify),
    (rf"(?:GET|HEAD) /{_NAME}/resolve/([^/]+)/(.+)", _resolve),
    (r"(?:GET|HEAD) /cdn/(\w+)", _cdn),
]

"""Which commit of which repository a source folder is, as download tools leave it behind.

    hub cache     …/models--ORG--NAME/snapshots/COMMIT/        both are in the path
    --local-dir   FOLDER/.cache/huggingface/download/FILE.metadata   line 1 is the commit, no name
    git clone     FOLDER/.git/HEAD and FOLDER/.git/config      both

A repository can be made anew under the same name, so a name without a commit identifies nothing;
where there is no commit, the hashes of the shards (see the manifest) have to do.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mmq.convert.checkpoint import Checkpoint
from mmq.convert.work import SOURCE

#: Key of `Checkpoint.extra` under which a source opened on the Hub says what it is.
EXTRA_KEY = "hub"

_COMMIT = re.compile(r"[0-9a-f]{40}")
_CACHE = re.compile(
    r"models--(?P<owner>[^/]+?)--(?P<name>[^/]+)/snapshots/(?P<commit>[0-9a-f]{40})"
)
_REMOTE = re.compile(
    r"url\s*=\s*\S*huggingface\.co[/:](?P<repo>[\w.-]+/[\w.-]+?)(?:\.git)?\s*$", re.M
)


class SourceRevision(NamedTuple):
    """A repository (`org/name`, "" when unknown) and a commit of it ("" when unknown)."""

    repo: str = ""
    commit: str = ""


def source_revision(source: Checkpoint) -> SourceRevision:
    """What is known of a source's origin; empty for a plain folder.

    A folder whose shards were downloaded from different commits has no revision.
    """
    hub = source.extra.get(EXTRA_KEY)
    if isinstance(hub, SourceRevision):
        return hub
    if source.root is None:
        return SourceRevision()
    root = source.root.absolute()
    if match := _CACHE.search(root.as_posix()):
        return SourceRevision(f"{match['owner']}/{match['name']}", match["commit"])
    if commit := _downloaded_commit(root, source.shards):
        return SourceRevision("", commit)
    return _cloned(root)


def recorded_source(manifest: Mapping[str, Any]) -> str | None:
    """`org/name@commit` of the Hub source that a manifest tells of; None where it was elsewhere."""
    hub = manifest.get("hub")
    found = hub.get(SOURCE) if isinstance(hub, dict) else None
    return f"{found.get('repo')}@{found.get('commit')}" if isinstance(found, dict) else None


def _downloaded_commit(root: Path, shards: Iterable[str]) -> str:
    commits = set()
    for name in shards:
        lines = _text(
            root / ".cache" / "huggingface" / "download" / f"{name}.metadata"
        ).splitlines()
        commits.add(lines[0].strip() if lines else "")
    commit = commits.pop() if len(commits) == 1 else ""
    return commit if _COMMIT.fullmatch(commit) else ""


def _cloned(root: Path) -> SourceRevision:
    head = _text(root / ".git" / "HEAD").strip()
    if head.startswith("ref: "):
        ref = head.removeprefix("ref: ")
        packed = re.search(
            rf"^([0-9a-f]{{40}}) {re.escape(ref)}$", _text(root / ".git" / "packed-refs"), re.M
        )
        head = _text(root / ".git" / ref).strip() or (packed[1] if packed else "")
    if not _COMMIT.fullmatch(head):
        return SourceRevision()
    remote = _REMOTE.search(_text(root / ".git" / "config"))
    return SourceRevision(remote["repo"] if remote else "", head)


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, ValueError):
        return ""

"""`org/name[@revision]`: how a repository is named where a path could stand."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from mmq.errors import UsageError

SCHEME = "hf://"
DEFAULT_REVISION = "main"

#: The Hub's own rule: letters, digits, `-`, `_`, `.`; none of `-` and `.` first or last.
_REPO = re.compile(r"[A-Za-z0-9_](?:[\w.-]*\w)?/[A-Za-z0-9_](?:[\w.-]*\w)?", re.ASCII)
_MAX_NAME = 96
#: What ends like this is a file that is not there, whatever stands before it.
_FILE_SUFFIXES = (".safetensors", ".json", ".git")


class HubLocation(NamedTuple):
    """A model repository, and the branch, tag or commit that was asked for."""

    repo: str
    revision: str

    def __str__(self) -> str:
        return f"{self.repo}@{self.revision}"


def parse_location(text: str) -> HubLocation | None:
    """The repository a word names; None where it names a path.

    A file or folder of that name wins. `hf://org/name` is a repository in any case.

    Raises:
        UsageError: `hf://` before what is no repository, or an `@` with nothing behind it.
    """
    explicit = text.startswith(SCHEME)
    if not explicit and _exists(text):
        return None
    repo, at, revision = text.removeprefix(SCHEME).partition("@")
    fits = _REPO.fullmatch(repo) and not any(bad in repo for bad in ("..", "--"))
    if not fits or len(repo) > _MAX_NAME or (repo.endswith(_FILE_SUFFIXES) and not explicit):
        if explicit:
            raise _no_location(text)
        return None
    if at and not revision:
        raise _no_location(text)
    return HubLocation(repo, revision or DEFAULT_REVISION)


def named_by_address(text: str) -> HubLocation | None:
    """The repository whose page a web address is (`https://huggingface.co/org/name/tree/v1`)."""
    address = urlsplit(text)
    if address.scheme not in ("http", "https"):
        return None
    owner, name, view, revision, *_ = (*address.path.strip("/").split("/"), "", "", "", "")
    known = view in ("tree", "blob", "resolve") and revision
    at = unquote(revision) if known else DEFAULT_REVISION
    try:
        return parse_location(f"{SCHEME}{owner}/{name}@{at}")
    except UsageError:
        return None


def _exists(text: str) -> bool:
    try:
        return Path(text).expanduser().exists()
    except (OSError, ValueError, RuntimeError):
        return False


def _no_location(text: str) -> UsageError:
    return UsageError(
        "hub-location", f"{text} names no repository", got=text, expected="org/name[@revision]"
    )

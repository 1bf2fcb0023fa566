"""A repository at one commit: its files with sizes and digests, and which of them are here already.

A revision is resolved once. From then on every byte comes from that commit, however often the
branch moves; `pinned` carries the choice over to the next run.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from mmq.errors import BadInputError
from mmq.hub.client import RemoteFile, is_offline, listing_file, read_all, repository_file
from mmq.hub.location import HubLocation

_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")

#: Commits by `org/name@revision`, for as long as `pinned` lasts.
_PINS: ContextVar[dict[str, str] | None] = ContextVar("pins", default=None)


class Hasher(Protocol):
    """One of hashlib's."""

    def update(self, data: Any, /) -> None: ...
    def hexdigest(self) -> str: ...


class HubFile(NamedTuple):
    """A file as the Hub lists it.

    Attributes:
        sha256: of its content, where LFS or Xet keeps it; else None.
        blob: git's id: SHA-1 over `blob SIZE\\0` and the content (of the pointer, for LFS).
    """

    name: str
    size: int
    sha256: str | None
    blob: str

    @property
    def digest(self) -> str:
        """What `hasher` has to come to."""
        return self.sha256 or self.blob

    def hasher(self) -> Hasher:
        """The hash the Hub lists for this file, with nothing of its content yet."""
        return hashlib.sha256() if self.sha256 else hashlib.sha1(b"blob %d\0" % self.size)


class Traffic:
    """Requests and bytes that it took to know what is known, counted in any thread."""

    def __init__(self) -> None:
        self.requests = self.bytes = 0
        self._lock = threading.Lock()

    def add(self, nbytes: int) -> None:
        """One more request."""
        with self._lock:
            self.requests += 1
            self.bytes += nbytes


@dataclass
class Snapshot:
    """A commit of a repository.

    Attributes:
        location: what was asked for.
        files: by name; empty offline, where only `cached` is known.
        cached: the commit's folder in the Hub's cache, None where there is none.
        traffic: what listing and headers took.
    """

    location: HubLocation
    commit: str
    files: Mapping[str, HubFile]
    cached: Path | None
    traffic: Traffic = field(default_factory=Traffic)

    @property
    def slug(self) -> Path:
        """Where this commit's files lie below a folder of downloads."""
        return Path(self.location.repo.replace("/", "--")) / self.commit

    def remote(self, name: str) -> RemoteFile:
        """A file of the commit, to be read from the Hub."""
        return repository_file(self.location, self.commit, name, self.files[name].size)

    def cached_file(self, name: str) -> Path | None:
        """A file of this commit that the cache holds whole.

        The cache names its blobs by their digest; a copy without that name is not trusted.
        """
        if self.cached is None:
            return None
        path = self.cached / name
        listed = self.files.get(name)
        if not path.is_file():
            return None
        if listed is None or (
            path.stat().st_size == listed.size
            and path.resolve().name in (listed.sha256, listed.blob)
        ):
            return path
        return None

    def as_dict(self) -> dict[str, str]:
        """What a manifest keeps of it."""
        return {"repo": self.location.repo, "revision": self.location.revision,
                "commit": self.commit}  # fmt: skip


@contextmanager
def pinned(known: Mapping[str, str] | None = None) -> Iterator[dict[str, str]]:
    """Resolve every revision once within the block.

    Args:
        known: commits by `org/name@revision`, from an earlier run that is to be resumed.

    Yields:
        The same with those that were resolved since.
    """
    pins = dict(known or {})
    token = _PINS.set(pins)
    try:
        yield pins
    finally:
        _PINS.reset(token)


def open_snapshot(location: HubLocation) -> Snapshot:
    """Resolve a revision, and list the files of its commit: one request.

    Raises:
        BadInputError: no such repository or revision, no access, or offline and not in the cache.
        IncompleteError: the Hub cannot be reached.
    """
    pins = _PINS.get()
    known = None if pins is None else pins.get(str(location))
    snapshot = _offline(location, known) if is_offline() else _online(location, known)
    if pins is not None:
        pins[str(location)] = snapshot.commit
    return snapshot


def _online(location: HubLocation, commit: str | None) -> Snapshot:
    wanted = location if commit is None else HubLocation(location.repo, commit)
    raw = read_all(listing_file(wanted), threading.Event())
    try:
        listing = json.loads(raw)
        found = str(listing["sha"])
        files = [_file(entry) for entry in listing["siblings"]]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise _unexpected(location) from None
    if not _COMMIT.fullmatch(found) or (commit is not None and found != commit):
        raise _unexpected(location)
    cached = _cache_of(location) / "snapshots" / found
    snapshot = Snapshot(
        location, found, {f.name: f for f in files}, cached if cached.is_dir() else None
    )
    snapshot.traffic.add(len(raw))
    return snapshot


def _file(entry: Any) -> HubFile:
    name, size, lfs = entry["rfilename"], entry["size"], entry.get("lfs") or {}
    sha256 = lfs.get("sha256")
    if not (isinstance(name, str) and _is_inside(name) and type(size) is int and size >= 0):
        raise ValueError
    if sha256 is not None and not _SHA256.fullmatch(sha256):
        raise ValueError
    return HubFile(name, size, sha256, str(entry.get("blobId", "")))


def _is_inside(name: str) -> bool:
    """Whether a name is a plain relative path: it becomes a file of ours."""
    parts = name.split("/")
    return "\0" not in name and "\\" not in name and not {"", ".", ".."} & set(parts)


def _unexpected(location: HubLocation) -> BadInputError:
    return BadInputError(
        "hub-listing", f"the Hub's listing of {location.repo} is none that mmq understands",
        where=str(location), hint="is HF_ENDPOINT the address of a Hub?",
    )  # fmt: skip


def _cache_of(location: HubLocation) -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE) / f"models--{location.repo.replace('/', '--')}"


def _offline(location: HubLocation, commit: str | None) -> Snapshot:
    """The snapshot that the cache has under this revision."""
    cache = _cache_of(location)
    commit = commit or location.revision
    if not _COMMIT.fullmatch(commit):
        try:
            commit = (cache / "refs" / location.revision).read_text("utf-8").strip()
        except (OSError, ValueError):
            commit = ""
    folder = cache / "snapshots" / commit
    if not _COMMIT.fullmatch(commit) or not folder.is_dir():
        raise BadInputError(
            "hub-not-cached", f"HF_HUB_OFFLINE is set, and the cache does not hold {location}",
            where=str(cache), hint=f"hf download {location.repo} --revision {location.revision}",
        )  # fmt: skip
    return Snapshot(location, commit, {}, folder)

"""What is sent, in which order, and what is there already: planned before a byte leaves."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mmq.convert.checkpoint import CONFIG_NAME, INDEX_NAME
from mmq.publish.folder import CARD_NAME
from mmq.publish.hub import RemoteFile

#: A batch ends at this many bytes or files, whichever comes first.
BATCH_BYTES, BATCH_FILES = 25_000_000_000, 50
#: What makes a repository a model to those who download it.
MODEL_FILES = (INDEX_NAME, CONFIG_NAME)


@dataclass(frozen=True)
class Item:
    """A file to publish: on disk, or made for the occasion (`data`).

    Attributes:
        mtime_ns: of the file when it was hashed.
        weights: whether it goes before everything else.
    """

    name: str
    nbytes: int
    sha256: str
    path: Path | None = None
    mtime_ns: int = 0
    data: bytes | None = None
    weights: bool = False

    def read(self) -> bytes:
        """All its bytes, from wherever they are."""
        if self.data is not None:
            return self.data
        assert self.path is not None
        return self.path.read_bytes()


def made(name: str, data: bytes) -> Item:
    """An item whose bytes were made here."""
    return Item(name, len(data), hashlib.sha256(data).hexdigest(), data=data)


@dataclass(frozen=True)
class UploadPlan:
    """What is sent, in which order.

    Attributes:
        batches: weights that the Hub lacks, in the order in which they go.
        last: everything else that it lacks; index and card at the end.
        kept: files that it has already.
        removed: files that speak of what was there before, in the last commit.
        at_once: whether all of it becomes visible in one commit.
    """

    batches: tuple[tuple[Item, ...], ...]
    last: tuple[Item, ...]
    kept: tuple[Item, ...]
    removed: tuple[str, ...] = ()
    at_once: bool = False

    @property
    def sent(self) -> list[Item]:
        """All items that go, in their order."""
        return [item for batch in (*self.batches, self.last) for item in batch]


def plan_upload(
    items: Sequence[Item], remote: Mapping[str, RemoteFile], removed: Sequence[str], *, pr: bool
) -> UploadPlan:
    """Which files go, and how.

    Args:
        remote: the files that are there.
        removed: those of them that go with the last commit.
        pr: whether it goes to a pull request, which is never half there.
    """
    kept = tuple(item for item in items if same(item, remote.get(item.name)))
    new = [item for item in items if item not in kept]
    last = sorted((i for i in new if not i.weights), key=lambda i: _rank(i.name))
    batches = tuple(_batches([i for i in new if i.weights]))
    at_once = pr or any(name in remote for name in MODEL_FILES)
    return UploadPlan(batches, tuple(last), kept, tuple(removed), at_once)


def _rank(name: str) -> tuple[int, str]:
    return ((INDEX_NAME, CARD_NAME).index(name) + 1 if name in (INDEX_NAME, CARD_NAME) else 0, name)


def _batches(items: Sequence[Item]) -> Iterator[tuple[Item, ...]]:
    batch: list[Item] = []
    for item in items:
        full = sum(i.nbytes for i in batch) + item.nbytes > BATCH_BYTES or len(batch) >= BATCH_FILES
        if batch and full:
            yield tuple(batch)
            batch = []
        batch.append(item)
    if batch:
        yield tuple(batch)


def same(item: Item, remote: RemoteFile | None) -> bool:
    """Whether the Hub has these bytes under this name."""
    if remote is None or remote.bytes != item.nbytes:
        return False
    if remote.sha256 is not None:
        return remote.sha256 == item.sha256
    return remote.blob == git_blob(item.read())


def git_blob(data: bytes) -> str:
    """Git's id of a file: SHA-1 of `blob SIZE\\0` and the bytes."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()

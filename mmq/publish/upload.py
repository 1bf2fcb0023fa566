"""Sending a folder so that what is visible is always either nothing, or all of it.

    nothing there yet    weights in batches, a commit each; then their digests are compared;
                         then one commit with configs, index and card
    a model is there,    weights go to the store, where nobody sees them; then one commit
    or a pull request    replaces everything at once, and removes weights the new index lacks

Either way a file that the Hub has with the same digest is not sent again.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from mmq.convert.checkpoint import CONFIG_NAME, INDEX_NAME
from mmq.errors import BadInputError, VerdictError
from mmq.publish.folder import CARD_NAME
from mmq.publish.hub import Hub, RemoteFile

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd

    from mmq.console import Console, Progress

#: A batch ends at this many bytes or files, whichever comes first.
BATCH_BYTES, BATCH_FILES = 25_000_000_000, 50
_SHARD_NAME = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
#: What makes a repository a model to those who download it.
_MODEL_FILES = (INDEX_NAME, CONFIG_NAME)


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
        removed: weights that only the old index names, or that an earlier attempt left behind.
        at_once: whether all of it becomes visible in one commit.
    """

    batches: tuple[tuple[Item, ...], ...]
    last: tuple[Item, ...]
    kept: tuple[Item, ...]
    removed: tuple[str, ...] = ()
    at_once: bool = False

    @property
    def sent(self) -> list[Item]:
        return [item for batch in (*self.batches, self.last) for item in batch]


def plan_upload(
    items: Sequence[Item], remote: Mapping[str, RemoteFile], old_weights: Sequence[str], *, pr: bool
) -> UploadPlan:
    """Which files go, and how.

    Args:
        old_weights: what the index that is there now names.
    """
    kept = tuple(item for item in items if same(item, remote.get(item.name)))
    new = [item for item in items if item not in kept]
    names = {item.name for item in items}
    strays = {*old_weights, *(n for n in remote if _SHARD_NAME.fullmatch(n))} - names
    removed = tuple(sorted(n for n in strays if n in remote))
    last = sorted((i for i in new if not i.weights), key=lambda i: _rank(i.name))
    batches = tuple(_batches([i for i in new if i.weights]))
    at_once = pr or any(name in remote for name in _MODEL_FILES)
    return UploadPlan(batches, tuple(last), kept, removed, at_once)


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


@dataclass
class Uploader:
    """Carries out one plan.

    Attributes:
        revision: branch to commit to.
        pr: open a pull request instead of committing to it.
    """

    hub: Hub
    plan: UploadPlan
    revision: str
    pr: bool
    message: str
    description: str
    console: Console
    _landed: str = field(default="", init=False)

    def run(self) -> str:
        """Send everything; returns the revision that has it all.

        Raises:
            VerdictError: the Hub holds other bytes than were sent.  MmqError: it did not work.
        """
        plan = self.plan
        self._landed = self.revision
        total = sum(item.nbytes for item in plan.sent)
        with self.console.progress(total, "uploading") as progress:
            waiting = [self._batch(n, batch, progress) for n, batch in enumerate(plan.batches, 1)]
            weights = [item for batch in plan.batches for item in batch]
            if not plan.at_once:
                # before the index makes it a model
                self._compare([*weights, *(item for item in plan.kept if item.weights)])
                waiting = []
            self._last([op for operations in waiting for op in operations], progress)
        try:
            self._compare([*plan.sent, *plan.kept])
        except VerdictError:
            self._withdraw()
            raise
        return self._landed

    def _withdraw(self) -> None:
        """Take the index away again: what is damaged must not pass for a model."""
        from huggingface_hub import CommitOperationDelete

        if self.pr or INDEX_NAME not in self.hub.tree(self._landed):
            return
        delete = CommitOperationDelete(path_in_repo=INDEX_NAME)
        self.hub.commit([delete], f"{self.message}: withdrawn, files differ", "", self.revision,
                        pr=False)  # fmt: skip
        self.console.warn(f"{INDEX_NAME} was removed from the repository again")

    def _batch(
        self, number: int, batch: tuple[Item, ...], progress: Progress
    ) -> list[CommitOperationAdd]:
        operations = [_operation(item) for item in batch]
        self.hub.upload(operations, self.revision, pr=self.pr)
        for item in batch:
            _check_unchanged(item)
        if not self.plan.at_once:
            part = f"weights, part {number} of {len(self.plan.batches)}"
            self.hub.commit(operations, f"{self.message}: {part}", "", self.revision, pr=False)
        progress.advance(sum(item.nbytes for item in batch), batch[-1].name)
        return operations

    def _last(self, waiting: list[CommitOperationAdd], progress: Progress) -> None:
        from huggingface_hub import CommitOperationDelete

        operations = [*waiting, *(_operation(item) for item in self.plan.last)]
        deletions = [CommitOperationDelete(path_in_repo=name) for name in self.plan.removed]
        if not operations and not deletions:
            return
        for item in self.plan.last:
            _check_unchanged(item)
        self._landed = self.hub.commit(
            [*operations, *deletions], self.message, self.description, self.revision, pr=self.pr
        )
        progress.advance(sum(item.nbytes for item in self.plan.last))

    def _compare(self, items: Sequence[Item]) -> None:
        """What the Hub says it holds, against what was sent."""
        remote = self.hub.tree(self._landed)
        for item in items:
            found = remote.get(item.name)
            if not same(item, found):
                raise VerdictError(
                    "publish-digest", f"the Hub does not hold {item.name} as it was sent",
                    where=item.name, got=_shown(found),
                    expected=f"{item.nbytes:,} bytes, {item.sha256}",
                    hint="a .gitignore in the repository, or a damaged upload: delete the file"
                    " there and run the same command again",
                )  # fmt: skip


def _shown(found: RemoteFile | None) -> str:
    return "absent" if found is None else f"{found.bytes:,} bytes, {found.sha256 or found.blob}"


def _operation(item: Item) -> CommitOperationAdd:
    from huggingface_hub import CommitOperationAdd

    operation = CommitOperationAdd(
        item.name, item.data if item.data is not None else str(item.path)
    )
    # known already; else every file would be read once more
    operation.upload_info.sha256 = bytes.fromhex(item.sha256)
    return operation


def _check_unchanged(item: Item) -> None:
    if item.path is None:
        return
    stat = item.path.stat()
    if (stat.st_size, stat.st_mtime_ns) != (item.nbytes, item.mtime_ns):
        raise BadInputError(
            "publish-file-changed", f"{item.name} changed while it was being sent",
            where=item.name, hint="make sure nothing writes to OUT, verify again, then publish",
        )  # fmt: skip

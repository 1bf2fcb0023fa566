"""A Hub repository as a `Checkpoint`: read through its stand-in, so it is judged like a folder.

Shards lie nowhere until `source_files` brings them; reading one before that fails as a file that is
not there. Identity is the Hub's digest, where a local file's is its time of change.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmq.convert.checkpoint import Checkpoint, Shard, open_folder
from mmq.convert.safetensors_header import TensorInfo
from mmq.convert.source_revision import EXTRA_KEY, SourceRevision
from mmq.hub.client import read_range
from mmq.hub.location import HubLocation
from mmq.hub.snapshot import Snapshot, open_snapshot
from mmq.hub.stand_in import THREADS, write_stand_in
from mmq.hub.threads import in_order

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class HubSource:
    """What a checkpoint on the Hub has besides headers.

    Attributes:
        folder: its small JSON files, for as long as this object lives.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self.folder = Path(tempfile.mkdtemp(prefix="mmq-hub-"))
        weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)

    @property
    def missing(self) -> Path:
        """Where files are said to lie that are not here."""
        return self.folder / "not-downloaded"

    def as_dict(self) -> dict[str, Any]:
        """For `mmq inspect`: what was read, and what that took."""
        traffic = self.snapshot.traffic
        return {**self.snapshot.as_dict(), "requests": traffic.requests, "bytes": traffic.bytes}


def open_hub(location: HubLocation, text: str) -> Checkpoint:
    """Open a repository at the commit that its revision means now.

    Args:
        text: the location as typed.

    Raises:
        BadInputError: refused, or damaged.  IncompleteError: not reachable.
    """
    snapshot = open_snapshot(location)
    revision = {EXTRA_KEY: SourceRevision(location.repo, snapshot.commit)}
    source = HubSource(snapshot)
    if not snapshot.files:
        assert snapshot.cached is not None
        opened = open_folder(snapshot.cached, text)
        shards = {n: replace(s, mtime_ns=0) for n, s in opened.shards.items()}
        return replace(opened, shards=shards, hub=source, extra=revision)
    write_stand_in(snapshot, source.folder)
    opened = open_folder(source.folder, text)
    shards = {name: _shard(shard, source) for name, shard in opened.shards.items()}
    for shard in opened.shards.values():
        shard.path.unlink()  # zeros that nobody must take for data
    return replace(opened, shards=shards, hub=source, extra=revision)


def _shard(shard: Shard, source: HubSource) -> Shard:
    """The shard where it really is: in the cache, or nowhere yet."""
    snapshot = source.snapshot
    path = snapshot.cached_file(shard.name) or source.missing / shard.name
    return replace(shard, path=path, mtime_ns=0, sha256=snapshot.files[shard.name].sha256)


def is_here(shard: Shard) -> bool:
    """Whether a shard of a Hub checkpoint can be read without downloading it."""
    return shard.path.is_file()


def read_small(hub: HubSource, tensors: Sequence[TensorInfo]) -> Iterator[npt.NDArray[np.uint8]]:
    """Small tensors' bytes in order, by range reads that run side by side.

    Raises:
        BadInputError: refused.  IncompleteError: not reachable.
    """
    import numpy as np

    def fetch(tensor: TensorInfo, stop: threading.Event) -> bytearray:
        remote = hub.snapshot.remote(tensor.shard)
        return read_range(remote, tensor.offset, tensor.nbytes, stop)

    for raw in in_order(fetch, tensors, THREADS):
        yield np.frombuffer(raw, np.uint8)


def side_listing(source: Checkpoint) -> list[tuple[Path, str, int]] | None:
    """(where it is or will be, name, size) of every listed file but shards; None for a folder."""
    if source.hub is None or not source.hub.snapshot.files:
        return None
    snapshot = source.hub.snapshot
    return [
        (snapshot.cached_file(name) or source.hub.missing / name, name, file.size)
        for name, file in sorted(snapshot.files.items())
    ]

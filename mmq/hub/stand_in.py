"""A folder that looks like a commit's: small files whole, shards with their headers and no data.

Whatever reads headers, index and sizes reads this folder as it would the downloaded one. Shards are
sparse files of their true size, so they take no room; what follows the header reads as zeros, and
whoever is handed this folder must not read it.
"""

from __future__ import annotations

import errno
import json
import struct
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from mmq.errors import BadInputError, MachineError
from mmq.hub.client import read_range
from mmq.hub.download import other_bytes
from mmq.hub.snapshot import Snapshot
from mmq.hub.threads import in_order

INDEX_NAME = "model.safetensors.index.json"
#: JSON files that say what a checkpoint is.
JSON_NAMES = (INDEX_NAME, "config.json", "hf_quant_config.json", "mmq-manifest.json")
#: Every header of the M3 release fits into one such read.
FIRST_READ = 512 << 10
_MAX_HEADER = 100_000_000
_MAX_JSON = 512_000_000
THREADS = 8


def write_stand_in(snapshot: Snapshot, folder: Path, *, everything: bool = False) -> None:
    """Fill an empty folder.

    Args:
        everything: give every other file a stand-in too, of its size, for checks of what is there.

    Raises:
        BadInputError: refused, or a JSON file of absurd size.  IncompleteError: not reachable.
        MachineError: the folder cannot be written.
    """
    json_names = [name for name in JSON_NAMES if name in snapshot.files]
    for name in json_names:
        if snapshot.files[name].size > _MAX_JSON:
            raise BadInputError(
                "json-too-large", f"{name} is too large", where=str(snapshot.location)
            )
    try:
        _fill(snapshot, folder, json_names, lambda name, stop: _whole(snapshot, name, stop))
        shards = shard_names(snapshot, folder)
        _fill(snapshot, folder, shards, lambda name, stop: _header(snapshot, name, stop))
        if everything:
            for name in set(snapshot.files) - {*json_names, *shards}:
                _sparse(folder / name, b"", snapshot.files[name].size)
    except OSError as error:
        reason = "the disk is full" if error.errno == errno.ENOSPC else error.strerror or str(error)
        raise MachineError(
            "stand-in", f"{folder} cannot hold headers: {reason}", where=str(folder),
            hint="TMPDIR on a disk that takes large sparse files",
        ) from error  # fmt: skip


def shard_names(snapshot: Snapshot, folder: Path) -> list[str]:
    """Weight files the index names, as far as the commit has them; without an index those on top.

    What is wrong with an index is for the reader of the folder to say.
    """
    if INDEX_NAME not in snapshot.files:
        return sorted(n for n in snapshot.files if "/" not in n and n.endswith(".safetensors"))
    try:
        named = set(json.loads((folder / INDEX_NAME).read_bytes())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return []
    return sorted(named & set(snapshot.files))


def _fill(
    snapshot: Snapshot, folder: Path, names: Sequence[str],
    read: Callable[[str, threading.Event], bytes | bytearray],
) -> None:  # fmt: skip
    for name, data in zip(names, in_order(read, names, THREADS), strict=True):
        _sparse(folder / name, data, snapshot.files[name].size)


def _sparse(path: Path, data: bytes | bytearray, size: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(data)
        file.truncate(size)


def _whole(snapshot: Snapshot, name: str, stop: threading.Event) -> bytes | bytearray:
    """A small file, from the cache where it is there."""
    cached = snapshot.cached_file(name)
    if cached is not None:
        return cached.read_bytes()
    file = snapshot.files[name]
    for _ in (1, 2):
        data = _read(snapshot, name, 0, file.size, stop)
        digest = file.hasher()
        digest.update(data)
        if digest.hexdigest() == file.digest:
            return data
    raise other_bytes(snapshot, file, digest.hexdigest())


def _header(snapshot: Snapshot, name: str, stop: threading.Event) -> bytes | bytearray:
    """Length field and JSON of a shard; as much of it as there is, where it is damaged."""
    size = snapshot.files[name].size
    cached = snapshot.cached_file(name)
    if cached is not None:
        with cached.open("rb") as file:
            start = file.read(8)
            return start + file.read(min(size, _length(start)))
    data = _read(snapshot, name, 0, min(size, FIRST_READ), stop)
    end = min(8 + _length(data), size)
    if end > len(data):
        data = data + _read(snapshot, name, len(data), end - len(data), stop)
    return data[: max(end, 64)]


def _length(start: bytes | bytearray) -> int:
    """The header's length; 0 for what is none, which the reader of the folder complains about."""
    if len(start) < 8:
        return 0
    length: int = struct.unpack("<Q", start[:8])[0]
    return length if length <= _MAX_HEADER else 0


def _read(
    snapshot: Snapshot, name: str, start: int, nbytes: int, stop: threading.Event
) -> bytearray:
    if not nbytes:
        return bytearray()
    snapshot.traffic.add(nbytes)
    return read_range(snapshot.remote(name), start, nbytes, stop)

"""The journal of a run: who it belongs to, and which shards are done.

    OUT/.mmq/lock            held while a run writes
    OUT/.mmq/journal.json    the fingerprint: source, options, numerics, plan
    OUT/.mmq/files.json      names the run writes, for --restart to clear away
    OUT/.mmq/done/NNNNN.json one record per finished shard: size, SHA-256, statistics

A shard is trusted on resume only if its record exists and size and SHA-256 agree; the folder goes
once the index is in place.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from mmq.convert.checkpoint import Checkpoint, read_json_object
from mmq.convert.options import INPUT_SCALES, KV_SCALES
from mmq.convert.plan import ConversionPlan
from mmq.convert.source_revision import source_revision
from mmq.convert.work import Task
from mmq.convert.writer import write_file
from mmq.errors import BadInputError, IncompleteError, RefusedError
from mmq.quantize.version import NUMERICS_VERSION

FOLDER = ".mmq"
FORMAT = "mmq-journal/1"
#: Key of a fingerprint that tells where the source lay: for messages, and no part of the identity.
LOCATION = "location"


def source_identity(source: Checkpoint) -> dict[str, Any]:
    """What tells whether a source is still the same: sizes, times and header hashes; for one on the
    Hub its digests, since another commit can have equal headers."""
    return {
        name: {
            "bytes": shard.file_bytes,
            "mtime_ns": shard.mtime_ns,
            "header_sha256": shard.header_sha256,
            **({"sha256": shard.sha256} if source.hub is not None else {}),
        }
        for name, shard in source.shards.items()
    }


def fingerprint(plan: ConversionPlan) -> dict[str, Any]:
    """Everything that decides this run's output bytes, and where the source lies."""
    digest = hashlib.sha256()
    for unit in plan.units:
        digest.update(unit.header)
        for task in unit.tasks:
            for key, value in _values(task):
                digest.update(repr((task.outputs[0].name, key, float(value).hex())).encode())
    config = json.dumps(plan.source.config, sort_keys=True, ensure_ascii=False)
    return {
        "format": FORMAT,
        LOCATION: _location(plan.source),
        "numerics_version": NUMERICS_VERSION,
        "options": _without_paths(plan.options.as_dict()),
        "source": source_identity(plan.source),
        "others": {origin: source_identity(other) for origin, other in plan.others.items()},
        "config_sha256": hashlib.sha256(config.encode("utf-8")).hexdigest(),
        "plan_sha256": digest.hexdigest(),
    }


def _location(source: Checkpoint) -> str:
    """`org/name@commit` of a source on the Hub, else its full path."""
    if source.hub is None:
        return str(Path(source.location).expanduser().absolute())
    return "{}@{}".format(*source_revision(source))


def _values(task: Task) -> Iterator[tuple[str, float]]:
    """Numbers of a task that no header tells."""
    for key in ("value", "stored_global", "stored_input"):
        value = getattr(task, key, None)
        if value is not None:
            yield key, value
    # 1.0 is what conversions without a file write: their fingerprints have never told it
    for value in (*getattr(task, "inputs", ()), getattr(task, "input", 1.0)):
        if value != 1.0:
            yield "input", value


def _without_paths(options: dict[str, Any]) -> dict[str, Any]:
    """Options without where files lie: what is in them is part of the fingerprint already."""
    for key, words in (("kv_scales", KV_SCALES), ("input_scales", INPUT_SCALES)):
        if options[key] not in words:
            options[key] = "file"
    return {**options, **{k: options[k] is not None for k in ("experts_from", "importance")}}


def lasting(value: Mapping[str, Any]) -> dict[str, Any]:
    """The fingerprint without places and file times: equal for equal bytes, wherever they lie."""

    def without_times(shards: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        return {
            name: {k: v for k, v in shard.items() if k != "mtime_ns"}
            for name, shard in shards.items()
        }

    return {
        **{k: v for k, v in value.items() if k != LOCATION},
        "source": without_times(value["source"]),
        "others": {origin: without_times(other) for origin, other in value["others"].items()},
    }


def flatten(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted path, leaf) of nested mappings."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from flatten(item, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, value


def fingerprint_diff(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Lines `what: old → new` for everything that differs."""
    before, after = dict(flatten(old)), dict(flatten(new))
    return [
        f"{key}: {before.get(key, '(none)')} → {after.get(key, '(none)')}"
        for key in sorted(before.keys() | after.keys())
        if key != LOCATION and before.get(key, "(none)") != after.get(key, "(none)")
    ]


class Journal:
    """The journal folder of one output folder."""

    def __init__(self, out: Path) -> None:
        self.folder = out / FOLDER
        self._lock = -1

    @property
    def exists(self) -> bool:
        return (self.folder / "journal.json").is_file()

    def lock(self) -> None:
        """Take the lock for this process.

        Raises:
            RefusedError: another run holds it.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.fstat(self._lock).st_nlink:
                # the other run finished and removed its journal between our open and our lock
                raise BlockingIOError
        except BlockingIOError:
            os.close(self._lock)
            self._lock = -1
            raise RefusedError(
                "locked",
                f"another run is writing {self.folder.parent}",
                where=str(self.folder.parent),
                hint="wait for it, or choose another OUT",
            ) from None

    def unlock(self) -> None:
        if self._lock >= 0:
            # forgotten first: a signal may be raised in between
            lock, self._lock = self._lock, -1
            os.close(lock)

    def read_fingerprint(self) -> dict[str, Any]:
        """The fingerprint of the unfinished run.

        Raises:
            RefusedError: the journal is damaged, so nobody can say whose run it is.
        """
        try:
            return read_json_object(self.folder / "journal.json")
        except BadInputError as error:
            raise RefusedError(
                "journal-damaged",
                f"the journal of the unfinished run in {self.folder.parent} cannot be read",
                where=str(self.folder / "journal.json"),
                got=error.message,
                hint="--restart discards the unfinished run",
            ) from None

    def read_files(self) -> set[str]:
        """Names the unfinished run was going to write; empty when nobody knows."""
        try:
            names = read_json_object(self.folder / "files.json").get("files")
        except BadInputError:
            return set()
        return {n for n in names if isinstance(n, str)} if isinstance(names, list) else set()

    def begin(self, value: Mapping[str, Any], writes: Iterable[str]) -> None:
        """Start a new run: forget old records, then store what it writes and its fingerprint."""
        shutil.rmtree(self.folder / "done", ignore_errors=True)
        (self.folder / "done").mkdir(parents=True)
        write_file(self.folder / "files.json", _json({"files": sorted(writes)}))
        write_file(self.folder / "journal.json", _json(value))

    def record(self, index: int, result: Mapping[str, Any]) -> None:
        write_file(self.folder / "done" / f"{index:05d}.json", _json(result))

    def done(self, plan: ConversionPlan) -> dict[int, dict[str, Any]]:
        """Records of shards that are finished and still there with their recorded size.

        A record that cannot be read is as good as none: its shard is made again.
        """
        records: dict[int, dict[str, Any]] = {}
        for unit in plan.units:
            path = self.folder / "done" / f"{unit.index:05d}.json"
            shard = self.folder.parent / unit.filename
            if not path.is_file() or not shard.is_file():
                continue
            with suppress(BadInputError):
                record = read_json_object(path)
                if record.get("bytes") == shard.stat().st_size == unit.file_bytes:
                    records[unit.index] = record
        return records

    def remove(self) -> None:
        """Forget the run; the index is in place, or the run is being discarded."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.unlock()


def _json(value: Mapping[str, Any]) -> bytes:
    # bytes of a path that are no text are escaped
    return (json.dumps(value, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")


def refuse_unfinished(out: Path) -> None:
    """Stop where a conversion into OUT has begun and not ended.

    Raises:
        IncompleteError: it has.
    """
    if (out / FOLDER).exists():
        raise IncompleteError(
            "output-unfinished", f"the conversion into {out} has not finished",
            where=str(out / FOLDER), hint="repeat the mmq convert command that made it",
        )  # fmt: skip

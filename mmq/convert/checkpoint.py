"""A checkpoint as its headers describe it: a folder, a file, a header manifest, or on the Hub.

Opening reads headers, index and config only; nothing here touches tensor data. `open_checkpoint`
is the seam for other kinds of source: whatever yields a `Checkpoint` can be inspected and planned.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from mmq.convert.safetensors_header import (
    LFS_MAGIC,
    TensorInfo,
    lfs_pointer,
    read_header,
    unreadable,
)
from mmq.errors import BadInputError
from mmq.report.findings import Finding

if TYPE_CHECKING:
    from mmq.convert.hub_source import HubSource

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
CONFIG_NAME = "config.json"
HF_QUANT_CONFIG_NAME = "hf_quant_config.json"
_MAX_JSON_BYTES = 512_000_000


@dataclass(frozen=True)
class Shard:
    """A weight file: size and header hash identify it; `path` is where to read (links followed)."""

    name: str
    path: Path
    file_bytes: int
    mtime_ns: int
    header_sha256: str
    metadata: Mapping[str, str]
    sha256: str | None = None


@dataclass(frozen=True)
class Checkpoint:
    """Everything known about a checkpoint without reading its weights.

    Attributes:
        location: what the user named.
        root: the folder, or None for a header manifest (which cannot be converted, only planned).
        tensors: by name.
        config: parsed config.json ({} when there is none).
        notes: observations that do not stop work, such as a wrong total_size.
        hub: where the files come from, for one on the Hub; shards are not here until downloaded.
    """

    location: str
    root: Path | None
    tensors: Mapping[str, TensorInfo]
    shards: Mapping[str, Shard]
    config: Mapping[str, Any]
    index_name: str | None = None
    notes: tuple[Finding, ...] = ()
    inferred: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)
    hub: HubSource | None = None

    @property
    def nbytes(self) -> int:
        """Payload bytes: tensors without headers."""
        return sum(t.nbytes for t in self.tensors.values())

    @property
    def text_config(self) -> Mapping[str, Any]:
        """The language model's part of config.json."""
        text = self.config.get("text_config", self.config)
        return text if isinstance(text, Mapping) else {}


def open_checkpoint(location: str | Path) -> Checkpoint:
    """Open a folder, a `.safetensors` file, a header manifest (`.json`), a built-in name or a Hub
    repository.

    Raises:
        BadInputError: nothing there, or damaged, with the file at fault.
        IncompleteError: the Hub cannot be reached.
    """
    from mmq.convert.header_manifest import BUILTIN, open_builtin, open_manifest
    from mmq.hub.location import parse_location

    path = Path(location).expanduser()
    # a path may hold bytes that are no text; reports must not
    text = str(location).encode("utf-8", "backslashreplace").decode("utf-8")
    if path.is_dir():
        return open_folder(path, text)
    if path.is_file():
        if path.suffix == ".json":
            return open_manifest(path, text)
        return open_single(path, text)
    if text in BUILTIN:
        return open_builtin(text)
    if repository := parse_location(text):
        from mmq.convert.hub_source import open_hub

        return open_hub(repository, text)
    from mmq.convert.not_found import not_found

    raise not_found(text)


def open_folder(root: Path, location: str) -> Checkpoint:
    """Open a folder with an index, or with a single unindexed .safetensors file."""
    index_path = root / INDEX_NAME
    notes: list[Finding] = []
    if _is_present(index_path):
        weight_map, total_size = _read_index(index_path)
        names = sorted(set(weight_map.values()))
        tensors, shards = _read_shards(root, names)
        _check_index(weight_map, tensors)
        payload = sum(t.nbytes for t in tensors.values())
        if total_size is not None and total_size != payload:
            notes.append(
                Finding(
                    "index-total-size", "warning",
                    "the index's total_size is wrong; sizes here come from the headers",
                    where=INDEX_NAME, got=f"{total_size:,}", expected=f"{payload:,}",
                )
            )  # fmt: skip
    else:
        names = [_only_weight_file(root)]
        tensors, shards = _read_shards(root, names)
    config = read_json_object(root / CONFIG_NAME) if _is_present(root / CONFIG_NAME) else {}
    return Checkpoint(
        location, root, tensors, shards, config,
        index_name=INDEX_NAME if index_path.is_file() else None, notes=tuple(notes),
    )  # fmt: skip


def open_single(path: Path, location: str) -> Checkpoint:
    """Open one .safetensors file; config.json beside it is read when present."""
    tensors, shards = _read_shards(path.parent, [path.name])
    config_path = path.parent / CONFIG_NAME
    config = read_json_object(config_path) if _is_present(config_path) else {}
    return Checkpoint(location, path.parent, tensors, shards, config)


def _only_weight_file(root: Path) -> str:
    found = sorted(p.name for p in root.glob("*.safetensors"))
    if SINGLE_NAME in found:
        return SINGLE_NAME
    if len(found) == 1:
        return found[0]
    hint = "an unfinished download or conversion has no index; finish it first"
    if not found:
        raise BadInputError(
            "no-weights", f"{root} has no {INDEX_NAME} and no .safetensors file", where=str(root),
            hint=hint,
        )  # fmt: skip
    raise BadInputError(
        "index-missing",
        f"{root} has no {INDEX_NAME} to say which of its {len(found)} weight files belong together",
        where=str(root), hint=hint,
    )  # fmt: skip


def _read_shards(root: Path, names: list[str]) -> tuple[dict[str, TensorInfo], dict[str, Shard]]:
    present = {name: _is_present(root / name) for name in names}
    missing = [name for name in names if not present[name]]
    if missing:
        raise BadInputError(
            "shard-missing",
            f"the index names {len(missing)} shard(s) that are not there: {', '.join(missing)}",
            where=str(root),
        )
    tensors: dict[str, TensorInfo] = {}
    shards: dict[str, Shard] = {}
    for name in names:
        path = root / name
        header = read_header(path, name)
        shards[name] = Shard(
            name, path, header.file_bytes, header.mtime_ns,
            hashlib.sha256(header.raw).hexdigest(), header.metadata, _hub_sha256(path),
        )  # fmt: skip
        for tensor in header.tensors:
            if tensor.name in tensors:
                raise BadInputError(
                    "tensor-twice",
                    f"{tensor.name} is stored twice, in {tensors[tensor.name].shard} and {name}",
                    where=tensor.name,
                )
            tensors[tensor.name] = tensor
    # by name, so that nothing made from them depends on which shard holds which
    return dict(sorted(tensors.items())), shards


def _is_present(path: Path) -> bool:
    """Whether something is there.

    Raises:
        BadInputError: a link whose target is gone, as a pruned download cache leaves them.
    """
    try:
        if path.exists():
            return True
        dangling = path.is_symlink()
    except OSError as error:
        raise unreadable(path, error) from None
    if dangling:
        target = path.readlink()
        raise BadInputError(
            "link-dangling",
            f"{path.name} links to {target}, which does not exist",
            where=str(path),
            got=target,
            hint="download the snapshot again: hf download ORG/NAME",
        )
    return False


def _hub_sha256(path: Path) -> str | None:
    """SHA-256 the Hub's cache vouches for: a snapshot links to a blob named by its digest."""
    if path.is_symlink():
        blob = path.readlink().name
        if len(blob) == 64 and set(blob) <= set("0123456789abcdef"):
            return blob
    return None


def read_json_object(path: Path) -> dict[str, Any]:
    """A JSON object from a file of bounded size, read as UTF-8 whatever the locale."""
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise BadInputError("json-too-large", f"{path.name} is too large", where=str(path))
        raw = path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from None
    if raw.startswith(LFS_MAGIC):
        raise lfs_pointer(path.name, path)
    try:
        value = json.loads(raw.decode("utf-8"))
        if b"\\u" in raw:
            # half a surrogate pair is valid JSON, but no text that could be written again
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as error:
        raise BadInputError(
            "json-invalid", f"{path.name} is not valid JSON: {error}", where=str(path)
        ) from None
    if not isinstance(value, dict):
        raise BadInputError("json-invalid", f"{path.name} must hold an object", where=str(path))
    return value


def _read_index(path: Path) -> tuple[dict[str, str], int | None]:
    index = read_json_object(path)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise BadInputError("index-invalid", "the index has no weight_map", where=str(path))
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not _is_safe_relative(shard):
            raise BadInputError(
                "index-path",
                f"the index maps {name} to {shard!r}, which is no plain relative path",
                where=INDEX_NAME,
                got=shard,
                expected="a relative path without '..'",
            )
    metadata = index.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    known = isinstance(total, int | float) and math.isfinite(total)
    return weight_map, int(total) if known else None  # type: ignore[arg-type]


def _is_safe_relative(name: str) -> bool:
    path = PurePosixPath(name)
    return (
        bool(name)
        and not path.is_absolute()
        and ".." not in path.parts
        and "\\" not in name
        and "\0" not in name
    )


def _check_index(weight_map: Mapping[str, str], tensors: Mapping[str, TensorInfo]) -> None:
    for name, shard in weight_map.items():
        held = tensors.get(name)
        if held is None or held.shard != shard:
            raise BadInputError(
                "index-tensor-missing",
                f"the index says {name} is in {shard}, but that shard does not hold it",
                where=shard,
                got="absent" if held is None else f"it is in {held.shard}",
                expected=name,
            )
    extra = [n for n in tensors if n not in weight_map]
    if extra:
        raise BadInputError(
            "index-tensor-unlisted",
            f"{len(extra)} tensor(s) are stored but not in the index, such as {extra[0]}"
            f" in {tensors[extra[0]].shard}",
            where=INDEX_NAME,
        )

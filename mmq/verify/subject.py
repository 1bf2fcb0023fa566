"""The checkpoint under judgement, opened so that a defect becomes a finding, not an exception."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from mmq.convert.checkpoint import (
    CONFIG_NAME,
    HF_QUANT_CONFIG_NAME,
    INDEX_NAME,
    SINGLE_NAME,
    Shard,
    open_checkpoint,
    read_json_object,
)
from mmq.convert.header_manifest import BUILTIN
from mmq.convert.modules import MXFP8_FORMAT, NVFP4_LAYOUT_OF, Module, group_modules
from mmq.convert.not_found import nearest
from mmq.convert.relayout import MANIFEST_NAME
from mmq.convert.safetensors_header import TensorInfo, read_header
from mmq.errors import BadInputError, UsageError
from mmq.report.findings import Finding

#: What a checkpoint is as a whole, by the formats its headers show.
MODELOPT_KIND, MINIMAX_KIND, MXFP8_KIND, PLAIN_KIND = "modelopt", "minimax", "mxfp8", "plain"


@dataclass(frozen=True)
class Index:
    """model.safetensors.index.json."""

    weight_map: Mapping[str, str]
    total_size: int | None


@dataclass
class Subject:
    """Everything known about OUT from headers, index and JSON files.

    Attributes:
        root: its folder; None for a header manifest, whose tensors cannot be read.
        lost_shards: files the index names that are absent or damaged.
        modules: well-formed modules by name.
        broken: module → error of one whose tensors do not fit together.
        hf_config: hf_quant_config.json, None when absent.
        manifest: mmq-manifest.json, None when absent.
        json_files: the JSON files that were read.
        headers_only: `root` stands in for a repository on the Hub: names, sizes, headers, JSON
            files, but no data.
    """

    location: str
    root: Path | None
    tensors: dict[str, TensorInfo] = field(default_factory=dict)
    shards: dict[str, Shard] = field(default_factory=dict)
    lost_shards: set[str] = field(default_factory=set)
    index: Index | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    hf_config: Mapping[str, Any] | None = None
    manifest: Mapping[str, Any] | None = None
    modules: dict[str, Module] = field(default_factory=dict)
    broken: dict[str, BadInputError] = field(default_factory=dict)
    json_files: list[str] = field(default_factory=list)
    headers_only: bool = False

    @functools.cached_property
    def lost_tensors(self) -> frozenset[str]:
        """Tensors that the index puts into a lost shard: its finding covers them."""
        if not self.lost_shards or self.index is None:
            return frozenset()
        return frozenset(n for n, s in self.index.weight_map.items() if s in self.lost_shards)

    @functools.cached_property
    def lost_modules(self) -> frozenset[str]:
        """Modules that miss a tensor for that reason."""
        return frozenset(name.rpartition(".")[0] for name in self.lost_tensors)

    @property
    def text_config(self) -> Mapping[str, Any]:
        text = self.config.get("text_config", self.config)
        return text if isinstance(text, Mapping) else {}

    @property
    def quantization(self) -> Mapping[str, Any]:
        """config.json's quantization_config, {} when absent."""
        block = self.config.get("quantization_config")
        return block if isinstance(block, Mapping) else {}

    @property
    def payload_bytes(self) -> int:
        return sum(t.nbytes for t in self.tensors.values())

    @functools.cached_property
    def nvfp4(self) -> list[Module]:
        return [m for m in self.modules.values() if m.format in NVFP4_LAYOUT_OF]

    @functools.cached_property
    def kind(self) -> str:
        """The layout most NVFP4 modules have; else mxfp8 or plain."""
        formats = [m.format for m in self.nvfp4]
        if formats:
            return max(NVFP4_LAYOUT_OF, key=formats.count)
        mxfp8 = any(m.format == MXFP8_FORMAT for m in self.modules.values())
        return MXFP8_KIND if mxfp8 else PLAIN_KIND

    @property
    def paths(self) -> dict[str, Path]:
        return {name: shard.path for name, shard in self.shards.items()}


def open_subject(location: str) -> tuple[Subject, list[Finding]]:
    """Open OUT; whatever is wrong with it is among the findings.

    Raises:
        BadInputError: nothing has this name, so there is nothing to judge.
    """
    from mmq.verify.hub import stand_in

    path = Path(location).expanduser()
    findings: list[Finding] = []
    remote = stand_in(location) if location not in BUILTIN else None
    if remote is not None:
        subject, path = remote
        findings += _open_folder(subject, path)
    elif path.is_dir():
        subject = Subject(location, path)
        findings += _open_folder(subject, path)
    else:
        subject = Subject(location, None)
        findings += _open_other(subject, path)
    findings += _group(subject)
    return subject, findings


def refuse_same(out: str, against: str | None) -> None:
    """A checkpoint held against itself agrees with itself, or is none that mmq converts.

    Raises:
        UsageError: OUT and SRC are one folder or file, links resolved.
    """
    paths = [Path(word).expanduser() for word in (out, against) if word]
    if len(paths) == 2 and all(path.exists() for path in paths) and paths[0].samefile(paths[1]):
        raise UsageError(
            "source-is-output", f"OUT and SRC are the same {_kind(paths[0])}, {out}", where=out,
            got=f"--against {against}", expected="the checkpoint that OUT was converted from",
            hint=f"mmq verify {out}",
        )  # fmt: skip


def _kind(path: Path) -> str:
    return "folder" if path.is_dir() else "file"


def _open_other(subject: Subject, path: Path) -> Iterator[Finding]:
    """A single file, a header manifest, or a built-in name."""
    if path.is_file() and path.suffix != ".json":
        subject.root = path.parent
        yield from _read_json_files(subject, path.parent)
        yield from _read_shard(subject, path.parent, path.name)
        return
    if not path.exists() and subject.location not in BUILTIN:
        got, hint = nearest(subject.location)
        raise BadInputError(
            "out-not-found", f"{subject.location} does not exist", where=subject.location, got=got,
            hint=hint,
        )  # fmt: skip
    try:
        opened = open_checkpoint(subject.location)
    except BadInputError as error:
        yield as_finding(error)
        return
    subject.tensors, subject.config = dict(opened.tensors), opened.config


def _open_folder(subject: Subject, root: Path) -> Iterator[Finding]:
    yield from _read_json_files(subject, root)
    if (root / INDEX_NAME).is_file():
        yield from _read_index(subject, root)
        names = sorted(set(subject.index.weight_map.values())) if subject.index else []
    else:
        names = sorted(p.name for p in root.glob("*.safetensors"))
        single = [SINGLE_NAME] if SINGLE_NAME in names else names if len(names) == 1 else []
        yield _no_index(names, bool(single))
        names = single
    for name in names:
        yield from _read_shard(subject, root, name)


def _no_index(names: list[str], single: bool) -> Finding:
    if single:
        return Finding(
            "index-missing", "warning",
            f"there is no {INDEX_NAME}: mmq writes one for a single file too, as its sign of a"
            " finished conversion", where=INDEX_NAME,
        )  # fmt: skip
    text = f"{len(names)} weight file(s) but no {INDEX_NAME}" if names else "no weights"
    return Finding(
        "index-missing", "error",
        f"the folder holds {text}: it is unfinished, and nothing says what belongs to it",
        where=INDEX_NAME, got=", ".join(names[:3]),
    )  # fmt: skip


def _read_json_files(subject: Subject, root: Path) -> Iterator[Finding]:
    for name, attribute in (
        (CONFIG_NAME, "config"),
        (HF_QUANT_CONFIG_NAME, "hf_config"),
        (MANIFEST_NAME, "manifest"),
    ):
        if not (root / name).exists():
            continue
        try:
            setattr(subject, attribute, read_json_object(root / name))
            subject.json_files.append(name)
        except (BadInputError, OSError) as error:
            yield _damaged(error, name)


def _read_index(subject: Subject, root: Path) -> Iterator[Finding]:
    try:
        value = read_json_object(root / INDEX_NAME)
    except (BadInputError, OSError) as error:
        yield _damaged(error, INDEX_NAME)
        return
    subject.json_files.append(INDEX_NAME)
    weight_map = value.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        yield Finding("index-invalid", "error", "the index has no weight_map", where=INDEX_NAME)
        return
    kept = {}
    for name, shard in weight_map.items():
        if isinstance(shard, str) and is_inside(shard):
            kept[name] = shard
        else:
            yield Finding(
                "index-path", "error", f"the index maps {name} to no plain relative path",
                where=name, got=repr(shard), expected="a relative path without '..'",
            )  # fmt: skip
    metadata = value.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    if not (isinstance(total, int | float) and math.isfinite(total)):
        total = None
    subject.index = Index(kept, None if total is None else int(total))


def is_inside(name: str) -> bool:
    """Whether a file name read from a file stays inside the folder."""
    path = PurePosixPath(name)
    return bool(name) and not path.is_absolute() and ".." not in path.parts and "\0" not in name


def _read_shard(subject: Subject, root: Path, name: str) -> Iterator[Finding]:
    path = root / name
    try:
        if not path.exists():
            raise _missing_shard(path)
        header = read_header(path, name)
    except (BadInputError, OSError) as error:
        subject.lost_shards.add(name)
        yield _damaged(error, name)
        return
    subject.shards[name] = Shard(
        name, path, header.file_bytes, header.mtime_ns,
        hashlib.sha256(header.raw).hexdigest(), header.metadata,
    )  # fmt: skip
    for tensor in header.tensors:
        other = subject.tensors.setdefault(tensor.name, tensor)
        if other is not tensor:
            yield Finding(
                "tensor-twice", "error", f"{tensor.name} is stored twice", where=tensor.name,
                got=f"{other.shard} and {name}", expected="one copy",
            )  # fmt: skip


def _missing_shard(path: Path) -> BadInputError:
    gone = f"links to {path.readlink()}, which does not exist" if path.is_symlink() else "is absent"
    return BadInputError("shard-missing", f"{path.name} {gone}", where=path.name)


def _damaged(error: Exception, name: str) -> Finding:
    if isinstance(error, BadInputError):
        return as_finding(error)
    reason = getattr(error, "strerror", None) or str(error)
    return Finding("file-unreadable", "error", f"{name} cannot be read: {reason}", where=name)


def as_finding(error: BadInputError) -> Finding:
    """An error that opening OUT gave, as a finding."""
    return Finding(
        error.id, "error", error.message, where=error.where or "", got=error.got or "",
        expected=error.expected or "",
    )  # fmt: skip


def _group(subject: Subject) -> Iterator[Finding]:
    """Sort tensors into modules; those that do not fit together are named and set aside."""
    grouped: dict[str, dict[str, TensorInfo]] = {}
    lost = subject.lost_modules
    for name, tensor in subject.tensors.items():
        grouped.setdefault(name.rpartition(".")[0], {})[name] = tensor
    for name, tensors in grouped.items():
        try:
            subject.modules.update(group_modules(tensors))
        except BadInputError as error:
            subject.broken[name] = error
            if name not in lost:
                yield as_finding(error)

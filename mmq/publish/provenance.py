"""Where a checkpoint comes from: which source, at which commit or with which bytes, made how.

A repository's name identifies nothing by itself: it can be made anew under the same name. So a card
names the commit, and where none is known, the hashes of the files that were read.
"""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmq.convert.options import ConvertOptions
from mmq.publish.folder import OutputFolder, bare, file_options, invalid_manifest
from mmq.quantize.layouts import LAYOUTS
from mmq.report.escape import shortened

_FLAGS = {
    "to": "--to", "layout": "--layout", "mtp": "--mtp", "input_scales": "--input-scales",
    "kv_scales": "--kv-scales", "kv_format": "--kv-format", "scale_search": "--scale-search",
    "importance": "--importance", "experts_from": "--experts-from",
}  # fmt: skip


@dataclass(frozen=True)
class SourceShard:
    """A weight file that was read: SHA-256 of it, or of its header only."""

    name: str
    bytes: int
    sha256: str
    whole: bool


@dataclass(frozen=True)
class Provenance:
    """What is known of the source, and the command that converted it.

    Attributes:
        repo / commit: of the source on the Hub; "" when unknown.
        digest: one SHA-256 over names, sizes and hashes of the source's shards.
        command: the command line, without folders of the machine it ran on.
    """

    repo: str
    commit: str
    digest: str
    shards: tuple[SourceShard, ...]
    command: str


def provenance(folder: OutputFolder, base_model: str | None) -> Provenance:
    """From the manifest; `base_model` names the source where it does not say.

    Raises:
        BadInputError: commit, shards or hashes are not what a manifest has there.
    """
    source = folder.manifest.get("source")
    source = source if isinstance(source, Mapping) else {}
    repo = str(source.get("repo") or "") or base_model or ""
    commit = _hex(source.get("commit"), 40)
    shards = tuple(_shards(source.get("shards")))
    lines = "".join(
        f"{s.name} {s.bytes} {s.sha256}\n" for s in sorted(shards, key=lambda s: s.name)
    )
    origin = repo or _location(folder) or "SRC"
    origin += f"@{commit}" if repo and commit else ""
    return Provenance(
        repo, commit, hashlib.sha256(lines.encode()).hexdigest(), shards,
        _command(folder, origin),
    )  # fmt: skip


def _location(folder: OutputFolder) -> str:
    return Path(folder.convert.source.location).name if folder.convert else ""


def _shards(entries: object) -> list[SourceShard]:
    found = []
    for entry in entries if isinstance(entries, list) else ():
        fields = entry if isinstance(entry, Mapping) else {}
        name, size = fields.get("name"), fields.get("bytes")
        if not isinstance(name, str) or not isinstance(size, int) or size < 0:
            raise invalid_manifest(f"a shard of the source is {shortened(entry, 80)}")
        whole = _hex(fields.get("sha256"), 64)
        digest = whole or _hex(fields.get("header_sha256"), 64)
        found.append(SourceShard(name, size, digest, bool(whole)))
    return found


def _hex(value: object, digits: int) -> str:
    """A hash or commit; "" for none."""
    if value is None or value == "":
        return ""
    if not isinstance(value, str) or not re.fullmatch(rf"[0-9a-f]{{{digits}}}", value):
        raise invalid_manifest(f"{shortened(value, 80)} is no hash of {digits} digits")
    return value


def _command(folder: OutputFolder, source: str) -> str:
    """The options that differ from the defaults of their layout, without the machine's folders."""
    options = folder.manifest.get("options")
    given: dict[str, Any] = dict(options) if isinstance(options, Mapping) else {}
    files = file_options(folder.manifest)
    plain = ConvertOptions()
    layout = LAYOUTS.get(str(given.get("layout")))
    defaults: dict[str, Any] = {**plain.as_dict(), "to": None}  # always shown
    if layout and given.get("to") == "nvfp4":
        defaults["kv_scales"] = layout.default_kv_scales
        defaults["input_scales"] = layout.default_input_scales
    else:
        # none of these means anything without NVFP4
        defaults |= {"kv_scales": "none", "input_scales": "none"}
        defaults |= {key: given.get(key) for key in ("layout", "mtp", "scale_search")}
    words = ["mmq", "convert", source, "OUT"]
    for key, flag in _FLAGS.items():
        value = given.get(key)
        if value is not None and value != defaults.get(key):
            words += [flag, bare(str(value)) if key not in files else Path(files[key]).name]
    ignored = given.get("ignore")
    for pattern in ignored if isinstance(ignored, list) else ():
        words += ["--ignore", str(pattern)]
    if given.get("max_shard_bytes") not in (None, plain.max_shard_bytes):
        words += ["--max-shard-size", f"{given['max_shard_bytes']}B"]
    if given.get("allow_nonfinite"):
        words.append("--allow-nonfinite-passthrough")
    return shlex.join(words)

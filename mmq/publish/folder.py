"""What of an output folder is published: the files its manifest and index name, and no other.

A folder also holds what was never meant to travel (`*.partial`, `.mmq/`, logs, `.DS_Store`), so
nothing here lists a directory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from mmq.convert.checkpoint import CONFIG_NAME, INDEX_NAME, read_json_object
from mmq.convert.finalize import MANIFEST_FORMAT
from mmq.convert.journal import refuse_unfinished
from mmq.convert.left_out import left_out
from mmq.convert.relayout import MANIFEST_NAME
from mmq.errors import BadInputError
from mmq.report.escape import shortened
from mmq.report.file_names import CONVERT_REPORT, VERIFY_REPORT
from mmq.report.load import read_report
from mmq.report.schema import ConvertReport, VerifyReport

CARD_NAME = "README.md"
#: Options that may name a file or a checkpoint.
_FILE_OPTIONS = ("kv_scales", "input_scales", "importance", "experts_from")
CONVERT_NAME, VERIFY_NAME = CONVERT_REPORT, VERIFY_REPORT


@dataclass(frozen=True)
class NamedFile:
    """A file as the manifest records it."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class OutputFolder:
    """A finished output of mmq's.

    Attributes:
        files: the manifest's, index and shards included, in its order, but for `left_out`.
        shards: names of the weight files that the index names, in order.
        config: config.json.
        convert / verify: the reports beside the checkpoint; None when absent.
        left_out: the manifest's files that are no part of a model, such as `.env`: never sent.
    """

    root: Path
    manifest: Mapping[str, Any]
    files: tuple[NamedFile, ...]
    shards: tuple[str, ...]
    config: Mapping[str, Any]
    convert: ConvertReport | None
    verify: VerifyReport | None
    left_out: tuple[str, ...] = ()

    @property
    def versions(self) -> Mapping[str, Any]:
        """Versions of what had a part in the bytes, by name."""
        versions = self.manifest.get("versions")
        return versions if isinstance(versions, Mapping) else {}

    @property
    def weights(self) -> frozenset[str]:
        """The index's shards, and weights of models in sub-folders (drafts)."""
        nested = {f.name for f in self.files if f.name.endswith(".safetensors")}
        return frozenset({*self.shards, *nested})


def open_output(root: Path) -> OutputFolder:
    """Read manifest, index, configs and reports of an output.

    Raises:
        BadInputError: no finished output of mmq's, or files of it are missing or of another size.
        IncompleteError: the conversion has not finished.
    """
    if not root.is_dir():
        raise BadInputError("output-not-found", f"there is no folder {root}", where=str(root))
    refuse_unfinished(root)
    manifest = _manifest(root)
    files = _files(manifest, root)
    shards = _shards(root, {f.name for f in files})
    beside = {f.name for f in files if left_out(f.name) is not None} - {*shards}
    return OutputFolder(
        root, manifest, tuple(f for f in files if f.name not in beside), shards,
        read_json_object(root / CONFIG_NAME), _convert_report(root), _verify_report(root),
        tuple(sorted(beside)),
    )  # fmt: skip


def _manifest(root: Path) -> dict[str, Any]:
    if not (root / MANIFEST_NAME).is_file():
        raise BadInputError(
            "publish-no-manifest", f"{root} has no {MANIFEST_NAME} to say what belongs to it",
            where=str(root), hint="publish the OUT of an mmq convert",
        )  # fmt: skip
    manifest = read_json_object(root / MANIFEST_NAME)
    if manifest.get("format") != MANIFEST_FORMAT:
        raise invalid_manifest(f"format {shortened(manifest.get('format'), 40)!r}")
    return manifest


def _files(manifest: Mapping[str, Any], root: Path) -> tuple[NamedFile, ...]:
    entries = manifest.get("files")
    if not isinstance(entries, list) or not entries:
        raise invalid_manifest("it lists no files")
    files = tuple(_file(entry) for entry in entries)
    if len({f.name for f in files}) != len(files):
        raise invalid_manifest("it lists a file twice")
    for file in files:
        path = root / file.name
        size = path.stat().st_size if path.is_file() else None
        # an author may have edited the card
        if size is None or (size != file.bytes and file.name != CARD_NAME):
            raise BadInputError(
                "publish-file-missing", f"{file.name} is not there as the manifest has it",
                where=file.name, got="absent" if size is None else f"{size:,} bytes",
                expected=f"{file.bytes:,} bytes", hint="convert again into a new folder",
            )  # fmt: skip
    return files


def _file(entry: object) -> NamedFile:
    fields = entry if isinstance(entry, dict) else {}
    name, size, digest = fields.get("name"), fields.get("bytes"), fields.get("sha256")
    if not (isinstance(name, str) and isinstance(size, int) and isinstance(digest, str)):
        raise invalid_manifest(f"an entry is {shortened(entry, 80)}")
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or str(path) != name or "\\" in name:
        raise invalid_manifest(f"{shortened(name, 80)} is no path inside the folder")
    return NamedFile(name, size, digest)


def _shards(root: Path, known: set[str]) -> tuple[str, ...]:
    if INDEX_NAME not in known:
        raise invalid_manifest(f"it does not name {INDEX_NAME}")
    weight_map = read_json_object(root / INDEX_NAME).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise BadInputError("index-invalid", "the index has no weight_map", where=INDEX_NAME)
    shards = sorted({str(name) for name in weight_map.values()})
    if lost := [name for name in shards if name not in known]:
        raise BadInputError(
            "index-manifest-differ",
            f"the index names {len(lost)} shard(s) that the manifest does not: {lost[0]}",
            where=INDEX_NAME,
        )  # fmt: skip
    return tuple(shards)


def _convert_report(root: Path) -> ConvertReport | None:
    path = root / CONVERT_NAME
    report = read_report(path) if path.is_file() else None
    return report if isinstance(report, ConvertReport) else None


def _verify_report(root: Path) -> VerifyReport | None:
    path = root / VERIFY_NAME
    report = read_report(path) if path.is_file() else None
    return report if isinstance(report, VerifyReport) else None


def invalid_manifest(problem: str) -> BadInputError:
    """The error for a manifest that cannot be used."""
    return BadInputError(
        "publish-manifest-invalid", f"{MANIFEST_NAME} cannot be used: {problem}",
        where=MANIFEST_NAME,
    )  # fmt: skip


def file_options(manifest: Mapping[str, Any]) -> dict[str, str]:
    """Options of the conversion that tell of folders of the machine it ran on."""
    options, hub = manifest.get("options"), manifest.get("hub")
    options = options if isinstance(options, Mapping) else {}
    read_there = hub if isinstance(hub, Mapping) else {}
    found = {key: options.get(key) for key in _FILE_OPTIONS if key not in read_there}
    return {k: v for k, v in found.items() if isinstance(v, str) and "/" in v}


def bare(text: str) -> str:
    """The last part of a path that says where it lies; other text as it is."""
    return (Path(text).name or text) if text.startswith(("/", "~", ".")) else text

"""Files of a checkpoint: index, shard metadata, leftovers of a run, manifest, side files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from mmq.convert.checkpoint import INDEX_NAME, Checkpoint
from mmq.convert.journal import FOLDER
from mmq.convert.left_out import left_out
from mmq.convert.relayout import MANIFEST_NAME
from mmq.convert.side_files import SideFile, list_side_files
from mmq.convert.writer import PARTIAL
from mmq.report.findings import Finding
from mmq.verify.subject import Subject, is_inside

#: Side files an engine reads; without them a model loads and answers differently, or not at all.
FUNCTIONAL_FILES = (
    "*.py", "*.jinja", "tokenizer*", "*processor*.json", "generation_config.json", "vocab*",
    "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template*",
)  # fmt: skip
#: The model card, which publishing writes anew.
_REWRITTEN_FILES = ("README.md",)


class ManifestFile(NamedTuple):
    """A file as mmq-manifest.json records it."""

    name: str
    bytes: int
    sha256: str


def check_index(subject: Subject) -> Iterator[Finding]:
    """The index and the headers name the same tensors in the same files."""
    if subject.index is None:
        return
    for name, shard in subject.index.weight_map.items():
        held = subject.tensors.get(name)
        if shard in subject.lost_shards or (held is not None and held.shard == shard):
            continue
        if held is None:
            yield Finding(
                "index-tensor-missing", "error",
                f"the index says {name} is in {shard}, which does not hold it", where=name,
                got="absent", expected=shard,
            )  # fmt: skip
        else:
            yield Finding(
                "index-tensor-misplaced", "error",
                f"the index says {name} is in {shard}, but it is in {held.shard}", where=name,
                got=shard, expected=held.shard,
            )  # fmt: skip
    for name, tensor in subject.tensors.items():
        if name not in subject.index.weight_map:
            yield Finding(
                "index-tensor-unlisted", "error",
                f"{name} is stored in {tensor.shard} but not in the index", where=name,
            )  # fmt: skip
    total = subject.index.total_size
    if total is not None and total != subject.payload_bytes and not subject.lost_shards:
        yield Finding(
            "index-total-size", "warning", "the index's total_size is wrong", where=INDEX_NAME,
            got=f"{total:,}", expected=f"{subject.payload_bytes:,}",
        )  # fmt: skip


def check_metadata(subject: Subject) -> Iterator[Finding]:
    """transformers loads only shards that say `format: pt`."""
    for name, shard in subject.shards.items():
        if shard.metadata.get("format") != "pt":
            yield Finding(
                "metadata-format", "error",
                f"{name} lacks the metadata format: pt, without which transformers refuses it",
                where=name, got=str(shard.metadata.get("format")), expected="pt",
            )  # fmt: skip


def check_folder(subject: Subject) -> Iterator[Finding]:
    """Nothing of an unfinished run, and no weights beside the index."""
    assert subject.root is not None
    if (subject.root / FOLDER).exists():
        yield Finding(
            "run-unfinished", "error",
            f"the conversion was not finished: its journal {FOLDER} is still there", where=FOLDER,
        )  # fmt: skip
    for path in sorted(subject.root.iterdir()):
        if path.name.endswith(PARTIAL):
            yield Finding(
                "run-unfinished", "error", f"{path.name} is a file that was never completed",
                where=path.name,
            )  # fmt: skip
        stray = path.suffix == ".safetensors" and subject.index is not None
        if stray and path.name not in subject.shards and path.name not in subject.lost_shards:
            yield Finding(
                "stray-weights", "warning",
                f"{path.name} is not in the index; loaders that glob would mix it in",
                where=path.name,
            )  # fmt: skip


def manifest_files(subject: Subject) -> list[ManifestFile]:
    """The manifest's well-formed file entries, but for the card's, which others rewrite."""
    entries = (subject.manifest or {}).get("files")
    found = []
    for entry in entries if isinstance(entries, list) else ():
        fields = entry if isinstance(entry, dict) else {}
        name, size, digest = fields.get("name"), fields.get("bytes"), fields.get("sha256")
        if isinstance(name, str) and isinstance(size, int) and isinstance(digest, str):
            found.append(ManifestFile(name, size, digest))
    return [f for f in found if is_inside(f.name) and f.name not in _REWRITTEN_FILES]


def check_manifest_sizes(subject: Subject) -> Iterator[Finding]:
    """Every file of mmq-manifest.json is there with its size, and every shard is in it."""
    assert subject.root is not None
    if subject.manifest is None:
        return
    entries = manifest_files(subject)
    if not entries:
        yield Finding("manifest-invalid", "error", "the manifest lists no files",
                      where=MANIFEST_NAME)  # fmt: skip
        return
    for entry in entries:
        path = subject.root / entry.name
        size = path.stat().st_size if path.is_file() else None
        # an early mmq copied such files; publishing does not send them
        expected = entry.name not in subject.lost_shards and left_out(entry.name) is None
        if size is None and expected:
            yield Finding(
                "file-missing", "error", f"{entry.name} is in the manifest but not there",
                where=entry.name,
            )  # fmt: skip
        elif size is not None and size != entry.bytes:
            yield Finding(
                "file-size", "error", f"{entry.name} has another size than the manifest says",
                where=entry.name, got=f"{size:,} bytes", expected=f"{entry.bytes:,} bytes",
            )  # fmt: skip
    known = {e.name for e in entries}
    for name in sorted(set(subject.shards) - known):
        yield Finding(
            "file-unlisted", "error", f"{name} is a shard that the manifest does not list",
            where=name,
        )  # fmt: skip


def side_files_of(source: Checkpoint) -> list[SideFile]:
    """What a conversion copies besides weights."""
    return list_side_files(source)[0]


def check_side_files(subject: Subject, side_files: list[SideFile]) -> Iterator[Finding]:
    """The source's tokenizer, templates, code and so on are there, with their sizes."""
    assert subject.root is not None
    for side in side_files:
        path = subject.root / side.name
        if not path.is_file():
            functional = is_functional(side.name) or side.folder is not None
            yield Finding(
                "side-file-missing", "error" if functional else "warning",
                f"{side.name} of the source was not copied", where=side.name,
            )  # fmt: skip
        elif path.stat().st_size != side.nbytes:
            yield _differs(side, f"{path.stat().st_size:,} bytes", f"{side.nbytes:,} bytes")


def check_side_contents(
    side_files: list[SideFile], out: Mapping[str, str], source: Mapping[str, str]
) -> Iterator[Finding]:
    """Side files of equal size have equal contents.

    Args:
        out / source: SHA-256 by name on either side, for files of equal size.
    """
    for side in side_files:
        if out.get(side.name) != source.get(side.name):
            yield _differs(side, str(out.get(side.name)), str(source.get(side.name)))


def _differs(side: SideFile, got: str, expected: str) -> Finding:
    severity = "note" if side.name in _REWRITTEN_FILES else "warning"
    return Finding(
        "side-file-differs", severity, f"{side.name} is not the source's", where=side.name,
        got=got, expected=expected,
    )  # fmt: skip


def is_functional(name: str) -> bool:
    """Whether an engine reads this side file."""
    return any(fnmatchcase(Path(name).name, pattern) for pattern in FUNCTIONAL_FILES)

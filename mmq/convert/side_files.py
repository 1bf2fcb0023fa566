"""Everything beside the weights: tokenizer, chat template, remote code, licence, drafts.

Copied byte for byte, links followed. What stays out: indexed shards (they are converted),
unindexed weights beside the index (nobody reads them), old indexes and quantisation configs
(they would contradict the new ones), and version-control or cache folders.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from mmq.convert.checkpoint import CONFIG_NAME, HF_QUANT_CONFIG_NAME, Checkpoint
from mmq.errors import BadInputError
from mmq.report.findings import Finding

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".ckpt", ".h5", ".msgpack")
_SKIPPED_NAMES = frozenset(
    {".git", ".cache", ".huggingface", ".mmq", ".DS_Store", "__pycache__", ".ipynb_checkpoints"}
)
#: Written anew, so the source's are not copied.
_REPLACED_NAMES = frozenset(
    {CONFIG_NAME, HF_QUANT_CONFIG_NAME, "mmq-manifest.json", "mmq-convert.json",
     "mmq-verify.json", "tensors.csv"}
)  # fmt: skip


class SideFile(NamedTuple):
    """A file to copy; `folder` is set for members of a sub-folder with its own model."""

    name: str
    path: Path
    nbytes: int
    folder: str | None


def list_side_files(source: Checkpoint) -> tuple[list[SideFile], list[Finding]]:
    """(files to copy, notes about weights left out), in sorted order.

    Raises:
        BadInputError: a dangling link.
    """
    if source.root is None:
        return [], []
    files: list[SideFile] = []
    notes: list[Finding] = []
    for path, name in _walk(source.root, source.root, set()):
        if name in source.shards or name in _REPLACED_NAMES or name == source.index_name:
            continue
        top = name.partition("/")[0]
        own_model = (source.root / top / CONFIG_NAME).is_file() if "/" in name else False
        if "/" not in name and _is_weight(name):
            notes.append(
                Finding("stray-weights", "note",
                        f"{name} is not in the index: neither read nor copied", where=name)
            )  # fmt: skip
            continue
        files.append(SideFile(name, path, path.stat().st_size, top if own_model else None))
    return files, notes


def _is_weight(name: str) -> bool:
    return name.endswith(_WEIGHT_SUFFIXES) or name.endswith(".index.json")


def _walk(folder: Path, root: Path, seen: set[Path]) -> Iterator[tuple[Path, str]]:
    """Files below a folder; linked folders are followed once."""
    real = folder.resolve()
    if real in seen:
        return
    seen.add(real)
    for entry in sorted(os.scandir(folder), key=lambda e: e.name):
        path = folder / entry.name
        if entry.name in _SKIPPED_NAMES:
            continue
        if path.is_dir():
            yield from _walk(path, root, seen)
        elif path.is_file():
            yield path, path.relative_to(root).as_posix()
        elif path.is_symlink():
            raise BadInputError(
                "side-file-link-dangling",
                f"{path.relative_to(root)} links to {path.readlink()}, which does not exist",
                where=str(path.relative_to(root)),
                got=path.readlink(),
            )

"""Everything beside the weights: tokenizer, chat template, remote code, licence, drafts.

Copied byte for byte, links followed. What stays out: indexed shards (they are converted),
unindexed weights beside the index (nobody reads them), old indexes and quantisation configs
(they would contradict the new ones), and what is no part of the model (see `left_out`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from mmq.convert.checkpoint import CONFIG_NAME, HF_QUANT_CONFIG_NAME, Checkpoint
from mmq.convert.hub_source import side_listing
from mmq.convert.left_out import LeftOut, left_out, left_out_notes
from mmq.convert.relayout import MANIFEST_NAME
from mmq.convert.safetensors_header import LFS_MAGIC, unreadable
from mmq.errors import BadInputError
from mmq.report.file_names import CONVERT_REPORT, VERIFY_REPORT, VERIFY_TOKENS
from mmq.report.findings import Finding

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".ckpt", ".h5", ".msgpack")
#: A Git LFS pointer is a few lines; larger files are not looked into.
_LFS_MAX_BYTES = 1024
#: Written anew, so the source's are not copied.
_REPLACED_NAMES = frozenset(
    {CONFIG_NAME, HF_QUANT_CONFIG_NAME, MANIFEST_NAME, CONVERT_REPORT, VERIFY_REPORT,
     VERIFY_TOKENS, "tensors.csv"}
)  # fmt: skip


class SideFile(NamedTuple):
    """A file to copy; `folder` is set for members of a sub-folder with its own model."""

    name: str
    path: Path
    nbytes: int
    folder: str | None


def list_side_files(source: Checkpoint) -> tuple[list[SideFile], list[Finding]]:
    """(files to copy, notes about what is left out), in sorted order.

    Raises:
        BadInputError: a dangling link, a name that is not UTF-8, a folder that cannot be read.
    """
    if source.root is None:
        return [], []
    listing = side_listing(source)
    beside: list[LeftOut] = []
    if listing is None:
        # a link back to a folder above would bring in its neighbours, and the source again
        above = set(source.root.resolve().parents)
        walk = _walk(source.root, source.root, above, beside)
        listing = [(path, name, path.stat().st_size) for path, name in walk]
    return _chosen(source, listing, beside)


def _chosen(
    source: Checkpoint, listing: list[tuple[Path, str, int]], beside: list[LeftOut]
) -> tuple[list[SideFile], list[Finding]]:
    """Args: beside: what is known to be left out already; more of it is added."""
    files: list[SideFile] = []
    notes: list[Finding] = []
    configs = {name for _, name, _ in listing if name.endswith(f"/{CONFIG_NAME}")}
    for path, name, nbytes in listing:
        if name in source.shards or name in _REPLACED_NAMES or name == source.index_name:
            continue
        top = name.partition("/")[0]
        if (left := left_out(name)) is not None:
            beside.append(left)
            continue
        own_model = f"{top}/{CONFIG_NAME}" in configs
        if "/" not in name and _is_weight(name):
            notes.append(
                Finding("stray-weights", "note",
                        f"{name} is not in the index: neither read nor copied", where=name)
            )  # fmt: skip
            continue
        here = source.hub is None or path.is_file()
        if here and nbytes < _LFS_MAX_BYTES and _starts_like_pointer(path):
            notes.append(
                Finding("side-file-lfs-pointer", "warning",
                        f"{name} is a Git LFS pointer, not the file itself, and is copied as that",
                        where=name)
            )  # fmt: skip
        files.append(SideFile(name, path, nbytes, top if own_model else None))
    return files, [*notes, *left_out_notes(beside)]


def _starts_like_pointer(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(LFS_MAGIC)) == LFS_MAGIC
    except OSError as error:
        raise unreadable(path, error) from None


def _is_weight(name: str) -> bool:
    return name.endswith(_WEIGHT_SUFFIXES) or name.endswith(".index.json")


def _utf8_name(name: str) -> str:
    """The name itself; manifests, indexes and the Hub hold UTF-8 only."""
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        shown = name.encode("utf-8", "backslashreplace").decode("ascii")
        raise BadInputError(
            "file-name-not-utf8", f"the name of {shown} is not UTF-8", where=shown,
            hint="rename the file",
        ) from None  # fmt: skip
    return name


def _walk(
    folder: Path, root: Path, seen: set[Path], beside: list[LeftOut]
) -> Iterator[tuple[Path, str]]:
    """Files below a folder; linked folders are followed once, those left out are not entered."""
    real = folder.resolve()
    if real in seen:
        return
    seen.add(real)
    try:
        entries = sorted(os.scandir(folder), key=lambda e: e.name)
    except OSError as error:
        raise unreadable(folder, error) from None
    for entry in entries:
        path = folder / entry.name
        name = path.relative_to(root).as_posix()
        if (left := left_out(name)) is not None:
            shown = name.encode("utf-8", "backslashreplace").decode("utf-8")
            beside.append(left._replace(name=f"{shown}/" if path.is_dir() else shown))
        elif path.is_dir():
            yield from _walk(path, root, seen, beside)
        elif path.is_file():
            yield path, _utf8_name(name)
        elif path.is_symlink():
            raise BadInputError(
                "side-file-link-dangling",
                f"{path.relative_to(root)} links to {path.readlink()}, which does not exist",
                where=str(path.relative_to(root)),
                got=path.readlink(),
            )

"""SHA-256 of files, for the report and against the manifest."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from mmq.report.findings import Finding
from mmq.report.schema import FileEntry
from mmq.verify.files import ManifestFile

_CHUNK = 8 << 20


def hash_file(path: Path) -> str:
    """SHA-256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def entry_of(root: Path, name: str) -> FileEntry:
    """A file's size and SHA-256."""
    path = root / name
    return FileEntry(name=name, bytes=path.stat().st_size, sha256=hash_file(path))


def hash_files(root: Path, names: Iterable[str], hashes: dict[str, FileEntry]) -> Iterator[Finding]:
    """Add the files that are there to `hashes`; those that cannot be read are findings."""
    for name in sorted(set(names) - set(hashes)):
        try:
            if (root / name).is_file():
                hashes[name] = entry_of(root, name)
        except OSError as error:
            text = f"{name} cannot be read: {error.strerror or error}"
            yield Finding("file-unreadable", "error", text, where=name)


def check_hashes(entries: list[ManifestFile], hashes: Mapping[str, FileEntry]) -> Iterator[Finding]:
    """Files whose bytes are not those the manifest was written for."""
    for entry in entries:
        found = hashes.get(entry.name)
        if found is not None and found.sha256 != entry.sha256:
            yield Finding(
                "file-hash", "error", f"{entry.name} is not the file that mmq wrote",
                where=entry.name, got=found.sha256, expected=entry.sha256,
            )  # fmt: skip

"""The texts: documentation and code from two pinned packages, sorted into training and held-out.

Both source distributions come from the Python Package Index through pip and are checked against
the SHA-256 below, so the texts are the same for everyone. A document is held out whole; a page
that is held out in one language is kept from training in all of them.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple


class Source(NamedTuple):
    """A source distribution on the Python Package Index."""

    package: str
    version: str
    licence: str
    archive: str
    sha256: str

    @property
    def root(self) -> str:
        return self.archive.removesuffix(".tar.gz")


FASTAPI = Source(
    "fastapi", "0.110.2", "MIT", "fastapi-0.110.2.tar.gz",
    "b53d673652da3b65e8cd787ad214ec0fe303cad00d2b529b86ce7db13f17518d",
)  # fmt: skip
DJANGO = Source(
    "Django", "5.0.4", "BSD-3-Clause", "Django-5.0.4.tar.gz",
    "4bd01a8c830bb77a8a3b0e7d8b25b887e536ad17a81ba2dce5476135c73312bd",
)  # fmt: skip
SOURCES = (FASTAPI, DJANGO)

LANGUAGES = {
    "de": "german", "en": "english", "es": "spanish", "fr": "french", "ja": "japanese",
    "pt": "portuguese", "zh": "chinese",
}  # fmt: skip
#: Bytes of held-out text by kind; the translated pages are one set of pages in three languages.
HELD_OUT_BYTES = {"english": 48_000, "code": 48_000, "german": 40_000}
_TRANSLATED = ("german", "french", "chinese")
_HELD_OUT_SIZES = range(2_000, 16_001)


class Document(NamedTuple):
    """One file of a source: its kind (english, code, german, …), path inside the archive, text."""

    kind: str
    source: Source
    path: str
    text: str

    @property
    def name(self) -> str:
        """Package and path, the same on every machine."""
        return f"{self.source.package}/{self.path}"

    @property
    def page(self) -> str:
        """The path without the language: translations of a page share it."""
        parts = PurePosixPath(self.path).parts
        translated = self.source is FASTAPI and parts[0] == "docs"
        return "/".join(("docs", *parts[2:])) if translated else self.path

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()


class Texts(NamedTuple):
    """Documents to train on and documents never seen, each in a fixed order."""

    training: list[Document]
    held_out: list[Document]


def gather(folder: Path) -> Texts:
    """Download both sources into `folder` where they are not there yet, and sort their documents.

    Raises:
        SystemExit: an archive has another SHA-256 than the one pinned here.
    """
    folder.mkdir(parents=True, exist_ok=True)
    documents = [d for source in SOURCES for d in _documents(source, _archive(source, folder))]
    documents.sort(key=_order)
    held_out = _held_out(documents)
    # translations and near relatives of a held-out page go too
    taken = {(d.source, d.page) for d in held_out}
    training = [d for d in documents if (d.source, d.page) not in taken]
    return Texts(training, held_out)


def shared_lines(texts: Texts) -> dict[str, float]:
    """By kind: the share of held-out text, in lines of 50 characters up, that training has too."""
    seen = {line.strip() for d in texts.training for line in d.text.split("\n")}
    shares = {}
    for kind in sorted({d.kind for d in texts.held_out}):
        own = [d.text for d in texts.held_out if d.kind == kind]
        lines = [x.strip() for text in own for x in text.split("\n") if len(x.strip()) >= 50]
        shares[kind] = sum(len(x) for x in lines if x in seen) / sum(map(len, lines))
    return shares


def _archive(source: Source, folder: Path) -> Path:
    path = folder / source.archive
    if not path.exists():
        wanted = f"{source.package}=={source.version}"
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps",
                   "--no-binary", ":all:", "--dest", str(folder), wanted]  # fmt: skip
        subprocess.run(command, check=True)
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != source.sha256:
        raise SystemExit(f"{path}: SHA-256 is {found}, expected {source.sha256}")
    return path


def _documents(source: Source, archive: Path) -> Iterator[Document]:
    with tarfile.open(archive) as tar:
        for member in tar:
            path = member.name.removeprefix(source.root + "/")
            kind = _kind(source, path) if member.isfile() else None
            file = tar.extractfile(member) if kind else None
            if kind and file:
                text = file.read().decode("utf-8").replace("\r\n", "\n")
                if len(text) > 200:
                    yield Document(kind, source, path, text)


def _kind(source: Source, path: str) -> str | None:
    """What kind of text a file is; None for what is left out."""
    parts = PurePosixPath(path).parts
    if source is FASTAPI and path.endswith(".md") and parts[0] == "docs" and len(parts) > 3:
        return LANGUAGES.get(parts[1])
    if source is DJANGO and path.endswith(".txt") and parts[0] == "docs":
        return "english"
    if path.endswith(".py") and parts[0] in ("django", "fastapi", "docs_src"):
        # tables of formats and migrations repeat each other
        return None if {"locale", "migrations"} & set(parts) else "code"
    return None


def _order(document: Document) -> str:
    return hashlib.sha256(document.name.encode()).hexdigest()


def _held_out(documents: list[Document]) -> list[Document]:
    chosen: list[Document] = []
    for kind, size in HELD_OUT_BYTES.items():
        taken = 0
        for document in documents:
            if taken < size and document.kind == kind and _may_be_held_out(document, documents):
                chosen.append(document)
                taken += len(document.text.encode())
    pages = {d.page for d in chosen if d.source is FASTAPI and d.kind == "german"}
    others = [k for k in _TRANSLATED if k != "german"]
    chosen += [d for d in documents if d.kind in others and d.page in pages]
    return chosen


def _may_be_held_out(document: Document, documents: list[Document]) -> bool:
    if len(document.text.encode()) not in _HELD_OUT_SIZES:
        return False
    if document.kind == "german":
        have = {d.kind for d in documents if d.page == document.page}
        return have.issuperset(_TRANSLATED)
    # release notes are too much alike, and English pages of FastAPI have translations
    return document.source is DJANGO and "releases" not in document.path

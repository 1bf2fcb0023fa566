"""What a loopback Hub holds: repositories, commits, branches, and contents by SHA-256."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

#: Files that the Hub keeps outside git; a test may make it other ones.
LFS_SUFFIXES = (".safetensors", ".npy", ".bin", ".gguf")


class Content(NamedTuple):
    """Bytes, in memory or in a file on disk."""

    sha256: str
    size: int
    data: bytes | None = None
    path: Path | None = None

    def read(self, start: int = 0, stop: int | None = None) -> bytes:
        stop = self.size if stop is None else stop
        if self.data is not None:
            return self.data[start:stop]
        with self.path.open("rb") as file:
            file.seek(start)
            return file.read(stop - start)


def content_of(source: bytes | Path, sha256: str | None = None) -> Content:
    """Content of bytes or of a file; the digest is computed unless it is given."""
    if isinstance(source, bytes):
        return Content(sha256 or hashlib.sha256(source).hexdigest(), len(source), source)
    if sha256 is None:
        with source.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    return Content(sha256, source.stat().st_size, None, source)


class File(NamedTuple):
    """A file of a commit."""

    content: Content
    lfs: bool

    @property
    def blob(self) -> str:
        """Git's id of the file, or of its LFS pointer."""
        data = self.content.read() if not self.lfs else pointer(self.content)
        return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()

    @property
    def etag(self) -> str:
        return self.content.sha256 if self.lfs else self.blob


def pointer(content: Content) -> bytes:
    """The LFS pointer that git holds in place of a large file."""
    return (
        f"version https://git-lfs.github.com/spec/v1\noid sha256:{content.sha256}\n"
        f"size {content.size}\n"
    ).encode()


Tree = dict[str, File]


@dataclass
class PullRequest:
    """A pull request; its commits are at refs/pr/NUMBER."""

    number: int
    title: str
    author: str = "loopback"
    status: str = "open"


@dataclass
class Repo:
    """A model repository: branches (and refs/pr/N) point to commits, commits are trees."""

    name: str
    private: bool = False
    commits: dict[str, Tree] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    messages: list[tuple[str, str, str]] = field(default_factory=list)
    parents: dict[str, str | None] = field(default_factory=dict)
    pulls: list[PullRequest] = field(default_factory=list)

    def commit(self, ref: str, tree: Tree, message: str = "", parent: str | None = None) -> str:
        """Add a commit on top of `ref` (or of `parent`) and move `ref` to it."""
        text = f"{self.name} {ref} {len(self.commits)} {message}"
        sha = hashlib.sha1(text.encode()).hexdigest()
        self.commits[sha] = tree
        self.parents[sha] = parent or self.refs.get(ref) or self.refs.get("main")
        self.refs[ref] = sha
        self.messages.append((ref, sha, message))
        return sha

    def history(self, commit: str) -> list[str]:
        """A commit and those before it, the latest first."""
        found: list[str] = []
        at: str | None = commit
        while at is not None:
            found.append(at)
            at = self.parents[at]
        return found

    def resolve(self, revision: str) -> str | None:
        """The commit of a branch, a reference or a commit id."""
        found = self.refs.get(revision)
        return found or (revision if revision in self.commits else None)


class Store:
    """Everything a loopback Hub holds."""

    def __init__(self, lfs_suffixes: tuple[str, ...] = LFS_SUFFIXES) -> None:
        self.repos: dict[str, Repo] = {}
        self.contents: dict[str, Content] = {}
        self.parts: dict[str, dict[int, bytes]] = {}
        self.lfs_suffixes = lfs_suffixes
        self._pull_requests = itertools.count(1)

    def is_lfs(self, name: str, size: int) -> bool:
        return name.endswith(self.lfs_suffixes) or size > 10_000_000

    def create(self, name: str, private: bool = False) -> Repo:
        """A repository as the Hub makes it: with a first commit that holds .gitattributes."""
        repo = self.repos[name] = Repo(name, private)
        repo.commit(
            "main", {".gitattributes": File(content_of(b"*.safetensors filter=lfs\n"), False)}
        )
        return repo

    def add(
        self, name: str, files: Mapping[str, bytes | Path], *, revision: str = "main",
        private: bool = False,
    ) -> str:  # fmt: skip
        """Put files into a repository, as if somebody had pushed them; returns the commit."""
        repo = self.repos.get(name) or self.create(name, private)
        tree = dict(repo.commits[repo.refs.get(revision) or repo.refs["main"]])
        for path, source in files.items():
            content = content_of(source)
            lfs = self.is_lfs(path, content.size)
            if lfs:
                self.contents[content.sha256] = content
            tree[path] = File(content, lfs)
        return repo.commit(revision, tree, "pushed")

    def next_pull_request(self) -> int:
        return next(self._pull_requests)

"""The tokens that are scored: text or ids, cut into windows, with the convention spelled out.

    a file is tokenised once, without special tokens, and cut into windows of `context` tokens that
    do not overlap; a tail shorter than a window is left out, unless the file is nothing else
    every token of a window but its first is scored, given the tokens of its window before it

That is the GPTQ convention for WikiText-2, except for BOS: where the tokenizer wants one
(`add_bos_token`), each window starts with it, and it takes the place of a token. Perplexity is
exp(total NLL / total scored tokens), never a mean over windows.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from mmq.convert.not_found import nearest
from mmq.errors import BadInputError, UsageError

Ids: TypeAlias = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Window:
    """A run of tokens of one file; `first` is where it begins among all tokens."""

    file: int
    first: int
    length: int

    @property
    def span(self) -> slice:
        return slice(self.first, self.first + self.length)


@dataclass(frozen=True)
class TokenSet:
    """All windows, one behind the other.

    Attributes:
        ids_T: I32 [T], the tokens of all windows.
        files: names of the texts, as windows refer to them.
        convention: how the windows came about, for the report.
        doubled_bos: windows that begin with BOS twice.
    """

    ids_T: Ids
    windows: tuple[Window, ...]
    files: tuple[str, ...]
    convention: Mapping[str, Any]
    doubled_bos: int = 0

    @property
    def count(self) -> int:
        return len(self.ids_T)

    @property
    def scored(self) -> int:
        """Tokens that are predicted: all but the first of each window."""
        return self.count - len(self.windows)

    @property
    def file_spans(self) -> dict[str, slice]:
        """Tokens of each text that has windows; windows are in the order of their files."""
        spans: dict[str, slice] = {}
        for window in self.windows:
            name = self.files[window.file]
            first = spans[name].start if name in spans else window.first
            spans[name] = slice(first, window.first + window.length)
        return spans

    @property
    def sha256(self) -> str:
        """Of the ids and where windows begin: two runs with equal hashes scored the same."""
        firsts = np.array([w.first for w in self.windows], "<i8")
        return hashlib.sha256(self.ids_T.astype("<i4").tobytes() + firsts.tobytes()).hexdigest()

    def rows(self) -> npt.NDArray[np.int32]:
        """The windows as I32 [W, longest], shorter ones padded with −1 on the right."""
        longest = max(w.length for w in self.windows)
        rows_WL = np.full((len(self.windows), longest), -1, np.int32)
        for row, window in zip(rows_WL, self.windows, strict=True):
            row[: window.length] = self.ids_T[window.span]
        return rows_WL


@dataclass(frozen=True)
class Tokenizer:
    """A folder's tokenizer.json, and whether its config wants a BOS.

    Attributes:
        bos: id that starts each window; None for none.
    """

    path: Path
    bos: int | None

    def encode(self, text: str) -> list[int]:
        """Ids without special tokens."""
        # Seconds to import, and not needed where ids are given.
        from tokenizers import Tokenizer as Model

        ids: list[int] = Model.from_file(str(self.path)).encode(text, add_special_tokens=False).ids
        return ids


def open_tokenizer(root: Path) -> Tokenizer:
    """The tokenizer of a model folder.

    Raises:
        BadInputError: there is no tokenizer.json, or it cannot be read.
    """
    path = root / "tokenizer.json"
    if not path.is_file():
        raise BadInputError(
            "tokenizer-missing",
            f"{root} has no tokenizer.json to tokenise text with",
            where=str(path),
            hint="give token ids instead: --tokens FILE.npy",
        )
    config_path = root / "tokenizer_config.json"
    try:
        config = json.loads(config_path.read_bytes()) if config_path.is_file() else {}
        added = json.loads(path.read_bytes()).get("added_tokens", [])
    except (ValueError, OSError) as error:
        raise BadInputError("json-invalid", f"{path.name}: {error}", where=str(path)) from None
    if not config.get("add_bos_token"):
        return Tokenizer(path, None)
    token = config.get("bos_token")
    content = token.get("content") if isinstance(token, dict) else token
    ids = [entry["id"] for entry in added if entry.get("content") == content]
    return Tokenizer(path, ids[0] if ids else None)


def read_texts(
    paths: Sequence[Path], tokenizer: Tokenizer, context: int, limit: int | None
) -> TokenSet:
    """Text files, UTF-8, as windows.

    Args:
        context: tokens of a window.
        limit: windows in all, taken from the files in turn; None for every window.

    Raises:
        UsageError: a file cannot be read or is not UTF-8.
    """
    pieces, hashes = [], {}
    for path in paths:
        raw, text = _read_text(path)
        hashes[path.name] = hashlib.sha256(raw).hexdigest()
        pieces.append(_cut(tokenizer.encode(text), context, tokenizer.bos))
    convention = {
        "source": "text", "context": context, "stride": context,
        "bos": "once per window" if tokenizer.bos is not None else "none",
        "scored": "all tokens of a window but its first", "tail": "left out",
        "text_sha256": hashes,
    }  # fmt: skip
    return _assemble(pieces, [p.name for p in paths], limit, convention, tokenizer.bos)


def read_tokens(path: Path, context: int, limit: int | None, bos: int | None = None) -> TokenSet:
    """Token ids from a .npy file: a stream [T], or windows [W, L] padded with −1 on the right.

    Raises:
        UsageError: no such file, other shapes or dtypes, padding elsewhere than on the right.
    """
    ids = _read_ids(path)
    if ids.dtype.kind not in "iu" or ids.ndim not in (1, 2):
        raise UsageError(
            "tokens-unreadable", f"{path} is no list of token ids", where=str(path),
            got=f"{ids.dtype} {list(ids.shape)}", expected="integers [T] or [W, L]",
        )  # fmt: skip
    rows = _cut(ids.tolist(), context, None) if ids.ndim == 1 else _padded(ids, path)
    convention = {
        "source": "ids", "context": max((len(r) for r in rows), default=0),
        "stride": context if ids.ndim == 1 else "as given", "bos": "as given",
        "scored": "all tokens of a window but its first",
        "tail": "left out" if ids.ndim == 1 else "as given",
        "text_sha256": {path.name: hashlib.sha256(path.read_bytes()).hexdigest()},
    }  # fmt: skip
    return _assemble([rows], [path.name], limit, convention, bos)


def check_files(texts: Sequence[Path], tokens: Path | None) -> None:
    """Read what will be read after hours of comparing weights, to fail now.

    Raises:
        UsageError: a file cannot be read.
    """
    for path in texts:
        _read_text(path)
    if tokens is not None:
        _read_ids(tokens)


def _read_text(path: Path) -> tuple[bytes, str]:
    try:
        raw = path.read_bytes()
        return raw, raw.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why, hint = _unreadable(path, error, "--text FILE, repeatable")
        raise UsageError(
            "text-unreadable", f"--text {path}: {why}", where=str(path), hint=hint
        ) from None


def _read_ids(path: Path) -> npt.NDArray[Any]:
    try:
        ids: npt.NDArray[Any] = np.load(path, allow_pickle=False)
        return ids
    except (OSError, ValueError) as error:
        why, hint = _unreadable(path, error, "--tokens FILE")
        raise UsageError(
            "tokens-unreadable", f"--tokens {path}: {why}", where=str(path), hint=hint
        ) from None


def _unreadable(path: Path, error: Exception, usage: str) -> tuple[str, str | None]:
    """Why a file cannot be read, and what to do about it.

    Args:
        usage: the option, as it is to be typed.
    """
    if isinstance(error, IsADirectoryError):
        return "it is a folder", usage
    if isinstance(error, FileNotFoundError):
        return "no such file", nearest(str(path))[1]
    if isinstance(error, UnicodeDecodeError):
        return f"it is not UTF-8, at byte {error.start:,}", f"iconv -t UTF-8 {path}"
    return (error.strerror if isinstance(error, OSError) else None) or str(error), None


def _cut(ids: list[int], context: int, bos: int | None) -> list[list[int]]:
    """Windows of `context` tokens."""
    room = context - (bos is not None)
    ends = range(room, len(ids) + 1, room) if len(ids) >= room else (len(ids),)
    start = [] if bos is None else [bos]
    return [start + ids[max(0, end - room) : end] for end in ends]


def _padded(ids_WL: npt.NDArray[Any], path: Path) -> list[list[int]]:
    """Rows without their padding."""
    rows = []
    for number, row in enumerate(ids_WL):
        kept = row[row >= 0]
        if (row[: len(kept)] < 0).any():
            raise UsageError(
                "tokens-padding", f"{path}: row {number} is padded elsewhere than on the right",
                where=f"{path}[{number}]", expected="token ids, then −1",
                hint="blocks of sparse attention are anchored at a row's first token",
            )  # fmt: skip
        rows.append(kept.tolist())
    return rows


def _assemble(
    pieces: Sequence[Sequence[list[int]]], files: Sequence[str], limit: int | None,
    convention: dict[str, Any], bos: int | None,
) -> TokenSet:  # fmt: skip
    chosen = list(_in_turn(pieces, limit))
    chosen = [(file, ids) for file, ids in chosen if len(ids) > 1]
    windows, first = [], 0
    for file, ids in chosen:
        windows.append(Window(file, first, len(ids)))
        first += len(ids)
    flat = np.fromiter((i for _, ids in chosen for i in ids), np.int32, first)
    doubled = sum(ids[0] == ids[1] == bos for _, ids in chosen) if bos is not None else 0
    convention["windows"] = len(windows)
    return TokenSet(flat, tuple(windows), tuple(files), convention, doubled)


def _in_turn(
    pieces: Sequence[Sequence[list[int]]], limit: int | None
) -> Iterable[tuple[int, list[int]]]:
    """Windows, at most `limit`, so that every file has its share; ordered by file."""
    order = sorted(
        ((k, file) for file, windows in enumerate(pieces) for k in range(len(windows))),
    )[:limit]
    return [(file, pieces[file][k]) for file, k in sorted((file, k) for k, file in order)]


def check_ids(tokens: TokenSet, vocab: int, location: str) -> None:
    """Refuse ids that a model has no embedding for, and sets in which nothing is scored.

    Raises:
        UsageError
    """
    if not tokens.scored:
        raise UsageError(
            "nothing-scored", "there is no token to score: every window has fewer than two",
            expected="a window of at least two tokens",
        )  # fmt: skip
    low, high = int(tokens.ids_T.min()), int(tokens.ids_T.max())
    if low < 0 or high >= vocab:
        raise UsageError(
            "token-out-of-range", f"token {high if high >= vocab else low} is outside the"
            f" vocabulary of {location}", got=f"{low} to {high}", expected=f"0 to {vocab - 1}",
        )  # fmt: skip

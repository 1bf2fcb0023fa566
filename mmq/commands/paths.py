"""Paths as people type them."""

from __future__ import annotations

from pathlib import Path
from typing import overload

from mmq.errors import UsageError


@overload
def expanded(path: str) -> str: ...
@overload
def expanded(path: None) -> None: ...
def expanded(path: str | None) -> str | None:
    """`~` as the home folder; other words (built-in names, `analytic`) stay as typed.

    Raises:
        UsageError: an empty word, as an unset shell variable leaves it; it would mean the current
            folder.
    """
    if path == "":
        raise UsageError("option-value", "a path is empty: is a shell variable unset?")
    return str(Path(path).expanduser()) if path and path.startswith("~") else path


def optional_path(path: str | None) -> Path | None:
    """The same as a Path."""
    word = expanded(path)
    return None if word is None else Path(word)

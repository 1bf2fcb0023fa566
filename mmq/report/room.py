"""Room for renderings with a limit: what would exceed it is left out, and said to be.

Names and messages come from anybody, so no number of rows alone keeps a page or a comment small.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

Piece = TypeVar("Piece")


class Room:
    """Bytes that are left of a limit."""

    def __init__(self, nbytes: int) -> None:
        self.left = nbytes

    def take(self, text: str) -> bool:
        """Whether the text still fits; then its bytes are gone."""
        nbytes = _size(text)
        if nbytes > self.left:
            return False
        self.left -= nbytes
        return True

    def first(self, pieces: Iterable[tuple[Piece, str]], most: int) -> list[Piece]:
        """The pieces from the first on whose texts fit, and have `most` bytes together."""
        taken: list[Piece] = []
        mine = Room(min(most, self.left))
        for piece, text in pieces:
            if not mine.take(text):
                break
            self.left -= _size(text)
            taken.append(piece)
        return taken


def left_out_line(lines: Sequence[object], shown: Sequence[object]) -> list[str]:
    """A sentence in place of those that are not shown."""
    missing = len(lines) - len(shown)
    return [f"… and {missing:,} more in the report."] if missing else []


def _size(text: str) -> int:
    return len(text.encode("utf-8", "backslashreplace"))

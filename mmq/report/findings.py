"""A finding: one thing a check noticed, with the two sides of the disagreement."""

from __future__ import annotations

from typing import Any, NamedTuple


class Finding(NamedTuple):
    """One observation of a check.

    Attributes:
        id: stable words, such as ``kv-scale-missing``; an anchor in docs/errors.md.
        severity: "error" (the checkpoint must not go live), "warning" or "note".
        message: one sentence that names what is concerned.
        where: tensor, module or file.
    """

    id: str
    severity: str
    message: str
    where: str = ""
    got: str = ""
    expected: str = ""

    def as_dict(self) -> dict[str, Any]:
        """The finding as reports and JSON lines write it."""
        return self._asdict()

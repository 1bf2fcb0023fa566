"""Nested settings as names and words, as every rendering lists them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

_WORDS: dict[object, str] = {None: "none", True: "yes", False: "no"}


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    """Dotted names and their values as words; a list is one value."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", setting_text(value)


def setting_text(value: object) -> str:
    """A setting's value as words."""
    if value is None or isinstance(value, bool):
        return _WORDS[value]
    if isinstance(value, list | tuple):
        return ", ".join(map(setting_text, value)) or "none"
    return str(value)

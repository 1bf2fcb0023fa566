"""Paths as people type them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import overload

import click

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
        raise UsageError(
            "option-value", f"{_place_of('') or 'a path'} is empty: is a shell variable unset?"
        )
    return str(Path(path).expanduser()) if path and path.startswith("~") else path


def optional_path(path: str | None) -> Path | None:
    """The same as a Path."""
    word = expanded(path)
    return None if word is None else Path(word)


def _place_of(value: str) -> str | None:
    """The argument (`SRC`) or option (`--against`) of the command being run that has this value."""
    context = click.get_current_context(silent=True)
    for param in context.command.params if context else ():
        given = context.params.get(param.name or "") if context else None
        values: Iterable[object] = given if isinstance(given, tuple) else (given,)
        if value in values:
            return param.opts[-1] if isinstance(param, click.Option) else param.human_readable_name
    return None

"""One line of `mmq doctor`, and how a library that cannot be used is told."""

from __future__ import annotations

import importlib
import importlib.metadata
import warnings
from typing import Any, NamedTuple


class Fact(NamedTuple):
    """One line of `mmq doctor`.

    Attributes:
        ok: None where it is neither good nor bad.
        text: what is there, or why not.
        remedy: one command or one sentence; there is one wherever `ok` is False.
    """

    name: str
    ok: bool | None
    text: str
    remedy: str | None = None


def first_line(error: BaseException) -> str:
    """An exception in one line."""
    return (str(error) or type(error).__name__).partition("\n")[0]


def load(name: str) -> Any:
    """Import a module without the warnings it may have.

    Raises:
        Exception: whatever a library that is there and broken raises.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(name)


def version(distribution: str) -> str | None:
    """Of an installed distribution; None where there is none."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None

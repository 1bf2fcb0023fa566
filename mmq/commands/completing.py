"""What a shell offers after Tab for SRC, OUT and the options that take paths.

These are callbacks for click's `shell_complete=`; they say nothing about what is accepted. An item
of type "file" or "dir" hands over to the shell's own completion, which click's script for bash
cannot mix with words of ours: while such a word may be meant, the entries of the current folder
are offered beside it.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import click
from click.shell_completion import CompletionItem

#: `mmq.convert.header_manifest.BUILTIN`, without what that module imports (a test compares them).
BUILTIN_SOURCES = ("minimax-m3-mxfp8", "minimax-m3-mxfp8-mtp")

# in quotes: click 8.3's class takes no parameters yet
_Complete: TypeAlias = "Callable[[click.Context, click.Parameter, str], list[CompletionItem[str]]]"


def complete_file(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem[str]]:
    """Files and folders."""
    return [CompletionItem(incomplete, type="file")]


def complete_folder(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem[str]]:
    """Folders."""
    return [CompletionItem(incomplete, type="dir")]


def words_or_files(words: Sequence[str]) -> _Complete:
    """Words, and files and folders."""

    def complete(
        ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem[str]]:
        meant = [word for word in words if word.startswith(incomplete)]
        if not meant:
            return complete_file(ctx, param, incomplete)
        return [CompletionItem(word) for word in (*meant, *_entries(incomplete))]

    return complete


complete_source = words_or_files(BUILTIN_SOURCES)


def _entries(start: str) -> list[str]:
    """Names in the current folder that a shell takes as they are, folders with a slash."""
    try:
        found = sorted(path for path in Path().iterdir() if path.name.startswith(start))
    except OSError:
        return []
    names = [f"{path.name}/" if path.is_dir() else path.name for path in found]
    return [name for name in names if name[0] != "." and shlex.quote(name) == name]

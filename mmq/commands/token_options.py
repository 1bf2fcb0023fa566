"""The options that say which tokens a forward reads, for `verify` and `calibrate`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from mmq.commands.completing import complete_file

_F = TypeVar("_F", bound=Callable[..., Any])

_OPTIONS = (
    click.option(
        "--text", "texts", multiple=True, metavar="FILE", shell_complete=complete_file,
        help="Text to read, UTF-8; repeatable.",
    ),
    click.option(
        "--tokens", metavar="FILE.npy", shell_complete=complete_file,
        help="Token ids instead, [T], or windows [W, L] padded with -1.",
    ),
    click.option(
        "--windows", type=click.IntRange(min=0), help="Windows to read, 0 for all.  [default: 32]"
    ),
    click.option(
        "--context", type=click.IntRange(min=2),
        help="Tokens of a window.  [default: twice what block selection needs to bind; 4096 for"
        " M3]",
    ),
)  # fmt: skip


def token_options(command: _F) -> _F:
    """Add them to a command."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command

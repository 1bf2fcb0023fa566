"""The options that inspect shares with convert: what NVFP4 checkpoint to make."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from mmq.commands.completing import complete_source
from mmq.errors import UsageError

_F = TypeVar("_F", bound=Callable[..., Any])


def target_options(command: _F) -> _F:
    """Add them to a command."""
    options = (
        click.option(
            "--layout", type=click.Choice(["modelopt", "minimax"], case_sensitive=False),
            default="modelopt", show_default=True,
            help="NVFP4 tensor names: ModelOpt's (vLLM, SGLang, TensorRT-LLM) or MiniMax-M3.1's.",
        ),
        click.option(
            "--mtp", type=click.Choice(["drop", "keep"]), default="drop", show_default=True,
            help="With --to nvfp4: drop the MTP modules, or keep and convert their experts.",
        ),
        click.option(
            "--experts-from", metavar="BF16_SRC", shell_complete=complete_source,
            help="Quantise the experts of this BF16 checkpoint; copy the rest from SRC.",
        ),
    )  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command


def refuse_idle_options(to: str | None) -> None:
    """Options of NVFP4 that were typed beside another target would decide nothing.

    Raises:
        UsageError: there is one.
    """
    context = click.get_current_context()
    typed = " and ".join(
        f"--{name.replace('_', '-')}"
        for name in ("layout", "mtp", "scale_search")
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE
    )
    if typed and to not in (None, "nvfp4"):
        raise UsageError(
            "option-conflict",
            f"{typed} would change nothing: --to {to} writes no NVFP4",
            hint=f"leave out {typed}",
        )

"""`mmq completion`."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class, shell_complete

from mmq.invocation import Run, global_options

PROGRAM = "mmq"
#: Set by the script when the shell asks what may follow.
VARIABLE = "_MMQ_COMPLETE"


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@global_options
@click.pass_context
def completion(ctx: click.Context, /, shell: str) -> int:
    """Print the script that completes mmq's commands, options and paths after Tab.

    One line, once:

    \b
    bash   in ~/.bashrc (bash 4.4 or newer):      eval "$(mmq completion bash)"
    zsh    in ~/.zshrc, after compinit:           eval "$(mmq completion zsh)"
    fish   in ~/.config/fish/config.fish:         mmq completion fish | source
    """
    run: Run = ctx.obj
    script = completion_script(ctx.find_root().command, shell)
    run.console.result(script.rstrip("\n"), {"command": "completion", "script": script})
    return 0


def completion_script(cli: click.Command, shell: str) -> str:
    """click's script for bash, zsh or fish."""
    kind = get_completion_class(shell)
    if kind is None:
        raise ValueError(f"click has no completion for {shell}")
    script = kind(cli, {}, PROGRAM, VARIABLE)
    # not `source()`: for bash that starts one to look at its version
    return script.source_template % script.source_vars()


def answer_shell(cli: click.Command, instruction: str) -> int:
    """Say what may follow the words in `COMP_WORDS`; returns the exit code.

    Args:
        instruction: `bash_complete` and the like, the value of `VARIABLE`.
    """
    return shell_complete(cli, {}, PROGRAM, VARIABLE, instruction)

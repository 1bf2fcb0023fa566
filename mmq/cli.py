"""The command line: parse, call one library function, render. Heavy imports stay in commands."""

from __future__ import annotations

import os
from collections.abc import Sequence

import click

from mmq import __version__
from mmq.commands.bench import bench
from mmq.commands.calibrate import calibrate
from mmq.commands.completion import VARIABLE, answer_shell, completion
from mmq.commands.convert import convert
from mmq.commands.demo import demo
from mmq.commands.doctor import doctor
from mmq.commands.inspect import inspect
from mmq.commands.publish import publish
from mmq.commands.report import report
from mmq.commands.verify import verify
from mmq.errors import EXIT_CODES
from mmq.invocation import global_options, invoke


def _exit_code_epilog() -> str:
    lines = [f"  {code:>3}  {meaning}" for code, meaning in EXIT_CODES.items()]
    return "\b\nExit codes:\n" + "\n".join(lines)


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=_exit_code_epilog(),
)
@click.version_option(__version__, prog_name="mmq")
@global_options
def cli() -> None:
    """Convert MiniMax-M3 MXFP8 checkpoints to NVFP4, and prove what came out.

    SRC is a folder, a .safetensors file, a header manifest (.json), a Hub repository
    (org/name[@revision]), or a built-in source: minimax-m3-mxfp8, minimax-m3-mxfp8-mtp (headers
    of the release, to try --dry-run on).
    """


for _command in (
    inspect, convert, calibrate, verify, report, publish, doctor, bench, demo, completion,
):  # fmt: skip
    cli.add_command(_command)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the `mmq` command: run it, return its exit code."""
    if asked := os.environ.get(VARIABLE):
        return answer_shell(cli, asked)
    return invoke(cli, argv)

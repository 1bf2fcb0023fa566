"""`mmq demo`."""

from __future__ import annotations

import click

from mmq.invocation import Run, global_options


@click.command()
@global_options
@click.pass_obj
def demo(run: Run, /) -> int:
    """The whole job on the bundled small model."""
    from mmq.demo import run_demo

    code: int = run_demo(run.console)
    return code

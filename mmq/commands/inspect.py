"""`mmq inspect`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from mmq.commands.completing import complete_source
from mmq.commands.paths import expanded
from mmq.commands.placement import budgets, placement_of, placement_options
from mmq.commands.planning import collector_paused, say_findings
from mmq.commands.target_options import refuse_idle_options, target_options
from mmq.console import Console
from mmq.errors import MmqError
from mmq.invocation import Run, global_options

if TYPE_CHECKING:
    from mmq.convert.checkpoint import Checkpoint
    from mmq.convert.plan import ConversionPlan

#: Reasons not to convert that are no fault of the source's.
_NOTHING_WRONG = ("already-converted", "nothing-to-convert")


@click.command()
@click.argument("src", shell_complete=complete_source)
@click.option(
    "--to", type=click.Choice(["nvfp4", "mxfp8", "bf16"], case_sensitive=False),
    help="Show what this conversion would give.  [default: nvfp4, where it is possible]",
)  # fmt: skip
@target_options
@placement_options
@global_options
@click.pass_obj
def inspect(
    run: Run, /, src: str, to: str | None, gpu: str | None, count: int | None, tp: int | None,
    **target: Any,
) -> None:  # fmt: skip
    """Sizes by component and dtype, KV bytes per token, what convert would make of SRC.

    Reads headers only.
    """
    from mmq.convert.checkpoint import open_checkpoint
    from mmq.convert.summary import checkpoint_summary, plan_summary, resource_summary
    from mmq.report.kv_budget_lines import budget_lines, million_lines
    from mmq.report.tables import inspect_lines, outcome_lines

    refuse_idle_options(to)
    placement = placement_of(gpu, count, tp)
    with collector_paused():
        source = open_checkpoint(expanded(src))
        data = checkpoint_summary(source)
        plan = _outcome(run.console, source, to, target)
        outcome = plan and plan_summary(plan, resource_summary(plan, None, 1))
        fits = budgets(source, plan, placement)
    lines = inspect_lines(data) + million_lines(data["kv_bytes_per_million_tokens"] or {})
    if outcome:
        lines += ["", *outcome_lines(outcome)]
    for what, one in (fits or {}).items():
        lines += ["", *budget_lines(one, f"weights as {what}")] if one else []
    told = {"command": "inspect", **data, "convert": outcome, "kv_budget": fits}
    run.console.result("\n".join(lines), told)
    say_findings(run.console, outcome["findings"] if outcome else data["findings"])


def _outcome(
    console: Console, source: Checkpoint, to: str | None, target: dict[str, Any]
) -> ConversionPlan | None:
    """The plan; None when SRC cannot be converted and --to did not ask for it."""
    from mmq.convert.not_found import refuse_absent
    from mmq.convert.options import ConvertOptions
    from mmq.convert.plan import build_plan

    target["experts_from"] = expanded(target["experts_from"])
    if target["experts_from"]:
        refuse_absent(target["experts_from"], "--experts-from")
    try:
        return build_plan(source, ConvertOptions(to=to or "nvfp4", **target))
    except MmqError as error:
        if to is not None:
            raise
        say = console.note if error.id in _NOTHING_WRONG else console.warn
        say(f"convert --to nvfp4 would refuse this source: [{error.id}] {error.message}")
        return None

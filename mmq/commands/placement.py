"""`mmq inspect --gpu`: on which GPUs a model is to run."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from mmq.errors import UsageError

if TYPE_CHECKING:
    from mmq.convert.checkpoint import Checkpoint
    from mmq.convert.kv_budget import Placement
    from mmq.convert.plan import ConversionPlan

_F = TypeVar("_F", bound=Callable[..., Any])


def placement_options(command: _F) -> _F:
    """--gpu, --count and --tp."""
    options = (
        click.option(
            "--gpu", metavar="NAME|SIZE",
            help="Tokens of KV cache that fit beside the weights on such GPUs, as B200 or 96GB.",
        ),
        click.option(
            "--count", type=click.IntRange(min=1), help="How many of them.  [default: --tp]"
        ),
        click.option(
            "--tp", type=click.IntRange(min=1),
            help="Tensor parallelism of each copy of the model.  [default: --count]",
        ),
    )  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command


def placement_of(gpu: str | None, count: int | None, tp: int | None) -> Placement | None:
    """What the options say; None without --gpu.

    Raises:
        UsageError: no such GPU, or --count and --tp that do not fit.
    """
    from mmq.convert.kv_budget import Placement

    if gpu is None:
        if count or tp:
            raise UsageError(
                "option-conflict", "--count and --tp say nothing without --gpu", hint="--gpu B200"
            )
        return None
    placement = Placement(gpu, count or tp or 1, tp or count or 1)
    placement.check()
    return placement


def budgets(
    source: Checkpoint, plan: ConversionPlan | None, placement: Placement | None
) -> dict[str, Any] | None:
    """What fits beside the weights as stored, and as converted."""
    from mmq.convert.kv_budget import budget

    if placement is None:
        return None
    stored = budget(source.tensors.values(), source.text_config, placement)
    if plan is None:
        return {"stored": stored, "converted": None}
    outputs = [output for unit in plan.units for output in unit.outputs]
    return {"stored": stored, "converted": budget(outputs, source.text_config, placement)}

"""`mmq doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mmq.errors import MachineError
from mmq.invocation import Run, global_options

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mmq.verify.kernels.support_table import Cell

_MARKS = {True: "ok", False: "no", None: ""}
_WIDTH = 44


@click.command()
@click.option(
    "--kernels", is_flag=True, help="The GPU kernels instead: how each runs on each target."
)
@global_options
@click.pass_obj
def doctor(run: Run, /, kernels: bool) -> int:
    """What works on this machine, and why not.

    --kernels shows, for every operation and target, whether it runs natively, by a fallback or not
    at all; nothing is compiled.
    """
    if kernels:
        return _kernels(run)
    from mmq.verify.kernels.machine import machine_facts

    sections = machine_facts(Path.cwd())
    lines: list[str] = []
    for title, facts in sections.items():
        lines += ["", title] if lines else [title]
        lines += [f"  {f.name:<{_WIDTH}}{_MARKS[f.ok]:<4}{f.text}".rstrip() for f in facts]
    data = {title: [f._asdict() for f in facts] for title, facts in sections.items()}
    run.console.result("\n".join(lines), {"command": "doctor", "sections": data})
    return 0


def _kernels(run: Run) -> int:
    try:
        from mmq.verify.kernels.support_table import support_cells

        cells = support_cells()
    except ImportError as error:
        raise MachineError(
            "backend-missing", f"the kernels cannot be loaded: {error}", where="doctor --kernels",
            hint="pip install 'mmq-toolkit[gpu]' (Linux)",
        ) from error  # fmt: skip
    data: dict[str, Any] = {"command": "doctor", "kernels": [cell._asdict() for cell in cells]}
    run.console.result("\n".join(kernel_table(cells)), data)
    return 0


def kernel_table(cells: Sequence[Cell]) -> list[str]:
    """Paths by operation and target, then every reason; operations with the same share them."""
    from mmq.report.tables import columns

    targets = list(dict.fromkeys(cell.target for cell in cells))
    rows: dict[str, list[str]] = {}
    reasons: dict[str, dict[tuple[str, str], list[str]]] = {}
    for cell in cells:
        rows.setdefault(cell.op, []).append(cell.path)
        own = reasons.setdefault(cell.op, {})
        own.setdefault((cell.path, cell.reason), []).append(cell.target)
    lines = columns(
        [("operation", *targets), *((op, *paths) for op, paths in rows.items())],
        left=1 + len(targets),
    )
    sharing: dict[str, list[str]] = {}
    for op, own in reasons.items():
        text = "\n".join(
            f"  {path}, {'every target' if len(where) == len(targets) else ', '.join(where)}:"
            f" {reason}"
            for (path, reason), where in own.items()
        )
        sharing.setdefault(text, []).append(op)
    for text, operations in sharing.items():
        lines += ["", *operations, *text.splitlines()]
    return lines

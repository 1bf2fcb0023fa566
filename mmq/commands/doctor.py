"""`mmq doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mmq.commands.completing import complete_folder
from mmq.commands.paths import optional_path
from mmq.errors import MachineError, UsageError
from mmq.invocation import Run, global_options

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mmq.doctor.facts import Fact
    from mmq.verify.kernels.support_table import Cell

_MARKS = {True: "ok", False: "no", None: ""}
_WIDTH = 44


@click.command()
@click.argument("path", required=False, shell_complete=complete_folder)
@click.option("--no-network", is_flag=True, help="Do not ask the Hub.")
@click.option(
    "--kernels", is_flag=True, help="The GPU kernels instead: how each runs on each target."
)
@global_options
@click.pass_obj
def doctor(run: Run, /, path: str | None, no_network: bool, kernels: bool) -> int:
    """What works on this machine, why the rest does not, and what to do about it.

    With PATH, a folder, its disk is measured: 256 MB are written there, read, and removed. The exit
    code is 0 as long as it could look, whatever it found.

    --kernels shows, for every operation and target, whether it runs natively, by a fallback or not
    at all; nothing is compiled.
    """
    if kernels:
        return _kernels(run, path)
    from mmq.doctor.sections import examined

    sections = examined(_folder(path), measure=path is not None, network=not no_network)
    data = {title: [f._asdict() for f in facts] for title, facts in sections.items()}
    run.console.result("\n".join(_lines(sections)), {"command": "doctor", "sections": data})
    return 0


def _folder(path: str | None) -> Path:
    """Whose disk is looked at.

    Raises:
        UsageError: PATH is no folder.
    """
    folder = optional_path(path)
    if folder is None:
        return Path.cwd()
    if not folder.is_dir():
        raise UsageError(
            "doctor-path", f"{path} is no folder", got=path, expected="a folder that is there",
            hint="mmq doctor .",
        )  # fmt: skip
    return folder


def _lines(sections: Mapping[str, Sequence[Fact]]) -> list[str]:
    lines: list[str] = []
    for title, facts in sections.items():
        lines += ["", title] if lines else [title]
        for fact in facts:
            lines.append(f"  {fact.name:<{_WIDTH}}{_MARKS[fact.ok]:<4}{fact.text}".rstrip())
            lines += [f"    remedy: {fact.remedy}"] if fact.remedy else []
    return lines


def _kernels(run: Run, path: str | None) -> int:
    if path is not None:
        raise UsageError(
            "option-conflict", "PATH would change nothing beside --kernels", got=path,
            hint="mmq doctor --kernels",
        )  # fmt: skip
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

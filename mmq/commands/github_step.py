"""What mmq adds to a step of GitHub Actions by itself: summary, annotations, step outputs.

Outside GitHub Actions, where `GITHUB_STEP_SUMMARY` and `GITHUB_OUTPUT` are not set, nothing. A file
of the runner's that cannot be written is a note: it must not change the exit code.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from mmq.console import Console

if TYPE_CHECKING:
    from mmq.report.load import Report


def tell_summary(report: Report, console: Console) -> None:
    """Append the report to the step's summary, and annotate its findings."""
    from mmq.report.github import summary_path, summary_text, workflow_commands
    from mmq.report.load import reports_of

    if summary_path(os.environ) is not None:
        console.annotate(workflow_commands(report.findings))
        add_to_summary(summary_text(reports_of(report)), console)


def add_to_summary(text: str, console: Console) -> Path | None:
    """Append to the step's summary; where that is, None if it could not be."""
    from mmq.report.github import append_summary, summary_path

    path = summary_path(os.environ)
    if path is None:
        return None
    try:
        append_summary(path, text)
    except OSError as error:
        console.note(f"the step summary was not written: {error.strerror or error}")
        return None
    return path


def tell_outputs(console: Console, **values: object) -> None:
    """Set outputs of the step, by name (`_` becomes `-`); later steps read them."""
    from mmq.report.github import append_outputs, outputs_path

    path = outputs_path(os.environ)
    if path is None:
        return
    try:
        append_outputs(path, {name.replace("_", "-"): v for name, v in values.items()})
    except OSError as error:
        console.note(f"the step's outputs were not written: {error.strerror or error}")


def tell_source(console: Console, out: Path, typed: str) -> None:
    """Set the output `source`: what OUT was converted from, a Hub's source by its commit."""
    from mmq.report.github import outputs_path

    if outputs_path(os.environ) is not None:
        from mmq.convert.finalize import pinned_source

        tell_outputs(console, source=pinned_source(out, typed))

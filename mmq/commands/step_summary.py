"""What a command of mmq's adds to a GitHub Actions step by itself: its summary and annotations."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from mmq.console import Console

if TYPE_CHECKING:
    from mmq.report.load import Report


def tell_github(report: Report, console: Console) -> None:
    """Append the report to `$GITHUB_STEP_SUMMARY` and annotate; nothing outside GitHub Actions.

    A summary that cannot be written is a note: it must not change the exit code.
    """
    from mmq.report.github import append_summary, summary_path, summary_text, workflow_commands
    from mmq.report.load import reports_of

    path = summary_path(os.environ)
    if path is None:
        return
    console.annotate(workflow_commands(report.findings))
    try:
        append_summary(path, summary_text(reports_of(report)))
    except OSError as error:
        console.note(f"the step summary was not written: {error.strerror or error}")

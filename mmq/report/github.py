"""GitHub Actions: a step summary in Markdown, annotations, and step outputs.

An annotation is a line that the runner reads from stdout or stderr; outputs are lines of a file:

    ::error title=gate-fail::top1 is beyond its limit
    verdict=fail
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from mmq.errors import MmqError
from mmq.report.escape import plain, shortened, workflow_data, workflow_property
from mmq.report.load import Reports
from mmq.report.markdown import markdown_text
from mmq.report.schema import FindingEntry
from mmq.report.sections import build_document

#: GitHub shows ten annotations of a kind for a step; more are dropped without a word.
MOST_ANNOTATIONS = 10
#: GitHub refuses a step's summary beyond 1 MiB; another command may have written some of it.
MOST_BYTES = 512 << 10
_MOST_CHARACTERS = 500
_COMMANDS = {"error": "error", "warning": "warning", "note": "notice"}


def summary_text(reports: Reports) -> str:
    """The step summary."""
    return markdown_text(build_document(reports))


def workflow_commands(findings: Iterable[FindingEntry]) -> list[str]:
    """At most ten workflow commands: errors first, then warnings, then notes."""
    ordered = sorted(findings, key=lambda f: list(_COMMANDS).index(f.severity))
    lines = [_annotation(finding) for finding in ordered[:MOST_ANNOTATIONS]]
    if len(ordered) > MOST_ANNOTATIONS:
        rest = len(ordered) - MOST_ANNOTATIONS + 1
        worst = _COMMANDS[ordered[MOST_ANNOTATIONS - 1].severity]
        lines[-1] = f"::{worst} title=mmq::{rest:,} more findings: see the summary or the report"
    return lines


def summary_path(environ: Mapping[str, str]) -> Path | None:
    """Where the step summary goes; None outside GitHub Actions."""
    return Path(path) if (path := environ.get("GITHUB_STEP_SUMMARY")) else None


def append_summary(path: Path, text: str) -> None:
    """Add to the step's summary, which other commands of the step share.

    Raises:
        OSError: the file cannot be written.
    """
    data = text.encode("utf-8", "backslashreplace")
    if len(data) > MOST_BYTES:
        data = data[: MOST_BYTES - 100].decode("utf-8", "ignore").rpartition("\n")[0].encode()
        data += b"\n\nThe rest is in the report: GitHub takes no longer summary.\n"
    with path.open("ab") as file:
        file.write(data + b"\n")


def outputs_path(environ: Mapping[str, str]) -> Path | None:
    """Where the step's outputs go; None outside GitHub Actions."""
    return Path(path) if (path := environ.get("GITHUB_OUTPUT")) else None


def append_outputs(path: Path, values: Mapping[str, object]) -> None:
    """Set outputs of the step, one line each: no value can begin another.

    Raises:
        OSError: the file cannot be written.
    """
    lines = (f"{name}={plain(value)}\n" for name, value in values.items())
    with path.open("ab") as file:
        file.write("".join(lines).encode("utf-8"))


def error_command(error: MmqError) -> str:
    """The workflow command for an error that ended a command."""
    return _command("error", error, ("hint", error.hint))


def _annotation(finding: FindingEntry) -> str:
    return _command(_COMMANDS[finding.severity], finding)


def _command(command: str, what: FindingEntry | MmqError, *more: tuple[str, str | None]) -> str:
    message = what.message
    for head, text in (
        ("where", what.where), ("got", what.got), ("expected", what.expected), *more,
    ):  # fmt: skip
        message += f"; {head}: {text}" if text else ""
    data = workflow_data(shortened(message, _MOST_CHARACTERS))
    return f"::{command} title={workflow_property(shortened(what.id, 80))}::{data}"

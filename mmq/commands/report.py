"""`mmq report`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from mmq.commands.completing import complete_file
from mmq.commands.github_step import add_to_summary
from mmq.commands.output_files import output_file
from mmq.commands.paths import expanded
from mmq.errors import UsageError
from mmq.invocation import Run, global_options

if TYPE_CHECKING:
    from mmq.console import Console
    from mmq.report.load import Reports

_FORMATS = ("text", "md", "html", "junit", "github", "json")


@click.command()
@click.argument("file", shell_complete=complete_file)
@click.argument("other", required=False, shell_complete=complete_file)
@click.option(
    "--format", "form", type=click.Choice(_FORMATS), default="text", show_default=True,
    help="text for a terminal, md for a model card or comment, html as one page, junit for CI,"
    " github as a step summary with annotations, json as it is.",
)  # fmt: skip
@click.option(
    "-o", "--output", metavar="OUT", shell_complete=complete_file,
    help="Write there.  [default: stdout; for github $GITHUB_STEP_SUMMARY, where it is set]",
)  # fmt: skip
@global_options
@click.pass_obj
def report(run: Run, /, file: str, other: str | None, form: str, output: str | None) -> int:
    """Render mmq-verify.json or mmq-convert.json; with OTHER, what differs between two runs.

    FILE and OTHER are reports, or the folders they are in; a folder's two reports are rendered
    together. The exit code says whether this worked, not what the verdict is.
    """
    from mmq.report.load import read_reports

    paths = [Path(expanded(path)) for path in (file, other) if path is not None]
    _refuse_target(paths[1:])
    target = output_file(output)
    _keep_input(paths, target)
    found = [read_reports(path) for path in paths]
    text = _compared(found[0], found[1], form) if len(found) > 1 else _rendered(found[0], form)
    if form == "github":
        _annotate(found[-1], run.console)
    if target is not None:
        from mmq.convert.writer import write_file

        write_file(target, text.encode("utf-8", "backslashreplace"))
    elif form == "github":
        target = add_to_summary(text, run.console)
    if target is not None:
        run.console.note(f"{form} report in {target}")
    data = {"command": "report", "format": form, "output": target and str(target)}
    data["text"] = None if target else text
    run.console.result("" if target else text.rstrip("\n"), data)
    return 0


def _refuse_target(others: list[Path]) -> None:
    """A file to be written, named without -o.

    Raises:
        UsageError: there is one.
    """
    for path in others:
        if path.suffix in (".html", ".md", ".xml", ".txt") and not path.exists():
            raise UsageError(
                "option-value", f"there is no report {path} to compare with", got=str(path),
                hint=f"-o {path}",
            )  # fmt: skip


def _keep_input(paths: list[Path], target: Path | None) -> None:
    """A rendering must not replace what it was made of."""
    from mmq.report.load import REPORT_NAMES

    if target is None or not target.exists():
        return
    inputs = [*paths, *(path / name for path in paths for name in REPORT_NAMES.values())]
    if any(path.exists() and target.samefile(path) for path in inputs):
        raise UsageError("output-is-input", f"-o {target} is the report itself", where=str(target))


def _rendered(found: Reports, form: str) -> str:
    from mmq.report.sections import build_document

    if form == "text":
        from mmq.report.text import report_text

        return report_text(found)
    if form == "junit":
        from mmq.report.junit import junit_text

        return junit_text(found)
    if form == "json":
        return _json(found)
    if form == "html":
        from mmq.report.html import html_text

        return html_text(build_document(found))
    from mmq.report.markdown import markdown_text

    return markdown_text(build_document(found))


def _json(found: Reports) -> str:
    from mmq.report.load import as_json

    if len(found.found) > 1:
        raise UsageError(
            "report-json-one", "--format json gives one report; the folder has two",
            hint="name mmq-verify.json or mmq-convert.json",
        )  # fmt: skip
    return as_json(found.found[0]) + "\n"


def _compared(first: Reports, second: Reports, form: str) -> str:
    from mmq.report.compare import compare_documents

    if form in ("junit", "json"):
        raise UsageError(
            "option-value", f"--format {form} renders one report, not a comparison",
            got=form, expected="text, md, html, github",
        )  # fmt: skip
    document = compare_documents(first, second)
    if form == "text":
        from mmq.report.text import document_text

        return document_text(document)
    if form == "html":
        from mmq.report.html import html_text

        return html_text(document)
    from mmq.report.markdown import markdown_text

    return markdown_text(document)


def _annotate(found: Reports, console: Console) -> None:
    from mmq.report.github import workflow_commands

    console.annotate(workflow_commands([f for r in found.found for f in r.findings]))

"""`mmq verify`."""

from __future__ import annotations

from typing import Any

import click
from click.core import ParameterSource

from mmq.commands.completing import complete_file, complete_folder, complete_source
from mmq.commands.github_step import tell_outputs, tell_summary
from mmq.commands.output_files import output_file
from mmq.commands.paths import expanded, optional_path
from mmq.commands.token_options import token_options
from mmq.errors import UsageError, VerdictError
from mmq.invocation import Run, global_options

#: What `--require` takes: a target of the kernels, or any GPU.
REQUIREMENTS = ("sm_100", "sm_103", "sm_107", "sm_120", "gfx950", "native")
#: Parameters that level logits alone reads.
_LOGITS_OPTIONS = ("texts", "tokens", "context", "windows", "layers", "kv", "index_k", "replay",
                   "dtype", "work_dir")  # fmt: skip
_CACHE_FORMATS = ("exact", "bf16", "fp8", "nvfp4")


@click.command()
@click.argument("out", required=False, shell_complete=complete_file)
@click.option(
    "--against", metavar="SRC", shell_complete=complete_source,
    help="The checkpoint OUT was converted from.",
)  # fmt: skip
@click.option(
    "--level", type=click.Choice(["structure", "weights", "logits", "kernels"]),
    help="Highest level to run; kernels stands alone.  [default: weights with --against, else"
    " structure]",
)  # fmt: skip
@click.option("--strict", is_flag=True, help="Let warnings fail (exit 3).")
@click.option(
    "--allow-inconclusive", is_flag=True,
    help="Exit 0 where figures are too close to a limit to decide.",
)  # fmt: skip
@click.option(
    "--gates", metavar="FILE", shell_complete=complete_file,
    help="Limits other than the default ones (YAML; docs/verify.md).",
)  # fmt: skip
@token_options
@click.option(
    "--layers",
    type=click.IntRange(min=1),
    help="Level logits: run the first layers only, which gives none.",
)
@click.option(
    "--kv", type=click.Choice(["auto", *_CACHE_FORMATS, "nvfp4-fp8-staged"]), default="auto",
    show_default=True, help="KV cache to judge; auto: what OUT's config declares.",
)  # fmt: skip
@click.option(
    "--index-k", type=click.Choice(["auto", *_CACHE_FORMATS]), default="auto", show_default=True,
    help="Format of the indexer's keys beside it.",
)  # fmt: skip
@click.option(
    "--replay/--no-replay", default=True, show_default=True,
    help="Also run OUT with the source's routing and block selection.",
)  # fmt: skip
@click.option(
    "--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32", show_default=True,
    help="Of the forward's matrix products.",
)  # fmt: skip
@click.option(
    "--work-dir", metavar="DIR", shell_complete=complete_folder,
    help="Hidden states while a logits run lasts.  [default: .mmq-verify beside the report]",
)  # fmt: skip
@click.option(
    "--device", type=click.Choice(["cpu", "cuda"]),
    help="Level logits: where the forward runs.  [default: cpu]  Level kernels: cpu for Triton's"
    " interpreter.  [default: a GPU if there is one]  cuda is ROCm too.",
)  # fmt: skip
@click.option(
    "--jobs", type=click.IntRange(min=1),
    help="Level weights: worker processes.  [default: min(4, cores), 1 for a small model]",
)  # fmt: skip
@click.option(
    "--require", type=click.Choice(REQUIREMENTS),
    help="Level kernels: exit 6 unless every operation ran natively on such a GPU.",
)  # fmt: skip
@click.option(
    "--download-dir", metavar="DIR", shell_complete=complete_folder,
    help="Where a Hub SRC's shards lie while they are needed, and whole copies, which stay: of a"
    " Hub OUT, and of SRC for level logits.  [default: .mmq-verify beside the report; none for"
    " copies]",
)  # fmt: skip
@click.option(
    "--keep-downloads", is_flag=True, help="Leave all of them in --download-dir, as a checkpoint."
)
@click.option(
    "-o", "--output", "report_path", metavar="FILE", shell_complete=complete_file,
    help="Where the report goes.  [default: mmq-verify.json in OUT; level kernels: nowhere]",
)  # fmt: skip
@global_options
@click.pass_obj
def verify(
    run: Run, /, out: str | None, against: str | None, level: str | None, strict: bool,
    allow_inconclusive: bool, report_path: str | None, device: str | None, require: str | None,
    **logits: Any,
) -> int:  # fmt: skip
    """Check OUT, alone or against the checkpoint it came from; exit 3 when it fails.

    \b
    structure   headers, configs, names, what loaders insist on
    weights     every stored value against the source's
    logits      perplexity and parity of both models on the same --text or --tokens
    kernels     the Triton kernels against their references on this machine; OUT is optional
    """
    _check_combination(out, against, level, device, require)
    _refuse_idle_options(level)
    unmet = None
    if level == "kernels":
        report, unmet = _kernels(run, out, device, require, report_path)
    else:
        logits["device"] = device or "cpu"
        report, unmet = _levels(run, out or "", against, level, strict, report_path, logits)
    from mmq.report.verdict import verify_lines

    data = report.model_dump()
    run.console.result("\n".join(verify_lines(data)), {"command": "verify", **data})
    tell_summary(report, run.console)
    if unmet is None:
        tell_outputs(run.console, verdict=report.verdict)
    elif report.verdict != "fail":
        raise unmet
    else:
        run.console.warn(unmet.message)
    fine = {"pass"} | (set() if strict else {"warn"})
    fine |= {"inconclusive"} if allow_inconclusive else set()
    return 0 if report.verdict in fine else VerdictError.exit_code


def _check_combination(
    out: str | None, against: str | None, level: str | None, device: str | None,
    require: str | None,
) -> None:  # fmt: skip
    """Words that belong to some levels only.

    Raises:
        UsageError: they are mixed.
    """
    if level == "kernels" and against is not None:
        raise UsageError(
            "option-conflict", "--against would change nothing: --level kernels has no source",
            hint="mmq verify --level kernels OUT",
        )  # fmt: skip
    if level != "kernels" and require is not None:
        raise UsageError(
            "option-conflict", "--require belongs to --level kernels", got=require,
            hint="add --level kernels",
        )  # fmt: skip
    if level not in ("kernels", "logits") and device is not None:
        raise UsageError(
            "option-conflict", "--device belongs to --level kernels and --level logits",
            got=device, hint="add --level logits",
        )  # fmt: skip
    if level != "kernels" and out is None:
        raise click.UsageError("Missing argument 'OUT'.", click.get_current_context())


def _refuse_idle_options(level: str | None) -> None:
    """Options of level logits that were typed without it would decide nothing.

    Raises:
        UsageError: there is one: a release must not pass for perplexity that nobody measured.
    """
    context = click.get_current_context()
    typed = " and ".join(
        option.opts[0]
        for option in context.command.params
        if option.name in _LOGITS_OPTIONS
        and context.get_parameter_source(option.name) is ParameterSource.COMMANDLINE
    )
    if typed and level != "logits":
        raise UsageError(
            "option-conflict", f"{typed} would change nothing without --level logits",
            hint=f"add --level logits, or leave out {typed}",
        )  # fmt: skip


def _kernels(
    run: Run, out: str | None, device: str | None, require: str | None, report_path: str | None
) -> tuple[Any, Any]:
    """Level kernels: its report, and what the machine did not meet."""
    from mmq.verify.kernels.level import verify_kernels

    return verify_kernels(
        expanded(out), device=device, require=require, report_path=output_file(report_path),
        console=run.console,
    )  # fmt: skip


def _levels(
    run: Run, out: str, against: str | None, level: str | None, strict: bool,
    report_path: str | None, logits: dict[str, Any],
) -> tuple[Any, Any]:  # fmt: skip
    """The other levels: their report, and why it was not written."""
    from mmq.convert.downloads import DownloadSettings
    from mmq.verify.report_file import ReportNotWrittenError
    from mmq.verify.run import verify as run_verify

    folder, keep = logits.pop("download_dir"), logits.pop("keep_downloads")
    jobs = logits.pop("jobs")
    try:
        report = run_verify(
            expanded(out), expanded(against), level, strict=strict,
            report_path=output_file(report_path), console=run.console,
            downloads=DownloadSettings.of(expanded(folder), keep), logits=_settings(logits),
            jobs=jobs,
        )  # fmt: skip
    except ReportNotWrittenError as error:
        return error.report, error
    return report, None


def _settings(words: dict[str, Any]) -> Any:
    """LogitsSettings from the options above."""
    from mmq.verify.logits.settings import LogitsSettings

    words["texts"] = tuple(path for word in words["texts"] if (path := optional_path(word)))
    words["work"] = words.pop("work_dir")
    for key in ("tokens", "gates", "work"):
        words[key] = optional_path(words[key])
    return LogitsSettings(**words)

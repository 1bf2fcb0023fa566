"""The command line: parse, call one library function, render. Heavy imports stay in commands."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from mmq import __version__
from mmq.commands.bench import bench
from mmq.commands.calibrate import calibrate
from mmq.commands.calibrated_scales import CALIBRATE, with_calibration
from mmq.commands.doctor import doctor
from mmq.commands.paths import expanded
from mmq.commands.placement import budgets, placement_of, placement_options
from mmq.commands.publish import publish
from mmq.commands.report import report
from mmq.commands.step_summary import tell_github
from mmq.commands.verify import verify
from mmq.console import Console
from mmq.errors import EXIT_CODES, MmqError, UsageError, VerdictError
from mmq.invocation import Run, global_options, invoke

if TYPE_CHECKING:
    from mmq.convert.checkpoint import Checkpoint
    from mmq.convert.downloads import DownloadSettings
    from mmq.convert.options import ConvertOptions
    from mmq.convert.plan import ConversionPlan

#: Reasons not to convert that are no fault of the source's.
_NOTHING_WRONG = ("already-converted", "nothing-to-convert")

_F = TypeVar("_F", bound=Callable[..., Any])


def _exit_code_epilog() -> str:
    lines = [f"  {code:>3}  {meaning}" for code, meaning in EXIT_CODES.items()]
    return "\b\nExit codes:\n" + "\n".join(lines)


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=_exit_code_epilog(),
)
@click.version_option(__version__, prog_name="mmq")
@global_options
def cli() -> None:
    """Convert MiniMax-M3 MXFP8 checkpoints to NVFP4, and prove what came out.

    SRC is a folder, a .safetensors file, a header manifest (.json), a Hub repository
    (org/name[@revision]), or a built-in source: minimax-m3-mxfp8, minimax-m3-mxfp8-mtp (headers
    of the release, to try --dry-run on).
    """


def target_options(command: _F) -> _F:
    """The options that inspect shares with convert."""
    options = (
        click.option(
            "--layout", type=click.Choice(["modelopt", "minimax"]), default="modelopt",
            show_default=True, help="NVFP4 tensor names: ModelOpt's (vLLM, SGLang, TensorRT-LLM)"
            " or MiniMax-M3.1's.",
        ),
        click.option(
            "--mtp", type=click.Choice(["drop", "keep"]), default="drop", show_default=True,
            help="With --to nvfp4: drop the MTP modules, or keep and convert their experts.",
        ),
        click.option(
            "--experts-from", metavar="BF16_SRC",
            help="Quantise the experts of this BF16 checkpoint; copy the rest from SRC.",
        ),
    )  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command


@cli.command()
@click.argument("src")
@click.option(
    "--to", type=click.Choice(["nvfp4", "mxfp8", "bf16"]),
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

    _refuse_idle_options(to)
    placement = placement_of(gpu, count, tp)
    with _collector_paused():
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
    _say(run.console, outcome["findings"] if outcome else data["findings"])


def _outcome(
    console: Console, source: Checkpoint, to: str | None, target: dict[str, Any]
) -> ConversionPlan | None:
    """The plan; None when SRC cannot be converted and --to did not ask for it."""
    from mmq.convert.options import ConvertOptions
    from mmq.convert.plan import build_plan

    target["experts_from"] = expanded(target["experts_from"])
    try:
        return build_plan(source, ConvertOptions(to=to or "nvfp4", **target))
    except MmqError as error:
        if to is not None:
            raise
        say = console.note if error.id in _NOTHING_WRONG else console.warn
        say(f"convert --to nvfp4 would refuse this source: [{error.id}] {error.message}")
        return None


@cli.command()
@click.argument("src")
@click.argument("out")
@click.option(
    "--to", type=click.Choice(["nvfp4", "mxfp8", "bf16"]), default="nvfp4", show_default=True,
    help="Format of the routed experts (nvfp4) or of all linears (mxfp8, bf16).",
)  # fmt: skip
@target_options
@click.option(
    "--input-scales", metavar="unit|none|FILE",
    help="Activation scales: 1.0 beside every NVFP4 projection, none, or from a scales file."
    "  [default: unit]",
)  # fmt: skip
@click.option(
    "--kv-scales", metavar="analytic|unit|none|calibrate|FILE",
    help="K and V scales: bounds from the weights, 1.0, none, what --text gives, or a scales file."
    "  [default: analytic; none for --layout minimax]",
)  # fmt: skip
@click.option(
    "--text", "texts", multiple=True, metavar="FILE",
    help="Text for --kv-scales calibrate, UTF-8; repeatable.",
)  # fmt: skip
@click.option(
    "--kv-format", type=click.Choice(["auto", "nvfp4", "fp8", "none"]), default="auto",
    show_default=True, help="KV-cache format that the config declares.",
)  # fmt: skip
@click.option(
    "--scale-search", type=click.Choice(["mse", "max", "four-over-six"]), default="mse",
    show_default=True,
    help="NVFP4 block scales: of least error, as ModelOpt has them, or the better of 4 and 6.",
)  # fmt: skip
@click.option(
    "--importance", metavar="FILE",
    help="Channel weights for the search's errors (safetensors, one F32 [K] per projection).",
)  # fmt: skip
@click.option(
    "--ignore", multiple=True, metavar="PATTERN",
    help="Leave modules as they are: fnmatch over full module names; repeatable.",
)  # fmt: skip
@click.option(
    "--max-shard-size", default="5GB", show_default=True, metavar="SIZE",
    help="Largest output shard, such as 5GB or 4.5GiB; a tensor is never split.",
)  # fmt: skip
@click.option(
    "--jobs", type=click.IntRange(min=1), help="Worker processes.  [default: min(4, cores)]"
)
@click.option(
    "--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True,
    help="Where to compute; cuda is ROCm too.  The bytes are the same.",
)  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Show the plan; write nothing.")
@click.option("--restart", is_flag=True, help="Discard this OUT's unfinished run and start again.")
@click.option("--overwrite", is_flag=True, help="Replace a finished or foreign checkpoint in OUT.")
@click.option("--strict", is_flag=True, help="Let warnings fail (exit 3).")
@click.option(
    "--allow-nonfinite-passthrough", is_flag=True,
    help="Record NaN and Inf in copied tensors instead of stopping.",
)  # fmt: skip
@click.option("--hash-source", is_flag=True, help="Hash the source's shards into the manifest.")
@click.option(
    "--download-dir", metavar="DIR",
    help="Where a Hub SRC's shards lie while they are needed.  [default: OUT/.mmq]",
)  # fmt: skip
@click.option(
    "--keep-downloads", is_flag=True, help="Leave all of them in --download-dir, as a checkpoint."
)
@global_options
@click.pass_obj
def convert(
    run: Run, /, src: str, out: str, jobs: int | None, device: str, dry_run: bool, restart: bool,
    overwrite: bool, strict: bool, hash_source: bool, texts: tuple[str, ...],
    download_dir: str | None, keep_downloads: bool, **target: Any,
) -> int:  # fmt: skip
    """Convert SRC into the new folder OUT.

    Run the same command again after an interruption: finished shards are kept.
    """
    from mmq.convert.downloads import DownloadSettings
    from mmq.convert.summary import default_jobs

    _refuse_idle_options(target["to"])
    src, folder = expanded(src), Path(expanded(out))
    options, jobs = _options(target), jobs or default_jobs()
    options = with_calibration(run.console, src, folder, options, texts, dry_run=dry_run)
    downloads = DownloadSettings.of(download_dir, keep_downloads)
    if dry_run:
        return _dry_run(run.console, src, folder, options, jobs, strict, downloads)
    from mmq.convert.run import RunSettings
    from mmq.convert.run import convert as run_convert
    from mmq.report.tables import convert_lines

    settings = RunSettings(jobs, restart, overwrite, strict, hash_source, device, downloads)
    done = run_convert(src, folder, options, settings, run.console)
    data = done.model_dump() if done else {"finished": True}
    text = "\n".join(convert_lines(data, src, out)) if done else f"{out} is finished"
    run.console.result(text, {"command": "convert", "out": str(folder), **data})
    if done:
        tell_github(done, run.console)
    return 0


def _refuse_idle_options(to: str | None) -> None:
    """Options of NVFP4 that were typed beside another target would decide nothing.

    Raises:
        UsageError: there is one.
    """
    context = click.get_current_context()
    typed = " and ".join(
        f"--{name.replace('_', '-')}"
        for name in ("layout", "mtp", "scale_search")
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE
    )
    if typed and to not in (None, "nvfp4"):
        raise UsageError(
            "option-conflict",
            f"{typed} would change nothing: --to {to} writes no NVFP4",
            hint=f"leave out {typed}",
        )


def _options(target: dict[str, Any]) -> ConvertOptions:
    """ConvertOptions from the command line's words."""
    from mmq.convert.options import INPUT_SCALES, KV_SCALES, ConvertOptions
    from mmq.convert.sizes import parse_size

    max_shard = parse_size(target.pop("max_shard_size"))
    allow = target.pop("allow_nonfinite_passthrough")
    for key, words in (("kv_scales", (*KV_SCALES, CALIBRATE)), ("input_scales", INPUT_SCALES)):
        if target[key] not in words:
            target[key] = _absolute(target[key])
    target["experts_from"] = _absolute(target["experts_from"])
    target["importance"] = _absolute(target["importance"])
    return ConvertOptions(max_shard_bytes=max_shard, allow_nonfinite=allow, **target)


def _dry_run(
    console: Console, src: str, out: Path, options: ConvertOptions, jobs: int, strict: bool,
    downloads: DownloadSettings,
) -> int:  # fmt: skip
    from mmq.convert.checkpoint import open_checkpoint
    from mmq.convert.plan import build_plan
    from mmq.convert.summary import plan_summary, resource_summary
    from mmq.report.tables import plan_lines

    with _collector_paused():
        plan = build_plan(open_checkpoint(src), options)
        data = plan_summary(plan, resource_summary(plan, out, jobs, downloads))
    console.result("\n".join(plan_lines(data)), {"command": "convert", "dry_run": True, **data})
    _say(console, data["findings"])
    warned = [f["id"] for f in data["findings"] if f["severity"] == "warning"]
    if strict and warned:
        raise VerdictError(
            "strict-warning",
            f"--strict: {len(warned)} warning(s): {', '.join(sorted(set(warned)))}",
        )
    return 0


cli.add_command(calibrate)
cli.add_command(verify)
cli.add_command(doctor)
cli.add_command(bench)
cli.add_command(publish)
cli.add_command(report)


@cli.command()
@global_options
@click.pass_obj
def demo(run: Run, /) -> int:
    """The whole job on the bundled small model."""
    from mmq.demo import run_demo

    code: int = run_demo(run.console)
    return code


def _absolute(path: str | None) -> str | None:
    """A file's full path, so that the manifest still finds it from another folder."""
    from mmq.hub.location import parse_location

    word = expanded(path)
    return str(Path(word).absolute()) if word and not parse_location(word) else word


@contextmanager
def _collector_paused() -> Iterator[None]:
    """A plan of the release is half a million tuples without cycles; looking for cycles among
    them takes a third of the time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _say(console: Console, findings: Iterable[dict[str, Any]]) -> None:
    """Findings about a source or a plan."""
    from mmq.report.findings import Finding

    for finding in findings:
        console.finding(Finding(**finding), talk=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the `mmq` command: run it, return its exit code."""
    return invoke(cli, argv)

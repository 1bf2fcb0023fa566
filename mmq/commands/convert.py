"""`mmq convert`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mmq.commands.calibrated_scales import CALIBRATE, with_calibration
from mmq.commands.completing import complete_file, complete_folder, complete_source, words_or_files
from mmq.commands.github_step import tell_source, tell_summary
from mmq.commands.paths import expanded
from mmq.commands.planning import collector_paused, say_findings
from mmq.commands.target_options import refuse_idle_options, target_options
from mmq.console import Console
from mmq.errors import VerdictError
from mmq.invocation import Run, global_options

if TYPE_CHECKING:
    from mmq.convert.downloads import DownloadSettings
    from mmq.convert.options import ConvertOptions


@click.command()
@click.argument("src", shell_complete=complete_source)
@click.argument("out", shell_complete=complete_folder)
@click.option(
    "--to", type=click.Choice(["nvfp4", "mxfp8", "bf16"], case_sensitive=False), default="nvfp4",
    show_default=True, help="Format of the routed experts (nvfp4) or of all linears (mxfp8, bf16).",
)  # fmt: skip
@target_options
@click.option(
    "--input-scales", metavar="unit|none|FILE",
    shell_complete=words_or_files(("unit", "none")),
    help="Activation scales: 1.0 beside every NVFP4 projection, none, or from a scales file."
    "  [default: unit]",
)  # fmt: skip
@click.option(
    "--kv-scales", metavar="analytic|unit|none|calibrate|FILE",
    shell_complete=words_or_files(("analytic", "unit", "none", CALIBRATE)),
    help="K and V scales: bounds from the weights, 1.0, none, what --text gives, or a scales file."
    "  [default: analytic; none for --layout minimax]",
)  # fmt: skip
@click.option(
    "--text", "texts", multiple=True, metavar="FILE", shell_complete=complete_file,
    help="Text for --kv-scales calibrate, UTF-8; repeatable.",
)  # fmt: skip
@click.option(
    "--kv-format", type=click.Choice(["auto", "nvfp4", "fp8", "none"], case_sensitive=False),
    default="auto", show_default=True, help="KV-cache format that the config declares.",
)  # fmt: skip
@click.option(
    "--scale-search", type=click.Choice(["mse", "max", "four-over-six"]), default="mse",
    show_default=True,
    help="NVFP4 block scales: of least error, as ModelOpt has them, or the better of 4 and 6.",
)  # fmt: skip
@click.option(
    "--importance", metavar="FILE", shell_complete=complete_file,
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
    "--download-dir", metavar="DIR", shell_complete=complete_folder,
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

    refuse_idle_options(target["to"])
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
        tell_summary(done, run.console)
    tell_source(run.console, folder, src)
    return 0


def _options(target: dict[str, Any]) -> ConvertOptions:
    """ConvertOptions from the command line's words."""
    from mmq.convert.not_found import refuse_absent
    from mmq.convert.options import INPUT_SCALES, KV_SCALES, ConvertOptions
    from mmq.convert.sizes import parse_size

    max_shard = parse_size(target.pop("max_shard_size"))
    allow = target.pop("allow_nonfinite_passthrough")
    for key, words in (("kv_scales", (*KV_SCALES, CALIBRATE)), ("input_scales", INPUT_SCALES)):
        if target[key] not in words:
            target[key] = _absolute(target[key])
    if target["experts_from"]:
        refuse_absent(target["experts_from"], "--experts-from")
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

    with collector_paused():
        plan = build_plan(open_checkpoint(src), options)
        data = plan_summary(plan, resource_summary(plan, out, jobs, downloads))
    console.result("\n".join(plan_lines(data)), {"command": "convert", "dry_run": True, **data})
    say_findings(console, data["findings"])
    warned = [f["id"] for f in data["findings"] if f["severity"] == "warning"]
    if strict and warned:
        raise VerdictError(
            "strict-warning",
            f"--strict: {len(warned)} warning(s): {', '.join(sorted(set(warned)))}",
        )
    return 0


def _absolute(path: str | None) -> str | None:
    """A file's full path, so that the manifest still finds it from another folder."""
    from mmq.hub.location import parse_location

    word = expanded(path)
    return str(Path(word).absolute()) if word and not parse_location(word) else word

"""`mmq calibrate`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mmq.commands.completing import complete_file, complete_folder, complete_source
from mmq.commands.output_files import output_file
from mmq.commands.paths import expanded, optional_path
from mmq.commands.token_options import token_options
from mmq.errors import UsageError
from mmq.invocation import Run, global_options

if TYPE_CHECKING:
    from mmq.calibrate.run import CalibrateSettings


@click.command()
@click.argument("src", required=False, shell_complete=complete_source)
@click.option(
    "-o", "--output", required=True, metavar="FILE", shell_complete=complete_file,
    help="The KV-scales file.",
)  # fmt: skip
@token_options
@click.option(
    "--observer", type=click.Choice(["max", "percentile", "mse"]), default="max",
    show_default=True, help="What the scales are made from: amax, a percentile, or least error.",
)  # fmt: skip
@click.option(
    "--percentile", type=click.FloatRange(0.5, 1), default=0.9999, show_default=True,
    help="Share of magnitudes that --observer percentile lets through.",
)  # fmt: skip
@click.option(
    "--kv-format", type=click.Choice(["fp8", "nvfp4"], case_sensitive=False), default="fp8",
    show_default=True, help="Format whose error --observer mse minimises.",
)  # fmt: skip
@click.option(
    "--importance-out", metavar="FILE", shell_complete=complete_file,
    help="Also write channel importance, for convert --importance.",
)  # fmt: skip
@click.option(
    "--input-scales-out", metavar="FILE", shell_complete=complete_file,
    help="Also write activation scales, for convert --input-scales.",
)  # fmt: skip
@click.option(
    "--experts-out", metavar="FILE", shell_complete=complete_file,
    help="Also write the experts' statistics, for --merge-experts.",
)  # fmt: skip
@click.option(
    "--merge", multiple=True, metavar="FILE", shell_complete=complete_file,
    help="Make the scales from the statistics of these files, without a model; repeatable.",
)  # fmt: skip
@click.option(
    "--merge-experts", multiple=True, metavar="FILE", shell_complete=complete_file,
    help="Make the experts' files from these, which --experts-out wrote; repeatable.",
)  # fmt: skip
@click.option(
    "--download-dir", metavar="DIR", shell_complete=complete_folder,
    help="Where SRC goes when it is a Hub repository; it stays.",
)  # fmt: skip
@click.option(
    "--work-dir", metavar="DIR", shell_complete=complete_folder,
    help="Hidden states while the run lasts.  [default: FILE.work]",
)  # fmt: skip
@global_options
@click.pass_obj
def calibrate(
    run: Run, /, src: str | None, output: str, merge: tuple[str, ...],
    merge_experts: tuple[str, ...], **words: Any,
) -> int:  # fmt: skip
    """KV scales from text, by a forward of SRC that is streamed layer by layer."""
    from mmq.calibrate.lines import calibration_lines

    downloads = optional_path(words.pop("download_dir"))
    out, settings = output_file(output), _settings(words)
    if merge or merge_experts:
        if src is not None or not merge or settings.texts or settings.tokens:
            raise UsageError(
                "option-value", "--merge takes files of earlier runs, and no SRC or text", got=src,
                hint="mmq calibrate -o all.json --merge a.json --merge b.json",
            )  # fmt: skip
        data = _merged(merge, merge_experts, out, settings)
    else:
        if src is None:
            raise UsageError("option-value", "give SRC, or files to --merge")
        from mmq.calibrate.run import calibrate as run_calibrate
        from mmq.convert.hub_copy import local_copy

        source = local_copy(expanded(src), downloads, run.console)
        data = run_calibrate(source, out, settings, run.console)
    text = "\n".join(calibration_lines(data, output))
    run.console.result(text, {"command": "calibrate", "out": str(out), **data})
    return 0


def _settings(words: dict[str, Any]) -> CalibrateSettings:
    """CalibrateSettings from the options above."""
    from mmq.calibrate.run import CalibrateSettings
    from mmq.calibrate.scales_file import Choice

    choice = Choice(words.pop("observer"), words.pop("percentile"), words.pop("kv_format"))
    words["texts"] = tuple(path for word in words["texts"] if (path := optional_path(word)))
    words["work"] = words.pop("work_dir")
    for key in ("tokens", "importance_out", "input_scales_out", "experts_out", "work"):
        words[key] = optional_path(words[key])
    return CalibrateSettings(choice=choice, **words)


def _merged(
    files: tuple[str, ...], experts: tuple[str, ...], out: Path, settings: CalibrateSettings
) -> dict[str, Any]:
    """Several runs as one: the same files as from a run over all of their tokens."""
    from mmq.calibrate.expert_layers import read_experts
    from mmq.calibrate.run import write_expert_files
    from mmq.calibrate.scales_file import read_calibrations, write_calibration

    calibration = read_calibrations([Path(expanded(file)) for file in files])
    layers = read_experts([Path(expanded(file)) for file in experts]) if experts else None
    summary = write_expert_files(settings, layers)
    return {**write_calibration(out, calibration, settings.choice), "experts": summary}

"""`mmq calibrate`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from mmq.commands.paths import expanded, optional_path
from mmq.errors import UsageError
from mmq.invocation import Run, global_options


@click.command()
@click.argument("src", required=False)
@click.option("-o", "--output", required=True, metavar="FILE", help="The KV-scales file.")
@click.option(
    "--text", "texts", multiple=True, metavar="FILE",
    help="Text to calibrate on, UTF-8; repeatable.",
)  # fmt: skip
@click.option("--tokens", metavar="FILE.npy", help="Token ids instead, [T], or windows [W, L].")
@click.option(
    "--windows", type=click.IntRange(min=0), help="Windows to read, 0 for all.  [default: 32]"
)
@click.option(
    "--context", type=click.IntRange(min=2),
    help="Tokens of a window.  [default: twice what block selection needs to bind; 4096 for M3]",
)  # fmt: skip
@click.option(
    "--observer", type=click.Choice(["max", "percentile", "mse"]), default="max",
    show_default=True, help="What the scales are made from: amax, a percentile, or least error.",
)  # fmt: skip
@click.option(
    "--percentile", type=click.FloatRange(0.5, 1), default=0.9999, show_default=True,
    help="Share of magnitudes that --observer percentile lets through.",
)  # fmt: skip
@click.option(
    "--kv-format", type=click.Choice(["fp8", "nvfp4"]), default="fp8", show_default=True,
    help="Format whose error --observer mse minimises.",
)  # fmt: skip
@click.option(
    "--importance-out", metavar="FILE",
    help="Also write channel importance, for convert --importance.",
)  # fmt: skip
@click.option(
    "--input-scales-out", metavar="FILE",
    help="Also write activation scales, for convert --input-scales.",
)  # fmt: skip
@click.option(
    "--merge", multiple=True, metavar="FILE",
    help="Make the scales from the statistics of these files, without a model; repeatable.",
)  # fmt: skip
@click.option(
    "--work-dir", metavar="DIR",
    help="Hidden states while the run lasts.  [default: FILE.work]",
)  # fmt: skip
@global_options
@click.pass_obj
def calibrate(
    run: Run, /, src: str | None, output: str, merge: tuple[str, ...], **words: Any
) -> int:
    """KV scales from text, by a forward of SRC that is streamed layer by layer."""
    from mmq.calibrate.lines import calibration_lines
    from mmq.calibrate.scales_file import Choice, read_calibrations, write_calibration

    choice = Choice(words.pop("observer"), words.pop("percentile"), words.pop("kv_format"))
    out = Path(expanded(output))
    if merge:
        if src is not None:
            raise UsageError("option-value", "--merge takes files, and no SRC", got=src)
        merged = read_calibrations([Path(expanded(file)) for file in merge])
        data = write_calibration(out, merged, choice)
    else:
        if src is None:
            raise UsageError("option-value", "give SRC, or files to --merge")
        data = _run(run, src, out, choice, words)
    text = "\n".join(calibration_lines(data, output))
    run.console.result(text, {"command": "calibrate", "out": str(out), **data})
    return 0


def _run(run: Run, src: str, out: Path, choice: Any, words: dict[str, Any]) -> dict[str, Any]:
    from mmq.calibrate.run import CalibrateSettings
    from mmq.calibrate.run import calibrate as run_calibrate

    words["texts"] = tuple(path for word in words["texts"] if (path := optional_path(word)))
    words["work"] = words.pop("work_dir")
    for key in ("tokens", "importance_out", "input_scales_out", "work"):
        words[key] = optional_path(words[key])
    settings = CalibrateSettings(choice=choice, **words)
    return run_calibrate(expanded(src), out, settings, run.console)

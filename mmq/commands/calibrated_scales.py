"""`mmq convert --kv-scales calibrate`: calibrate, then convert with the file that came out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mmq.commands.paths import optional_path
from mmq.console import Console
from mmq.errors import UsageError

if TYPE_CHECKING:
    from mmq.convert.options import ConvertOptions

#: The word of --kv-scales.
CALIBRATE = "calibrate"
SUFFIX = ".kv-scales.json"


def with_calibration(
    console: Console, src: str, out: Path, options: ConvertOptions, texts: Sequence[str], *,
    dry_run: bool,
) -> ConvertOptions:  # fmt: skip
    """The options with the file of a calibration for the word `calibrate`; others as they are.

    Args:
        dry_run: without a forward: a plan of the same size.

    Raises:
        UsageError: --text without `calibrate`, or the other way round.
    """
    if not _is_calibrating(options.kv_scales, texts):
        return options
    if dry_run:
        return without_calibration(options)
    file = calibrated_scales(console, src, out, options, texts)
    return replace(options, kv_scales=str(file))


def _is_calibrating(kv_scales: str | None, texts: Sequence[str]) -> bool:
    calibrating = kv_scales == CALIBRATE
    if calibrating and not texts:
        raise UsageError(
            "text-needed", "--kv-scales calibrate needs text: --text FILE, repeatable",
            hint="mmq convert SRC OUT --kv-scales calibrate --text train.txt",
        )  # fmt: skip
    if texts and not calibrating:
        raise UsageError(
            "option-conflict", "--text would change nothing without --kv-scales calibrate",
            got=kv_scales, hint="--kv-scales calibrate, or leave out --text",
        )  # fmt: skip
    return calibrating


def without_calibration(options: ConvertOptions) -> ConvertOptions:
    """Options that give a plan of the same size, without a forward.

    Raises:
        UsageError: the layout takes no calibrated scales, or another contradiction.
    """
    return replace(options.resolved(), kv_scales="analytic")


def calibrated_scales(
    console: Console, src: str, out: Path, options: ConvertOptions, texts: Sequence[str]
) -> Path:
    """The scales file beside OUT; made anew unless it holds this very calibration already.

    Args:
        options: of the conversion; what it would refuse is refused here, before the forward.
    """
    from mmq.calibrate.run import CalibrateSettings, calibrate, prepare
    from mmq.calibrate.scales_file import is_calibration_of
    from mmq.convert.hub_copy import local_copy
    from mmq.convert.plan import build_plan

    file = out.with_name(out.name + SUFFIX).absolute()
    paths = tuple(path for word in texts if (path := optional_path(word)))
    settings = CalibrateSettings(texts=paths)
    src = local_copy(src, None, console)
    prepared = prepare(src, settings)
    build_plan(prepared.source, without_calibration(options))
    if is_calibration_of(file, prepared.model, prepared.tokens.sha256, settings.choice):
        console.note(f"KV scales as calibrated before, in {file}")
    else:
        calibrate(src, file, settings, console)
        console.note(f"KV scales kept in {file}")
    return file

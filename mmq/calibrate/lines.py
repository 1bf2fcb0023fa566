"""A calibration as lines of text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_HEAD = f"{'layer':>5}  {'kind':<7} {'amax':>9} {'bound/amax':>10} {'scale':>11} {'clipped':>9}"


def calibration_lines(data: Mapping[str, Any], out: str) -> list[str]:
    """What `mmq calibrate` prints; `data` is a scales file without its statistics."""
    told = data["calibration"]
    format = told["kv_format"]
    lines = [f"{_HEAD}  error fp8  nvfp4"]
    for layer in told["layers"]:
        for kind in ("k", "v", "index_k"):
            if kind in layer:
                lines.append(_line(layer["layer"], kind, layer[kind], format))
    experts = data.get("experts")
    if experts:
        lines.append(
            f"experts  {experts['unreached']:,} that no token reached, in"
            f" {experts['layers']} layers"
        )
    lines.append(
        f"scales   {len(data['scales'])} in {out}: observer {told['observer']},"
        f" {told['tokens']:,} tokens"
    )
    return lines


def _line(number: int, kind: str, seen: Mapping[str, Any], format: str) -> str:
    slack = "–" if seen["slack"] is None else f"{seen['slack']:.2f}"
    error = seen["relative_error"]
    return (
        f"{number:>5}  {kind:<7} {seen['amax']:>9.4g} {slack:>10} {seen['scale']:>11.6g}"
        f" {100 * seen['clip_rate'][format]:>7.3f} %  {100 * error['fp8']:>7.3f} %"
        f" {100 * error['nvfp4']:>5.2f} %"
    )

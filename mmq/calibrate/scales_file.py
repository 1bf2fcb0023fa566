"""The scales file: what convert takes, and all that another run needs to go on from it.

    {"format": "mmq-kv-scales/1", "scales": {name: F32}, "calibration": {…}}

`calibration` says which model, tokens and observer the scales come from, what each layer was like,
and holds the statistics, so that files of several runs can be merged into one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmq.calibrate.kv_statistics import FORMATS, VectorStatistics, candidate_scales
from mmq.calibrate.observers import DEFAULT_PERCENTILE, OBSERVERS, Observer, clip_rate, scale_of
from mmq.calibrate.runs import merged_runs
from mmq.convert.checkpoint import read_json_object
from mmq.convert.kv_scales_file import FORMAT
from mmq.convert.writer import write_file
from mmq.errors import BadInputError, RefusedError, UsageError
from mmq.quantize.architecture import TEXT
from mmq.quantize.layouts import K_SCALE, V_SCALE

#: Kinds of vectors, as the file names them; index keys get no scale, engines have none for them.
KINDS = ("k", "v", "index_k")


@dataclass(frozen=True)
class Choice:
    """How scales are made from statistics."""

    observer: Observer = "max"
    percentile: float = DEFAULT_PERCENTILE
    format: str = "fp8"


@dataclass
class Calibration:
    """Statistics of all layers and where they come from.

    Attributes:
        model: {"location", "norms_sha256", "layers"}.
        runs: what each run saw: tokens, convention, hashes.
        layers: for each layer, statistics by kind.
    """

    model: dict[str, Any]
    runs: list[dict[str, Any]]
    layers: list[dict[str, VectorStatistics]] = field(default_factory=list)

    def merge(self, other: Calibration, where: str) -> None:
        """Add another run of the same model.

        Raises:
            UsageError: another model, or tokens that were seen already.
        """
        self.runs = merged_runs(self.model, self.runs, other.model, other.runs, where)
        try:
            for own, more in zip(self.layers, other.layers, strict=True):
                if own.keys() != more.keys():
                    raise ValueError(f"{', '.join(more)} beside {', '.join(own)}")
                for kind in own:
                    own[kind].merge(more[kind])
        except ValueError as error:
            raise UsageError(
                "calibrations-differ", f"{where} has other layers: {error}", where=where
            ) from None

    def scales(self, choice: Choice) -> dict[str, float]:
        """F32 by tensor name."""
        found = {}
        for number, layer in enumerate(self.layers):
            for kind, suffix in (("k", K_SCALE), ("v", V_SCALE)):
                name = f"{TEXT}model.layers.{number}.{suffix}"
                found[name] = scale_of(
                    layer[kind], choice.observer, choice.format, choice.percentile
                )
        return found

    def table(self, choice: Choice) -> list[dict[str, Any]]:
        """What each layer was like, and what its scales do."""
        return [
            {"layer": number, **{kind: _described(layer[kind], choice) for kind in layer}}
            for number, layer in enumerate(self.layers)
        ]


def _described(seen: VectorStatistics, choice: Choice) -> dict[str, Any]:
    scale = scale_of(seen, choice.observer, choice.format, choice.percentile)
    nearest = min(
        range(len(candidate_scales(seen.analytic))),
        key=lambda j: abs(candidate_scales(seen.analytic)[j] - scale),
    )
    bound = seen.analytic * 448
    return {
        "amax": seen.amax,
        "amax_by_head": [float(a) for a in seen.amax_H],
        "p99": seen.percentile(0.99),
        "p9999": seen.percentile(0.9999),
        "bound": bound,
        "slack": bound / seen.amax if seen.amax else None,
        "scale": scale,
        "clip_rate": {name: clip_rate(seen, scale, name) for name in FORMATS},
        "relative_error": {
            name: float(seen.relative_errors(name)[nearest]) for name in FORMATS
        },
    }  # fmt: skip


def write_calibration(path: Path, calibration: Calibration, choice: Choice) -> dict[str, Any]:
    """Write the file; returns what it holds, without the statistics."""
    told = {
        "model": calibration.model,
        "observer": choice.observer,
        "percentile": choice.percentile if choice.observer == "percentile" else None,
        "kv_format": choice.format,
        "tokens": sum(int(run["tokens"]) for run in calibration.runs),
        "runs": calibration.runs,
        "layers": calibration.table(choice),
    }
    statistics = [
        {kind: seen.as_json() for kind, seen in layer.items()} for layer in calibration.layers
    ]
    data = {
        "format": FORMAT, "scales": calibration.scales(choice),
        "calibration": {**told, "statistics": statistics},
    }  # fmt: skip
    write_file(path, (json.dumps(data, ensure_ascii=False) + "\n").encode("utf-8"))
    return {**data, "calibration": told}


def read_calibrations(paths: Sequence[Path]) -> Calibration:
    """Files of several runs as one.

    Raises:
        UsageError: they do not belong together.  BadInputError: one is damaged or no such file.
    """
    merged: Calibration | None = None
    for path in paths:
        one = _read(path)
        if merged is None:
            merged = one
        else:
            merged.merge(one, str(path))
    assert merged is not None
    return merged


def _read(path: Path) -> Calibration:
    data = read_json_object(path)
    calibration = data.get("calibration")
    if data.get("format") != FORMAT or not isinstance(calibration, Mapping):
        raise BadInputError(
            "calibration-format", f"{path} holds no calibration's statistics", where=str(path),
            got=data.get("format"), expected=f"{FORMAT} with a calibration",
        )  # fmt: skip
    try:
        layers = [
            {kind: VectorStatistics.from_json(seen) for kind, seen in layer.items()}
            for layer in calibration["statistics"]
        ]
        model, runs = dict(calibration["model"]), [dict(run) for run in calibration["runs"]]
        if len(layers) != int(model["layers"]):
            raise ValueError(f"{len(layers)} of {model['layers']} layers")
        for number, layer in enumerate(layers):
            if not {"k", "v"} <= set(layer) <= set(KINDS):
                raise ValueError(f"layer {number} has {', '.join(layer) or 'nothing'}")
        if not all({"tokens", "tokens_sha256"} <= run.keys() for run in runs):
            raise ValueError("a run without its tokens")
        if not isinstance(model["norms_sha256"], str):
            raise ValueError("no model")
        return Calibration(model, runs, layers)
    except (KeyError, TypeError, ValueError, IndexError, OverflowError, AttributeError) as error:
        raise BadInputError(
            "calibration-damaged", f"{path}: the statistics are damaged: {error!r}",
            where=str(path),
        ) from None  # fmt: skip


def is_calibration_of(
    path: Path, model: Mapping[str, Any], tokens_sha256: str, choice: Choice
) -> bool:
    """Whether a file holds the calibration of this model on these tokens with this observer.

    Raises:
        RefusedError: a file is there that is no calibration, so it is not to be overwritten.
    """
    if not path.exists():
        return False
    try:
        found = _read(path)
    except BadInputError as error:
        raise RefusedError(
            "calibration-not-ours", f"{path} is there, but no calibration of mmq's: it is not"
            " overwritten", where=str(path), got=error.message, hint=f"move {path} away",
        ) from None  # fmt: skip
    told = read_json_object(path)["calibration"]
    same = (told.get("observer"), told.get("kv_format")) == (choice.observer, choice.format)
    tokens = [run["tokens_sha256"] for run in found.runs]
    norms = found.model["norms_sha256"]
    return same and tokens == [tokens_sha256] and norms == model["norms_sha256"]


__all__ = [
    "KINDS", "OBSERVERS", "Calibration", "Choice", "is_calibration_of", "read_calibrations",
    "write_calibration",
]  # fmt: skip

"""What a verification tells of each layer, read from the report's free-form entries.

An entry is `{"layer": 3, "arms": {"both": {"cosine": …, "routing": …, "selection": …}},
"expert_tokens": […]}` (written by `mmq.verify.logits.layer_stats`); whatever is absent or of
another form is None here, since reports are input too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from mmq.report.schema import LogitsReport


class LayerFigures(NamedTuple):
    """One arm's layer beside the source's.

    Attributes:
        cosine / least_cosine: of hidden states after the layer: mean and worst token.
        routing: share of tokens with the source's set of experts; None in a dense layer.
        overlap / overlap_p1: share of the source's chosen blocks, mean and 1 % quantile; None
            where block selection leaves nothing out.
        expert_tokens: tokens of each expert in the source's forward.
    """

    layer: int
    cosine: float | None
    least_cosine: float | None
    routing: float | None
    flips: int | None
    near_ties: int | None
    overlap: float | None
    overlap_p1: float | None
    expert_tokens: tuple[int, ...]


def layer_figures(logits: LogitsReport, arm: str) -> list[LayerFigures]:
    """All layers of one arm, in the report's order."""
    return [_figures(entry, index, arm) for index, entry in enumerate(logits.layers)]


def worst_layers(figures: Iterable[LayerFigures], count: int = 3) -> list[LayerFigures]:
    """Layers with the least mean cosine, the worst first."""
    known = [f for f in figures if f.cosine is not None]
    return sorted(known, key=lambda f: f.cosine or 0.0)[:count]


def mean_and_least(values: Iterable[float | None]) -> tuple[float, float] | None:
    """Mean and least of the values there are; None when there are none."""
    known = [v for v in values if v is not None]
    return (sum(known) / len(known), min(known)) if known else None


def _figures(entry: Mapping[str, Any], index: int, arm: str) -> LayerFigures:
    ours = _mapping(_mapping(entry, "arms"), arm)
    cosine, routing = _mapping(ours, "cosine"), _mapping(ours, "routing")
    selection = _mapping(ours, "selection")
    tokens = entry.get("expert_tokens")
    return LayerFigures(
        layer=_count(entry.get("layer"), index),
        cosine=_number(cosine.get("mean")),
        least_cosine=_number(cosine.get("min")),
        routing=_number(routing.get("same")),
        flips=_count(routing.get("flips"), None),
        near_ties=_count(routing.get("near_ties"), None),
        overlap=_number(selection.get("overlap")),
        overlap_p1=_number(selection.get("p1")),
        expert_tokens=tuple(_count(t, 0) for t in tokens) if isinstance(tokens, list) else (),
    )


def _mapping(value: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = value.get(key)
    return found if isinstance(found, dict) else {}


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def _count(value: object, default: Any) -> Any:
    fits = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 53
    return value if fits else default

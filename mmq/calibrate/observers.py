"""From statistics to a scale.

    max          amax / 448
    percentile   p-th percentile of the magnitudes / 448        larger ones saturate
    mse          the candidate scale with the least Σ (x − cache(x))² in the format

All are rounded up to F32 and follow ModelOpt's convention, in which NVFP4 keeps a factor of 6 of
headroom in its block scales. Nothing seen (no tokens, or zeros alone) leaves the analytic scale.

Four numbers: amax 89.6 gives 0.2; with 99.9 % of magnitudes at most 56, `percentile` gives 0.125.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from mmq.calibrate.kv_statistics import VectorStatistics, candidate_scales
from mmq.quantize.kv_scales import E4M3_MAX, scale_from_bound

Observer = Literal["max", "percentile", "mse"]
OBSERVERS: tuple[Observer, ...] = ("max", "percentile", "mse")
#: Share of magnitudes that `percentile` lets through by default.
DEFAULT_PERCENTILE = 0.9999


def scale_of(
    seen: VectorStatistics, observer: Observer, format: str, percentile: float = DEFAULT_PERCENTILE
) -> float:
    """The scale an observer chooses for one layer's K, V or index keys.

    Args:
        format: "fp8" or "nvfp4", for `mse`.
        percentile: a share, for `percentile`.
    """
    if not seen.amax:
        return seen.analytic
    if observer == "max":
        return float(scale_from_bound(seen.amax))
    if observer == "percentile":
        return float(scale_from_bound(seen.percentile(percentile)))
    return candidate_scales(seen.analytic)[int(np.argmin(seen.relative_errors(format)))]


def clip_rate(seen: VectorStatistics, scale: float, format: str) -> float:
    """Share of elements too large for the format under this scale, to a bin's width.

    NVFP4's block scales reach 448, its elements 6: 2688 · scale.
    """
    return seen.share_above(scale * E4M3_MAX * (6 if format == "nvfp4" else 1))

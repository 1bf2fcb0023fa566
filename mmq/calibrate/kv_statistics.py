"""What the keys and values of one layer were like, in numbers that add up whatever the order.

    amax          largest magnitude of each head                          maxima
    histogram     magnitudes of each head by their leading bits            counts
    errors        Σ (x − cache(x))² for each format and candidate scale    exact sums

A bin of the histogram holds the magnitudes that agree in exponent and five bits of mantissa, so a
percentile is known to 1/32 and given as its bin's upper edge. The candidate scales are the analytic
one (`mmq.quantize.kv_scales`), which nothing can exceed, times 2^(−j/2), j = 0 … 15.

Dimensions: T tokens, H heads (KV heads, or 1 for index keys), D head dimension, J candidates.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mmq.calibrate.exact_sums import ExactSums
from mmq.kernels.kv_pages import KvFormat
from mmq.kernels.reference.kv_cache import decode_rows, encode_rows

#: Formats whose round trip is measured.
FORMATS: tuple[KvFormat, ...] = ("fp8", "nvfp4")
#: Candidate scales: the analytic one and smaller ones, by half powers of two.
CANDIDATES = 16
_SHIFT = 18  # F32 bits that are left out of a bin's number: 23 − 5
_BINS = 1 << (31 - _SHIFT)


def candidate_scales(analytic: float) -> list[float]:
    """F32 scales, largest first."""
    return [float(np.float32(analytic * 2.0 ** (-j / 2))) for j in range(CANDIDATES)]


@dataclass
class VectorStatistics:
    """Keys, values or index keys of one layer.

    Attributes:
        analytic: the scale whose bound nothing exceeds.
        tokens: seen so far.
        amax_H: F32.
        histogram_HB: I64 [H, bins].
        errors: format → exact sums [J], in units of the analytic scale squared.
        signal: exact sum of x², in the same units.
    """

    analytic: float
    heads: int
    tokens: int = 0
    amax_H: npt.NDArray[np.float32] = field(init=False)
    histogram_HB: npt.NDArray[np.int64] = field(init=False)
    errors: dict[str, ExactSums] = field(init=False)
    signal: ExactSums = field(init=False)

    def __post_init__(self) -> None:
        self.amax_H = np.zeros(self.heads, np.float32)
        self.histogram_HB = np.zeros((self.heads, _BINS), np.int64)
        self.errors = {name: ExactSums.zeros(CANDIDATES) for name in FORMATS}
        self.signal = ExactSums.zeros(1)

    def observe(self, x_THD: Tensor) -> None:
        """Take in one window's vectors, F32."""
        x_THD = x_THD.float().cpu().contiguous()
        self.tokens += len(x_THD)
        magnitude_THD = x_THD.abs()
        self.amax_H = np.maximum(self.amax_H, magnitude_THD.amax((0, 2)).numpy())
        bins_THD = magnitude_THD.view(torch.int32) >> _SHIFT
        for head in range(self.heads):
            counts = torch.bincount(bins_THD[:, head].flatten(), minlength=_BINS)
            self.histogram_HB[head] += counts.numpy()
        x_RD = x_THD.flatten(0, 1)
        unit = self.analytic**2
        self.signal.add((x_RD.double().square().sum(1) / unit)[:, None])
        for name in FORMATS:
            error_JR = [
                (x_RD - decode_rows(*encode_rows(x_RD, name, scale), name, scale))
                .double().square().sum(1) / unit
                for scale in candidate_scales(self.analytic)
            ]  # fmt: skip
            self.errors[name].add(torch.stack(error_JR, dim=1))

    def merge(self, other: VectorStatistics) -> None:
        """Add another run's.

        Raises:
            ValueError: of another model: other heads, or another analytic scale.
        """
        if (self.analytic, self.heads) != (other.analytic, other.heads):
            raise ValueError(
                f"analytic scale {other.analytic!r} and {other.heads} heads beside"
                f" {self.analytic!r} and {self.heads}"
            )
        self.tokens += other.tokens
        self.amax_H = np.maximum(self.amax_H, other.amax_H)
        self.histogram_HB += other.histogram_HB
        self.signal.merge(other.signal)
        for name in FORMATS:
            self.errors[name].merge(other.errors[name])

    @property
    def amax(self) -> float:
        return float(self.amax_H.max(initial=0.0))

    def percentile(self, share: float) -> float:
        """A magnitude that `share` of all elements do not exceed: the upper edge of its bin."""
        counts = self.histogram_HB.sum(0)
        # a product that is a whole number but for its rounding is meant to be one
        wanted = int(np.ceil(share * float(counts.sum()) * (1 - 1e-12)))
        place = int(np.searchsorted(counts.cumsum(), max(wanted, 1)))
        edge = np.array([(place + 1) << _SHIFT], np.uint32).view(np.float32)[0]
        return min(float(edge), self.amax)

    def share_above(self, limit: float) -> float:
        """Share of elements in bins beyond the one that `limit` lies in: surely larger than it."""
        counts = self.histogram_HB.sum(0)
        place = int(np.array([limit], np.float32).view(np.uint32)[0]) >> _SHIFT
        total = int(counts.sum())
        return float(counts[place + 1 :].sum()) / total if total else 0.0

    def relative_errors(self, format: str) -> npt.NDArray[np.float64]:
        """Σ(x − cache(x))² / Σx² under each candidate scale."""
        signal = float(self.signal.totals()[0])
        return self.errors[format].totals() / signal if signal else np.zeros(CANDIDATES)

    def as_json(self) -> dict[str, Any]:
        """All of it; histograms without their empty bins."""
        return {
            "analytic": self.analytic,
            "tokens": self.tokens,
            "amax": [float(a) for a in self.amax_H],
            "histogram": [
                [[int(b), int(row[b])] for b in np.flatnonzero(row)] for row in self.histogram_HB
            ],
            "signal": _sums_json(self.signal),
            "errors": {name: _sums_json(sums) for name, sums in self.errors.items()},
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> VectorStatistics:
        """The inverse of `as_json`.

        Raises:
            ValueError, KeyError, TypeError, OverflowError: it is no such thing.
        """
        own = cls(float(data["analytic"]), len(data["amax"]), int(data["tokens"]))
        own.amax_H = np.array(data["amax"], np.float32)
        if not (np.isfinite(own.amax_H).all() and (own.amax_H >= 0).all()):
            raise ValueError("amax is not finite")
        if not (np.isfinite(own.analytic) and own.analytic > 0 and own.tokens >= 0):
            raise ValueError(f"analytic scale {own.analytic}, {own.tokens} tokens")
        for row, pairs in zip(own.histogram_HB, data["histogram"], strict=True):
            for place, count in pairs:
                if not (0 <= int(place) < _BINS and int(count) > 0):
                    raise ValueError(f"a histogram with {count} in bin {place}")
                row[int(place)] = int(count)
            if own.tokens and row.sum() % own.tokens:
                raise ValueError(f"{row.sum()} elements of {own.tokens} tokens")
        own.signal = _sums_from(data["signal"], 1)
        own.errors = {name: _sums_from(data["errors"][name], CANDIDATES) for name in FORMATS}
        return own


def _sums_json(sums: ExactSums) -> list[list[int]]:
    return [sums.whole.tolist(), sums.fraction.tolist()]


def _sums_from(data: list[list[int]], length: int) -> ExactSums:
    whole, fraction = (np.array(part, np.int64) for part in data)
    if whole.shape != (length,) or fraction.shape != (length,):
        raise ValueError("sums of another length")
    sums = ExactSums(whole, fraction)
    sums.check()
    return sums

"""Perplexity and parity from per-token scores, each figure with its standard error.

    ln ratio       mean(NLL arm − NLL source), so that PPL arm / PPL source = exp(ln ratio)
    KLD            source ‖ arm, mean and quantiles
    Δp             p_arm(token) − p_source(token): mean, and root mean square
    top-1          share of tokens whose most likely token is the source's
    top-5          mean share that the five most likely tokens have in common

Tokens of one window are not independent. So a mean's standard error comes from the windows, as
that of a ratio of sums: with S_w the sum and n_w the count in window w, m the mean, W windows,

    SE² = W / (W − 1) · Σ_w (S_w − m · n_w)² / N²

A single window has no spread between windows; its tokens are taken then, and the report says so. A
quantile's error is Woodruff's: half the distance between the quantiles at p ± SE of the share
below it. A maximum has none.

Names follow llama.cpp's ``llama-perplexity --kl-divergence`` (PRs 5076, 6936) and Hugging Face.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mmq.report.schema import ArmFigures, Measure, PositionBin
from mmq.verify.logits.arms import ArmName
from mmq.verify.logits.head import ArmScores
from mmq.verify.logits.tokens import TokenSet

#: Quantiles of the KLD that are reported, by name.
QUANTILES = {"kld_median": 0.5, "kld_p90": 0.9, "kld_p99": 0.99, "kld_p999": 0.999}
#: Bins of the position within a window, for figures by position.
POSITION_BINS = 16
#: Points of the sorted per-token KLD that the report keeps for its plot.
CURVE_POINTS = 201


@dataclass(frozen=True)
class Clusters:
    """Which window each scored token is in.

    Attributes:
        window_R: I64 [R], numbered from 0.
    """

    window_R: Tensor

    @property
    def windows(self) -> int:
        return int(self.window_R.max()) + 1 if len(self.window_R) else 0

    def mean(self, values_R: Tensor) -> Measure:
        """The mean and its standard error."""
        values_R = values_R.double()
        mean = values_R.mean()
        deviation_R = values_R - mean
        if self.windows > 1:
            sums_W = torch.zeros(self.windows, dtype=torch.float64)
            sums_W.index_add_(0, self.window_R, deviation_R)
            factor = self.windows / (self.windows - 1)
        else:
            sums_W, factor = deviation_R, len(values_R) / max(1, len(values_R) - 1)
        variance = factor * sums_W.square().sum() / len(values_R) ** 2
        return Measure(value=mean.item(), se=variance.sqrt().item())

    def quantile(self, values_R: Tensor, share: float) -> Measure:
        """A quantile (the smallest value that `share` of the values do not exceed)."""
        ordered_R = values_R.double().sort().values
        value = _at(ordered_R, share)
        below = self.mean((values_R.double() <= value).double())
        error = below.se or 0.0
        width = _at(ordered_R, share + error) - _at(ordered_R, share - error)
        return Measure(value=value, se=width / 2)

    def part(self, keep_R: Tensor) -> Clusters:
        """The clusters of some tokens, numbered anew."""
        return Clusters(torch.unique(self.window_R[keep_R], return_inverse=True)[1])


def _at(ordered_R: Tensor, share: float) -> float:
    index = math.ceil(share * len(ordered_R)) - 1
    return float(ordered_R[min(max(index, 0), len(ordered_R) - 1)])


def window_clusters(tokens: TokenSet) -> Clusters:
    """Clusters of the tokens in the order of `head.predicted_rows`."""
    counts = torch.tensor([w.length - 1 for w in tokens.windows])
    return Clusters(torch.repeat_interleave(torch.arange(len(counts)), counts))


def perplexity(nll_R: Tensor, clusters: Clusters) -> Measure:
    """exp(mean NLL); its error is the mean's times itself."""
    mean = clusters.mean(nll_R)
    value = math.exp(mean.value)
    return Measure(value=value, se=value * (mean.se or 0.0))


def figures(arm: ArmScores, source: ArmScores, clusters: Clusters) -> ArmFigures:
    """All figures of one arm against the source."""
    ln_ratio = clusters.mean(arm.nll_R - source.nll_R)
    ratio = math.exp(ln_ratio.value)
    delta_p_R = arm.p_target_R - source.p_target_R
    square = clusters.mean(delta_p_R.square())
    rms = math.sqrt(square.value)
    common_R = (arm.top_R5[:, :, None] == source.top_R5[:, None]).any(2).double().mean(1)
    return ArmFigures(
        perplexity=perplexity(arm.nll_R, clusters),
        ln_ratio=ln_ratio,
        delta_ppl_percent=Measure(value=100 * (ratio - 1), se=100 * ratio * (ln_ratio.se or 0.0)),
        kld_mean=clusters.mean(arm.kld_R),
        **{name: clusters.quantile(arm.kld_R, q) for name, q in QUANTILES.items()},
        kld_max=Measure(value=float(arm.kld_R.max()), se=None),
        delta_p_mean=clusters.mean(delta_p_R),
        delta_p_rms=Measure(value=rms, se=(square.se or 0.0) / (2 * rms) if rms else 0.0),
        top1=clusters.mean((arm.top_R5[:, 0] == source.top_R5[:, 0]).double()),
        top5=clusters.mean(common_R),
    )


def by_file(
    arm: ArmScores, source: ArmScores, tokens: TokenSet, clusters: Clusters
) -> dict[str, ArmFigures]:
    """The same for each text, so that one language cannot collapse unseen."""
    file_W = torch.tensor([w.file for w in tokens.windows])
    file_R = file_W[clusters.window_R]
    found = {}
    for number, name in enumerate(tokens.files):
        keep_R = file_R == number
        if bool(keep_R.any()):
            found[name] = figures(_kept(arm, keep_R), _kept(source, keep_R), clusters.part(keep_R))
    return found


def _kept(scores: ArmScores, keep_R: Tensor) -> ArmScores:
    return ArmScores(scores.nll_R[keep_R], scores.kld_R[keep_R], scores.top_R5[keep_R])


def by_position(arm: ArmScores, source: ArmScores, tokens: TokenSet) -> list[PositionBin]:
    """Mean KLD and top-1 agreement by position within the window."""
    position_R = torch.cat([torch.arange(1, w.length) for w in tokens.windows])
    longest = int(position_R.max()) + 1
    bins = min(POSITION_BINS, longest - 1)
    bin_R = (position_R - 1) * bins // (longest - 1)
    same_R = (arm.top_R5[:, 0] == source.top_R5[:, 0]).double()
    found = []
    for number in range(bins):
        keep_R = bin_R == number
        inside = position_R[keep_R]
        found.append(
            PositionBin(
                first=int(inside.min()), last=int(inside.max()), tokens=len(inside),
                kld_mean=arm.kld_R[keep_R].mean().item(), top1=same_R[keep_R].mean().item(),
            )
        )  # fmt: skip
    return found


def kld_curve(arm: ArmScores) -> list[float]:
    """The per-token KLD at evenly spaced shares from 0 to 1: its sorted curve."""
    ordered_R = arm.kld_R.double().sort().values
    shares = torch.linspace(0, len(ordered_R) - 1, CURVE_POINTS).round().long()
    return [float(f"{v:.4g}") for v in ordered_R[shares].tolist()]


def first_nonfinite(scores: Mapping[ArmName, ArmScores]) -> tuple[ArmName, int] | None:
    """The first arm and scored token whose NLL or KLD is no number."""
    for name, arm in scores.items():
        bad_R = ~(arm.nll_R.isfinite() & arm.kld_R.isfinite())
        if bool(bad_R.any()):
            return name, int(bad_R.int().argmax())
    return None

"""Statistics and the scales made from them, against what the vectors themselves give."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from mmq.calibrate import kv_statistics, observers
from mmq.calibrate.kv_statistics import FORMATS, VectorStatistics, candidate_scales
from mmq.calibrate.observers import clip_rate, scale_of
from mmq.kernels.reference.kv_cache import decode_rows, encode_rows

ANALYTIC = 0.05  # bound 22.4
HEADS, DIM = 3, 32


def vectors(seed: int, tokens: int = 60) -> torch.Tensor:
    """Gaussian with a few outliers, below the bound, each head of its own size."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((tokens, HEADS, DIM)) * np.array([0.5, 1.0, 2.0])[:, None]
    x[rng.random(x.shape) < 0.002] *= 8
    return torch.tensor(x.clip(-22, 22), dtype=torch.float32)


def seen_of(*parts: torch.Tensor) -> VectorStatistics:
    seen = VectorStatistics(ANALYTIC, HEADS)
    for part in parts:
        seen.observe(part)
    return seen


@pytest.fixture(scope="module")
def x():
    return vectors(1)


@pytest.fixture(scope="module")
def seen(x):
    return seen_of(x)


def true_percentile(x, share):
    """The smallest magnitude that `share` of all do not exceed."""
    ordered = np.sort(x.abs().numpy(), axis=None)
    return ordered[math.ceil(share * ordered.size * (1 - 1e-12)) - 1]


def test_amax_by_head(x, seen):
    assert seen.amax_H.tolist() == [float(x[:, h].abs().max()) for h in range(HEADS)]
    assert seen.amax == float(x.abs().max())
    assert seen.tokens == len(x)


@pytest.mark.parametrize("share", [0.5, 0.9, 0.99, 0.999, 0.9999, 1.0])
def test_percentiles_to_a_bin(x, seen, share):
    true = true_percentile(x, share)
    assert true <= seen.percentile(share) <= true * (1 + 1 / 32) * (1 + 1e-6)


def brute_error(x, format, scale):
    rows = x.flatten(0, 1)
    back = decode_rows(*encode_rows(rows, format, scale), format, scale)
    return float((rows.double() - back.double()).square().sum() / rows.double().square().sum())


@pytest.mark.parametrize("format", FORMATS)
def test_errors_and_least_error_by_brute_force(x, seen, format):
    expected = [brute_error(x, format, s) for s in candidate_scales(ANALYTIC)]
    assert seen.relative_errors(format) == pytest.approx(expected, rel=1e-6)
    best = candidate_scales(ANALYTIC)[int(np.argmin(expected))]
    assert scale_of(seen, "mse", format) == best
    assert min(expected) < 0.9 * expected[-1], "small scales saturate, so there is a choice"


def test_scales_follow_the_convention(x, seen):
    assert scale_of(seen, "max", "fp8") * 448 >= seen.amax > scale_of(seen, "max", "fp8") * 447.99
    limit = seen.percentile(0.99)
    assert scale_of(seen, "percentile", "fp8", 0.99) * 448 == pytest.approx(limit, rel=1e-6)
    assert scale_of(VectorStatistics(ANALYTIC, 1), "max", "fp8") == ANALYTIC
    zeros = VectorStatistics(ANALYTIC, 1)
    zeros.observe(torch.zeros(4, 1, DIM))
    assert {scale_of(zeros, o, "nvfp4") for o in observers.OBSERVERS} == {ANALYTIC}


@pytest.mark.parametrize("format, reach", [("fp8", 448), ("nvfp4", 2688)])
def test_clip_rate_to_a_bin(x, seen, format, reach):
    scale = 2.0 / reach
    above = float((x.abs() > 2.0).double().mean())
    surely = float((x.abs() >= 2.0 * (1 + 1 / 32)).double().mean())
    assert surely <= clip_rate(seen, scale, format) <= above
    assert surely > 0.02
    assert clip_rate(seen, scale_of(seen, "max", "fp8"), format) == 0


@pytest.mark.parametrize("cuts", [[20], [1, 2, 59], [30, 31]])
def test_windows_may_be_split_and_merged(x, seen, cuts):
    parts = torch.tensor_split(x, cuts)
    merged = VectorStatistics(ANALYTIC, HEADS)
    for part in reversed(parts):
        merged.merge(seen_of(part))
    assert merged.as_json() == seen_of(*parts).as_json() == seen.as_json()


def test_json_and_back(seen):
    again = VectorStatistics.from_json(json.loads(json.dumps(seen.as_json())))
    assert again.as_json() == seen.as_json()
    assert again.relative_errors("fp8").tolist() == seen.relative_errors("fp8").tolist()


def test_other_models_do_not_merge(seen):
    for other in (VectorStatistics(ANALYTIC * 1.01, HEADS), VectorStatistics(ANALYTIC, 1)):
        with pytest.raises(ValueError, match="analytic"):
            seen.merge(other)


def _set(key, value):
    return lambda data: data.update({key: value})


DAMAGE = {
    "no histogram": lambda d: d.pop("histogram"),
    "a head without histogram": lambda d: d["histogram"].pop(),
    "bin out of range": lambda d: d["histogram"][0].append([1 << 20, 1]),
    "bin below zero": lambda d: d["histogram"][0].append([-1, DIM]),
    "negative count": lambda d: d["histogram"][0][0].__setitem__(1, -3),
    "count of no whole tokens": lambda d: d["histogram"][0].append([0, 1]),
    "NaN amax": lambda d: d["amax"].__setitem__(0, math.nan),
    "infinite amax": lambda d: d["amax"].__setitem__(0, math.inf),
    "NaN analytic": _set("analytic", math.nan),
    "zero analytic": _set("analytic", 0),
    "infinite tokens": _set("tokens", math.inf),
    "negative tokens": _set("tokens", -1),
    "sums of another length": lambda d: d["errors"]["fp8"][0].pop(),
    "negative sums": lambda d: d["signal"][0].__setitem__(0, -1),
    "a format missing": lambda d: d["errors"].pop("nvfp4"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_statistics(seen, name):
    data = seen.as_json()
    DAMAGE[name](data)
    with pytest.raises((ValueError, KeyError, TypeError, OverflowError)):
        VectorStatistics.from_json(data)


def heads_pooled(patch):
    right = VectorStatistics.observe

    def observe(self, x_THD):
        right(self, x_THD)
        self.amax_H[:] = self.amax_H.max()

    patch.setattr(VectorStatistics, "observe", observe)


def negatives_dropped(patch):
    right = VectorStatistics.observe
    patch.setattr(VectorStatistics, "observe", lambda self, x: right(self, x.clamp(min=0)))


def bins_too_wide(patch):
    patch.setattr(kv_statistics, "_SHIFT", 21)


def lower_edge(patch):
    right = VectorStatistics.percentile

    def percentile(self, share):
        return right(self, share) / (1 + 1 / 16)

    patch.setattr(VectorStatistics, "percentile", percentile)


def wrong_format(patch):
    right = kv_statistics.encode_rows
    swapped = {"fp8": "bf16", "nvfp4": "nvfp4"}
    patch.setattr(kv_statistics, "encode_rows", lambda x, f, s: right(x, swapped[f], s))
    decode = kv_statistics.decode_rows
    patch.setattr(kv_statistics, "decode_rows", lambda d, b, f, s: decode(d, b, swapped[f], s))


def off_by_one_bin(patch):
    right = VectorStatistics.share_above
    patch.setattr(
        VectorStatistics, "share_above", lambda self, limit: right(self, limit / (1 + 1 / 16))
    )


def no_block_headroom(patch):
    patch.setattr(observers, "E4M3_MAX", 448.0 / 6)


def last_window_only(patch):
    right = VectorStatistics.merge

    def merge(self, other):
        right(self, other)
        self.tokens = other.tokens

    patch.setattr(VectorStatistics, "merge", merge)


MISTAKES = [
    heads_pooled, negatives_dropped, bins_too_wide, lower_edge, wrong_format, off_by_one_bin,
    no_block_headroom, last_window_only,
]  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_seen(x, monkeypatch, mistake):
    mistake(monkeypatch)
    wrong = seen_of(x)
    checks = [
        lambda: test_amax_by_head(x, wrong),
        *(lambda s=s: test_percentiles_to_a_bin(x, wrong, s) for s in (0.9, 0.999)),
        *(lambda f=f: test_errors_and_least_error_by_brute_force(x, wrong, f) for f in FORMATS),
        lambda: test_clip_rate_to_a_bin(x, wrong, "fp8", 448),
        lambda: test_clip_rate_to_a_bin(x, wrong, "nvfp4", 2688),
        lambda: test_windows_may_be_split_and_merged(x, wrong, [20]),
    ]

    def fails(check):
        try:
            check()
        except AssertionError:
            return True
        return False

    assert any(fails(check) for check in checks)

"""Scores streamed over the vocabulary, and figures with their errors, against plain definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from mmq.verify.logits import metrics
from mmq.verify.logits.arms import Arm
from mmq.verify.logits.head import ArmScores, _Running, _scores
from mmq.verify.logits.tokens import TokenSet, Window


def streamed(logits_by_arm, targets, run):
    """Scores of given logits [R, V], fed `run` columns at a time."""
    arms = [Arm(name, "candidate") for name in logits_by_arm]
    running = {arm.name: _Running(len(targets)) for arm in arms}
    vocab = next(iter(logits_by_arm.values())).shape[1]
    source = arms[0].name
    for first in range(0, vocab, run):
        for span in (slice(0, 3), slice(3, None)):
            parts = {n: x[span, first : first + run] for n, x in logits_by_arm.items()}
            for name, own in running.items():
                own.extend(span, parts[name], first, targets[span], running[source], parts[source])
    return _scores(running, arms)


@pytest.mark.parametrize("run", [1, 7, 64, 1000])
def test_scores_equal_their_definition(run):
    """Rising maxima, a target in every run, ties, a distribution that is almost one token."""
    rng = torch.Generator().manual_seed(1)
    a = torch.randn(9, 100, generator=rng) * 4
    a[1] += torch.arange(100) * 0.5
    a[2] -= torch.arange(100) * 0.5
    a[3, 17] += 60
    b = a + torch.randn(9, 100, generator=rng) * 0.3
    targets = torch.tensor([0, 99, 50, 17, 3, 64, 63, 7, 6])
    found = streamed({"source": a, "weights": b}, targets, run)
    p, q = (x.double().log_softmax(1) for x in (a, b))
    rows = torch.arange(9)
    torch.testing.assert_close(found["source"].nll_R, -p[rows, targets], atol=1e-5, rtol=1e-6)
    torch.testing.assert_close(found["weights"].nll_R, -q[rows, targets], atol=1e-5, rtol=1e-6)
    kld = (p.exp() * (p - q)).sum(1)
    torch.testing.assert_close(found["weights"].kld_R, kld, atol=1e-6, rtol=1e-5)
    assert found["source"].kld_R.abs().max() == 0
    assert found["weights"].top_R5.tolist() == b.topk(5, dim=1).indices.tolist()


def test_equal_logits_have_no_divergence():
    a = torch.randn(5, 50, generator=torch.Generator().manual_seed(2)) * 10
    found = streamed({"source": a, "weights": a.clone()}, torch.arange(5), 16)
    assert found["weights"].kld_R.abs().max() < 1e-12
    assert torch.equal(found["weights"].nll_R, found["source"].nll_R)


def token_set(lengths, files=None):
    firsts = np.cumsum([0, *lengths[:-1]])
    files = files or [0] * len(lengths)
    windows = tuple(Window(f, int(s), n) for f, s, n in zip(files, firsts, lengths, strict=True))
    names = tuple(f"text{i}" for i in range(max(files) + 1))
    return TokenSet(np.zeros(sum(lengths), np.int32), windows, names, {})


def scores(nll, kld=None, top=None):
    nll = torch.as_tensor(nll, dtype=torch.float64)
    kld = torch.zeros_like(nll) if kld is None else torch.as_tensor(kld, dtype=torch.float64)
    top = torch.arange(5).expand(len(nll), 5) if top is None else torch.as_tensor(top)
    return ArmScores(nll, kld, top)


def test_perplexity_weighs_tokens_not_windows():
    """Windows of 1,000 and 5 scored tokens: the mean of window means would be 2.5 nats."""
    tokens = token_set([1001, 6])
    nll = torch.cat([torch.full((1000,), 2.0), torch.full((5,), 3.0)]).double()
    clusters = metrics.window_clusters(tokens)
    expected = math.exp((2000 + 15) / 1005)
    assert metrics.perplexity(nll, clusters).value == pytest.approx(expected, rel=1e-12)


def test_the_error_of_a_mean_covers_the_truth():
    """Tokens that share their window's level: errors from tokens alone are far too small."""
    rng = np.random.default_rng(3)
    inside = {"windows": 0, "tokens": 0}
    for _ in range(300):
        level = rng.standard_normal(40)
        values = torch.from_numpy((level[:, None] + rng.standard_normal((40, 30))).ravel())
        clusters = metrics.Clusters(torch.arange(40).repeat_interleave(30))
        mean = clusters.mean(values)
        inside["windows"] += abs(mean.value) < 2 * mean.se
        inside["tokens"] += abs(mean.value) < 2 * values.std().item() / math.sqrt(len(values))
    assert 0.90 < inside["windows"] / 300 < 0.99
    assert inside["tokens"] / 300 < 0.6


def test_windows_of_different_lengths_are_a_ratio_of_sums():
    clusters = metrics.Clusters(torch.tensor([0, 0, 0, 1]))
    values = torch.tensor([1.0, 2.0, 3.0, 8.0], dtype=torch.float64)
    mean = 14 / 4
    sums = [6 - 3 * mean, 8 - mean]
    expected = math.sqrt(2 / 1 * sum(s * s for s in sums)) / 4
    assert clusters.mean(values).value == pytest.approx(mean)
    assert clusters.mean(values).se == pytest.approx(expected)


def test_a_single_window_is_judged_by_its_tokens():
    values = torch.tensor([1.0, 2.0, 3.0, 6.0])
    measure = metrics.Clusters(torch.zeros(4, dtype=torch.int64)).mean(values)
    assert measure.se == pytest.approx(values.std().item() / 2)


def test_quantiles_and_their_errors():
    rng = np.random.default_rng(4)
    values = torch.from_numpy(rng.exponential(size=20_000))
    clusters = metrics.Clusters(torch.arange(100).repeat_interleave(200))
    for share in (0.5, 0.9, 0.99):
        measure = clusters.quantile(values, share)
        truth = -math.log(1 - share)
        theory = math.sqrt(share * (1 - share) / 20_000) / (1 - share)
        assert abs(measure.value - truth) < 4 * theory
        assert measure.se == pytest.approx(theory, rel=0.5)
    assert clusters.quantile(values, 1.0).value == values.max()


def test_figures_of_a_hand_made_pair():
    """The arm is worse by .1 nats on one token of four, and its best two are swapped there."""
    tokens = token_set([3, 3])
    clusters = metrics.window_clusters(tokens)
    source = scores([1.0, 1.0, 1.0, 1.0])
    top = [[0, 1, 2, 3, 4]] * 3 + [[1, 0, 2, 3, 9]]
    arm = scores([1.0, 1.0, 1.0, 1.1], kld=[0.0, 0.0, 0.0, 0.04], top=top)
    found = metrics.figures(arm, source, clusters)
    assert found.ln_ratio.value == pytest.approx(0.025)
    assert found.delta_ppl_percent.value == pytest.approx(100 * (math.exp(0.025) - 1))
    assert found.kld_mean.value == pytest.approx(0.01)
    assert found.kld_max.value == 0.04 and found.kld_max.se is None
    assert found.top1.value == 0.75
    assert found.top5.value == pytest.approx((3 + 0.8) / 4)
    drop = math.exp(-1.1) - math.exp(-1.0)
    assert found.delta_p_mean.value == pytest.approx(drop / 4)
    assert found.delta_p_rms.value == pytest.approx(abs(drop) / 2)


def test_each_text_by_itself():
    """One text collapses: the mean over all hides it, its own figures do not."""
    tokens = token_set([91, 11], files=[0, 1])
    nll = torch.cat([torch.full((90,), 1.0), torch.full((10,), 1.0)]).double()
    worse = nll.clone()
    worse[90:] += 2
    clusters = metrics.window_clusters(tokens)
    found = metrics.by_file(scores(worse), scores(nll), tokens, clusters)
    assert found["text0"].ln_ratio.value == pytest.approx(0)
    assert found["text1"].ln_ratio.value == pytest.approx(2)


def test_positions_fall_into_bins_of_their_own():
    tokens = token_set([33, 17])
    kld = torch.cat([torch.arange(32), torch.arange(16)]).double()
    bins = metrics.by_position(scores(torch.zeros(48), kld=kld), scores(torch.zeros(48)), tokens)
    assert len(bins) == 16 and (bins[0].first, bins[-1].last) == (1, 32)
    assert sum(b.tokens for b in bins) == 48
    assert bins[0].kld_mean == pytest.approx(0.5)  # positions 1 and 2 of both windows
    assert bins[15].tokens == 2


def test_nonfinite_scores_are_named():
    good = scores([1.0, 2.0])
    assert metrics.first_nonfinite({"source": good}) is None
    assert metrics.first_nonfinite({"source": good, "kv": scores([1.0, math.nan])}) == ("kv", 1)
    assert metrics.first_nonfinite({"kv": scores([1.0, 1.0], kld=[math.inf, 0])}) == ("kv", 0)

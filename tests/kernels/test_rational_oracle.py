"""The kernels against exact rational arithmetic on more than 10,000 blocks."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import rational_oracle as oracle
import sample_blocks

from mmq.kernels import ops
from mmq.quantize.global_scale import nvfp4_global_scale

#: Of sums of sixteen F32 squares: each is rounded once, and once more with a weight, and takes part
#: in four rounded additions: 6 · 2^−24, and as much for the sum it is compared with.
TOLERANCE = Fraction(12, 2**24)


def nibbles(packed):
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)


def as_bf16(values):
    return (values.view(np.uint32) & 0xFFFF0000).view(np.float32)


def sample(count, seed):
    """BF16 numbers of all kinds, F32 [n, 16]."""
    share = -(-count // len(sample_blocks.DISTRIBUTIONS))
    blocks = [make(share, seed) for make in sample_blocks.DISTRIBUTIONS]
    return as_bf16(np.concatenate(blocks)[:count])


def fractions(numbers):
    return [Fraction(float(x)) for x in numbers]


@pytest.mark.parametrize("s2", [2.0**-11, 1 / 2688, 19 / 16 * 2.0**-10])
def test_max_scaling(s2):
    """Ties included: with s2 a power of two, BF16 numbers lie on midpoints all the time."""
    s2 = np.float32(s2)
    blocks = sample(3_500, seed=21)
    out = ops.quantize_nvfp4_from_float(blocks, "F32", s2)
    exact = Fraction(float(s2))
    ties = 0
    for block, code, codes in zip(blocks, out.scale[:, 0], nibbles(out.packed), strict=True):
        numbers = fractions(block)
        assert code == oracle.max_code(numbers, exact)
        assert codes.tolist() == oracle.elements(numbers, int(code), exact)
        step = oracle.f32(oracle.e4m3(int(code)) * exact)
        ties += sum(abs(x) / step in oracle.MIDPOINTS for x in numbers)
    assert ties > 100 or s2 != 2.0**-11


def check_search(blocks, weights=None):
    """Every chosen code is one of least exact error; where that is one code, it is that code."""
    s2 = nvfp4_global_scale(np.abs(blocks).max(), "mse")
    out = ops.quantize_nvfp4_from_float(blocks, "F32", s2, search="mse", importance=weights)
    exact = Fraction(float(s2))
    # F32 weights of at least 2^−10 as whole numbers.
    counts = [1] * 16 if weights is None else [int(w * 2**40) for w in fractions(weights)]
    undecided = 0
    for block, code, codes in zip(blocks, out.scale[:, 0], nibbles(out.packed), strict=True):
        numbers = fractions(block)
        allowed = oracle.best_codes(numbers, exact, TOLERANCE, counts)
        assert code in allowed
        if len(allowed) > 1:
            undecided += 1
            exactly = oracle.best_codes(numbers, exact, 0, counts)
            if exactly == allowed and weights is None and len(set(map(abs, numbers)) - {0}) == 1:
                # One magnitude: the errors are equal sums of equal squares, and the rule decides.
                first = oracle.max_code(numbers, exact)
                assert code == min(allowed, key=lambda k: (abs(k - first), k))
        assert codes.tolist() == oracle.elements(numbers, int(code), exact)
    return undecided


def test_search():
    """3,000 blocks here, 10,000 in the slow test; few leave a choice, and those by design."""
    blocks = sample(3_000, seed=22)
    assert check_search(blocks) < 0.1 * len(blocks)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(23, 28))
def test_search_on_ten_thousand_blocks(seed):
    check_search(sample(2_000, seed))


def test_search_with_importance():
    blocks = sample(300, seed=28)
    weights = np.random.default_rng(28).lognormal(0, 2, 16).astype(np.float32)
    weights[5] = 0
    check_search(blocks, weights)


def test_quotients_are_midpoints_or_far_from_them():
    """As the oracle supposes: none within 2^−20 of a midpoint, where F32's rounding could matter.

    And with E4M3 numbers none is a midpoint: 19 is a prime, and their significands end at 15.
    """
    midpoints = np.array([float(m) for m in oracle.MIDPOINTS])
    bounds = (np.arange(8, 16)[:, None] * 19 / 16 * midpoints).reshape(1, -1)
    for significands in (np.arange(128, 256), np.arange(8, 16)):
        numbers = significands * 2.0 ** np.arange(-8, 8)[:, None]
        distance = np.abs(numbers.reshape(-1, 1) / bounds - 1)
        assert distance[distance > 0].min() > 2.0**-20
    assert distance.min() > 0

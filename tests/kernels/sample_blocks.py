"""Blocks of weights for the scale search: four distributions, and blocks meant to mislead it.

Each function takes a number of blocks and a seed, and gives F32 [n, 16] whose largest magnitude is
about 1, so that block scales use the upper codes as in a real tensor.
"""

from __future__ import annotations

import numpy as np

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
MIDPOINTS = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])


def gaussian(count, seed):
    return _scaled(np.random.default_rng(seed).standard_normal((count, 16)))


def lognormal_rows_with_outliers(count, seed):
    rng = np.random.default_rng(seed)
    blocks = (
        rng.standard_normal((count, 16))
        * np.repeat(rng.lognormal(0, 0.6, count // 8 + 1), 8)[:count, None]
    )
    blocks[rng.random((count, 16)) < 0.002] *= 12
    return _scaled(blocks)


def student_t4(count, seed):
    return _scaled(np.random.default_rng(seed).standard_t(4, (count, 16)))


def laplace(count, seed):
    return _scaled(np.random.default_rng(seed).laplace(size=(count, 16)))


def adversarial(count, seed):
    """Ties, exact fits, saturation, constants, single elements, wide ranges; in equal parts."""
    rng = np.random.default_rng(seed)
    makers = [_exact_fits, _ties, _around_seven, _few_levels, _sparse, _decaying, _far_below]
    share = -(-count // len(makers))
    blocks = np.concatenate([maker(share, rng) for maker in makers])
    return rng.permutation(blocks)[:count].astype(np.float32)


DISTRIBUTIONS = [gaussian, lognormal_rows_with_outliers, student_t4, laplace, adversarial]


def _scaled(blocks):
    return (blocks / np.abs(blocks).max()).astype(np.float32)


def _steps(count, rng):
    """Steps e4m3 · 19/16 · 2^n over four octaves, F64 [count, 1]: what the search tries."""
    return (rng.integers(8, 16, count) * 19 / 16 * np.exp2(rng.integers(-12, -8, count)))[:, None]


def _signs(shape, rng):
    return rng.choice([-1.0, 1.0], shape)


def _exact_fits(count, rng):
    """Multiples of one step: its error is 0, and that of half or twice the step may be 0 too."""
    levels = rng.choice(E2M1, (count, 16)) * _signs((count, 16), rng)
    return levels * _steps(count, rng)


def _ties(count, rng):
    """Midpoints of one step, some an F32 ulp off."""
    x = rng.choice(MIDPOINTS, (count, 16)) * _signs((count, 16), rng) * _steps(count, rng)
    return x * (1 + rng.choice([0, 0, 2.0**-23, -(2.0**-23)], (count, 16)))


def _around_seven(count, rng):
    """The largest element between 6 and 8 steps, the others at levels that smaller steps miss."""
    blocks = rng.choice([0.5, 1.5, 1.5, 3, 4, 4, 6, 6], (count, 16)) * _signs((count, 16), rng)
    blocks[:, 0] = rng.uniform(5.9, 8.1, count)
    return blocks * _steps(count, rng)


def _few_levels(count, rng):
    """One, two or three magnitudes in a block."""
    values = rng.uniform(0.01, 1, (count, 3))
    picks = rng.integers(0, 3, (count, 16)) % rng.integers(1, 4, count)[:, None]
    return np.take_along_axis(values, picks, axis=1) * _signs((count, 16), rng) / 2


def _sparse(count, rng):
    """Zero but for one to three elements, −0 among the zeros."""
    blocks = rng.standard_normal((count, 16)) * 0.1
    keep = rng.random((count, 16)).argsort(axis=1) < rng.integers(1, 4, count)[:, None]
    return np.where(keep, blocks, -0.0)


def _decaying(count, rng):
    """Each element a power smaller than the last: everything from 1 to far below a step."""
    ratios = rng.uniform(0.2, 0.95, (count, 1)) ** np.arange(16)
    return rng.permuted(ratios * _signs((count, 16), rng), axis=1) * rng.uniform(0.1, 1, (count, 1))


def _far_below(count, rng):
    """Blocks 2^−8 to 2^−24 below the tensor's largest: small and subnormal scales, or none."""
    return rng.standard_normal((count, 16)) * np.exp2(rng.uniform(-24, -8, (count, 1)))


#: A global scale of the search's rule, for blocks whose largest element is about 1.
S2 = 19 / 16 * 2.0**-10


def near_ties(count, seed):
    """Blocks in which two scales under S2 leave the same error, but for the last bits of F32.

    One element is moved to where the exact errors meet: between two codes they differ linearly in
    an element as long as its E2M1 levels stay. What is chosen then hangs on every rounding.
    """
    rng = np.random.default_rng(seed)
    x = np.abs(rng.standard_normal((8 * count, 16))) * rng.uniform(0.1, 0.3, (8 * count, 1))
    steps = _e4m3(np.arange(8, 127)) * S2
    errors, products = _errors(x, steps)
    best, second = np.argsort(errors, axis=1)[:, :2].T
    rows = np.arange(len(x))
    gap = products[rows, second] - products[rows, best]
    column = np.abs(gap).argmax(axis=1)
    # The gap is 0 where both codes store the same values: those blocks are dropped below.
    shift = (errors[rows, second] - errors[rows, best]) / np.where(gap == 0, 1, 2 * gap)[
        rows, column
    ]
    moved = x.copy()
    moved[rows, column] += shift
    moved = np.abs(moved).astype(np.float32)
    after, _ = _errors(moved.astype(np.float64), steps)
    least = after.min(axis=1)
    tied = (after[rows, best] < least * (1 + 1e-6)) & (after[rows, second] < least * (1 + 1e-6))
    return (moved * _signs(moved.shape, rng).astype(np.float32))[tied][:count]


def _e4m3(code):
    return np.ldexp(8.0 + (code & 7), (code >> 3) - 10)


def _errors(x, steps):
    """Exact errors F64 [n, steps] and the stored values F64 [n, steps, 16] of |x|."""
    quotient = x[:, None, :] / steps[:, None]
    products = E2M1[np.searchsorted(MIDPOINTS, quotient)] * steps[:, None]
    return ((x[:, None, :] - products) ** 2).sum(axis=-1), products

"""Sums that no order, split or merge changes."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmq.calibrate.exact_sums import ExactSums

STEP = Fraction(1, 1 << 40)
values = st.lists(
    st.one_of(st.floats(0, 4), st.floats(0, 1e9), st.floats(0, 1e-9), st.just(2.0**-41)),
    min_size=1, max_size=40,
)  # fmt: skip


def rounded(value: float) -> Fraction:
    """To a multiple of 2^-40, ties to even."""
    return round(Fraction(value) / STEP) * STEP


def exact(sums: ExactSums) -> Fraction:
    return int(sums.whole[0]) + int(sums.fraction[0]) * STEP


def summed(numbers):
    sums = ExactSums.zeros(1)
    sums.add(torch.tensor(numbers, dtype=torch.float64)[:, None])
    return sums


@given(values)
def test_it_is_the_sum(numbers):
    sums = summed(numbers)
    assert exact(sums) == sum(map(rounded, numbers))
    assert sums.totals()[0] == pytest.approx(float(exact(sums)), rel=1e-15)
    sums.check()


@given(values, st.data())
def test_no_order_split_or_merge_changes_a_bit(numbers, data):
    whole = summed(numbers)
    shuffled = data.draw(st.permutations(numbers))
    cut = data.draw(st.integers(0, len(numbers)))
    parts = [p for p in (shuffled[:cut], shuffled[cut:]) if p]
    merged = ExactSums.zeros(1)
    for part in parts:
        merged.merge(summed(part))
    assert (merged.whole, merged.fraction) == (whole.whole, whole.fraction)


def test_the_examples():
    def form(numbers):
        sums = summed(numbers)
        return int(sums.whole[0]), int(sums.fraction[0])

    assert form([1.5]) == (1, 1 << 39)
    assert form([2.0**-41]) == (0, 0)
    assert form([1.5, 0.75]) == (2, 1 << 38)
    assert summed([1.5, 0.75]).totals()[0] == 2.25
    assert form([1e300, 1.0]) == ((1 << 40) + 1, 0)


def test_many_rows_do_not_overflow():
    sums = ExactSums.zeros(1)
    block = torch.full((1 << 20, 1), 2.0**40 - 2.0**-12, dtype=torch.float64)
    for _ in range(4):
        sums.add(block)
    assert exact(sums) == (1 << 22) * Fraction(2.0**40 - 2.0**-12)


def test_a_row_of_many(tmp_path):
    sums = ExactSums.zeros(3, 2)
    sums.add(torch.tensor([[1.0, 0.5], [2.0, 0.25]]), row=1)
    assert sums.totals().tolist() == [[0, 0], [3, 0.75], [0, 0]]


def test_plain_sums_depend_on_the_order():
    """What would be seen if floats were added: the check above can fail."""
    numbers = [1e9, 1e-7, 1e-7, 1e-7, 3e-7]
    forward, backward = np.float64(0), np.float64(0)
    for a, b in zip(numbers, reversed(numbers), strict=True):
        forward, backward = forward + a, backward + b
    assert forward != backward
    assert exact(summed(numbers)) == exact(summed(numbers[::-1]))


@pytest.mark.parametrize("whole, fraction", [(-1, 0), (0, -1), (0, 1 << 40)])
def test_what_are_no_sums(whole, fraction):
    sums = ExactSums(np.array([whole], np.int64), np.array([fraction], np.int64))
    with pytest.raises(ValueError, match="range"):
        sums.check()

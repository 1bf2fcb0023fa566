"""The tables: what they hold, against the definition, and that nobody can spoil them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mmq.kernels import tables
from mmq.kernels.reference import nvfp4, scale_search
from mmq.kernels.reference.e4m3 import decode_e4m3

C = 19 / 16


def test_docstring_example():
    row = tables.max_table(1.0)[0x30]
    assert row[7] - tables.CODE_BIAS == 0x1B
    assert row[:7].tolist() == [0x0B, 0x18, 0x1D, 0x21, 0x25, 0x29, 0x2D]
    levels = (np.array([0x30, 0x18, 0x20, 0x00])[:, None] > row[:7]).sum(axis=1)
    assert levels.tolist() == [7, 1, 3, 0]


@pytest.mark.parametrize(
    ("s2", "expected"),
    [(19 / 16 * 2.0**-14, (C, 14)), (2.0**-7, (1, 7)), (1, (1, 0)), (3, (1.5, -1))],
)
def test_split_scale(s2, expected):
    assert tables.split_scale(np.float32(s2)) == expected


def test_which_scales_have_tables():
    assert tables.is_searchable(np.float32(C * 2.0**-20))
    assert tables.is_searchable(np.float32(1 + 2.0**-17))
    assert not tables.is_searchable(np.float32(1 + 2.0**-18))
    assert tables.is_regular(np.float32(1 + 2.0**-23))
    assert not tables.is_regular(np.float32(2.0**-101))
    assert not tables.is_searchable(np.float32(2.0**101))


@pytest.mark.parametrize("c", [1.0, C, 1.9999998807907104])
def test_first_codes_are_the_max_codes(c):
    """Wherever the rule, with its clamps, gives a code from 8 to 126."""
    values = decode_e4m3(torch.arange(1, 127, dtype=torch.uint8))
    first = tables.max_table(c)[1:127, 7].astype(int) - tables.CODE_BIAS
    checked = 0
    for shift in range(-20, 20):
        blocks = torch.zeros(126, 16)
        blocks[:, 3] = values * 2.0**shift
        by_rule = nvfp4.max_scale(blocks, torch.tensor(c, dtype=torch.float32))[:, 0].numpy()
        regular = (first + 8 * shift >= 8) & (first + 8 * shift <= 126)
        np.testing.assert_array_equal(by_rule[regular], (first + 8 * shift)[regular])
        checked += regular.sum()
    assert checked > 1500


def test_errors_are_those_of_the_definition():
    """For every largest code, |code| and candidate that is left: one element alone in a block."""
    errors, _ = tables.search_tables(C)
    s2 = torch.tensor(C, dtype=torch.float32)
    values = decode_e4m3(torch.arange(127, dtype=torch.uint8))
    first = tables.max_table(C)[:, 7].astype(int) - tables.CODE_BIAS
    compared = 0
    for lane, offset in enumerate(tables.CANDIDATES):
        for largest in range(100, 127):  # elsewhere candidates would be no E4M3 codes at shift 0
            if not np.isfinite(errors[largest, 0, lane]):
                continue
            code = torch.full((1, largest + 1), first[largest] + offset, dtype=torch.uint8)
            blocks = torch.zeros(1, largest + 1, 16)
            blocks[0, :, 0] = values[: largest + 1]
            expected = scale_search.block_errors(blocks, code, s2, None)[0].numpy()
            np.testing.assert_array_equal(errors[largest, : largest + 1, lane], expected)
            compared += 1
    assert compared > 250


def test_no_code_outside_e4m3_can_win():
    """Of regular blocks, whose `max` codes end at 120: candidate 127 would be NaN."""
    errors, rows = tables.search_tables(C)
    first = rows[:, 0, 7].astype(int)
    mantissa_zero = (first - tables.CODE_BIAS) % 8 == 0
    assert np.isinf(errors[mantissa_zero][1:, :, tables.CANDIDATES.index(7)]).all()
    assert tables.REGULAR_SEARCH[1] + 6 == tables.REGULAR_MAX[1] == 126
    assert tables.REGULAR_SEARCH[0] + min(tables.CANDIDATES) == tables.REGULAR_MAX[0] == 8


def test_candidates_are_in_the_order_that_breaks_ties():
    by_rule = sorted(tables.CANDIDATES, key=lambda offset: (abs(offset), offset))
    assert list(tables.CANDIDATES) == by_rule
    assert set(tables.CANDIDATES) == set(range(-4, 8))


def test_tables_are_shared_and_cannot_be_written():
    errors, rows = tables.search_tables(C)
    assert tables.search_tables(C)[0] is errors
    assert errors.ctypes.data % 64 == 0
    for table in (errors, rows, tables.max_table(C)):
        with pytest.raises(ValueError, match="read-only"):
            table[0] = 0

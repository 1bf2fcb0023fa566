"""SQNR by layer and projection, and the histogram, from the rows of tensors.csv."""

from __future__ import annotations

import math

import pytest

from mmq.convert.quality_map import by_module, format_sizes, histogram
from mmq.convert.task_context import TensorRow
from mmq.report.tables import SizeRow

NAME = "language_model.model.layers.{}.block_sparse_moe.experts.{}.{}.weight"


def row(name: str, signal: float, noise: float, action: str = "quantize") -> TensorRow:
    return TensorRow(name, action, "F8_E4M3", "U8", (1, 1), 1, 1, 1.0, signal, noise)


def test_experts_of_a_layer_are_taken_together():
    rows = [
        row(NAME.format(3, 0, "w1"), 100.0, 1.0), row(NAME.format(3, 7, "w1"), 100.0, 3.0),
        row(NAME.format(3, 0, "w2"), 10.0, 1.0), row(NAME.format(4, 0, "w1"), 1000.0, 1.0),
        row("language_model.lm_head.weight", 1000.0, 10.0),
    ]  # fmt: skip
    found = {(m.layer, m.module): m for m in by_module(rows)}
    assert set(found) == {(3, "routed_experts w1"), (3, "routed_experts w2"),
                          (4, "routed_experts w1"), (None, "lm_head lm_head")}  # fmt: skip
    both = found[3, "routed_experts w1"]
    assert both.tensors == 2
    assert both.sqnr_db == pytest.approx(10 * math.log10(200 / 4), abs=1e-3)
    assert both.worst_tensor_sqnr_db == pytest.approx(10 * math.log10(100 / 3), abs=1e-3)


@pytest.mark.parametrize(
    "left_out",
    [row("a.weight", 1.0, 1.0, "copy"), row("a.weight", 0.0, 0.0), row("a.weight", 1.0, 0.0)],
    ids=["copied", "zero", "exact"],
)
def test_what_has_no_error_has_no_place(left_out):
    assert by_module([left_out]) == [] and histogram([left_out]) is None


@pytest.mark.parametrize("spread", [0.0, 0.003, 0.3, 4.0, 70.0, 900.0])
def test_the_histogram_counts_every_tensor_once(spread):
    decibels = [20 + spread * n / 99 for n in range(100)]
    found = histogram([row(NAME.format(1, n, "w1"), 10 ** (d / 10), 1.0)
                       for n, d in enumerate(decibels)])  # fmt: skip
    assert found is not None and sum(found.counts) == 100
    assert len(found.edges) == len(found.counts) + 1 <= 41
    assert found.counts[0] and found.counts[-1], "no empty bin at either end"
    edges = zip(found.edges, found.edges[1:], found.counts, strict=False)
    for low, high, count in edges:
        inside = sum(low - 1e-9 <= d < high - 1e-9 for d in decibels)
        assert abs(inside - count) <= 1, "rounding at an edge moves one tensor at most"


def test_sizes_by_format():
    before = [
        SizeRow("routed_experts", "MXFP8", "F8_E4M3", 2, 96),
        SizeRow("routed_experts", "MXFP8", "U8", 2, 4),
        SizeRow("norms", "BF16", "BF16", 1, 8),
    ]
    after = [
        SizeRow("norms", "BF16", "BF16", 1, 8),
        SizeRow("routed_experts", "NVFP4", "U8", 2, 50),
    ]
    assert [(s.component, s.format, s.before_bytes, s.after_bytes)
            for s in format_sizes(before, after)] == [
        ("routed_experts", "MXFP8", 100, 0), ("routed_experts", "NVFP4", 0, 50),
        ("norms", "BF16", 8, 8),
    ]  # fmt: skip

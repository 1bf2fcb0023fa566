"""Every operation agrees with its reference, and a kernel that does not is seen."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("triton", reason="needs triton, which has wheels for Linux only")

import parity_faults

from mmq.verify.kernels import worker
from mmq.verify.kernels.compare import exactly, within
from mmq.verify.kernels.operations import OPERATIONS, attention_op, projection_op

FAULTS = parity_faults.FAULTS
#: What other tests run too, and what takes the interpreter longest.
LONG = {
    attention_op("prefill", "nvfp4"), attention_op("dense", "nvfp4"),
    attention_op("dense", "nvfp4 staged"), projection_op("bf16"),
}  # fmt: skip


@pytest.mark.parametrize(
    "op", [pytest.param(op, marks=pytest.mark.slow) if op in LONG else op for op in OPERATIONS]
)
def test_operation_is_what_its_reference_is(interpreting, op):
    outcome = interpreting.call(worker.run_operation, op, None, False)
    assert outcome.error is None
    assert outcome.comparisons, "nothing was compared"
    assert sum(c.values for c in outcome.comparisons) > 0
    assert [c for c in outcome.comparisons if c.ratio > 1] == []
    assert all(c.case.startswith("small: ") for c in outcome.comparisons)
    assert outcome.path in ("native", "fallback")


@pytest.mark.parametrize("fault", FAULTS)
def test_mistake_is_seen(interpreting, fault):
    wrong = interpreting.call(parity_faults.first_wrong, fault)
    assert wrong is not None
    assert wrong.values > 0


def test_every_operation_has_a_mistake():
    # One of each kind of attention is enough: they differ in the cache's format alone.
    attention = {op for op in OPERATIONS if "attention" in op}
    assert {op for op, _ in FAULTS.values()} >= set(OPERATIONS) - attention
    assert {op.split()[0] for op, _ in FAULTS.values() if op in attention} == {
        "prefill", "decode", "dense"
    }  # fmt: skip


def test_comparisons():
    """Bits, differences, and what is never right."""
    nan, inf = math.nan, math.inf
    got, expected = torch.tensor([1.0, 2, 3, 4]), torch.tensor([1.0, 2.5, 3, 4])
    case = within("x", got, expected, torch.ones(()))
    assert (case.worst, case.bound, case.ratio) == (0.5, 1.0, 0.5)
    assert within("x", got, expected, torch.tensor([9, 0.25, 9, 9])).ratio == 2
    assert within("x", got, expected, torch.zeros(())).ratio == inf
    for wrong in (nan, inf):
        bad = within("x", torch.tensor([1.0, wrong]), torch.ones(2), torch.full((2,), inf))
        assert bad.ratio == inf
        hidden = within("x", torch.tensor([wrong]), torch.tensor([-inf]), torch.tensor([-inf]))
        assert hidden.ratio == inf
    same = torch.tensor([-inf, 1.0])
    assert within("x", same, same, torch.tensor([nan, 1.0])).ratio == 0
    assert within("x", torch.ones(2), torch.ones(3), torch.ones(3)).ratio == inf
    assert exactly("x", torch.tensor([0.0, nan]), torch.tensor([-0.0, -nan])).worst == 1
    assert exactly("x", torch.ones(2), torch.ones(2).double()).ratio == inf
    assert exactly("x", torch.ones(2), torch.ones(3)).ratio == inf
    assert exactly("x", (torch.ones(2), None), (torch.ones(2), None)).ratio == 0
    with pytest.raises(ValueError, match="zip"):
        exactly("x", (torch.ones(2), None), (torch.ones(2), torch.ones(2)))

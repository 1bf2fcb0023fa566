"""All operations on one layer's weights: each kernel beside its reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from mmq.verify.kernels import operations as ops
from mmq.verify.kernels.attention_parity import attention
from mmq.verify.kernels.cache_parity import staging, write_and_read
from mmq.verify.kernels.compare import Comparison, poisoned_memory
from mmq.verify.kernels.material import Material
from mmq.verify.kernels.moe_parity import experts, routing
from mmq.verify.kernels.qkv_parity import projection
from mmq.verify.kernels.selection_parity import over_ranks, scores_and_selection
from mmq.verify.kernels.weights_parity import amax, from_mxfp8, from_nvfp4, to_mxfp8, to_nvfp4

Check = Callable[[Material], Iterator[Comparison]]

#: Operation → its check; the names, and their order, are those of `operations.OPERATIONS`.
CHECKS: dict[str, Check] = {
    ops.STAGING: staging,
    **{ops.selection_op(f): partial(scores_and_selection, format=f) for f in ops.FORMATS},
    ops.RANKS: over_ranks,
    **{
        ops.attention_op(kind, format): partial(attention, kind=kind, format=format)
        for kind in ops.ATTENTION
        for format in ops.CACHES
    },
    **{ops.write_op(f): partial(write_and_read, format=f) for f in ops.FORMATS},
    **{ops.projection_op(x): partial(projection, x_format=x) for x in ("bf16", "mxfp8")},
    ops.ROUTER: routing,
    ops.W4A16: partial(experts, activations="bf16"),
    ops.W4A4: partial(experts, activations="nvfp4"),
    ops.TO_NVFP4: to_nvfp4,
    ops.TO_MXFP8: to_mxfp8,
    ops.FROM_NVFP4: from_nvfp4,
    ops.FROM_MXFP8: from_mxfp8,
    ops.AMAX: amax,
}
#: What an operation needs of a layer, where a checkpoint may not have it.
_NEEDS = {ops.W4A16: "experts", ops.W4A4: "experts"}


def left_out(op: str, material: Material) -> str | None:
    """Why an operation cannot run on these weights; None if it can."""
    return material.reasons.get(_NEEDS.get(op, ""))


def run_check(op: str, material: Material) -> list[Comparison]:
    """All cases of one operation."""
    with poisoned_memory():
        return [
            comparison._replace(case=f"{material.name}: {comparison.case}")
            for comparison in CHECKS[op](material)
        ]

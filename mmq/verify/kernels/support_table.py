"""How each operation runs on each target, as the kernels' own modules answer.

Importing this module imports Triton; it compiles nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from mmq.kernels.kv_pages import PageLayout
from mmq.kernels.support import Support
from mmq.kernels.triton import (
    block_attention,
    block_selection,
    fp8_staging,
    kv_cache,
    moe,
    qkv_rope,
    router,
)
from mmq.kernels.triton.launch import TARGETS
from mmq.verify.kernels import operations as ops


def _attention(format: str, target: str) -> Support:
    layout = PageLayout("nvfp4" if "nvfp4" in format else format)  # type: ignore[arg-type]
    support: Support = block_attention.supports(
        target, layout, heads=64, staged=format.endswith("staged")
    )
    return support


def _scores(format: str, target: str) -> Support:
    support: Support = block_selection.supports(target, key_format=format)
    return support


def _written(format: str, target: str) -> Support:
    support: Support = kv_cache.supports(target, format)
    return support


def _projection(x: str, target: str) -> Support:
    support: Support = qkv_rope.supports(target, x, "mxfp8")
    return support


def _experts(activations: str, target: str) -> Support:
    support: Support = moe.supports(target, activations=activations)
    return support


def _integer_keys(target: str) -> Support:
    if target not in TARGETS:
        return Support("unsupported", f"never compiled for {target}")
    return Support("native", "comparisons of 64-bit integers")


def _weights(target: str) -> Support:
    """Of the kernels that convert weights, which have one form for all targets."""
    if target not in TARGETS:
        return Support("unsupported", f"never compiled for {target}")
    return Support("fallback", "integer arithmetic and IEEE F32: no target's own conversions")


#: Operation → `supports` of a target's name.
SUPPORTS: dict[str, Callable[[str], Support]] = {
    ops.STAGING: fp8_staging.supports,
    **{ops.selection_op(format): partial(_scores, format) for format in ops.FORMATS},
    ops.RANKS: _integer_keys,
    **{
        ops.attention_op(kind, format): partial(_attention, format)
        for kind in ops.ATTENTION
        for format in ops.CACHES
    },
    **{ops.write_op(format): partial(_written, format) for format in ops.FORMATS},
    **{ops.projection_op(x): partial(_projection, x) for x in ("bf16", "mxfp8")},
    ops.ROUTER: router.supports,
    ops.W4A16: partial(_experts, "bf16"),
    ops.W4A4: partial(_experts, "nvfp4"),
    **dict.fromkeys(ops.WEIGHTS, _weights),
}


class Cell(NamedTuple):
    """One operation on one target, as `mmq doctor --kernels` shows it."""

    op: str
    target: str
    path: str
    reason: str


def support_cells() -> list[Cell]:
    """All operations × targets."""
    return [Cell(op, t, *supports(t)) for op, supports in SUPPORTS.items() for t in TARGETS]

"""Mistakes planted in kernels, each of which level kernels has to see; functions travel by name."""

from __future__ import annotations

from unittest.mock import patch

import torch

from mmq.kernels.triton import (
    backend,
    block_attention,
    block_selection,
    fp8_staging,
    kv_cache,
    moe,
    qkv_rope,
    router,
    selection_ranks,
)
from mmq.kernels.triton.launch import pretended
from mmq.verify.kernels import material, worker
from mmq.verify.kernels import operations as ops
from mmq.verify.kernels.compare import poisoned_memory
from mmq.verify.kernels.geometry import SMALL
from mmq.verify.kernels.material import made_up
from mmq.verify.kernels.parity import CHECKS, run_check


def _changed(module, name, change):
    """`module.name`, with its result changed."""
    right = getattr(module, name)

    def wrong(*arguments, **options):
        return change(right(*arguments, **options))

    return patch.object(module, name, wrong)


def _first_bit(tensor):
    """The lowest bit of the first element is another."""
    tensor = tensor.clone()
    tensor.view(torch.uint8).view(-1)[:1] ^= 1
    return tensor


def _one_nan(tensor):
    return tensor.index_fill(0, torch.tensor([0]), torch.nan)


def _half_percent(tensor):
    return (tensor.float() * 1.005).to(tensor.dtype)


def _page_byte(right):
    """A write that touches a byte of a page which is nobody's."""

    def wrong(cache, *arguments):
        right(cache, *arguments)
        cache.pages_PZ[-1, -1] ^= 1

    return wrong


def _second_best(routing):
    return routing._replace(experts_TK=routing.experts_TK.flip(1))


def _bias_in_shares(routing):
    return routing._replace(shares_TK=routing.shares_TK * 1.0000002)


def _scores_off(routing):
    return routing._replace(scores_TE=routing.scores_TE + 1e-4)


def _act_off(act):
    return act._replace(act=(act.act.float() * 1.02).bfloat16())


def _scale_off(act):
    return act._replace(scale=_first_bit(act.scale))


def _arrays(change):
    """The same for results in NumPy: of the first array."""

    def changed(result):
        first, *rest = result if isinstance(result, tuple) else (result,)
        first = first.copy()
        change(first)
        return (first, *rest) if rest else first

    return changed


def _byte(array):
    array.view("u1").reshape(-1)[0] ^= 1


def _error_sum(result):
    result[2][0, 1] *= 1 + 2**-52
    return result


#: Mistake → operation that must see it, and what plants it.
FAULTS = {
    "a staged code": (ops.STAGING, lambda: _changed(fp8_staging, "stage_fp8", _first_bit)),
    "scores 0.5 % off": (
        ops.selection_op("fp8"), lambda: _changed(block_selection, "score_pages", _half_percent),
    ),
    "a score that is NaN": (
        ops.selection_op("bf16"), lambda: _changed(block_selection, "score_pages", _one_nan),
    ),
    "a selection of the next block": (
        ops.selection_op("nvfp4"), lambda: _changed(block_selection, "select_blocks", _first_bit),
    ),
    "a rank's key": (ops.RANKS, lambda: _changed(selection_ranks, "candidate_keys", _first_bit)),
    "a merge": (ops.RANKS, lambda: _changed(selection_ranks, "merge_candidates", _first_bit)),
    "attention 5 % off": (
        ops.attention_op("prefill", "bf16"),
        lambda: _changed(block_attention, "attend_pages", lambda x: x * 1.05),
    ),
    "V's scale ignored": (
        ops.attention_op("decode", "fp8"),
        lambda: patch.object(block_attention, "_tensor_scale", lambda cache, scale: 1.0),
    ),
    "a row of attention that is NaN": (
        ops.attention_op("dense", "bf16"),
        lambda: _changed(block_attention, "attend_pages", _one_nan),
    ),
    "staging left out": (
        ops.attention_op("decode", "nvfp4 staged"),
        lambda: patch.object(block_attention, "staging_path", lambda target: ""),
    ),
    "a byte outside the slots": (
        ops.write_op("bf16"),
        lambda: patch.object(kv_cache, "write_pages", _page_byte(kv_cache.write_pages)),
    ),
    "V's scales always linear": (
        ops.write_op("nvfp4"),
        lambda: _changed(kv_cache, "layout_constants", lambda c: c | {"QUADS": False}),
    ),
    "a value read back": (
        ops.write_op("fp8"),
        lambda: _changed(kv_cache, "read_pages", lambda kv: (_first_bit(kv[0]), kv[1])),
    ),
    "the row 2 % off": (
        ops.projection_op("bf16"),
        lambda: _changed(qkv_rope, "project_rows", lambda x: (x.float() * 1.02).bfloat16()),
    ),
    "a query of the fused kernel": (
        ops.projection_op("mxfp8"),
        lambda: _changed(qkv_rope, "project_and_insert", lambda q: (_first_bit(q[0]), q[1])),
    ),
    "experts in another order": (ops.ROUTER, lambda: _changed(router, "route", _second_best)),
    "shares off by an ulp": (ops.ROUTER, lambda: _changed(router, "route", _bias_in_shares)),
    "router scores 1e-4 off": (ops.ROUTER, lambda: _changed(router, "route", _scores_off)),
    "activations 2 % off": (ops.W4A16, lambda: _changed(moe, "gate_up", _act_off)),
    "a scale of the activations": (ops.W4A4, lambda: _changed(moe, "gate_up", _scale_off)),
    "outputs 0.5 % off": (ops.W4A4, lambda: _changed(moe, "down", _half_percent)),
    "the combination": (ops.W4A16, lambda: _changed(moe, "combine", _first_bit)),
    "w1 and w3 swapped": (
        ops.W4A16,
        lambda: _changed(
            moe, "stack_experts", lambda layer: layer._replace(gate=layer.up, up=layer.gate)
        ),
    ),
    "a packed code": (
        ops.TO_NVFP4, lambda: _changed(backend, "quantize_nvfp4_from_mxfp8", _arrays(_byte)),
    ),
    "an error sum": (
        ops.TO_MXFP8, lambda: _changed(backend, "quantize_mxfp8_from_f32", _error_sum),
    ),
    "an MXFP8 code": (
        ops.TO_MXFP8, lambda: _changed(backend, "quantize_mxfp8_from_f32", _arrays(_byte)),
    ),
    "a decoded BF16": (
        ops.FROM_NVFP4, lambda: _changed(backend, "dequantize_nvfp4_bf16", _arrays(_byte)),
    ),
    "a decoded F32": (
        ops.FROM_MXFP8, lambda: _changed(backend, "dequantize_mxfp8_f32", _arrays(_byte)),
    ),
    "amax": (ops.AMAX, lambda: _changed(backend, "mxfp8_amax", lambda x: x * x.dtype.type(1.5))),
}  # fmt: skip


def first_wrong(fault):
    """The first case in which a fault shows, at small sizes; None if it shows in none."""
    op, plant = FAULTS[fault]
    with plant(), pretended(worker.EMULATED), poisoned_memory():
        cases = CHECKS[op](made_up(SMALL, "small"))
        return next((case for case in cases if case.ratio > 1), None)


def run_with(fault, *arguments):
    """`run_operation` with one of the faults planted, whatever the operation."""
    with FAULTS[fault][1]():
        return worker.run_operation(*arguments)


def on_a_cut_layer(out, *operations):
    """Name of a checkpoint's layer, cut as large ones are, and all cases of some operations."""
    with patch.multiple(material, EMULATED_HIDDEN=128, EMULATED_INNER=64):
        layer = material.layer_of(out, cut=True)
        with pretended(worker.EMULATED):
            return layer.name, [case for op in operations for case in run_check(op, layer)]


def crash(*arguments):
    """`run_operation` where the router's kernel raises."""

    def broken(*arguments, **options):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with patch.object(router, "route", broken):
        return worker.run_operation(*arguments)

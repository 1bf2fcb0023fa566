"""What the interpreting process runs for the MoE tests: functions travel by name.

All memory that kernels are given to write is filled first, F32 and BF16 with NaN, bytes with 0xEE.
"""

from __future__ import annotations

from contextlib import contextmanager

import torch
import triton
import triton.language as tl

from mmq.kernels.triton import expert_gemm, moe, router
from mmq.kernels.triton.launch import pretended
from mmq.kernels.triton.small_floats import bits_of, decode_e2m1, decode_e4m3
from mmq.kernels.triton.tiles import load_tile


@contextmanager
def filled_memory():
    """torch.empty gives NaN, or 0xEE in each byte."""
    former = torch.empty

    def filled(*shape, **options):
        memory = former(*shape, **options)
        if memory.is_floating_point():
            return memory.fill_(torch.nan)
        return memory.fill_(0xEE if memory.dtype == torch.uint8 else -0x11111112)

    torch.empty = filled
    try:
        yield
    finally:
        torch.empty = former


@triton.jit
def _higher_ids_first(choice_NE, expert_E, inside_E):
    key_NE = (bits_of(choice_NE).to(tl.int64) << 16) | (0xFFFF - expert_E)[None, :].to(tl.int64)
    key_NE = tl.where(choice_NE < 0, -(1 << 61), key_NE + 2 * expert_E[None, :].to(tl.int64))
    return tl.where(inside_E[None, :], key_NE, -(1 << 62))


@triton.jit
def _signs_ignored(choice_NE, expert_E, inside_E):
    bits_NE = (bits_of(choice_NE) & 0x7FFFFFFF).to(tl.int64)
    key_NE = (bits_NE << 16) | (0xFFFF - expert_E)[None, :].to(tl.int64)
    return tl.where(inside_E[None, :], key_NE, -(1 << 62))


#: Mistakes in the router's keys.
ROUTER_FAULTS = {
    "ties to higher ids": _higher_ids_first,
    "signs ignored": _signs_ignored,
}


def run_route(hidden_TM, gate_EM, bias_E, top_k=4, fault=None):
    right = router._keys
    router._keys = ROUTER_FAULTS[fault] if fault else right
    try:
        with filled_memory():
            return tuple(router.route(hidden_TM, gate_EM, bias_E, top_k=top_k))
    finally:
        router._keys = right


def run_moe(target, x_TM, routing, experts, shared, activations="bf16", fault=None):
    """The whole layer as launched on `target`, with one of the faults if asked for."""
    owner, name, wrong = (FAULTS | NVFP4_FAULTS)[fault] if fault else (moe, "moe", moe.moe)
    right = getattr(owner, name)
    setattr(owner, name, wrong)
    try:
        with pretended(target), filled_memory():
            layer = moe.stack_experts(experts, shared)
            return moe.moe(x_TM, routing, layer, activations=activations)
    finally:
        setattr(owner, name, right)


@triton.jit
def _swiglu_unlimited(gate, up, alpha, limit, beta):
    return (up + beta) * (gate / (1.0 + tl.exp(-alpha * gate)))


@triton.jit
def _silu(gate, up, alpha, limit, beta):
    return up * (gate / (1.0 + tl.exp(-gate)))


@triton.jit
def _swapped_nibbles(packed, scale, row_R, inside_R, k, K, BK: tl.constexpr):
    R: tl.constexpr = row_R.shape[0]
    byte_RP = load_tile(packed, row_R, inside_R, k // 2, K // 2, BK // 2).to(tl.int32)
    code_RBJ = tl.join(byte_RP >> 4, byte_RP & 15).reshape(R, BK // 16, 16)
    scale_RB = load_tile(scale, row_R, inside_R, k // 16, K // 16, BK // 16).to(tl.int32)
    value_RBJ = decode_e2m1(code_RBJ) * decode_e4m3(scale_RB)[:, :, None]
    return value_RBJ.reshape(R, BK).to(tl.bfloat16)


@triton.jit
def _no_exponents(codes, exponents, row_R, inside_R, k, K, BK: tl.constexpr):
    code_RK = load_tile(codes, row_R, inside_R, k, K, BK).to(tl.int32)
    return (decode_e4m3(code_RK) * 0.00390625).to(tl.bfloat16)


def _off_by_one(experts_TK, experts, size, shared, right=moe.map_blocks):
    blocks = right(experts_TK, experts, size, shared)
    routed = (blocks.expert >= 0) & (blocks.expert < experts)
    return blocks._replace(expert=blocks.expert.where(~routed, (blocks.expert + 1) % experts))


def _last_slot_lost(experts_TK, experts, size, shared, right=moe.map_blocks):
    blocks = right(experts_TK, experts, size, shared)
    return blocks._replace(count=(blocks.count - 1).clamp(min=0))


def _unscaled_weights(experts, shared, right=moe.stack_experts):
    layer = right(experts, shared)
    return layer._replace(down=layer.down._replace(s2_E=layer.gate.s2_E))


def _swapped(experts, shared, right=moe.stack_experts):
    layer = right(experts, shared)
    return layer._replace(gate=layer.up, up=layer.gate)


def _shared_scaled(out_SM, routing, shared, right=moe.combine):
    out_SM[routing.experts_TK.numel() :] *= routing.scaling
    return right(out_SM, routing, shared)


def _unscaled(out_SM, routing, shared, right=moe.combine):
    return right(out_SM, routing._replace(scaling=1.0), shared)


def _no_input_scale(act, layer, blocks, routing, activations="bf16", right=moe.down):
    down = layer.down._replace(s2_E=layer.down.s2_E / layer.down.input_scale_E)
    return right(act, layer._replace(down=down), blocks, routing, activations)


@triton.jit
def _e8m0_scales(scale, row_R, inside_R, k, K, BK: tl.constexpr):
    """Bytes that `tl.dot_scaled` takes for powers of two."""
    return load_tile(scale, row_R, inside_R, k // 16, K // 16, BK // 16)


#: Mistakes planted in the product: what to replace, and by what.
FAULTS = {
    "no limit": (expert_gemm, "_swiglu", _swiglu_unlimited),
    "SiLU": (expert_gemm, "_swiglu", _silu),
    "nibbles swapped": (expert_gemm, "_nvfp4_tile", _swapped_nibbles),
    "MXFP8 exponents ignored": (expert_gemm, "mxfp8_tile", _no_exponents),
    "experts off by one": (moe, "map_blocks", _off_by_one),
    "last slot lost": (moe, "map_blocks", _last_slot_lost),
    "w2 under w1's s2": (moe, "stack_experts", _unscaled_weights),
    "w1 and w3 swapped": (moe, "stack_experts", _swapped),
    "shared expert scaled": (moe, "combine", _shared_scaled),
    "no scaling": (moe, "combine", _unscaled),
}
#: The same where activations are NVFP4 and the dot is native.
NVFP4_FAULTS = {
    "no input scale in alpha": (moe, "down", _no_input_scale),
    "scales read as E8M0": (expert_gemm, "_e4m3_scales", _e8m0_scales),
}


def run_stages(target, x_TM, routing, experts, shared, activations, size=16):
    """What each stage leaves: (act, packed, scale), out by slot, y, and the block map."""
    layer = moe.stack_experts(experts, shared)
    top_k = routing.experts_TK.shape[1]
    with pretended(target), filled_memory():
        blocks = moe.map_blocks(routing.experts_TK, len(experts), size, shared is not None)
        act = moe.gate_up(x_TM, layer, blocks, top_k, activations)
        out_SM = moe.down(act, layer, blocks, routing, activations)
        return tuple(act), out_SM, moe.combine(out_SM, routing, shared is not None), tuple(blocks)


def run_down(target, act, routing, experts, activations, rounding=True):
    """`down` of given intermediates; without `rounding` out is not BF16 before its share."""
    layer = moe.stack_experts(experts)
    right = expert_gemm._round_bf16
    expert_gemm._round_bf16 = right if rounding else _not_rounded
    try:
        with pretended(target), filled_memory():
            blocks = moe.map_blocks(routing.experts_TK, len(experts), 16, False)
            return moe.down(moe.Intermediate(*act), layer, blocks, routing, activations)
    finally:
        expert_gemm._round_bf16 = right


@triton.jit
def _not_rounded(values):
    return values


def refusal(target, activations):
    """What `moe` says to these activations on `target`."""
    with pretended(target):
        try:
            moe.moe(torch.ones(1, 32), None, None, activations=activations)
        except moe.UnsupportedDotError as error:
            return str(error)
    return None

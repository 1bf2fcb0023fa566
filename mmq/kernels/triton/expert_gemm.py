"""Grouped GEMMs of experts: NVFP4 weights, and MXFP8 weights of the shared expert beside them.

Reference: `mmq.kernels.reference.moe`, order "engine".

    g, u = bf16(alpha1 · W1 xᵀ), bf16(alpha3 · W3 xᵀ)      act = (u + beta) · g · sigmoid(alpha · g)
    out  = bf16(bf16(alpha2 · W2 actᵀ) · share)            act as BF16, or as NVFP4 per 16

Four numbers, a weight's bytes: packed 0x97, 0x03 under the scale 0x53 (11) are 6, −0.5, 1.5, 0
times 11 = 66, −5.5, 16.5, 0: exact in BF16. The tensor's s2 comes last, inside alpha.

A program takes ROWS rows of one expert's weights and up to N of its tokens. Operands are swapped:
weights are the left, 128-row side of the dot, tokens the right side, so that few tokens an expert,
as in decoding, leave the tensor cores no smaller tile than many do. Which expert and which tokens
come from a block map (`moe.map_blocks`); expert E stands for the shared one.

NATIVE takes `tl.dot_scaled` for NVFP4 × NVFP4. Without it both sides are decoded to BF16, where
they are exact, and multiplied by `tl.dot`.

Dimensions: E experts, I intermediate, M hidden, S slots (token · K + choice, then one a token for
the shared expert), N slots of a block; inside tiles O weight rows, K columns, P = K/2, B = K/16,
G = K/32.
"""

import triton
import triton.language as tl

from .nvfp4 import max_scale
from .small_floats import decode_e2m1, decode_e4m3, encode_e2m1
from .tiles import load_tile, mxfp8_tile


@triton.jit
def _nvfp4_tile(packed, scale, row_R, inside_R, k, K, BK: tl.constexpr):
    """BF16 [R, BK] of NVFP4 without its s2, exactly: 2 + 4 significant bits."""
    R: tl.constexpr = row_R.shape[0]
    byte_RP = load_tile(packed, row_R, inside_R, k // 2, K // 2, BK // 2).to(tl.int32)
    code_RBJ = tl.join(byte_RP & 15, byte_RP >> 4).reshape(R, BK // 16, 16)
    scale_RB = load_tile(scale, row_R, inside_R, k // 16, K // 16, BK // 16).to(tl.int32)
    value_RBJ = decode_e2m1(code_RBJ) * decode_e4m3(scale_RB)[:, :, None]
    return value_RBJ.reshape(R, BK).to(tl.bfloat16)


@triton.jit
def _weight_tile(elements, scale, row_O, inside_O, k, K, BK: tl.constexpr, MXFP8: tl.constexpr):
    if MXFP8:
        tile = mxfp8_tile(elements, scale, row_O, inside_O, k, K, BK)
    else:
        tile = _nvfp4_tile(elements, scale, row_O, inside_O, k, K, BK)
    return tile


@triton.jit
def _e4m3_scales(scale, row_R, inside_R, k, K, BK: tl.constexpr):
    tile = load_tile(scale, row_R, inside_R, k // 16, K // 16, BK // 16)
    return tile.to(tl.float8e4nv, bitcast=True)


@triton.jit
def _dot_nvfp4(
    w, w_scale, row_O, inside_O, x_packed, x_scale, x_row_N, inside_N, k, K, acc_ON,
    BK: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """acc + W xᵀ over BK columns of NVFP4 × NVFP4, both without their s2."""
    if NATIVE:
        w_OP = load_tile(w, row_O, inside_O, k // 2, K // 2, BK // 2)
        w_OB = _e4m3_scales(w_scale, row_O, inside_O, k, K, BK)
        x_NP = load_tile(x_packed, x_row_N, inside_N, k // 2, K // 2, BK // 2)
        x_NB = _e4m3_scales(x_scale, x_row_N, inside_N, k, K, BK)
        acc_ON = tl.dot_scaled(w_OP, w_OB, "e2m1", tl.trans(x_NP), x_NB, "e2m1", acc_ON)
    else:
        w_OK = _nvfp4_tile(w, w_scale, row_O, inside_O, k, K, BK)
        x_NK = _nvfp4_tile(x_packed, x_scale, x_row_N, inside_N, k, K, BK)
        acc_ON = tl.dot(w_OK, tl.trans(x_NK), acc_ON)
    return acc_ON


@triton.jit
def _bf16_tile(x, row_N, inside_N, k, K, BK: tl.constexpr):
    column_K = k + tl.arange(0, BK)
    offset_NK = row_N.to(tl.int64)[:, None] * K + column_K[None, :]
    return tl.load(x + offset_NK, mask=inside_N[:, None] & (column_K < K)[None, :], other=0.0)


@triton.jit
def _round_bf16(values):
    return values.to(tl.bfloat16).to(tl.float32)


@triton.jit
def _swiglu(gate, up, alpha, limit, beta):
    """F32; comparisons that let NaN through, as clamp does in the reference."""
    g = tl.where(gate > limit, limit, gate)
    u = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    return (u + beta) * (g / (1.0 + tl.exp(-alpha * g)))


@triton.jit
def _store_act_bf16(act, act_ON, row_O, inside_O, slot_N, inside_N, inner):
    offset_ON = slot_N.to(tl.int64)[None, :] * inner + row_O[:, None]
    inside_ON = inside_O[:, None] & inside_N[None, :]
    tl.store(act + offset_ON, act_ON.to(tl.bfloat16), mask=inside_ON)


@triton.jit
def _store_act_nvfp4(packed, scale, act_ON, s2, tile, slot_N, inside_N, inner):
    """Quantise blocks of 16 rows (columns of the second GEMM) by the `max` rule, and store."""
    R: tl.constexpr = act_ON.shape[0]
    N: tl.constexpr = act_ON.shape[1]
    x_BJ = tl.trans(act_ON).reshape(N * R // 16, 16)
    scale_B = max_scale(x_BJ, s2)
    step_B1 = (decode_e4m3(scale_B) * s2)[:, None]
    code_BJ = encode_e2m1(tl.div_rn(x_BJ, tl.broadcast_to(step_B1, x_BJ.shape)))
    low_BP, high_BP = tl.split(code_BJ.reshape(N * R // 16, 8, 2))
    byte_NP = (low_BP | (high_BP << 4)).to(tl.uint8).reshape(N, R // 2)
    column_P = tile * (R // 2) + tl.arange(0, R // 2)
    column_B = tile * (R // 16) + tl.arange(0, R // 16)
    slot_N = slot_N.to(tl.int64)
    inside_NP = inside_N[:, None] & (column_P < inner // 2)[None, :]
    inside_NB = inside_N[:, None] & (column_B < inner // 16)[None, :]
    tl.store(packed + slot_N[:, None] * (inner // 2) + column_P[None, :], byte_NP, mask=inside_NP)
    scale_NB = scale_B.to(tl.uint8).reshape(N, R // 16)
    tl.store(scale + slot_N[:, None] * (inner // 16) + column_B[None, :], scale_NB, mask=inside_NB)


@triton.jit
def _gate_up_bf16(
    x, w1, w1_scale, w3, w3_scale, row_O, inside_O, token_N, inside_N, M,
    N: tl.constexpr, BK: tl.constexpr, MXFP8: tl.constexpr,
):  # fmt: skip
    gate_ON = tl.zeros((row_O.shape[0], N), tl.float32)
    up_ON = tl.zeros((row_O.shape[0], N), tl.float32)
    for k in range(0, M, BK):
        x_KN = tl.trans(_bf16_tile(x, token_N, inside_N, k, M, BK))
        w1_OK = _weight_tile(w1, w1_scale, row_O, inside_O, k, M, BK, MXFP8)
        gate_ON = tl.dot(w1_OK, x_KN, gate_ON)
        w3_OK = _weight_tile(w3, w3_scale, row_O, inside_O, k, M, BK, MXFP8)
        up_ON = tl.dot(w3_OK, x_KN, up_ON)
    return gate_ON, up_ON


@triton.jit
def gate_up_kernel(
    x, x_packed, x_scale, w1, w1_scale, w3, w3_scale, alpha1_E, alpha3_E,
    shared_w1, shared_w1_scale, shared_w3, shared_w3_scale,
    slots, block_expert, block_first, block_count,
    act, act_packed, act_scale, act_s2_E, alpha, limit, beta, experts, routed, top_k, M, inner,
    ROWS: tl.constexpr, N: tl.constexpr, BK: tl.constexpr,
    QUANTISED: tl.constexpr, NATIVE: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """Steps 2 and 3: SwiGLU of both products, stored by slot.

    Args:
        x: BF16 [T, M]; not read for routed experts if QUANTISED.
        x_packed, x_scale: NVFP4 [T, M], read if QUANTISED.
        w1, w1_scale, w3, w3_scale: NVFP4 [E, I, M].
        alpha1_E, alpha3_E: F32, s2, times x's s2 if QUANTISED.
        shared_…: MXFP8 [I, M], read if SHARED.
        slots: I32 [S] by expert. block_…: I32, one a program of axis 1; expert −1: nothing to do.
        act: BF16 [S, I], or if QUANTISED [T, I], for the shared expert alone.
        act_packed, act_scale, act_s2_E: NVFP4 [S, I] and its s2 by expert, if QUANTISED.
        routed: slots of routed experts; `top_k` of them a token.
    """
    tile = tl.program_id(0)
    block = tl.program_id(1)
    expert = tl.load(block_expert + block)
    if expert < 0:
        return
    row_O = tile * ROWS + tl.arange(0, ROWS)
    inside_O = row_O < inner
    inside_N = tl.arange(0, N) < tl.load(block_count + block)
    first = tl.load(block_first + block)
    slot_N = tl.load(slots + first + tl.arange(0, N), mask=inside_N, other=0)
    if SHARED and expert == experts:
        gate_ON, up_ON = _gate_up_bf16(
            x, shared_w1, shared_w1_scale, shared_w3, shared_w3_scale,
            row_O, inside_O, slot_N - routed, inside_N, M, N, BK, True,
        )  # fmt: skip
        act_ON = _swiglu(_round_bf16(gate_ON), _round_bf16(up_ON), alpha, limit, beta)
        act_N = slot_N - routed if QUANTISED else slot_N
        _store_act_bf16(act, act_ON, row_O, inside_O, act_N, inside_N, inner)
    else:
        token_N = slot_N // top_k
        matrix = expert.to(tl.int64) * inner * (M // 16)
        w1, w3 = w1 + matrix * 8, w3 + matrix * 8
        w1_scale, w3_scale = w1_scale + matrix, w3_scale + matrix
        if QUANTISED:
            gate_ON = tl.zeros((ROWS, N), tl.float32)
            up_ON = tl.zeros((ROWS, N), tl.float32)
            for k in range(0, M, BK):
                gate_ON = _dot_nvfp4(
                    w1, w1_scale, row_O, inside_O, x_packed, x_scale, token_N, inside_N, k, M,
                    gate_ON, BK, NATIVE,
                )  # fmt: skip
                up_ON = _dot_nvfp4(
                    w3, w3_scale, row_O, inside_O, x_packed, x_scale, token_N, inside_N, k, M,
                    up_ON, BK, NATIVE,
                )  # fmt: skip
        else:
            gate_ON, up_ON = _gate_up_bf16(
                x, w1, w1_scale, w3, w3_scale, row_O, inside_O, token_N, inside_N, M, N, BK, False
            )
        gate_ON = _round_bf16(gate_ON * tl.load(alpha1_E + expert))
        up_ON = _round_bf16(up_ON * tl.load(alpha3_E + expert))
        act_ON = _swiglu(gate_ON, up_ON, alpha, limit, beta)
        if QUANTISED:
            s2 = tl.load(act_s2_E + expert)
            _store_act_nvfp4(act_packed, act_scale, act_ON, s2, tile, slot_N, inside_N, inner)
        else:
            _store_act_bf16(act, act_ON, row_O, inside_O, slot_N, inside_N, inner)


@triton.jit
def _down_bf16(
    act, w2, w2_scale, row_O, inside_O, slot_N, inside_N, inner,
    N: tl.constexpr, BK: tl.constexpr, MXFP8: tl.constexpr,
):  # fmt: skip
    acc_ON = tl.zeros((row_O.shape[0], N), tl.float32)
    for k in range(0, inner, BK):
        act_KN = tl.trans(_bf16_tile(act, slot_N, inside_N, k, inner, BK))
        w2_OK = _weight_tile(w2, w2_scale, row_O, inside_O, k, inner, BK, MXFP8)
        acc_ON = tl.dot(w2_OK, act_KN, acc_ON)
    return acc_ON


@triton.jit
def down_kernel(
    act, act_packed, act_scale, w2, w2_scale, alpha2_E, shared_w2, shared_w2_scale, shares,
    slots, block_expert, block_first, block_count, out, experts, routed, M, inner,
    ROWS: tl.constexpr, N: tl.constexpr, BK: tl.constexpr,
    QUANTISED: tl.constexpr, NATIVE: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """Steps 4 and 5: out BF16 [S, M] by slot, routed ones times their share.

    Args:
        act, act_packed, act_scale: as `gate_up_kernel` left them.
        w2, w2_scale: NVFP4 [E, M, I]. shared_w2, shared_w2_scale: MXFP8 [M, I], read if SHARED.
        alpha2_E: F32, s2, times act's s2 if QUANTISED.
        shares: F32, by routed slot.
    """
    block = tl.program_id(1)
    expert = tl.load(block_expert + block)
    if expert < 0:
        return
    row_O = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside_O = row_O < M
    inside_N = tl.arange(0, N) < tl.load(block_count + block)
    first = tl.load(block_first + block)
    slot_N = tl.load(slots + first + tl.arange(0, N), mask=inside_N, other=0)
    offset_ON = slot_N.to(tl.int64)[None, :] * M + row_O[:, None]
    inside_ON = inside_O[:, None] & inside_N[None, :]
    if SHARED and expert == experts:
        act_N = slot_N - routed if QUANTISED else slot_N
        acc_ON = _down_bf16(
            act, shared_w2, shared_w2_scale, row_O, inside_O, act_N, inside_N, inner, N, BK, True
        )
        tl.store(out + offset_ON, acc_ON.to(tl.bfloat16), mask=inside_ON)
    else:
        matrix = expert.to(tl.int64) * M * (inner // 16)
        w2, w2_scale = w2 + matrix * 8, w2_scale + matrix
        if QUANTISED:
            acc_ON = tl.zeros((ROWS, N), tl.float32)
            for k in range(0, inner, BK):
                acc_ON = _dot_nvfp4(
                    w2, w2_scale, row_O, inside_O, act_packed, act_scale, slot_N, inside_N, k,
                    inner, acc_ON, BK, NATIVE,
                )  # fmt: skip
        else:
            acc_ON = _down_bf16(
                act, w2, w2_scale, row_O, inside_O, slot_N, inside_N, inner, N, BK, False
            )
        share_N = tl.load(shares + slot_N, mask=inside_N, other=0.0)
        out_ON = _round_bf16(acc_ON * tl.load(alpha2_E + expert)) * share_N[None, :]
        tl.store(out + offset_ON, out_ON.to(tl.bfloat16), mask=inside_ON)


@triton.jit
def combine_kernel(out, y, scaling, tokens, top_k, M, C: tl.constexpr, SHARED: tl.constexpr):
    """Steps 6 to 8: y BF16 [T, M] from out BF16 [S, M]."""
    scaling = tl.full((), scaling, tl.float32)
    token = tl.program_id(0).to(tl.int64)
    column_C = tl.program_id(1) * C + tl.arange(0, C)
    inside_C = column_C < M
    sum_C = tl.zeros((C,), tl.float32)
    for k in range(top_k):
        slot = token * top_k + k
        sum_C += tl.load(out + slot * M + column_C, mask=inside_C, other=0.0).to(tl.float32)
    y_C = _round_bf16(_round_bf16(sum_C) * scaling)
    if SHARED:
        slot = tl.cast(tokens, tl.int64) * top_k + token
        y_C += tl.load(out + slot * M + column_C, mask=inside_C, other=0.0).to(tl.float32)
    tl.store(y + token * M + column_C, y_C.to(tl.bfloat16), mask=inside_C)

"""What each stage of the MoE kernels may leave, given what the stage before it left.

Dimensions: T tokens, K experts of a token, E experts, M hidden, I intermediate, S slots.
"""

from __future__ import annotations

import moe_runs
import torch
from tolerances import products_apart, rounded_apart, swiglu_apart

from mmq.kernels.reference import moe as reference
from mmq.kernels.reference.e4m3 import decode_e2m1, decode_e4m3, encode_e2m1, encode_e4m3
from mmq.kernels.reference.moe import bf16
from mmq.kernels.reference.nvfp4 import dequantize_nvfp4, unpack_nibbles


def projections(x_TM, weights, quantised):
    """F32 products of gate and up, not yet rounded."""
    activations = "nvfp4" if quantised else "bf16"
    return [reference._product(x_TM.float(), weight, activations) for weight in weights[:2]]


def magnitudes(x_TM, weight, quantised):
    """Σ|x·w|, F64, of x as it is multiplied."""
    x = x_TM.float()
    if quantised:
        input_scale = torch.tensor(weight.input_scale)
        packed, scale, _ = reference.quantize_nvfp4(x, input_scale)
        x = dequantize_nvfp4(packed, scale, input_scale)
    return x.abs().double() @ reference.to_f32(weight).abs().double().T


def act_bounds(x_TM, weights, quantised, exact):
    """Reference act F32 [T, I] and how far the kernel's can be from it before it is rounded."""
    aparts, rounded = [], []
    for weight, value in zip(weights[:2], projections(x_TM, weights, quantised), strict=True):
        # Two roundings more than the sum's: of s2 · input_scale, and of the product with it.
        apart = products_apart(magnitudes(x_TM, weight, quantised), x_TM.shape[1] + 2)
        aparts.append(rounded_apart(value.double(), torch.zeros_like(apart) if exact else apart))
        rounded.append(bf16(value))
    gate, up = (each.double() for each in rounded)
    swiglu = reference.M3_SWIGLU._asdict()
    act = reference.swiglu_oai(*rounded, **swiglu)
    return act, swiglu_apart(gate, up, *aparts, **swiglu)


def assert_act_bf16(act, expected, apart):
    assert ((act.float() - bf16(expected)).abs() <= rounded_apart(expected.double(), apart)).all()


def assert_act_nvfp4(packed, scale, expected, apart, s2):
    """Codes and scales are those of numbers within `apart` of the expected ones.

    Rounding is monotone: what lies between two numbers becomes a code between their codes.
    """
    s2 = torch.tensor(s2)
    low, high = expected.double() - apart, expected.double() + apart
    largest = torch.maximum(low.abs(), high.abs()).unflatten(1, (-1, 16)).amax(-1)
    smallest = (expected.double().abs() - apart).clamp(0).unflatten(1, (-1, 16)).amax(-1)
    codes = [
        encode_e4m3((amax.float() / (6.0 * s2)).clamp(2.0**-9, 448)).int()
        for amax in (smallest, largest)
    ]
    scale_is_one = (scale == 0x38) & (smallest == 0)
    assert (((codes[0] <= scale) & (scale <= codes[1])) | scale_is_one).all()
    step = (decode_e4m3(scale) * s2).repeat_interleave(16, 1)
    number = decode_e2m1(unpack_nibbles(packed))
    ends = [decode_e2m1(encode_e2m1(end.float() / step)) for end in (low, high)]
    assert ((ends[0] <= number) & (number <= ends[1])).all()


def check_gate_up(act, x_TM, routing, experts, shared, exact):
    """Steps 2 and 3; `act` as `moe.Intermediate`."""
    act_SI, packed, scale = act
    quantised, (tokens, top_k) = packed is not None, routing.experts_TK.shape
    assert_act_bf16(act_SI[-tokens:], *act_bounds(x_TM, shared, False, exact))
    for expert, slots_N in reference.by_expert(routing.experts_TK):
        weights = experts[expert]
        bounds = act_bounds(x_TM[slots_N // top_k], weights, quantised, exact)
        if quantised:
            s2 = weights.down_MI.input_scale
            assert_act_nvfp4(packed[slots_N], scale[slots_N], *bounds, s2)
        else:
            assert_act_bf16(act_SI[slots_N], *bounds)


def check_down(out_NM, x_NI, weight, share_N1):
    """Steps 4 and 5, of the kernel's own activations as F32; no share for the shared expert."""
    w_MI = reference.to_f32(weight).double()
    value = x_NI.double() @ w_MI.T
    apart = products_apart(x_NI.abs().double() @ w_MI.abs().T, x_NI.shape[1] + 2)
    expected, allowed = bf16(value.float()), rounded_apart(value, apart)
    if share_N1 is not None:
        expected, allowed = bf16(expected * share_N1), allowed * share_N1
        allowed = rounded_apart(expected.double(), allowed)
    assert ((out_NM.float() - expected).abs() <= allowed).all()


def check(interpreted, target, layer, activations, exact):
    """All stages of one run; the last, which sums in a given order, bit for bit."""
    x_TM, routing, experts, shared = layer
    act, out_SM, y_TM, _ = interpreted(
        moe_runs.run_stages, target, x_TM, routing, experts, shared, activations
    )
    check_gate_up(act, x_TM, routing, experts, shared, exact)
    tokens, routed = len(x_TM), routing.experts_TK.numel()
    check_down(out_SM[routed:], act[0][-tokens:].float(), shared.down_MI, None)
    for expert, slots_N in reference.by_expert(routing.experts_TK):
        weight = experts[expert].down_MI
        if activations == "nvfp4":
            s2 = torch.tensor(weight.input_scale)
            x_NI = dequantize_nvfp4(act[1][slots_N], act[2][slots_N], s2)
        else:
            x_NI = act[0][slots_N].float()
        check_down(out_SM[slots_N], x_NI, weight, routing.shares_TK.flatten()[slots_N][:, None])
    weighed_TKM = out_SM[:routed].float().view(*routing.experts_TK.shape, -1)
    expected_TM = reference.combine(weighed_TKM, routing.scaling, out_SM[routed:].float())
    assert torch.equal(y_TM.float(), expected_TM)

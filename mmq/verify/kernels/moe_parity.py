"""Router and experts beside their references, stage by stage.

Each stage is judged by what the stage before it really left, so that bounds stay sharp: choices and
shares bit for bit from the kernel's own scores, activations and outputs within the error of their
sums, and the combination, which sums in a given order, bit for bit.

Dimensions: T tokens, K experts of a token, E experts, M hidden, I intermediate, S slots.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from mmq.kernels.error_bounds import (
    products_apart,
    rounded_apart,
    router_scores_apart,
    swiglu_apart,
)
from mmq.kernels.reference import moe as reference
from mmq.kernels.reference import router as router_reference
from mmq.kernels.reference.e4m3 import decode_e2m1, decode_e4m3, encode_e2m1, encode_e4m3
from mmq.kernels.reference.moe import Activations, Mlp, Nvfp4Weight, Swiglu, Weight, bf16
from mmq.kernels.reference.nvfp4 import dequantize_nvfp4, quantize_nvfp4, unpack_nibbles
from mmq.kernels.reference.router import Routing
from mmq.kernels.triton import moe, router
from mmq.kernels.triton.launch import device
from mmq.verify.kernels.compare import Comparison, exactly, moved, within
from mmq.verify.kernels.material import Material

_CPU = torch.device("cpu")
#: Tokens of a batch: few, as in decoding, and one.
TOKENS = (5, 1)


def routing(material: Material) -> Iterator[Comparison]:
    """Scores within their bound; choices and shares exact."""
    top_k = material.geometry.top_experts
    for tokens in (0, 1, 19):
        x_TM, bias_E = material.hidden(tokens, salt=15), material.bias_E
        arguments = x_TM, material.gate_EM, bias_E
        found = router.route(*moved(arguments, device()), top_k=top_k)
        ids_TK, shares_TK, scores_TE = (each.cpu() for each in found[:3])
        x, gate = x_TM.double(), material.gate_EM.double()
        logits_TE = x @ gate.T
        allowed_TE = router_scores_apart(x.abs() @ gate.abs().T, logits_TE, x.shape[1])
        yield within(f"scores of {tokens} tokens", scores_TE, logits_TE.sigmoid(), allowed_TE)
        wanted_TK = router_reference.choose_experts(scores_TE, bias_E, top_k)
        yield exactly(f"choices of {tokens} tokens", ids_TK, wanted_TK)
        wanted_shares = router_reference.shares(scores_TE, ids_TK)
        yield exactly(f"shares of {tokens} tokens", shares_TK, wanted_shares)


def experts(material: Material, activations: Activations) -> Iterator[Comparison]:
    """All stages of the layer, and the layer in one call."""
    layer = moe.stack_experts(moved(material.experts, device()), moved(material.shared, device()))
    yield _whole_numbers(material, activations)
    for tokens in TOKENS:
        yield from _stages(material, layer, activations, tokens)
    none_TM = material.hidden(0)
    y_TM = moe.moe(
        *moved((none_TM, material.routing(none_TM)), device()), layer, activations=activations
    )
    yield exactly("no tokens", y_TM.cpu(), none_TM)


def _whole_numbers(material: Material, activations: Activations) -> Comparison:
    """Steps 4 and 5 of numbers whose sums F32 holds in any order: every bit is specified.

    Up to 6 · 2 times 6 · 2 in steps of 1/16, 3,072 of them: below 2^24 steps.
    """
    generator, x_TM = material.generator(17), material.hidden(5, salt=17)
    routed = material.routing(x_TM)
    mlps = [
        mlp._replace(down_MI=_whole(mlp.down_MI, generator)) for mlp in material.experts
    ]  # fmt: skip
    slots, inner = routed.experts_TK.numel(), material.geometry.inner
    if activations == "bf16":
        act_SI = torch.randint(-3, 4, (slots, inner), generator=generator).bfloat16()
        act, x_SI = moe.Intermediate(act_SI), act_SI.float()
    else:
        blank = torch.zeros(slots, inner // 2, dtype=torch.uint8)
        like = Nvfp4Weight(blank, torch.zeros(slots, inner // 16, dtype=torch.uint8), 1.0)
        codes = _whole(like, generator)
        act = moe.Intermediate(None, codes.packed_OP, codes.scale_OB)
        x_SI = dequantize_nvfp4(codes.packed_OP, codes.scale_OB, torch.ones(()))
    layer = moe.stack_experts(moved(mlps, device()))
    routing = moved(routed, device())
    size = moe.block_size(slots, len(mlps))
    blocks = moe.map_blocks(routing.experts_TK, len(mlps), size, False)
    out_SM = moe.down(moved(act, device()), layer, blocks, routing, activations)
    expected_SM = torch.full(out_SM.shape, torch.nan)
    for expert, slots_N in reference.by_expert(routed.experts_TK):
        weight = mlps[expert].down_MI
        assert isinstance(weight, Nvfp4Weight)
        unit_MI = dequantize_nvfp4(weight.packed_OP, weight.scale_OB, torch.ones(()))
        alpha = torch.tensor(weight.s2)
        if activations == "nvfp4":
            alpha = alpha * torch.tensor(weight.input_scale)
        out_NM = bf16((x_SI[slots_N] @ unit_MI.T) * alpha)
        expected_SM[slots_N] = bf16(out_NM * routed.shares_TK.flatten()[slots_N][:, None])
    return exactly("outputs of whole numbers", out_SM.cpu().float(), expected_SM)


def _whole(like: Weight, generator: torch.Generator) -> Nvfp4Weight:
    """Any codes, under scales of 0.5, 1 and 2."""
    assert isinstance(like, Nvfp4Weight)
    shapes = like.packed_OP.shape, like.scale_OB.shape
    packed = torch.randint(0, 256, shapes[0], generator=generator).to(torch.uint8)
    scale = torch.randint(6, 9, shapes[1], generator=generator).to(torch.uint8) * 8
    return like._replace(packed_OP=packed, scale_OB=scale)


def _stages(
    material: Material, layer: moe.Layer, activations: Activations, tokens: int
) -> Iterator[Comparison]:
    x_TM = material.hidden(tokens, salt=16) * 2
    routed, swiglu = material.routing(x_TM), material.geometry.swiglu
    x, routing = moved((x_TM, routed), device())
    (_, top_k), shared = routed.experts_TK.shape, material.shared is not None
    count = len(material.experts)
    size = moe.block_size(tokens * top_k, count)
    blocks = moe.map_blocks(routing.experts_TK, count, size, shared)
    act = moe.gate_up(x, layer, blocks, top_k, activations, swiglu)
    out_SM = moe.down(act, layer, blocks, routing, activations)
    # Before `combine`, which may reuse nothing of them.
    act_S, out_S = moved(tuple(act), _CPU), out_SM.cpu()
    y_TM = moe.combine(out_SM, routing, shared).cpu()
    yield from _checked_act(material, x_TM, routed, act_S, activations)
    yield from _checked_down(material, routed, act_S, out_S, activations)
    slots = routed.experts_TK.numel()
    weighed_TKM = out_S[:slots].float().view(tokens, top_k, -1)
    shared_TM = out_S[slots:].float() if shared else None
    expected_TM = reference.combine(weighed_TKM, routed.scaling, shared_TM)
    yield exactly(f"combination, {tokens} tokens", y_TM.float(), expected_TM)
    whole_TM = moe.moe(x, routing, layer, activations=activations, swiglu=swiglu)
    yield exactly(f"layer in one call, {tokens} tokens", whole_TM.cpu(), y_TM)


def _checked_act(
    material: Material, x_TM: Tensor, routing: Routing, act: tuple[Any, ...],
    activations: Activations,
) -> Iterator[Comparison]:  # fmt: skip
    """Steps 2 and 3 of order "engine", expert by expert."""
    act_SI, packed, scale = (*act, None, None)[:3]
    (tokens, top_k), swiglu = routing.experts_TK.shape, material.geometry.swiglu
    if material.shared is not None:
        expected, apart = _act_bounds(x_TM, material.shared, "bf16", swiglu)
        bound = rounded_apart(expected, apart)
        case = f"activations of the shared expert, {tokens} tokens"
        yield within(case, act_SI[-tokens:], bf16(expected.float()), bound)
    for expert, slots_N in reference.by_expert(routing.experts_TK):
        weights = material.experts[expert]
        expected, apart = _act_bounds(x_TM[slots_N // top_k], weights, activations, swiglu)
        case = f"activations of expert {expert}, {len(slots_N)} of {tokens} tokens"
        if packed is None or scale is None:
            bound = rounded_apart(expected, apart)
            yield within(case, act_SI[slots_N], bf16(expected.float()), bound)
        else:
            assert isinstance(weights.down_MI, Nvfp4Weight)
            s2 = torch.tensor(weights.down_MI.input_scale)
            yield _codes_between(case, packed[slots_N], scale[slots_N], expected, apart, s2)


def _act_bounds(
    x_TM: Tensor, weights: Mlp, activations: Activations, swiglu: Swiglu
) -> tuple[Tensor, Tensor]:
    """The activations, F64, and how far a kernel's can be from them before they are rounded."""
    values, aparts = [], []
    for weight in weights[:2]:
        value, magnitude = _product(x_TM.float(), weight, activations)
        # Two roundings more than the sum's: of s2 · input_scale, and of the product with it.
        apart = products_apart(magnitude, x_TM.shape[1] + 2)
        values.append(bf16(value.float()).double())
        aparts.append(rounded_apart(value, apart))
    act = reference.swiglu_oai(*values, **swiglu._asdict())
    return act, swiglu_apart(*values, *aparts, **swiglu._asdict())


def _product(x_TK: Tensor, weight: Weight, activations: Activations) -> tuple[Tensor, Tensor]:
    """x · weightᵀ in F64, of x as it is multiplied, and Σ|x·w|."""
    if activations == "nvfp4" and isinstance(weight, Nvfp4Weight):
        input_scale = torch.tensor(weight.input_scale)
        packed, scale, _ = quantize_nvfp4(x_TK, input_scale)
        x_TK = dequantize_nvfp4(packed, scale, input_scale)
    w_OK = reference.to_f32(weight).double()
    x = x_TK.double()
    return x @ w_OK.T, x.abs() @ w_OK.abs().T


def _codes_between(
    case: str, packed: Tensor, scale: Tensor, expected: Tensor, apart: Tensor, s2: Tensor
) -> Comparison:
    """Codes and scales are those of numbers within `apart` of the expected ones.

    Rounding is monotone: what lies between two numbers becomes a code between their codes.
    """
    low, high = expected - apart, expected + apart
    largest = torch.maximum(low.abs(), high.abs()).reshape(len(low), -1, 16).amax(-1)
    smallest = (expected.abs() - apart).clamp(0).reshape(len(low), -1, 16).amax(-1)
    lowest, highest = (
        encode_e4m3((amax.float() / (6.0 * s2)).clamp(2.0**-9, 448)).int()
        for amax in (smallest, largest)
    )
    is_one = (scale == 0x38) & (smallest == 0)
    wrong = int((~(((lowest <= scale) & (scale <= highest)) | is_one)).sum())
    step = (decode_e4m3(scale) * s2).repeat_interleave(16, 1)
    number = decode_e2m1(unpack_nibbles(packed))
    ends = [decode_e2m1(encode_e2m1(end.float() / step)) for end in (low, high)]
    wrong += int((~((ends[0] <= number) & (number <= ends[1]))).sum())
    return Comparison(case, True, scale.numel() + number.numel(), float(wrong), 0.0)


def _checked_down(
    material: Material, routing: Routing, act: tuple[Any, ...], out_SM: Tensor,
    activations: Activations,
) -> Iterator[Comparison]:  # fmt: skip
    """Steps 4 and 5, of the kernel's own activations."""
    tokens, slots = len(routing.experts_TK), routing.experts_TK.numel()
    if material.shared is not None:
        x_TI = act[0][-tokens:].float()
        case = f"outputs of the shared expert, {tokens} tokens"
        yield _down(case, out_SM[slots:], x_TI, material.shared.down_MI, None)
    for expert, slots_N in reference.by_expert(routing.experts_TK):
        weight = material.experts[expert].down_MI
        if activations == "nvfp4":
            assert isinstance(weight, Nvfp4Weight)
            s2 = torch.tensor(weight.input_scale)
            x_NI = dequantize_nvfp4(act[1][slots_N], act[2][slots_N], s2)
        else:
            x_NI = act[0][slots_N].float()
        share_N1 = routing.shares_TK.flatten()[slots_N][:, None]
        case = f"outputs of expert {expert}, {len(slots_N)} of {tokens} tokens"
        yield _down(case, out_SM[slots_N], x_NI, weight, share_N1)


def _down(
    case: str, out_NM: Tensor, x_NI: Tensor, weight: Weight, share_N1: Tensor | None
) -> Comparison:
    w_MI, x = reference.to_f32(weight).double(), x_NI.double()
    value = x @ w_MI.T
    apart = products_apart(x.abs() @ w_MI.abs().T, x.shape[1] + 2)
    expected, allowed = bf16(value.float()), rounded_apart(value, apart)
    if share_N1 is not None:
        expected, allowed = bf16(expected * share_N1), allowed * share_N1
        allowed = rounded_apart(expected.double(), allowed)
    if not math.isfinite(float(allowed.max())):
        raise ValueError(f"{case}: no bound")
    return within(case, out_NM, expected, allowed)

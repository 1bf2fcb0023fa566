"""The mixture of experts: clamped SwiGLU experts, a shared one, and two orders of rounding.

    g = min(gate, limit)      u = clamp(up, −limit, limit)      gate, up = x · W1ᵀ, x · W3ᵀ
    act = (u + beta) · g · sigmoid(alpha · g)                   out = act · W2ᵀ
    y = scaling · Σ_k share_k · out_k  +  out_shared            the shared expert is not scaled

Four numbers, alpha 1.702, limit 7, beta 1: (gate, up) = (1, 0) gives 1 · sigmoid(1.702) = 0.8458;
(9, 9) is (7, 7) and gives 8 · 7 · 0.99999 = 56.000; (−1, 2) gives 3 · −1 · 0.1542 = −0.4626; the
gate has no lower clamp: (−9, 0) gives −9 · sigmoid(−15.318) = −2.0e−6.

Order "f32": every operation in F32, experts added in ascending id, scaling on the sum. This is
transformers 5.24 ``MiniMaxM3VLSparseMoeBlock``, and what the verifier computes.

Order "engine": what fused kernels round, and when. bf16(·) rounds to nearest, ties to even; sums of
products are F32; q(·) is NVFP4 under the weight's input_scale, by the `max` rule.

    1  x     = bf16(hidden)                   activations "nvfp4": q(x) for the routed experts
    2  g, u  = bf16(alpha1 · acc)             alpha1 = s2, times input_scale of q(x)
    3  a     = bf16(act) in F32 inside        activations "nvfp4": q(act), not rounded before
    4  out   = bf16(alpha2 · acc)
    5  c_k   = bf16(out_k · share_k)          after the second GEMM: the share is not in q(act)
    6  r     = bf16(Σ_k c_k)                  F32 sum in the router's order
    7  r     = bf16(r · scaling)
    8  y     = bf16(r + out_shared)           the shared expert: bf16 activations, steps 1 to 4

Source of the steps: DeepGEMM PR 409, ``sm100_fp4_fp4_mega_moe.cuh`` (there with plain SwiGLU and a
BF16 shared expert), which vLLM PR 52705 and 54520 call. Values of weights without s2 are exact in
BF16 (2 + 4 significant bits), so that "bf16" activations round no weight. MXFP8 weights are exact
in BF16 too, except outside its range of exponents.

Dimensions: T tokens, K experts of a token, E experts, M hidden, I intermediate; in weights O rows,
K columns, P = K/2, B = K/16, G = K/32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from .mxfp8 import dequantize_mxfp8
from .nvfp4 import dequantize_nvfp4, quantize_nvfp4
from .router import Routing

Order = Literal["f32", "engine"]
Activations = Literal["bf16", "nvfp4"]


class Nvfp4Weight(NamedTuple):
    """value = e2m1 · e4m3 · s2.

    Attributes:
        packed_OP, scale_OB: U8.
        s2: multiplier of the tensor (ModelOpt's weight_scale_2).
        input_scale: multiplier of quantised activations (ModelOpt's input_scale). Both are rounded
            to F32.
    """

    packed_OP: Tensor
    scale_OB: Tensor
    s2: float
    input_scale: float = 1.0


class Mxfp8Weight(NamedTuple):
    """value = e4m3 · 2^(exponent − 127): codes U8 [O, K], exponents U8 [O, K/32]."""

    codes_OK: Tensor
    exponent_OG: Tensor


Weight: TypeAlias = Tensor | Nvfp4Weight | Mxfp8Weight


class Mlp(NamedTuple):
    """W1, W3 and W2 of an expert: [I, M], [I, M] and [M, I], each in a format of its own."""

    gate_IM: Weight
    up_IM: Weight
    down_MI: Weight


#: Weights by expert id; asked for an expert only when a token goes there, and once.
Experts: TypeAlias = Callable[[int], Mlp] | Mapping[int, Mlp]


class Swiglu(NamedTuple):
    """Parameters of `swiglu_oai`: M3's swiglu_alpha, swiglu_limit and swiglu_beta."""

    alpha: float = 1.702
    limit: float = 7.0
    beta: float = 1.0


M3_SWIGLU = Swiglu()


def swiglu_oai(
    gate: Tensor, up: Tensor, *, alpha: float = 1.702, limit: float = 7.0, beta: float = 1.0
) -> Tensor:
    """(u + beta) · g · sigmoid(alpha · g) with g = min(gate, limit) and u = clamp(up, ±limit)."""
    g = gate.clamp(max=limit)
    return (up.clamp(-limit, limit) + beta) * (g * torch.sigmoid(alpha * g))


def mlp(
    x_TM: Tensor, w_gate: Weight, w_up: Weight, w_down: Weight, *, swiglu: Swiglu = M3_SWIGLU
) -> Tensor:
    """A dense or shared MLP: [T, M] to F32 [T, M]; products as `linear` has them."""
    gate_TI, up_TI = linear(x_TM, w_gate), linear(x_TM, w_up)
    return linear(swiglu_oai(gate_TI, up_TI, **swiglu._asdict()), w_down)


def linear(x_TK: Tensor, weight: Weight) -> Tensor:
    """x · Wᵀ, F32 [T, O]; in BF16, and rounded to it, where the weight is a BF16 tensor."""
    if isinstance(weight, Tensor) and weight.dtype == torch.bfloat16:
        return (x_TK.bfloat16() @ weight.T).float()
    return x_TK.float() @ to_f32(weight).T


def moe(
    hidden_TM: Tensor,
    routing: Routing,
    experts: Experts,
    shared: Mlp | None = None,
    *,
    order: Order = "f32",
    activations: Activations = "bf16",
    swiglu: Swiglu = M3_SWIGLU,
) -> Tensor:
    """The MoE layer's output, F32 [T, M]; with order "engine" all values are BF16 numbers.

    Args:
        hidden_TM: F32 or BF16.
        shared: the shared expert, if there is one.
        activations: of routed NVFP4 weights under order "engine"; "f32" rounds none. Other
            weights, and the shared expert, have BF16 activations.

    Raises:
        ValueError: an unknown order, or W1 and W3 of an expert quantise x differently.
    """
    if order == "f32":
        return _moe_f32(hidden_TM.float(), routing, experts, shared, swiglu)
    if order != "engine":
        raise ValueError(f'order "{order}" is neither "f32" nor "engine"')
    x_TM = bf16(hidden_TM)
    slots, top_k = routing.experts_TK.numel(), routing.experts_TK.shape[1]
    out_SM = x_TM.new_zeros(slots, x_TM.shape[1])
    for expert, slots_N in by_expert(routing.experts_TK):
        weights = _of(experts, expert)
        out_SM[slots_N] = engine_mlp(x_TM[slots_N // top_k], weights, activations, swiglu)
    shared_TM = None if shared is None else engine_mlp(x_TM, shared, "bf16", swiglu)
    out_TKM = out_SM.view(*routing.experts_TK.shape, x_TM.shape[1])
    return combine(weigh(out_TKM, routing.shares_TK), routing.scaling, shared_TM)


def _moe_f32(
    x_TM: Tensor, routing: Routing, experts: Experts, shared: Mlp | None, swiglu: Swiglu
) -> Tensor:
    """Order "f32"."""
    top_k = routing.experts_TK.shape[1]
    share_S1 = routing.shares_TK.flatten()[:, None]
    y_TM = torch.zeros_like(x_TM)
    for expert, slots_N in by_expert(routing.experts_TK):
        tokens_N = slots_N // top_k
        out_NM = mlp(x_TM[tokens_N], *_of(experts, expert), swiglu=swiglu)
        y_TM.index_add_(0, tokens_N, out_NM * share_S1[slots_N])
    y_TM *= routing.scaling
    return y_TM if shared is None else y_TM + mlp(x_TM, *shared, swiglu=swiglu)


def by_expert(experts_TK: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Experts that got tokens, ascending, each with its slots, I64.

    A slot is token · K + position of the choice; an expert's slots ascend.
    """
    slots_S = experts_TK.flatten().sort(stable=True).indices
    start = 0
    for expert, count in enumerate(torch.bincount(experts_TK.flatten()).tolist()):
        if count:
            yield expert, slots_S[start : start + count]
        start += count


def _of(experts: Experts, expert: int) -> Mlp:
    return experts[expert] if isinstance(experts, Mapping) else experts(expert)


def to_f32(weight: Weight) -> Tensor:
    """A weight's values in F32."""
    if isinstance(weight, Nvfp4Weight):
        return dequantize_nvfp4(weight.packed_OP, weight.scale_OB, _scalar(weight.s2))
    if isinstance(weight, Mxfp8Weight):
        return dequantize_mxfp8(*weight)
    return weight.float()


def bf16(values: Tensor) -> Tensor:
    """Rounded to BF16, as F32."""
    return values.to(torch.bfloat16).float()


def engine_mlp(x_TM: Tensor, weights: Mlp, activations: Activations, swiglu: Swiglu) -> Tensor:
    """Steps 2 to 4 of order "engine": BF16 numbers [T, M] to BF16 numbers [T, M]."""
    return engine_down(engine_act(x_TM, weights, activations, swiglu), weights, activations)


def engine_act(x_TM: Tensor, weights: Mlp, activations: Activations, swiglu: Swiglu) -> Tensor:
    """Steps 2 and 3 before their last rounding: act, F32 [T, I].

    Raises:
        ValueError: W1 and W3 quantise x differently.
    """
    gate, up, _ = weights
    scales = {each.input_scale for each in (gate, up) if isinstance(each, Nvfp4Weight)}
    if activations == "nvfp4" and len(scales) > 1:
        raise ValueError(f"W1 and W3 quantise x by {sorted(scales)}, where one scale is needed")
    gate_TI, up_TI = (bf16(_product(x_TM, each, activations)) for each in (gate, up))
    return swiglu_oai(gate_TI, up_TI, **swiglu._asdict())


def engine_down(act_TI: Tensor, weights: Mlp, activations: Activations) -> Tensor:
    """The last rounding of step 3, and step 4: BF16 numbers [T, M]."""
    return bf16(_product(act_TI, weights.down_MI, activations))


def weigh(out_TKM: Tensor, shares_TK: Tensor) -> Tensor:
    """Step 5: BF16 numbers [T, K, M]."""
    return bf16(out_TKM * shares_TK[..., None])


def combine(weighed_TKM: Tensor, scaling: float, shared_TM: Tensor | None) -> Tensor:
    """Steps 6 to 8: BF16 numbers [T, M]."""
    sum_TM = torch.zeros_like(weighed_TKM[:, 0])
    for weighed_TM in weighed_TKM.unbind(1):
        sum_TM = sum_TM + weighed_TM
    routed_TM = bf16(bf16(sum_TM) * _scalar(scaling))
    return routed_TM if shared_TM is None else bf16(routed_TM + shared_TM)


def _product(x_TK: Tensor, weight: Weight, activations: Activations) -> Tensor:
    """x · weightᵀ with quantised or rounded operands, F32 sums, and the multipliers at the end."""
    if not isinstance(weight, Nvfp4Weight):
        return bf16(x_TK) @ bf16(to_f32(weight)).T
    one, multiplier = _scalar(1.0), _scalar(weight.s2)
    unit_OK = dequantize_nvfp4(weight.packed_OP, weight.scale_OB, one)
    if activations == "bf16":
        return (bf16(x_TK) @ unit_OK.T) * multiplier
    input_scale = _scalar(weight.input_scale)
    packed, scale, _ = quantize_nvfp4(x_TK, input_scale)
    return (dequantize_nvfp4(packed, scale, one) @ unit_OK.T) * (multiplier * input_scale)


def _scalar(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float32)

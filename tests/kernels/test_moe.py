"""The MoE layer against its definition, token by token, in both orders of rounding.

Dimensions: T tokens, K experts of a token, E experts, M hidden, I intermediate.
"""

from __future__ import annotations

import math

import pytest
import torch
from moe_bounds import moe_apart
from moe_cases import Cases
from tolerances import BF16_LAYER, swiglu_apart

from mmq.kernels.reference import moe as reference
from mmq.kernels.reference.e4m3 import decode_e2m1, decode_e4m3
from mmq.kernels.reference.moe import (
    M3_SWIGLU,
    Mlp,
    Nvfp4Weight,
    Swiglu,
    mlp,
    moe,
    swiglu_oai,
    to_f32,
)
from mmq.kernels.reference.nvfp4 import quantize_nvfp4, unpack_nibbles
from mmq.kernels.reference.router import Routing, route

WIDTH, INNER, EXPERTS = 64, 96, 6


def layer(seed, tokens=7, experts=EXPERTS, exact=False, scaling=2.0, **scales):
    """BF16 tokens, their routing, NVFP4 experts and an MXFP8 shared one."""
    cases = Cases(seed, exact)
    x_TM = cases.tokens(tokens, WIDTH)
    gate_EM = cases.normal(experts, WIDTH)
    routing = route(x_TM, gate_EM, cases.normal(experts), scaling=scaling)
    weights = {e: cases.expert(WIDTH, INNER, **scales) for e in range(experts)}
    return x_TM, routing, weights, cases.shared(WIDTH, INNER)


def scalar_swiglu(gate, up, alpha=1.702, limit=7.0, beta=1.0):
    gate, up = min(gate, limit), max(min(up, limit), -limit)
    return (up + beta) * gate / (1 + math.exp(-alpha * gate))


def by_token(x_TM, routing, experts, shared, swiglu=M3_SWIGLU):
    """F64 [T, M] of F64 weights, one expert of one token at a time."""

    def one(x_M, weights):
        gate_IM, up_IM, down_MI = (to_f32(weight).double() for weight in weights)
        pairs = zip((gate_IM @ x_M).tolist(), (up_IM @ x_M).tolist(), strict=True)
        act_I = [scalar_swiglu(gate, up, *swiglu) for gate, up in pairs]
        return down_MI @ torch.tensor(act_I, dtype=torch.float64)

    rows = []
    for x_M, ids_K, shares_K in zip(
        x_TM.double(), routing.experts_TK.tolist(), routing.shares_TK.tolist(), strict=True
    ):
        routed = [share * one(x_M, experts[e]) for e, share in zip(ids_K, shares_K, strict=True)]
        y_M = sum(routed) * routing.scaling
        rows.append(y_M if shared is None else y_M + one(x_M, shared))
    return torch.stack(rows)


def test_four_numbers_of_the_docstring():
    gate, up = torch.tensor([1.0, 9, -1, -9]), torch.tensor([0.0, 9, 2, 0])
    expected = [0.8458, 56.0, -0.4626, -2.0e-6]
    assert swiglu_oai(gate, up).tolist() == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize("swiglu", [Swiglu(), Swiglu(1.0, 3.0, 0.5)])
def test_swiglu_against_scalars(swiglu):
    gate, up = torch.meshgrid(torch.linspace(-12, 12, 49), torch.linspace(-9, 9, 37), indexing="ij")
    pairs = zip(gate.flatten().tolist(), up.flatten().tolist(), strict=True)
    expected = torch.tensor([scalar_swiglu(*pair, *swiglu) for pair in pairs], dtype=torch.float64)
    zero = torch.zeros_like(gate).double()
    allowed = swiglu_apart(gate.double(), up.double(), zero, zero, **swiglu._asdict())
    ours = swiglu_oai(gate, up, **swiglu._asdict()).double()
    assert ((ours - expected.view_as(gate)).abs() <= allowed).all()


def test_swiglu_lets_nan_and_infinity_through():
    inf, nan = torch.inf, torch.nan
    act = swiglu_oai(torch.tensor([nan, 1, -inf, inf]), torch.tensor([1, nan, 1, inf]))
    assert act.isnan().tolist() == [True, True, True, False]
    assert act[3].item() == pytest.approx(56.0, rel=1e-4)


@pytest.mark.parametrize("shared", [True, False])
def test_f32_against_the_definition(shared):
    x_TM, routing, experts, extra = layer(1)
    extra = extra if shared else None
    expected_TM = by_token(x_TM, routing, experts, extra)
    allowed_TM = moe_apart(x_TM, routing, experts, extra)
    ours_TM = moe(x_TM, routing, experts, extra)
    assert ours_TM.dtype == torch.float32
    assert ((ours_TM - expected_TM).abs() <= allowed_TM).all()
    assert (allowed_TM < 2e-3 * expected_TM.abs().max()).all()  # and the bound says something


def test_an_mlp_is_what_the_shared_expert_is():
    x_TM, routing, experts, shared = layer(2)
    alone_TM = mlp(x_TM, *shared)
    with_TM, without_TM = moe(x_TM, routing, experts, shared), moe(x_TM, routing, experts)
    assert torch.equal(with_TM, without_TM + alone_TM)


def test_experts_that_nobody_reaches_are_not_asked_for():
    x_TM, routing, experts, _ = layer(3, tokens=3, experts=128)
    asked = []

    def ask(expert):
        asked.append(expert)
        return experts[expert]

    for order in ("f32", "engine"):
        asked.clear()
        y_TM = moe(x_TM, routing, ask, order=order)
        assert asked == routing.experts_TK.unique().tolist()
        assert torch.equal(y_TM, moe(x_TM, routing, experts, order=order))


@pytest.mark.parametrize("order", ["f32", "engine"])
@pytest.mark.parametrize("activations", ["bf16", "nvfp4"])
def test_no_tokens_one_token_and_tokens_alone(order, activations):
    """Tokens do not see each other: one at a time they give what they give together."""
    x_TM, routing, experts, shared = layer(4, exact=True)
    options = {"order": order, "activations": activations}
    together_TM = moe(x_TM, routing, experts, shared, **options)
    for t in range(len(x_TM) + 1):
        part = slice(t, t + 1)  # the last is empty
        alone = Routing(*(each[part] for each in routing[:3]), routing.scaling)
        y_TM = moe(x_TM[part], alone, experts, shared, **options)
        assert y_TM.shape == x_TM[part].shape
        apart_TM = (y_TM - together_TM[part]).abs()
        if order == "f32":
            assert (apart_TM <= moe_apart(x_TM[part], alone, experts, shared)).all()
        else:
            assert apart_TM.norm() <= BF16_LAYER * together_TM[part].norm()


def test_a_nan_token_stays_alone():
    x_TM, routing, experts, shared = layer(5)
    clean_TM = moe(x_TM, routing, experts, shared)
    x_TM[2] = torch.nan
    dirty_TM = moe(x_TM, routing, experts, shared)
    assert dirty_TM[2].isnan().all()
    others = torch.arange(7) != 2
    assert torch.equal(dirty_TM[others], clean_TM[others])


def bf16(number):
    return torch.as_tensor(number, dtype=torch.float32).to(torch.bfloat16).float()


def unit(weight):
    """F64 values of NVFP4 without s2, looked up code by code."""
    scale_OK = decode_e4m3(weight.scale_OB).repeat_interleave(16, dim=1)
    return (decode_e2m1(unpack_nibbles(weight.packed_OP)) * scale_OK).double()


def engine_by_token(x_TM, routing, experts, shared, activations):
    """Order "engine" with exact sums, one expert of one token at a time, step by step."""

    def product(x_K, weight, quantise):
        if not isinstance(weight, Nvfp4Weight):
            return (to_f32(weight).double() @ bf16(x_K).double()).float()
        s2 = torch.tensor(weight.s2)
        if not quantise:
            return (unit(weight) @ bf16(x_K).double()).float() * s2
        input_scale = torch.tensor(weight.input_scale)
        packed, scale, _ = quantize_nvfp4(x_K[None], input_scale)
        q_K = unit(Nvfp4Weight(packed, scale, 1.0))[0]
        return (unit(weight) @ q_K).float() * (s2 * input_scale)

    def one(x_M, weights, quantise):
        gate, up, down = weights
        gate_I, up_I = bf16(product(x_M, gate, quantise)), bf16(product(x_M, up, quantise))
        return bf16(product(swiglu_oai(gate_I, up_I), down, quantise))

    rows = []
    for x_M, ids_K, shares_K in zip(
        x_TM.float(), routing.experts_TK.tolist(), routing.shares_TK, strict=True
    ):
        sum_M = torch.zeros_like(x_M)
        for expert, share in zip(ids_K, shares_K, strict=True):
            sum_M = sum_M + bf16(one(x_M, experts[expert], activations == "nvfp4") * share)
        routed_M = bf16(bf16(sum_M) * torch.tensor(routing.scaling))
        rows.append(routed_M if shared is None else bf16(routed_M + one(x_M, shared, False)))
    return torch.stack(rows)


#: Steps of order "engine" left out or moved, for the tests to notice.
STEPS = {
    "no rounding of out": ("engine_down", lambda act, w, q: reference._product(act, w.down_MI, q)),
    "no rounding of the share": ("weigh", lambda out, share: out * share[..., None]),
    "no rounding of gate and up": (
        "engine_act",
        lambda x, w, q, s: swiglu_oai(
            *(reference._product(x, each, q) for each in w[:2]), **s._asdict()
        ),
    ),
    "no rounding of the routed sum": (
        "combine",
        lambda out, scaling, shared: reference.bf16(out.sum(1) * scaling + shared),
    ),
    "shared expert scaled": (
        "combine",
        lambda out, scaling, shared: reference.bf16(
            (reference.bf16(out.sum(1)) + shared) * scaling
        ),
    ),
}


@pytest.mark.parametrize("step", [None, *STEPS])
@pytest.mark.parametrize("activations", ["bf16", "nvfp4"])
def test_engine_order_step_by_step(activations, step, monkeypatch):
    """Bit for bit where sums are exact: act is rounded before the only sum that is not."""
    x_TM, routing, experts, shared = layer(6, exact=True, scaling=1.7, act_scale=0.37)
    expected_TM = engine_by_token(x_TM, routing, experts, shared, activations)
    if step:
        monkeypatch.setattr(reference, *STEPS[step])
    ours_TM = moe(x_TM, routing, experts, shared, order="engine", activations=activations)
    different = (ours_TM != expected_TM).float().mean()
    # The second product sums 96 numbers of act in F32 here, in F64 there: BF16 hides nearly all.
    assert (different > 0.05) if step else (different < 0.01)


def test_the_two_orders_are_as_near_as_bf16_allows():
    x_TM, routing, experts, shared = layer(7)
    f32_TM = moe(x_TM, routing, experts, shared)
    engine_TM = moe(x_TM, routing, experts, shared, order="engine")
    assert (engine_TM == bf16(engine_TM)).all()
    assert (f32_TM - engine_TM).norm() <= BF16_LAYER * f32_TM.norm()
    assert not torch.equal(f32_TM, engine_TM)


def test_quantised_activations_cost_what_four_bits_cost():
    x_TM, routing, experts, _ = layer(8, x_scale=1 / 448, act_scale=1 / 256)
    wide_TM = moe(x_TM, routing, experts, order="engine")
    narrow_TM = moe(x_TM, routing, experts, order="engine", activations="nvfp4")
    lost = ((wide_TM - narrow_TM).norm() / wide_TM.norm()).item()
    # NVFP4 loses 9 to 10 % of a Gaussian's norm, here three times (x in gate and up, act).
    assert 0.05 < lost < 0.3


@pytest.mark.parametrize(
    "mutant",
    {
        "w1 and w3 swapped": lambda e: Mlp(e[1], e[0], e[2]),
        "nibbles swapped": lambda e: e._replace(
            gate_IM=e.gate_IM._replace(
                packed_OP=(e.gate_IM.packed_OP >> 4) | (e.gate_IM.packed_OP << 4)
            )
        ),
        "w2 under w1's s2": lambda e: e._replace(down_MI=e.down_MI._replace(s2=e.gate_IM.s2)),
        "block scales of the neighbour": lambda e: e._replace(
            up_IM=e.up_IM._replace(scale_OB=e.up_IM.scale_OB.roll(1, 1))
        ),
    }.items(),
    ids=lambda item: item[0],
)
def test_weights_mistaken_are_far_off(mutant):
    x_TM, routing, experts, shared = layer(9)
    allowed_TM = moe_apart(x_TM, routing, experts, shared)
    right_TM = moe(x_TM, routing, experts, shared)
    wrong_TM = moe(x_TM, routing, {e: mutant[1](w) for e, w in experts.items()}, shared)
    assert ((wrong_TM - right_TM).abs() > allowed_TM).float().mean() > 0.5


def test_what_is_refused():
    x_TM, routing, experts, _ = layer(10)
    with pytest.raises(ValueError, match='order "fast" is neither'):
        moe(x_TM, routing, experts, order="fast")
    gate, up, down = experts[0]
    uneven = Mlp(gate, up._replace(input_scale=0.5), down)
    with pytest.raises(ValueError, match="W1 and W3 quantise x by"):
        moe(x_TM, routing, lambda _: uneven, order="engine", activations="nvfp4")
    # BF16 activations have no scales to disagree about.
    moe(x_TM, routing, lambda _: uneven, order="engine")


def test_weights_of_any_format():
    """A plain tensor is taken as it is, in BF16 under order "engine"."""
    x_TM, routing, _, _ = layer(11)
    cases = Cases(12)
    experts = {e: cases.dense(WIDTH, INNER) for e in range(EXPERTS)}
    f32_TM = moe(x_TM, routing, experts)
    assert ((f32_TM - by_token(x_TM, routing, experts, None)).abs()
            <= moe_apart(x_TM, routing, experts, None)).all()  # fmt: skip
    engine_TM = moe(x_TM, routing, experts, order="engine", activations="nvfp4")
    assert (f32_TM - engine_TM).norm() <= BF16_LAYER * f32_TM.norm()

"""Router and expert kernels in Triton's interpreter against the reference, stage by stage.

What does not depend on the order of a sum is compared bit for bit: choices and shares given the
kernel's own scores, pre-activations and outputs of `exact` cases (`moe_cases`), the combination.
What does is compared within bounds that are derived in `mmq.kernels.error_bounds`.

Dimensions: T tokens, K experts of a token, E experts, M hidden, I intermediate, S slots.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="needs triton, which has wheels for Linux only")

import moe_runs
import moe_stages
from moe_cases import Cases
from tolerances import BF16_LAYER, router_scores_apart

from mmq.kernels.reference import moe as reference
from mmq.kernels.reference.moe import Mlp, bf16
from mmq.kernels.reference.nvfp4 import dequantize_nvfp4
from mmq.kernels.reference.router import Routing, choose_experts, route, shares
from mmq.kernels.triton import moe as kernels

#: Odd on purpose: 160 rows are one tile of 128 and a part, 80 columns a step of 64 and a part.
WIDTH, INNER, EXPERTS = 96, 160, 6
#: BF16 activations; NVFP4 × NVFP4 decoded, and as one instruction.
PATHS = [("sm_90", "bf16"), ("sm_90", "nvfp4"), ("sm_100", "nvfp4")]
#: The decoded one, which takes the interpreter longest, left to the slow tests.
QUICK_PATHS = [PATHS[0], pytest.param(*PATHS[1], marks=pytest.mark.slow), PATHS[2]]


def make_layer(seed, tokens=5, experts=EXPERTS, exact=False, top_k=4, scaling=1.7, **scales):
    cases = Cases(seed, exact)
    x_TM = cases.tokens(tokens, WIDTH)
    gate_EM, bias_E = cases.normal(experts, WIDTH) * 0.2, cases.normal(experts)
    routing = route(x_TM, gate_EM, bias_E, top_k=top_k, scaling=scaling)
    weights = [cases.expert(WIDTH, INNER, **scales) for _ in range(experts)]
    return x_TM, routing, weights, cases.shared(WIDTH, INNER)


# The router


@pytest.mark.parametrize(
    ("tokens", "experts", "width", "top_k", "kind"),
    [
        (1, 6, 40, 4, torch.bfloat16),
        (17, 128, 200, 4, torch.float32),
        (33, 20, 64, 20, torch.bfloat16),
    ],
)
def test_router(interpreted, tokens, experts, width, top_k, kind):
    cases = Cases(40)
    hidden_TM = cases.normal(tokens, width).to(kind)
    gate_EM, bias_E = cases.normal(experts, width) * 0.2, cases.normal(experts)
    ids_TK, shares_TK, scores_TE, _ = interpreted(
        moe_runs.run_route, hidden_TM, gate_EM, bias_E if top_k == 4 else None, top_k
    )
    logits_TE = hidden_TM.double() @ gate_EM.double().T
    magnitudes_TE = hidden_TM.double().abs() @ gate_EM.double().abs().T
    allowed_TE = router_scores_apart(magnitudes_TE, logits_TE, width)
    assert ((scores_TE - logits_TE.sigmoid()).abs() <= allowed_TE).all()
    assert torch.equal(ids_TK, choose_experts(scores_TE, bias_E if top_k == 4 else None, top_k))
    assert torch.equal(shares_TK, shares(scores_TE, ids_TK))


def test_router_ties_nan_and_extremes(interpreted):
    """One hidden column, so that the gate is the logits: equal ones, ±0, ±inf, NaN."""
    inf, nan = torch.inf, torch.nan
    gate_EM = torch.tensor([[1, 2, 1, 2, 0.0, -0.0, inf, -inf, nan, 200, -200, 2]]).T
    hidden_TM = torch.tensor([[1.0], [-1.0], [0.5], [0.0]])
    bias_E = torch.tensor([0.0, 0, 0.5, 0, 0, 0, 0, 1, 0, -0.0, 0, 0])
    ids_TK, shares_TK, scores_TE, _ = interpreted(
        moe_runs.run_route, hidden_TM, gate_EM, bias_E, 12
    )
    assert torch.equal(ids_TK, choose_experts(scores_TE, bias_E, 12))
    expected_TE = (hidden_TM.double() @ gate_EM.double().T).sigmoid()
    torch.testing.assert_close(
        scores_TE.double(), expected_TE, rtol=2.0**-21, atol=2.0**-125, equal_nan=True
    )
    assert shares_TK.isnan().all()  # each token chose the NaN, and shows it


@pytest.mark.parametrize("fault", [None, *moe_runs.ROUTER_FAULTS])
def test_faults_in_the_order_are_found(interpreted, fault):
    gate_EM = torch.tensor([[1.0, 2, 1, 2, 0, -1]]).T
    bias_E = torch.tensor([-3.0, -2, -3, -2, 0, 0])
    ids_TK, _, scores_TE, _ = interpreted(
        moe_runs.run_route, torch.ones(3, 1), gate_EM, bias_E, 4, fault
    )
    assert torch.equal(ids_TK, choose_experts(scores_TE, bias_E, 4)) is (fault is None)


def test_no_tokens(interpreted):
    x_TM, routing, experts, shared = make_layer(41, tokens=0)
    ids_TK, shares_TK, scores_TE, _ = interpreted(
        moe_runs.run_route, x_TM, torch.ones(EXPERTS, WIDTH), None
    )
    assert ids_TK.shape == shares_TK.shape == (0, 4)
    assert scores_TE.shape == (0, EXPERTS)
    y_TM = interpreted(moe_runs.run_moe, "sm_90", x_TM, routing, experts, shared)
    assert y_TM.shape == (0, WIDTH)
    assert y_TM.dtype == torch.bfloat16


# Block map


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(("tokens", "experts", "size"), [(1, 128, 16), (50, 3, 16), (37, 9, 64)])
def test_block_map(tokens, experts, size, shared):
    """Every slot once, in a block of its expert, no block too large."""
    ids_TK = route(Cases(42).normal(tokens, 8), Cases(43).normal(experts, 8), None, top_k=3)[0]
    if experts == 3:
        ids_TK[:] = torch.tensor([0, 2, 2])  # expert 1 gets nothing
    blocks = kernels.map_blocks(ids_TK, experts, size, shared)
    seen = {}
    for expert, first, count in zip(*(b.tolist() for b in blocks[1:4]), strict=True):
        assert (expert >= 0) == (count > 0)
        assert count <= size
        seen |= dict.fromkeys(blocks.slots[first : first + count].tolist(), expert)
    routed = dict(enumerate(ids_TK.flatten().tolist()))
    extra = dict.fromkeys(range(tokens * 3, tokens * 4), experts) if shared else {}
    assert seen == routed | extra
    assert len(seen) == len(blocks.slots) == sum(blocks.count.tolist())


# The stages


@pytest.mark.parametrize(("target", "activations"), PATHS)
def test_stages_of_exact_sums(interpreted, target, activations):
    layer = make_layer(44, exact=True, act_scale=0.37)
    moe_stages.check(interpreted, target, layer, activations, exact=True)


@pytest.mark.parametrize(("target", "activations"), QUICK_PATHS)
def test_stages_of_any_sums(interpreted, target, activations):
    layer = make_layer(44, act_scale=0.37)
    moe_stages.check(interpreted, target, layer, activations, exact=False)


@pytest.mark.parametrize("rounding", [True, False], ids=["", "out not rounded"])
@pytest.mark.parametrize(("target", "activations"), PATHS)
def test_down_bit_for_bit(interpreted, target, activations, rounding):
    """Where sums are exact nothing of steps 4 and 5 is left to chance."""
    _, routing, experts, _ = make_layer(52, exact=True, act_scale=0.37)
    cases, slots = Cases(53, exact=True), routing.experts_TK.numel()
    if activations == "bf16":
        act = (cases.tokens(slots, INNER),)
        x_SI = act[0].float()
    else:
        q = cases.nvfp4(slots, INNER)
        act = (None, q.packed_OP, q.scale_OB)
        x_SI = dequantize_nvfp4(q.packed_OP, q.scale_OB, torch.tensor(1.0))
    out_SM = interpreted(moe_runs.run_down, target, act, routing, experts, activations, rounding)
    expected_SM = torch.full((slots, WIDTH), torch.nan)
    for expert, slots_N in reference.by_expert(routing.experts_TK):
        packed, scale, s2, input_scale = experts[expert].down_MI
        unit_MI = dequantize_nvfp4(packed, scale, torch.tensor(1.0))
        alpha = torch.tensor(s2) * (torch.tensor(input_scale) if activations == "nvfp4" else 1.0)
        out_NM = bf16((x_SI[slots_N] @ unit_MI.T) * alpha)
        expected_SM[slots_N] = bf16(out_NM * routing.shares_TK.flatten()[slots_N][:, None])
    assert torch.equal(out_SM.float(), expected_SM) is rounding


# The layer


def wrong_by(y_TM, expected_TM):
    """Relative norm of the difference, and 1 − cosine."""
    y, expected = y_TM.double().flatten(), expected_TM.double().flatten()
    cosine = torch.dot(y, expected) / (y.norm() * expected.norm())
    return ((y - expected).norm() / expected.norm()).item(), (1 - cosine).item()


def same_layer(y_TM, expected_TM):
    """Within BF16 rounding; NaN is not."""
    apart, turned = wrong_by(y_TM, expected_TM)
    return apart <= BF16_LAYER and turned <= 1e-4


@pytest.mark.parametrize(("target", "activations"), QUICK_PATHS)
def test_a_fused_shared_expert_is_one_added_after(interpreted, target, activations):
    x_TM, routing, experts, shared = make_layer(45, tokens=2, top_k=2)
    fused_TM = interpreted(moe_runs.run_moe, target, x_TM, routing, experts, shared, activations)
    routed_TM = interpreted(moe_runs.run_moe, target, x_TM, routing, experts, None, activations)
    unfused_TM = routed_TM.float() + reference.mlp(x_TM, *shared)
    assert same_layer(fused_TM, unfused_TM)
    experts = dict(enumerate(experts))
    options = {"order": "engine", "activations": activations}
    assert same_layer(fused_TM, reference.moe(x_TM, routing, experts, shared, **options))
    assert same_layer(routed_TM, reference.moe(x_TM, routing, experts, **options))
    assert not same_layer(fused_TM, routed_TM)


def test_one_token_and_128_experts(interpreted):
    """Most experts get nothing, and their weights, NaN in every scale, are not read."""
    x_TM, routing, experts, shared = make_layer(46, tokens=1, experts=128, top_k=3)
    expected_TM = reference.moe(x_TM, routing, dict(enumerate(experts)), shared, order="engine")
    reached = set(routing.experts_TK.flatten().tolist())
    for e in set(range(128)) - reached:
        gate = experts[e].gate_IM
        poison = gate._replace(scale_OB=torch.full_like(gate.scale_OB, 0x7F))
        experts[e] = Mlp(poison, poison, experts[e].down_MI)
    y_TM = interpreted(moe_runs.run_moe, "sm_90", x_TM, routing, experts, shared)
    assert same_layer(y_TM, expected_TM)


def test_a_nan_token_stays_alone(interpreted):
    x_TM, routing, experts, shared = make_layer(47, tokens=3, top_k=2)
    x_TM[1, 5] = torch.nan
    y_TM = interpreted(moe_runs.run_moe, "sm_90", x_TM, routing, experts, shared)
    expected_TM = reference.moe(x_TM, routing, dict(enumerate(experts)), shared, order="engine")
    assert y_TM[1].isnan().all()
    assert same_layer(y_TM[[0, 2]], expected_TM[[0, 2]])


@pytest.fixture(scope="module")
def small_layer():
    """Loud enough that limits are met."""
    x_TM, routing, experts, shared = make_layer(48, tokens=2, top_k=2, experts=3, act_scale=0.37)
    return x_TM * 8, routing, experts, shared


@pytest.mark.parametrize("fault", [None, *moe_runs.FAULTS, *moe_runs.NVFP4_FAULTS])
def test_planted_faults_are_found(interpreted, small_layer, fault):
    x_TM, routing, experts, shared = small_layer
    activations = "nvfp4" if fault in moe_runs.NVFP4_FAULTS else "bf16"
    y_TM = interpreted(
        moe_runs.run_moe, "sm_100", x_TM, routing, experts, shared, activations, fault
    )
    options = {"order": "engine", "activations": activations}
    expected_TM = reference.moe(x_TM, routing, dict(enumerate(experts)), shared, **options)
    assert same_layer(y_TM, expected_TM) is (fault is None)


@pytest.mark.slow
@pytest.mark.parametrize(("width", "inner"), [(6144, 256), (128, 3072)])
@pytest.mark.parametrize(("target", "activations"), PATHS)
def test_true_widths(interpreted, target, activations, width, inner):
    """M3's 6144 and 3072 columns, beside two tiles and one of the other width."""
    cases = Cases(49)
    x_TM = cases.tokens(2, width)
    routing = Routing(
        torch.tensor([[0, 1], [1, 0]], dtype=torch.int32), torch.tensor([[0.7, 0.3], [0.6, 0.4]]),
        torch.empty(2, 2), 2.0,
    )  # fmt: skip
    experts = [cases.expert(width, inner, 1.0, 0.37) for _ in range(2)]
    shared = cases.shared(width, inner)
    y_TM = interpreted(moe_runs.run_moe, target, x_TM, routing, experts, shared, activations)
    options = {"order": "engine", "activations": activations}
    expected_TM = reference.moe(x_TM, routing, dict(enumerate(experts)), shared, **options)
    assert same_layer(y_TM, expected_TM)


# What is refused


@pytest.mark.parametrize("activations", ["fp8", "mxfp8", "int8"])
@pytest.mark.parametrize("target", ["sm_90", "sm_100", "sm_120", "gfx950"])
def test_dots_without_right_code_are_refused(interpreted, target, activations):
    assert not kernels.supports(target, activations=activations).ok
    message = interpreted(moe_runs.refusal, target, activations)
    assert message.startswith(f"NVFP4 × {activations}: ")


@pytest.mark.parametrize("x_TM", [torch.ones(1, 64), torch.ones(1, 32, dtype=torch.bfloat16)])
def test_hidden_states_that_do_not_fit_are_refused(interpreted, x_TM):
    experts = [Cases(51).expert(64, 32)]
    routing = route(torch.ones(1, 4), torch.ones(1, 4), None, top_k=1)
    with pytest.raises(ValueError, match="not BF16 of width 64"):
        interpreted(moe_runs.run_moe, "sm_90", x_TM, routing, experts, None)


def test_weights_that_do_not_fit_are_refused():
    cases = Cases(50)
    expert, other = cases.expert(64, 32), cases.expert(64, 32, x_scale=0.5)
    with pytest.raises(ValueError, match="W1 and W3 quantise x by"):
        kernels.stack_experts([expert, other])
    with pytest.raises(ValueError, match="shared expert is not MXFP8 of the experts' widths"):
        kernels.stack_experts([expert], cases.shared(64, 64))
    with pytest.raises(ValueError, match="shared expert is not MXFP8"):
        kernels.stack_experts([expert], expert)
    with pytest.raises(ValueError, match="experts' weights are not NVFP4"):
        kernels.stack_experts([cases.dense(64, 32)])


def test_block_sizes():
    sizes = [kernels.block_size(tokens * 4, 128) for tokens in (1, 512, 513, 1024, 1025, 99999)]
    assert sizes == [16, 16, 32, 32, 64, 64]

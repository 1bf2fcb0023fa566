"""Router and MoE layer against MiniMax-M3 in transformers, which shares no code with us.

Weights as compressed-tensors decodes them, too: the same packed bytes must give the same layer.
"""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
from compressed_tensors.quantization import QuantizationScheme, preset_name_to_scheme
from moe_bounds import moe_apart
from moe_cases import Cases
from tolerances import BF16_LAYER, router_scores_apart
from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl as theirs
from transformers.models.minimax_m3_vl.configuration_minimax_m3_vl import MiniMaxM3VLTextConfig

from mmq.kernels.reference import moe as reference
from mmq.kernels.reference.moe import Mlp, Nvfp4Weight, moe, to_f32
from mmq.kernels.reference.router import route

WIDTH, INNER, EXPERTS, TOP_K, TOKENS = 96, 64, 16, 4, 29
SCHEME: QuantizationScheme = preset_name_to_scheme("NVFP4A16", ["Linear"])


def their_block(experts=EXPERTS, width=WIDTH, inner=INNER) -> theirs.MiniMaxM3VLSparseMoeBlock:
    """M3's block, narrow, its weights not yet set."""
    config = MiniMaxM3VLTextConfig(
        hidden_size=width, intermediate_size=inner, shared_intermediate_size=inner,
        num_local_experts=experts, num_experts_per_tok=TOP_K, routed_scaling_factor=2.0,
    )  # fmt: skip
    config._experts_implementation = "eager"
    block = theirs.MiniMaxM3VLSparseMoeBlock(config).requires_grad_(False)
    assert (config.swiglu_alpha, config.swiglu_limit) == (1.702, 7.0)
    return block


def fill(block, gate_EM, bias_E, experts, shared):
    """Their layout: gate rows, then up rows, in one tensor for all experts."""
    block.gate.weight.copy_(gate_EM)
    block.gate.e_score_correction_bias.copy_(bias_E)
    for e, weights in experts.items():
        gate_IM, up_IM, down_MI = (to_f32(weight) for weight in weights)
        block.experts.gate_up_proj[e] = torch.cat([gate_IM, up_IM])
        block.experts.down_proj[e] = down_MI
    gate_IM, up_IM, down_MI = (to_f32(weight) for weight in shared)
    block.shared_experts.gate_up_proj.weight.copy_(torch.cat([gate_IM, up_IM]))
    block.shared_experts.down_proj.weight.copy_(down_MI)


@pytest.fixture(scope="module")
def layer():
    """Tokens, gate, bias, experts, shared expert: all F32, and outliers that clamps catch."""
    cases = Cases(20)
    x_TM = cases.normal(TOKENS, WIDTH) * torch.logspace(-3, 1, TOKENS)[:, None]
    gate_EM, bias_E = cases.normal(EXPERTS, WIDTH) * 0.3, cases.normal(EXPERTS)
    experts = {e: cases.dense(WIDTH, INNER) for e in range(EXPERTS)}
    return x_TM, gate_EM, bias_E, experts, cases.dense(WIDTH, INNER)


@pytest.fixture(scope="module")
def block(layer):
    block = their_block()
    fill(block, *layer[1:])
    return block


def test_the_router_chooses_the_same_experts(layer, block):
    x_TM, gate_EM, bias_E, *_ = layer
    logits_TE, weights_TK, experts_TK = block.gate(x_TM)
    ours = route(x_TM, gate_EM, bias_E)
    ids_TK, order_TK = experts_TK.sort(1)
    ours_TK, our_order_TK = ours.experts_TK.long().sort(1)
    assert torch.equal(ours_TK, ids_TK)
    exact_TE = x_TM.double() @ gate_EM.double().T
    magnitudes_TE = x_TM.double().abs() @ gate_EM.double().abs().T
    allowed_TE = router_scores_apart(magnitudes_TE, exact_TE, WIDTH)
    apart_TE = (ours.scores_TE - logits_TE.sigmoid()).abs()
    assert (apart_TE <= allowed_TE).all()
    # A share moves by what its score and the sum move by, and a few roundings.
    total_T1 = ours.scores_TE.gather(1, ours_TK).sum(1, keepdim=True)
    allowed_TK = 2 * (allowed_TE.gather(1, ours_TK).sum(1, keepdim=True)) / total_T1 + 8 * 2.0**-24
    apart_TK = (ours.shares_TK.gather(1, our_order_TK) - weights_TK.gather(1, order_TK)).abs()
    assert (apart_TK <= allowed_TK).all()


def with_shares(side, shares_TK):
    return {"routing": side["routing"]._replace(shares_TK=shares_TK)}


def w1_and_w3_swapped(side):
    return {"experts": {e: Mlp(w[1], w[0], w[2]) for e, w in side["experts"].items()}}


def shared_expert_scaled(side):
    shared = side["shared"]
    return {"shared": shared._replace(down_MI=2 * shared.down_MI)}


#: Mistakes, as what they change on our side: the comparison must notice each of them.
MUTANTS = {
    "w1 and w3 swapped": w1_and_w3_swapped,
    "experts off by one": lambda s: {"experts": lambda e: s["experts"][(e + 1) % EXPERTS]},
    "alpha of SiLU": lambda s: {"swiglu": reference.Swiglu(alpha=1.0)},
    "no limit": lambda s: {"swiglu": reference.Swiglu(limit=torch.inf)},
    "no +1": lambda s: {"swiglu": reference.Swiglu(beta=0.0)},
    "bias as weight": lambda s: with_shares(s, s["biased"]),
    "weights not normalised": lambda s: with_shares(s, s["chosen"]),
    "no scaling": lambda s: {"routing": s["routing"]._replace(scaling=1.0)},
    "no shared expert": lambda s: {"shared": None},
    "shared expert scaled": shared_expert_scaled,
    "choices without bias": lambda s: {"routing": route(s["x"], s["gate"], None)},
}


def ours(side):
    names = ("x", "routing", "experts", "shared")
    options = {"swiglu": side["swiglu"]} if "swiglu" in side else {}
    return moe(*(side[name] for name in names), **options)


@pytest.mark.parametrize("mutant", [None, *MUTANTS])
def test_the_layer_in_f32(layer, block, mutant):
    x_TM, gate_EM, bias_E, experts, shared = layer
    routing = route(x_TM, gate_EM, bias_E)
    chosen_TK = routing.scores_TE.gather(1, routing.experts_TK.long())
    biased_TK = chosen_TK + bias_E[routing.experts_TK.long()]
    side = {
        "x": x_TM, "gate": gate_EM, "routing": routing, "experts": experts, "shared": shared,
        "chosen": chosen_TK, "biased": biased_TK / biased_TK.sum(1, keepdim=True),
    }  # fmt: skip
    allowed_TM = moe_apart(x_TM, routing, experts, shared)
    if mutant:
        side = side | MUTANTS[mutant](side)
    wrong_TM = (ours(side) - block(x_TM[None])[0]).abs() > allowed_TM
    assert wrong_TM.any() if mutant else not wrong_TM.any()


def decompressed(weight: Nvfp4Weight) -> torch.Tensor:
    """F32 of BF16 weights as compressed-tensors reads them, its tensor scale being a divisor."""
    state = {
        "weight_packed": weight.packed_OP,
        "weight_scale": weight.scale_OB.view(torch.float8_e4m3fn),
        "weight_global_scale": torch.tensor([1 / weight.s2]),
    }
    return NVFP4PackedCompressor.decompress(state, SCHEME)["weight"].float()


@pytest.mark.parametrize("swap", [False, True], ids=["as packed", "nibbles swapped"])
def test_the_layer_of_packed_weights(swap):
    """s2 a power of two: BF16 holds every weight, so that only F32 sums differ."""
    cases = Cases(21)
    x_TM, gate_EM, bias_E = cases.normal(5, WIDTH), cases.normal(8, WIDTH), cases.normal(8)
    experts = {
        e: Mlp(*(w._replace(s2=2.0**-11) for w in cases.expert(WIDTH, INNER))) for e in range(8)
    }
    shared = cases.shared(WIDTH, INNER)
    foreign = {e: Mlp(*(decompressed(w) for w in experts[e])) for e in experts}
    if swap:
        experts = {
            e: Mlp(*(w._replace(packed_OP=(w.packed_OP >> 4) | (w.packed_OP << 4)) for w in each))
            for e, each in experts.items()
        }
    block = their_block(experts=8)
    fill(block, gate_EM, bias_E, foreign, shared)
    routing = route(x_TM, gate_EM, bias_E)
    allowed_TM = moe_apart(x_TM, routing, foreign, shared)
    apart_TM = (moe(x_TM, routing, experts, shared) - block(x_TM[None])[0]).abs()
    assert bool((apart_TM <= allowed_TM).all()) is not swap


@pytest.mark.slow
def test_an_expert_of_full_width():
    """6144 columns, a slice of 256 intermediate ones, four experts of 128, engine order too."""
    cases = Cases(22)
    x_TM, gate_EM = cases.normal(6, 6144), cases.normal(128, 6144) / 64
    routing = route(x_TM, gate_EM, torch.zeros(128))
    used = routing.experts_TK.unique().tolist()
    experts = {e: Mlp(*(w._replace(s2=2.0**-11) for w in cases.expert(6144, 256))) for e in used}
    shared = cases.shared(6144, 256)
    block = their_block(experts=128, width=6144, inner=256)
    fill(block, gate_EM, torch.zeros(128), experts, shared)
    expected_TM = block(x_TM[None])[0]
    ours_TM = moe(x_TM, routing, experts, shared)
    assert ((ours_TM - expected_TM).abs() <= moe_apart(x_TM, routing, experts, shared)).all()
    engine_TM = moe(x_TM.to(torch.bfloat16), routing, experts, shared, order="engine")
    wanted_TM = moe(x_TM.to(torch.bfloat16), routing, experts, shared)
    assert (engine_TM - wanted_TM).norm() <= BF16_LAYER * wanted_TM.norm()

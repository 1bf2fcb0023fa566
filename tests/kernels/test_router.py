"""The router against its definition, written out expert by expert in F64.

Dimensions: T tokens, M hidden, E experts, K experts of a token.
"""

from __future__ import annotations

import math

import pytest
import torch
from moe_cases import Cases
from tolerances import router_scores_apart

from mmq.kernels.reference.router import choose_experts, route, shares


def rank(scores_E, bias_E, top_k):
    """Ids by tuples: NaN first, then s + bias descending, then id."""
    choice_E = [torch.tensor(s) + torch.tensor(b) for s, b in zip(scores_E, bias_E, strict=True)]
    order = sorted(
        range(len(choice_E)),
        key=lambda e: (not choice_E[e].isnan(), -choice_E[e].nan_to_num(0.0), e),
    )
    return order[:top_k]


def test_four_numbers_of_the_docstring():
    hidden_TM, gate_EM = torch.eye(1), torch.tensor([[0.0], [2.0], [-1.0], [0.0]])
    biased = route(hidden_TM, gate_EM, torch.tensor([0, 0, 0.4, 0]), top_k=2)
    assert biased.experts_TK.tolist() == [[1, 2]]
    assert biased.shares_TK.tolist()[0] == pytest.approx([0.7661, 0.2339], abs=5e-5)
    assert biased.weights_TK.tolist()[0] == pytest.approx([1.5322, 0.4678], abs=1e-4)
    assert biased.scores_TE.tolist()[0] == pytest.approx([0.5, 0.8808, 0.2689, 0.5], abs=5e-5)
    tied = route(hidden_TM, gate_EM, None, top_k=2)
    assert tied.experts_TK.tolist() == [[1, 0]]
    assert tied.experts_TK.dtype == torch.int32


@pytest.mark.parametrize("top_k", [1, 3, 4, 11])
def test_against_the_definition(top_k):
    cases = Cases(1)
    hidden_TM, gate_EM, bias_E = cases.normal(33, 40), cases.normal(11, 40), cases.normal(11)
    routing = route(hidden_TM, gate_EM, bias_E, top_k=top_k, scaling=2.5)
    logits_TE = hidden_TM.double() @ gate_EM.double().T
    magnitudes_TE = hidden_TM.double().abs() @ gate_EM.double().abs().T
    allowed_TE = router_scores_apart(magnitudes_TE, logits_TE, 40)
    assert ((routing.scores_TE - logits_TE.sigmoid()).abs() <= allowed_TE).all()
    for scores_E, ids_K, weights_K in zip(
        routing.scores_TE, routing.experts_TK.tolist(), routing.weights_TK, strict=True
    ):
        assert ids_K == rank(scores_E.tolist(), bias_E.tolist(), top_k)
        total = math.fsum(scores_E[ids_K].tolist())
        expected_K = scores_E[ids_K].double() / total * 2.5
        torch.testing.assert_close(weights_K.double(), expected_K, rtol=8 * 2.0**-24, atol=0)


def test_ties_go_to_lower_ids_wherever_they_are():
    scores_TE = torch.tensor([0.25, 0.5, 0.75]).repeat(2, 7)[:, torch.randperm(21)]
    for scores_E, ids_K in zip(
        scores_TE, choose_experts(scores_TE, None, 16).tolist(), strict=True
    ):
        assert ids_K == rank(scores_E.tolist(), [0.0] * 21, 16)


def test_nan_is_chosen_first_and_shows():
    scores_TE = torch.tensor([[0.1, 0.9, torch.nan, 0.5], [torch.nan, 0.9, torch.nan, 0.5]])
    experts_TK = choose_experts(scores_TE, None, 2)
    assert experts_TK.tolist() == [[2, 1], [0, 2]]
    assert shares(scores_TE, experts_TK).isnan().all()


def test_the_bias_chooses_and_does_nothing_else():
    cases = Cases(2)
    hidden_TM, gate_EM = cases.normal(9, 16), cases.normal(8, 16)
    bias_E = torch.tensor([9.0, 0, 0, 9, 0, 0, 9, 0])
    routing = route(hidden_TM, gate_EM, bias_E, top_k=3)
    assert (routing.experts_TK.sort(1).values == torch.tensor([0, 3, 6])).all()
    chosen_TK = routing.scores_TE.gather(1, routing.experts_TK.long())
    assert torch.equal(routing.shares_TK, shares(routing.scores_TE, routing.experts_TK))
    assert (chosen_TK[:, :-1] >= chosen_TK[:, 1:]).all()


def test_bf16_hidden_states_are_widened_not_the_gate_rounded():
    cases = Cases(3)
    hidden_TM, gate_EM = cases.tokens(5, 32), cases.normal(6, 32)
    narrow = route(hidden_TM, gate_EM, None)
    assert torch.equal(narrow.scores_TE, route(hidden_TM.float(), gate_EM, None).scores_TE)
    rounded = gate_EM.to(torch.bfloat16)
    assert not torch.equal(narrow.scores_TE, route(hidden_TM, rounded, None).scores_TE)


def test_no_tokens_and_one_token():
    gate_EM = Cases(4).normal(6, 8)
    empty = route(torch.empty(0, 8), gate_EM, torch.zeros(6))
    assert empty.experts_TK.shape == empty.weights_TK.shape == (0, 4)
    assert empty.scores_TE.shape == (0, 6)
    assert route(torch.ones(1, 8), gate_EM, None, top_k=6).experts_TK.shape == (1, 6)


@pytest.mark.parametrize("top_k", [0, 7])
def test_more_experts_than_there_are(top_k):
    with pytest.raises(ValueError, match=f"cannot choose {top_k} of 6 experts"):
        route(torch.ones(1, 8), torch.ones(6, 8), None, top_k=top_k)

"""The router: which experts a token goes to, and how much each of them counts.

    s       = sigmoid(x · gate)                  F32 throughout, also where x is BF16
    chosen  = the top_k experts by s + bias      the bias chooses and does nothing else
    share_k = s_k / (s_1 + … + s_top_k)          weight_k = share_k · scaling

Four numbers, top 2 of 4: logits [0, 2, −1, 0] give s = [0.5, 0.8808, 0.2689, 0.5]. With bias
[0, 0, 0.4, 0] experts 1 (0.8808) and 2 (0.6689) are chosen. Their shares come from s alone:
0.8808 / 1.1497 = 0.7661 and 0.2339. With the bias 0 it is experts 1 and 0: 0 and 3 tie, and the
lower id wins.

The order of the chosen is part of the definition: by s + bias, largest first, equal ones by id. So
is the order of the sum: from left to right. Engines leave ties to their sort; for all else they
agree. A NaN counts as larger than every number, so that it shows in the output.

Sources: transformers 5.24 ``MiniMaxM3VLTopKRouter``; vLLM ``vllm/models/minimax_m3``, which keeps
gate and logits F32. The gate in BF16 routes near ties differently.

Dimensions: T tokens, M hidden, E experts, K experts of a token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Routing(NamedTuple):
    """Where tokens go.

    Attributes:
        experts_TK: I32, ids of the chosen experts, best first.
        shares_TK: F32, what each of them counts; a token's shares sum to 1.
        scores_TE: F32, the sigmoids of all experts, without bias.
        scaling: what the routed sum is multiplied by, M3's routed_scaling_factor.
    """

    experts_TK: Tensor
    shares_TK: Tensor
    scores_TE: Tensor
    scaling: float

    @property
    def weights_TK(self) -> Tensor:
        """F32, shares times scaling: what an expert's output counts in the sum."""
        return self.shares_TK * self.scaling


def route(
    hidden_TM: Tensor,
    gate_EM: Tensor,
    bias_E: Tensor | None,
    *,
    top_k: int = 4,
    scaling: float = 2.0,
) -> Routing:
    """Choose experts for tokens.

    Args:
        hidden_TM: F32, or BF16, which is widened.
        gate_EM: F32.
        bias_E: F32, M3's e_score_correction_bias; None for none.

    Raises:
        ValueError: top_k is not between 1 and the number of experts.
    """
    scores_TE = torch.sigmoid(hidden_TM.float() @ gate_EM.float().T)
    experts_TK = choose_experts(scores_TE, bias_E, top_k)
    return Routing(experts_TK, shares(scores_TE, experts_TK), scores_TE, scaling)


def choose_experts(scores_TE: Tensor, bias_E: Tensor | None, top_k: int) -> Tensor:
    """Ids I32 [T, top_k] of the experts with the largest score + bias, largest first, ties by id.

    Raises:
        ValueError: top_k is not between 1 and the number of experts.
    """
    if not 1 <= top_k <= scores_TE.shape[1]:
        raise ValueError(f"cannot choose {top_k} of {scores_TE.shape[1]} experts")
    choice_TE = scores_TE if bias_E is None else scores_TE + bias_E.float()
    # Not torch.topk, which leaves the order of equal numbers open.
    order_TE = torch.sort(choice_TE, dim=1, descending=True, stable=True).indices
    return order_TE[:, :top_k].to(torch.int32)


def shares(scores_TE: Tensor, experts_TK: Tensor) -> Tensor:
    """Scores of the chosen experts, F32 [T, K], divided by their sum, added from left to right."""
    chosen_TK = scores_TE.gather(1, experts_TK.long())
    total_T = chosen_TK[:, 0]
    for score_T in chosen_TK.unbind(1)[1:]:
        total_T = total_T + score_T
    return chosen_TK / total_T[:, None]

"""How far apart two implementations of an MLP or a MoE layer in F32 can be.

Dimensions: T tokens, M hidden, I intermediate.
"""

from __future__ import annotations

import torch
from tolerances import F32, products_apart, swiglu_apart

from mmq.kernels.reference.moe import M3_SWIGLU, swiglu_oai, to_f32


def mlp_apart(x_TM, weights, swiglu=M3_SWIGLU):
    """How far an MLP in F32 and in F64 can be apart; the magnitude of its last sums, too."""
    x_TM = x_TM.double()
    gate_IM, up_IM, down_MI = (to_f32(weight).double() for weight in weights)
    gate_TI, up_TI = x_TM @ gate_IM.T, x_TM @ up_IM.T
    aparts = (products_apart(x_TM.abs() @ each.abs().T, x_TM.shape[1]) for each in (gate_IM, up_IM))
    act_apart_TI = swiglu_apart(gate_TI, up_TI, *aparts, **swiglu._asdict())
    act_TI = swiglu_oai(gate_TI, up_TI, **swiglu._asdict()).abs() + act_apart_TI
    magnitude_TM = act_TI @ down_MI.abs().T
    last_TM = products_apart(magnitude_TM, down_MI.shape[1])
    return act_apart_TI @ down_MI.abs().T + last_TM, magnitude_TM


def moe_apart(x_TM, routing, experts, shared, swiglu=M3_SWIGLU):
    """How far two implementations of order "f32" can be apart, F64 [T, M]."""
    total_TM = torch.zeros(x_TM.shape, dtype=torch.float64)
    magnitude_TM = total_TM.clone()
    for k, ids_T in enumerate(routing.experts_TK.T.tolist()):
        for t, expert in enumerate(ids_T):
            weight = routing.weights_TK[t, k].double()
            apart, magnitude = mlp_apart(x_TM[t : t + 1], experts[expert], swiglu)
            total_TM[t] += (weight * apart)[0]
            magnitude_TM[t] += (weight * magnitude)[0]
    if shared is not None:
        apart, magnitude = mlp_apart(x_TM, shared, swiglu)
        total_TM, magnitude_TM = total_TM + apart, magnitude_TM + magnitude
    # Share, scaling, and at most K + 1 additions, in either implementation.
    roundings = routing.experts_TK.shape[1] + 3
    return total_TM + 2 * roundings * F32 * magnitude_TM

"""The router in one kernel: F32 logits, sigmoid, top-k under the bias, shares.

Reference: `mmq.kernels.reference.router`.

    s = sigmoid(x · gate)      chosen = top_k of s + bias      share = s / Σ s of the chosen

Four numbers, top 2 of 4: logits [0, 2, −1, 0] give s = [0.5, 0.8808, 0.2689, 0.5]; without bias
experts 1 and 0 are chosen, since of equal ones the lower id wins, with shares 0.6379 and 0.3621.

Precision: `tl.dot` with input_precision "ieee", which is F32 multiply-adds, no TF32 and no BF16
passes. The order of the sum is the compiler's, so scores differ from the reference's by rounding
(`error_bounds.router_score_error`). All that follows from the scores is exact: a top-k of 64-bit
keys (ordered score, 0xFFFF − id), the sum from left to right, an IEEE division.

Dimensions: T tokens, N of them in a program, M hidden, E experts, K experts of a token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..reference.router import Routing
from ..support import Support
from .launch import launch_options
from .small_floats import bits_of

#: Tokens and hidden columns of a step: the smallest dot there is, since gates are small.
TOKENS, COLUMNS = 16, 64
THREADS = 128
#: Ids are 16 bits of a key.
MAX_EXPERTS = 1 << 16


@triton.jit
def _keys(choice_NE, expert_E, inside_E):
    """I64 that order as (choice descending, id ascending), NaN above everything; least outside."""
    choice_NE = tl.where(choice_NE != choice_NE, float("nan"), choice_NE + 0.0)  # no −0, one NaN
    bits_NE = bits_of(choice_NE)
    bits_NE = tl.where(choice_NE != choice_NE, 0x7FC00000, bits_NE)
    ordered_NE = (bits_NE ^ ((bits_NE >> 31) & 0x7FFFFFFF)).to(tl.int64)
    key_NE = (ordered_NE << 16) | (0xFFFF - expert_E)[None, :].to(tl.int64)
    return tl.where(inside_E[None, :], key_NE, -(1 << 62))


@triton.jit
def router_kernel(
    hidden, gate, bias, scores, experts_TK, shares_TK, tokens, experts, M,
    N: tl.constexpr, E: tl.constexpr, BM: tl.constexpr, TOP_K: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Scores F32 [T, experts], ids I32 [T, TOP_K] and shares F32 [T, TOP_K].

    Args:
        hidden: F32 or BF16 [T, M]. gate: F32 [experts, M]. bias: F32 [experts], read if BIAS.
        E: `experts` rounded up to a power of two.
    """
    token_N = tl.program_id(0) * N + tl.arange(0, N)
    inside_N = token_N < tokens
    expert_E = tl.arange(0, E)
    inside_E = expert_E < experts
    logits_NE = tl.zeros((N, E), tl.float32)
    for m in range(0, M, BM):
        column_B = m + tl.arange(0, BM)
        inside_B = column_B < M
        x_NB = tl.load(
            hidden + token_N.to(tl.int64)[:, None] * M + column_B[None, :],
            mask=inside_N[:, None] & inside_B[None, :], other=0.0,
        ).to(tl.float32)  # fmt: skip
        gate_EB = tl.load(
            gate + expert_E[:, None] * M + column_B[None, :],
            mask=inside_E[:, None] & inside_B[None, :], other=0.0,
        )  # fmt: skip
        logits_NE = tl.dot(x_NB, tl.trans(gate_EB), logits_NE, input_precision="ieee")
    score_NE = tl.div_rn(tl.full((N, E), 1.0, tl.float32), 1.0 + tl.exp(-logits_NE))
    inside_NE = inside_N[:, None] & inside_E[None, :]
    tl.store(scores + token_N[:, None] * experts + expert_E[None, :], score_NE, mask=inside_NE)
    choice_NE = score_NE
    if BIAS:
        choice_NE += tl.load(bias + expert_E, mask=inside_E, other=0.0)[None, :]
    key_NE = _keys(choice_NE, expert_E, inside_E)
    total_N = tl.zeros((N,), tl.float32)
    for choice in tl.static_range(TOP_K):
        best_N = tl.max(key_NE, 1)
        id_N = 0xFFFF - (best_N & 0xFFFF).to(tl.int32)
        taken_NE = expert_E[None, :] == id_N[:, None]
        total_N += tl.sum(tl.where(taken_NE, score_NE, 0.0), 1)
        key_NE = tl.where(taken_NE, -(1 << 62), key_NE)
        tl.store(experts_TK + token_N * TOP_K + choice, id_N, mask=inside_N)
    # A second pass, so that the shares need no second array of the chosen scores.
    key_NE = _keys(choice_NE, expert_E, inside_E)
    for choice in tl.static_range(TOP_K):
        id_N = 0xFFFF - (tl.max(key_NE, 1) & 0xFFFF).to(tl.int32)
        taken_NE = expert_E[None, :] == id_N[:, None]
        score_N = tl.sum(tl.where(taken_NE, score_NE, 0.0), 1)
        key_NE = tl.where(taken_NE, -(1 << 62), key_NE)
        share_N = tl.div_rn(score_N, total_N)
        tl.store(shares_TK + token_N * TOP_K + choice, share_N, mask=inside_N)


def route(
    hidden_TM: Tensor,
    gate_EM: Tensor,
    bias_E: Tensor | None,
    *,
    top_k: int = 4,
    scaling: float = 2.0,
) -> Routing:
    """`mmq.kernels.reference.router.route` on the device of `hidden_TM`.

    Args:
        hidden_TM: F32 or BF16. gate_EM, bias_E: F32.

    Raises:
        ValueError: top_k is not between 1 and the number of experts, shapes or types do not fit,
            or there are more than 65,536 experts.
    """
    (tokens, width), experts = hidden_TM.shape, gate_EM.shape[0]
    if not 1 <= top_k <= experts <= MAX_EXPERTS:
        raise ValueError(f"cannot choose {top_k} of {experts} experts")
    if gate_EM.dtype != torch.float32 or gate_EM.shape[1] != width:
        raise ValueError(f"a gate {gate_EM.dtype}{list(gate_EM.shape)} for {width} hidden columns")
    device = hidden_TM.device
    scores_TE = torch.empty(tokens, experts, device=device)
    experts_TK = torch.empty(tokens, top_k, dtype=torch.int32, device=device)
    shares_TK = torch.empty(tokens, top_k, device=device)
    if tokens:
        router_kernel[(triton.cdiv(tokens, TOKENS),)](
            hidden_TM.contiguous(), gate_EM.contiguous(), bias_E, scores_TE, experts_TK, shares_TK,
            tokens, experts, width, N=TOKENS, E=max(16, triton.next_power_of_2(experts)),
            BM=COLUMNS, TOP_K=top_k, BIAS=bias_E is not None, **launch_options(THREADS),
        )  # fmt: skip
    return Routing(experts_TK, shares_TK, scores_TE, scaling)


def supports(target: str) -> Support:
    """F32 has multiply-add instructions everywhere; only tensor cores lack it on NVIDIA."""
    if target.startswith("gfx"):
        return Support("native", "v_mfma_f32 of F32")
    return Support("native", "fma.rn.f32: tensor cores have no F32 but TF32")

"""Causal attention over all keys, or over the blocks of keys that each token chose.

    score = (q · scale) · k            scale = D^−½ unless given
    p     = exp(score − max score)     over the visible keys alone
    out   = Σ p·v / Σ p                lse = max score + ln Σ p

A key s is visible to the query at position t if s ≤ t and, with a selection, if block s div B is
among the blocks chosen for the query's KV head. Query head h reads KV head h div R. Everything is
F32. A query that sees nothing gives 0 and lse −inf.

Four numbers, D 1, scale 1, q = 2 at position 3, block 2: k = [0, 9, 0.5, 1], v = [7, 7, 1, 5],
chosen block 1. Visible scores [1, 2], p = [e^−1, 1] = [0.368, 1], out = (0.368 + 5) / 1.368 =
3.924, lse = 2 + ln 1.368 = 2.313.

Source: vLLM 0.33 ``models/minimax_m3`` (``sparse_attn.py``), transformers 5.24
``minimax_m3_vl`` (``build_block_mask``), MiniMax MSA. Up to C·B = 2,048 tokens of context every
block is chosen and the result is dense causal attention.

Dimensions: T query tokens, S key positions of the sequence, H query heads, G KV heads, R = H/G,
D head dimension, N blocks of the sequence, C chosen blocks, B tokens of a block, X parts whose
results are merged, Q sequences.
"""

from __future__ import annotations

import dataclasses
import itertools

import torch
from torch import Tensor

from ..kv_pages import PagedCache, TokenBatch
from .kv_cache import read_pages

#: Scores held at a time, of one KV head. On one core 2^21 (8 MB) and 2^22 ran 64 query heads over
#: 4,096 keys at 80 GFLOP/s, 2^24 at 51.
SCORES = 2**21
#: Up to how many keys, as a multiple of C·B, scores of all keys are computed and masked. Scores of
#: the chosen blocks alone take 1.2 times as long at C·B (64 heads of 128, C 16, B 128), 0.9 at
#: 1.5·C·B, 0.65 at 2·C·B, 0.3 at 4·C·B; with small blocks (8 heads of 32, C 4, B 16) they win
#: sooner still.
MASKED_KEYS = 1.25


def attend(
    q_THD: Tensor,
    k_SGD: Tensor,
    v_SGD: Tensor,
    positions_T: Tensor,
    selection_GTC: Tensor | None = None,
    *,
    block: int = 128,
    scale: float | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Attention output [T, H, D] of one sequence, in `dtype`, by default that of `q_THD`.

    Args:
        k_SGD, v_SGD: keys and values of positions 0 to S − 1, F32 or BF16.
        positions_T: position of each query token, from 0, in any order.
        selection_GTC: chosen blocks, distinct for a token and head; −1 is none. Without it all
            keys up to the token's own are visible.
        block: tokens of a block.
        scale: of the scores.

    Raises:
        ValueError: the query heads are no multiple of the KV heads.
    """
    out_THD, _ = attend_with_lse(
        q_THD, k_SGD, v_SGD, positions_T, selection_GTC, block=block, scale=scale
    )
    return out_THD.to(dtype or q_THD.dtype)


def attend_with_lse(
    q_THD: Tensor,
    k_SGD: Tensor,
    v_SGD: Tensor,
    positions_T: Tensor,
    selection_GTC: Tensor | None = None,
    *,
    block: int = 128,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The same, F32 [T, H, D], and the log of each query's sum of exponentials, F32 [T, H].

    Two forms give the same numbers but for the order of additions: scores of all keys, masked, and
    scores of the chosen blocks alone, which long contexts take.
    """
    tokens, heads, dim = q_THD.shape
    kv_heads = k_SGD.shape[1]
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads are no multiple of {kv_heads} KV heads")
    q_THD = q_THD.float() * (dim**-0.5 if scale is None else scale)
    q_GTRD = q_THD.reshape(tokens, kv_heads, heads // kv_heads, dim).transpose(0, 1)
    k_GSD, v_GSD = (x.float().transpose(0, 1).contiguous() for x in (k_SGD, v_SGD))
    out_GTRD = torch.zeros(q_GTRD.shape)
    lse_GTR = torch.full(q_GTRD.shape[:3], -torch.inf)
    step = _tokens_at_a_time(heads // kv_heads, k_SGD.shape[0], selection_GTC, block)
    for start in range(0, tokens, step):
        now = slice(start, start + step)
        keys = min(k_SGD.shape[0], int(positions_T[now].max()) + 1)
        for g in range(kv_heads if keys else 0):
            chosen_TC = None if selection_GTC is None else selection_GTC[g, now].long()
            operands = q_GTRD[g, now], k_GSD[g, :keys], v_GSD[g, :keys], positions_T[now].long()
            if chosen_TC is None or _masking_is_faster(keys, chosen_TC, block):
                out_GTRD[g, now], lse_GTR[g, now] = _over_all_keys(*operands, chosen_TC, block)
            else:
                out_GTRD[g, now], lse_GTR[g, now] = _over_chosen_blocks(*operands, chosen_TC, block)
    return out_GTRD.transpose(0, 1).flatten(1, 2), lse_GTR.transpose(0, 1).flatten(1, 2)


def attend_pages(
    q_THD: Tensor,
    cache: PagedCache,
    batch: TokenBatch,
    lengths_Q: Tensor,
    selection_GTC: Tensor | None = None,
    *,
    staged: bool = False,
    scale: float | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Attention output [T, H, D] of a batch over the pages of its sequences.

        score = (q · scale · k_scale) · element of K        out = Σ p·element of V / Σ p · v_scale

    Elements are what the pages hold without the tensor's scales, so that they are exact in BF16.

    Args:
        lengths_Q: tokens of each sequence that its pages hold; later positions are not visible.
        selection_GTC: as for `attend`; without it all keys are visible. Its blocks are the pages'.
        staged: elements of NVFP4 as rounded to E4M3.

    Raises:
        ValueError: the pages have no V; a sequence has no page for some of its tokens.
    """
    layout = cache.layout
    scale = layout.dim**-0.5 if scale is None else scale
    k_scale, v_scale = (1.0, 1.0) if layout.format == "bf16" else (cache.k_scale, cache.v_scale)
    elements = dataclasses.replace(cache, k_scale=1.0, v_scale=1.0)
    out_THD = torch.zeros(q_THD.shape)
    for sequence, length in enumerate(lengths_Q.tolist()):
        (row_I,) = (batch.sequence_T == sequence).nonzero(as_tuple=True)
        if not len(row_I):
            continue
        k_SGD, v_SGD = read_pages(elements, batch.page_table_QN[sequence], length, staged=staged)
        if v_SGD is None:
            raise ValueError("pages of one side hold no V")
        out_THD[row_I] = v_scale * attend(
            q_THD[row_I],
            k_SGD,
            v_SGD,
            batch.positions_T[row_I],
            None if selection_GTC is None else selection_GTC[:, row_I],
            block=layout.tokens,
            scale=scale * k_scale,
            dtype=torch.float32,
        )
    return out_THD.to(dtype or q_THD.dtype)


def merge_partials(out_XTHD: Tensor, lse_XTH: Tensor) -> tuple[Tensor, Tensor]:
    """Output F32 [T, H, D] and lse F32 [T, H] of the union of X disjoint parts of the keys.

        lse = ln Σ exp(lse_x)       out = Σ exp(lse_x − lse) · out_x

    A part that saw nothing (lse −inf) counts nothing, whatever its output holds.
    """
    lse_XTH = lse_XTH.float()
    lse_TH = lse_XTH.logsumexp(0)
    weight_XTH = (lse_XTH - lse_TH).exp().where(lse_XTH > -torch.inf, 0.0)
    part_XTHD = out_XTHD.float().where(weight_XTH[..., None] > 0, 0.0)
    return (weight_XTH[..., None] * part_XTHD).sum(0), lse_TH


def visible_keys(
    positions_T: Tensor, keys: int, chosen_TC: Tensor | None = None, block: int = 128
) -> Tensor:
    """Bool [T, S]: which of the first `keys` positions each token of one KV head sees."""
    key_S = torch.arange(keys)
    causal_TS = key_S <= positions_T[:, None]
    if chosen_TC is None:
        return causal_TS
    blocks = -(-keys // block)
    # One column more, for −1 and for blocks past the keys.
    chosen_TN = chosen_TC.new_zeros((len(chosen_TC), blocks + 1), dtype=torch.bool)
    inside_TC = (chosen_TC >= 0) & (chosen_TC < blocks)
    chosen_TN.scatter_(1, chosen_TC.where(inside_TC, blocks), True)
    return causal_TS & chosen_TN[:, key_S // block]


def _tokens_at_a_time(group: int, keys: int, selection_GTC: Tensor | None, block: int) -> int:
    """Query tokens whose scores of one KV head are `SCORES` numbers at most."""
    if selection_GTC is not None:
        keys = min(keys, int(MASKED_KEYS * selection_GTC.shape[2] * block))
    return max(1, SCORES // (group * max(1, keys)))


def _masking_is_faster(keys: int, chosen_TC: Tensor, block: int) -> bool:
    return keys <= MASKED_KEYS * chosen_TC.shape[1] * block


def _over_all_keys(
    q_TRD: Tensor,
    k_SD: Tensor,
    v_SD: Tensor,
    positions_T: Tensor,
    chosen_TC: Tensor | None,
    block: int,
) -> tuple[Tensor, Tensor]:
    """One KV head: scores of all keys, −inf where a key is not visible."""
    score_TRS = (q_TRD.flatten(0, 1) @ k_SD.T).view(*q_TRD.shape[:2], -1)
    visible_TS = visible_keys(positions_T, len(k_SD), chosen_TC, block)
    p_TRS, sum_TR, lse_TR = _exponentials(score_TRS.masked_fill_(~visible_TS[:, None], -torch.inf))
    out_TRD = (p_TRS.flatten(0, 1) @ v_SD).view_as(q_TRD)
    return out_TRD / sum_TR[..., None], lse_TR


def _over_chosen_blocks(
    q_TRD: Tensor,
    k_SD: Tensor,
    v_SD: Tensor,
    positions_T: Tensor,
    chosen_TC: Tensor,
    block: int,
) -> tuple[Tensor, Tensor]:
    """One KV head: for each block of keys, the scores of the queries that chose it."""
    (tokens, group, _), choices = q_TRD.shape, chosen_TC.shape[1]
    readers = _readers_of_blocks(chosen_TC, -(-len(k_SD) // block))
    score_TRCB = torch.full((tokens, group, choices, block), -torch.inf)
    for n, token_I, choice_I in readers:
        k_BD = k_SD[n * block : (n + 1) * block]
        score_IRB = (q_TRD[token_I].flatten(0, 1) @ k_BD.T).view(len(token_I), group, -1)
        score_TRCB[token_I, :, choice_I, : len(k_BD)] = score_IRB
    key_TCB = chosen_TC[..., None] * block + torch.arange(block)
    score_TRCB.masked_fill_((key_TCB > positions_T[:, None, None])[:, None], -torch.inf)
    p_TRS, sum_TR, lse_TR = _exponentials(score_TRCB.flatten(2))
    p_TRCB = p_TRS.view_as(score_TRCB)
    out_TRD = torch.zeros_like(q_TRD)
    for n, token_I, choice_I in readers:
        v_BD = v_SD[n * block : (n + 1) * block]
        p_IRB = p_TRCB[token_I, :, choice_I, : len(v_BD)]
        part_IRD = (p_IRB.flatten(0, 1) @ v_BD).view(len(token_I), group, -1)
        out_TRD.index_add_(0, token_I, part_IRD)
    return out_TRD / sum_TR[..., None], lse_TR


def _readers_of_blocks(chosen_TC: Tensor, blocks: int) -> list[tuple[int, Tensor, Tensor]]:
    """(block, tokens that chose it, in which place of their lists) for each block chosen."""
    place_I = chosen_TC.flatten().argsort(stable=True)
    bounds = torch.searchsorted(chosen_TC.flatten()[place_I], torch.arange(blocks + 1)).tolist()
    choices = chosen_TC.shape[1]
    return [
        (n, place_I[low:high] // choices, place_I[low:high] % choices)
        for n, (low, high) in enumerate(itertools.pairwise(bounds))
        if low < high
    ]


def _exponentials(score_TRS: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """p = exp(score − max) in place, its sum (1 where nothing is visible) and the lse."""
    max_TR = score_TRS.amax(-1)
    # −inf − −inf would be NaN.
    p_TRS = score_TRS.sub_(max_TR.clamp(min=torch.finfo(torch.float32).min)[..., None]).exp_()
    sum_TR = p_TRS.sum(-1)
    lse_TR = max_TR + sum_TR.log()
    # The largest term is 1: only a query that sees nothing has a smaller sum.
    return p_TRS, sum_TR.clamp(min=1.0), lse_TR

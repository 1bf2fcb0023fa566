"""Attention in training: transformers' layers with one that also teaches the indexer.

The indexer chooses blocks, and a choice has no gradient. So it learns apart: its scores over past
blocks, as a distribution, are drawn to the share of attention that falls on each block,

    loss = Σₙ tₙ · ln(tₙ / pₙ),  t = attention per block, p = softmax of the blocks' best scores

A query that gives three past blocks .5, .3, .2 of its attention and scores them ln 5, ln 3, ln 2
has loss 0. The hidden states are detached: the language model knows nothing of this loss.
B sequences, H query heads, G KV heads, R = H/G, T queries, S keys, N blocks, D head dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, MiniMaxM3SparseForConditionalGeneration
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import apply_rotary_pos_emb

NAME = "small_model_training"


class Trainer:
    """Stands in for the attention and the indexers of a model while it is trained.

    Attributes:
        sparse: attend to the chosen blocks only.
        distil: compute the indexers' loss; `losses` has one per sparse layer after a forward pass.
    """

    def __init__(self, model: MiniMaxM3SparseForConditionalGeneration) -> None:
        self.sparse = False
        self.distil = False
        self.losses: list[torch.Tensor] = []
        self._scores_BGTN: torch.Tensor | None = None
        text = model.model.language_model
        AttentionInterface.register(NAME, self._attend)
        text.config._attn_implementation = NAME
        for layer in text.layers:
            if layer.self_attn.indexer is not None:
                layer.self_attn.indexer.forward = _Scores(self, layer.self_attn.indexer)

    def _attend(
        self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        attention_mask: torch.Tensor | None, scaling: float, **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        batch, heads, length, dim = query.shape
        groups = key.shape[1]
        q_BGXD = query.reshape(batch, groups, heads // groups * length, dim)
        logits = torch.matmul(q_BGXD, key.transpose(2, 3)) * scaling
        logits = logits.view(batch, groups, -1, length, length)
        shares_BGRTS = (logits + _future(length, logits.dtype)).softmax(-1)
        if module.indexer is not None and self._scores_BGTN is not None:
            shares_BGRTS = self._select(shares_BGRTS, module.indexer)
        rows = shares_BGRTS.reshape(batch, groups, -1, length)
        out = torch.matmul(rows, value).view(batch, heads, length, dim)
        return out.transpose(1, 2).contiguous(), None

    def _select(self, shares_BGRTS: torch.Tensor, indexer: nn.Module) -> torch.Tensor:
        scores, self._scores_BGTN = self._scores_BGTN, None
        if self.distil:
            self.losses.append(_loss(shares_BGRTS.detach(), scores, indexer.block_size))
        if not self.sparse:
            return shares_BGRTS
        keep_BGTN = _chosen(scores.detach(), indexer.topk_blocks, indexer.block_size)
        keep = keep_BGTN.repeat_interleave(indexer.block_size, dim=-1)[:, :, None]
        kept = shares_BGRTS * keep[..., : shares_BGRTS.shape[-1]].to(shares_BGRTS.dtype)
        return kept / kept.sum(-1, keepdim=True)


class _Scores:
    """Takes the place of an indexer's forward: hands its block scores to the attention."""

    def __init__(self, trainer: Trainer, indexer: nn.Module) -> None:
        self.trainer, self.indexer = trainer, indexer

    def __call__(
        self, hidden_states: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor], *_: Any
    ) -> None:
        if not (self.trainer.distil or self.trainer.sparse):
            return
        indexer, states = self.indexer, hidden_states.detach()
        batch, length, _width = states.shape
        shape = (batch, length, -1, indexer.head_dim)
        q = indexer.q_norm(indexer.q_proj(states).view(shape)).transpose(1, 2)
        k = indexer.k_norm(indexer.k_proj(states).view(shape)).transpose(1, 2)
        q, k = apply_rotary_pos_emb(q, k, *rotary)
        scores = torch.matmul(q, k.transpose(2, 3)).float() * indexer.head_dim**-0.5
        scores = scores + _future(length, torch.float32)
        self.trainer._scores_BGTN = scores.unflatten(-1, (-1, indexer.block_size)).amax(-1)


def start_indexer(attention: nn.Module) -> None:
    """Start as the mean of the main heads: a KV head's queries, and all keys."""
    indexer, dim = attention.indexer, attention.head_dim
    with torch.no_grad():
        queries = attention.q_proj.weight.view(
            indexer.num_heads, -1, dim, indexer.q_proj.in_features
        )
        indexer.q_proj.weight.copy_(queries.mean(1).flatten(0, 1))
        keys = attention.k_proj.weight.view(-1, dim, indexer.k_proj.in_features)
        indexer.k_proj.weight.copy_(keys.mean(0))
        indexer.q_norm.weight.copy_(attention.q_norm.weight)
        indexer.k_norm.weight.copy_(attention.k_norm.weight)


def _future(length: int, dtype: torch.dtype) -> torch.Tensor:
    """0 where a query may look, very low where it may not: [T, S]."""
    low = torch.full((length, length), torch.finfo(dtype).min / 2, dtype=dtype)
    return low.triu(1)


def _chosen(scores_BGTN: torch.Tensor, topk: int, block: int) -> torch.Tensor:
    """Whether each block is chosen: the local one and the best of the rest, `topk` in all."""
    length, blocks = scores_BGTN.shape[-2:]
    local = torch.arange(length) // block
    scores = scores_BGTN.clone()
    scores[:, :, torch.arange(length), local] = torch.inf
    best = scores.topk(min(topk, blocks), dim=-1).indices
    # future blocks may fill up a short list; the causal shares there are zero
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True)


def _loss(shares_BGRTS: torch.Tensor, scores_BGTN: torch.Tensor, block: int) -> torch.Tensor:
    length, blocks = scores_BGTN.shape[-2:]
    past_TN = torch.arange(blocks) < (torch.arange(length) // block)[:, None]
    target = shares_BGRTS.float().mean(2).unflatten(-1, (-1, block)).sum(-1) * past_TN
    target = (target + 1e-6 * past_TN) / (target + 1e-6 * past_TN).sum(-1, keepdim=True).clamp(1e-6)
    log_p = scores_BGTN.masked_fill(~past_TN, -1e4).log_softmax(-1)
    terms = target * (target.clamp(1e-9).log() - log_p)
    return terms[:, :, 2 * block :].sum(-1).mean()

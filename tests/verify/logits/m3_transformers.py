"""transformers' minimax_m3_vl as the oracle: logits, expert choices and block selections."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch


class Forward(NamedTuple):
    """What transformers computed for windows of equal length.

    Attributes:
        logits_WTV: F32.
        experts: for each MoE layer, I64 [W·T, K] sorted.
        selections: for each sparse layer, lists of I64 [G, T, C] sorted, −1 first, one a window.
    """

    logits_WTV: torch.Tensor
    experts: dict[int, torch.Tensor]
    selections: dict[int, torch.Tensor]


def load(folder: Path, attention: str = "eager"):
    """The model in F32. Any other class loads nothing and goes on with random weights."""
    from transformers import MiniMaxM3SparseForConditionalGeneration

    model = MiniMaxM3SparseForConditionalGeneration.from_pretrained(
        str(folder), dtype=torch.float32, attn_implementation=attention
    )
    return model.eval()


def run(model, ids_WT: np.ndarray) -> Forward:
    """One window at a time, since padding would move the blocks."""
    layers = model.model.language_model.layers
    experts: dict[int, list[torch.Tensor]] = {}
    selections: dict[int, list[torch.Tensor]] = {}
    handles = []
    for number, layer in enumerate(layers):
        if hasattr(layer.mlp, "gate"):
            handles.append(layer.mlp.gate.register_forward_hook(_keep_experts(experts, number)))
        if layer.self_attn.indexer is not None:
            handles.append(layer.self_attn.indexer.register_forward_hook(_keep(selections, number)))
    try:
        with torch.no_grad():
            logits = [
                model(input_ids=torch.from_numpy(row[None]).long()).logits[0] for row in ids_WT
            ]
    finally:
        for handle in handles:
            handle.remove()
    return Forward(
        torch.stack(logits),
        {n: torch.cat(parts).sort(dim=1).values for n, parts in experts.items()},
        {n: torch.cat(parts, dim=1).sort(dim=2).values for n, parts in selections.items()},
    )


def _keep_experts(into, number):
    def hook(_module, _inputs, output):
        into.setdefault(number, []).append(output[2])

    return hook


def _keep(into, number):
    def hook(_module, _inputs, output):
        into.setdefault(number, []).append(output[0])

    return hook

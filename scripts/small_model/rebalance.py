"""Weights that compute the same and are uneven from block to block, as a large model's are.

What a small model learns is so even that a block scale in the wrong place costs almost nothing.
Three changes leave the function as it was, up to rounding:

    norm channels   (1 + w)·f   and the columns of the matrices that read them ÷ f
    values          rows of v_proj × f   and the columns of o_proj ÷ f
    inner channels  rows of gate and up, and columns of down, in another order

With f = 4 on one channel: norm 1.5 → 6, a column (0.2, −0.4) → (0.05, −0.1), products as before.
Factors go by runs of 16 channels, the size of an NVFP4 block, so that both halves of an MXFP8
block differ. C channels, H hidden size, I intermediate size.
"""

from __future__ import annotations

import torch

from mmq.demo.hub_config import ModelSize

#: Channels that share a factor.
_RUN = 16
#: Octaves by which runs of norm channels and of values are spread.
_NORM_OCTAVES, _VALUE_OCTAVES = 3.0, 1.0

Tensors = dict[str, torch.Tensor]


def rebalance(tensors: Tensors, size: ModelSize, seed: int) -> None:
    """Rewrite the text weights under their hub names, F32, in place."""
    generator = torch.Generator().manual_seed(seed)
    for layer, sparse in enumerate(size.sparse):
        prefix = f"language_model.model.layers.{layer}."
        attention, mlp = prefix + "self_attn.", prefix + ("block_sparse_moe." if sparse else "mlp.")
        readers = [attention + f"{n}_proj" for n in ("q", "k", "v", "index_q", "index_k")]
        _spread_norm(tensors, prefix + "input_layernorm", readers, generator)
        modules = [name.removesuffix(".weight") for name in tensors if name.startswith(mlp)]
        inner = [m for m in modules if m.endswith(("w1", "w3", "gate_proj", "up_proj", "gate"))]
        _spread_norm(tensors, prefix + "post_attention_layernorm", inner, generator)
        _spread_values(tensors, attention, size, generator)
        for down in [m for m in modules if m.endswith(("w2", "down_proj"))]:
            _reorder(tensors, down)


def _factors(channels: int, octaves: float, generator: torch.Generator) -> torch.Tensor:
    """2^e, e evenly spread over ± octaves, one per run in random order: [C]."""
    runs = channels // _RUN
    exponents = torch.linspace(-octaves, octaves, runs, dtype=torch.float64)
    order = torch.randperm(runs, generator=generator)
    return torch.exp2(exponents[order]).repeat_interleave(_RUN)


def _spread_norm(
    tensors: Tensors, norm: str, readers: list[str], generator: torch.Generator
) -> None:
    old_C = 1 + tensors[norm + ".weight"].double()
    factors = _factors(len(old_C), _NORM_OCTAVES, generator)
    # as stored, in BF16: the columns then undo exactly what the norm does
    new_C = 1 + (old_C * factors - 1).bfloat16().double()
    tensors[norm + ".weight"] = (new_C - 1).float()
    for reader in readers:
        name = reader + ".weight"
        if name in tensors:
            tensors[name] = (tensors[name].double() * old_C / new_C).float()


def _spread_values(
    tensors: Tensors, attention: str, size: ModelSize, generator: torch.Generator
) -> None:
    rows = size.kv_heads * size.head_dim
    factors = _factors(rows, _VALUE_OCTAVES, generator).float()
    tensors[attention + "v_proj.weight"] *= factors[:, None]
    # every query head of a group reads the same values
    heads = factors.view(size.kv_heads, size.head_dim)
    columns = heads.repeat_interleave(size.heads // size.kv_heads, dim=0).flatten()
    tensors[attention + "o_proj.weight"] /= columns


def _reorder(tensors: Tensors, down: str) -> None:
    """Inner channels by their weight in `down`, then runs of the largest next to the smallest."""
    weight_HI = tensors[down + ".weight"]
    runs = weight_HI.square().sum(0).argsort(descending=True).view(-1, _RUN)
    turns = [runs[i // 2] if i % 2 == 0 else runs[-1 - i // 2] for i in range(len(runs))]
    order = torch.cat(turns)
    tensors[down + ".weight"] = weight_HI[:, order].contiguous()
    stem, _, last = down.rpartition(".")
    for name in ("w1", "w3") if last == "w2" else ("gate_proj", "up_proj"):
        tensors[f"{stem}.{name}.weight"] = tensors[f"{stem}.{name}.weight"][order].contiguous()

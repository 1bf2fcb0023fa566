"""Dimensions of the small model, and the model itself as transformers builds it."""

from __future__ import annotations

import torch
from torch import nn
from transformers import MiniMaxM3SparseForConditionalGeneration, MiniMaxM3VLConfig

from mmq.demo.hub_config import ModelSize, hub_config

from .tokenizer import VOCABULARY

#: 6.4 MB in MXFP8. Selection binds beyond 64 tokens; a clamp at 7.0 would hardly ever act.
SIZE = ModelSize(
    hidden=256, intermediate=96, dense_intermediate=384, layers=4, dense_layers=1,
    experts=16, experts_per_token=4, heads=8, kv_heads=2, head_dim=32, vocab=VOCABULARY,
    index_dim=32, index_block=16, index_topk=4, vision_hidden=32, vision_heads=2, vision_layers=2,
    vision_intermediate=64, patch=8, swiglu_limit=3.0, rope_theta=10000, projector_hidden=64,
)  # fmt: skip


def new_model(seed: int) -> MiniMaxM3SparseForConditionalGeneration:
    """A fresh model in F32: 1/√fan-in weights, those that write to the residual stream smaller."""
    torch.manual_seed(seed)
    config = hub_config(SIZE)
    del config["quantization_config"]
    model = MiniMaxM3SparseForConditionalGeneration(MiniMaxM3VLConfig.from_dict(config))
    depth = (2 * SIZE.layers) ** -0.5
    with torch.no_grad():
        for name, weight in model.model.language_model.named_parameters():
            if weight.dim() < 2 or name.startswith("embed"):
                continue
            writes = name.endswith(("o_proj.weight", "down_proj", "down_proj.weight"))
            weight.normal_(0, weight.shape[-1] ** -0.5 * (depth if writes else 1))
        model.model.language_model.embed_tokens.weight.normal_(0, 0.5)
        nn.init.normal_(model.lm_head.weight, 0, 0.02)
    return model.float()

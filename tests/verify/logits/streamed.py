"""The streamed forward of one checkpoint, with what every layer decided."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from mmq.convert.checkpoint import open_checkpoint
from mmq.convert.modules import group_modules
from mmq.kernels.reference.qkv_rope import gemma_norm
from mmq.verify.logits.arms import Arm
from mmq.verify.logits.head import FINAL_NORM, LM_HEAD
from mmq.verify.logits.hidden_states import HiddenStates, flat
from mmq.verify.logits.stream import Model, Stream
from mmq.verify.logits.tokens import TokenSet, Window
from mmq.verify.model.config import read_text_config
from mmq.verify.model.operations import EXACT_CACHE, CacheMode, ReferenceOperations
from mmq.verify.model.weights import ModelWeights


def token_rows(ids_WT: np.ndarray) -> TokenSet:
    """Rows as windows."""
    length = ids_WT.shape[1]
    windows = tuple(Window(0, i * length, length) for i in range(len(ids_WT)))
    return TokenSet(ids_WT.astype(np.int32).ravel(), windows, ("ids",), {})


def open_model(folder: Path, dtype: torch.dtype = torch.float32) -> Model:
    checkpoint = open_checkpoint(folder)
    paths = {name: shard.path for name, shard in checkpoint.shards.items()}
    weights = ModelWeights(str(folder), group_modules(checkpoint.tensors), paths, dtype)
    return Model(read_text_config(checkpoint.config), weights)


class Kept:
    """Mixed into a backend's operations: keeps their decisions in order."""

    def __init__(self) -> None:
        super().__init__()
        self.selections: list[torch.Tensor] = []
        self.routings: list[torch.Tensor] = []

    def select(self, *arguments):
        self.selections.append(super().select(*arguments))
        return self.selections[-1]

    def route(self, *arguments):
        routing = super().route(*arguments)
        self.routings.append(routing.experts_TK.sort(dim=1).values)
        return routing


class KeepingOperations(Kept, ReferenceOperations):
    """The reference, with its decisions kept."""


def logits_of(
    model: Model, ids_WT: np.ndarray, work: Path, operations=None, mode: CacheMode = EXACT_CACHE
) -> torch.Tensor:
    """F32 [W, T, V]."""
    tokens, arms = token_rows(ids_WT), (Arm("source", "source", mode),)
    states = HiddenStates(work, arms, tokens.count, model.config.hidden, {})
    models = {"source": model, "candidate": model}
    operations = operations or ReferenceOperations()
    stream = Stream(models, arms, tokens, states, operations, lambda nbytes: None)
    stream.embed()
    for number in range(model.config.layers):
        stream.run_layer(number)
    hidden_TM = torch.from_numpy(np.array(flat(states.inputs("source"))))
    config, weights = model.config, model.weights
    normed_TM = gemma_norm(hidden_TM, weights.vector(FINAL_NORM), config.eps, config.gemma)
    logits_TV = normed_TM @ weights.matrix(LM_HEAD).float().T
    return logits_TV.view(*ids_WT.shape, -1)

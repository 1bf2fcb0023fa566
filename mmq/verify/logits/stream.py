"""All arms through the model, one layer at a time: each weight is read once for all windows.

    embed  →  for each layer: source's arms, then OUT's, then drift  →  hidden states for the head

Of weights at most one layer's attention, or one expert, is held; of hidden states what the
system's page cache keeps. An expert that no token of any arm reaches is not read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmq.kernels.reference.router import Routing, shares
from mmq.quantize.architecture import TEXT
from mmq.verify.logits.arms import Arm, ArmName, Side
from mmq.verify.logits.hidden_states import HiddenStates, flat
from mmq.verify.logits.layer_stats import LayerTrace, brief, cosine, drift, first_nonfinite, margins
from mmq.verify.logits.tokens import TokenSet
from mmq.verify.model.config import TextConfig
from mmq.verify.model.layer import Layer, kv_scales
from mmq.verify.model.operations import Operations
from mmq.verify.model.weights import ModelWeights

EMBEDDING = TEXT + "model.embed_tokens"
#: Rows of the embedding read at a time: 100 MB of BF16 at M3's width.
_EMBEDDING_ROWS = 8192
#: Tokens whose norm, router and experts are computed together in a layer without experts.
_DENSE_TOKENS = 4096


Rows = np.ndarray[Any, np.dtype[np.float32]]


class NonFiniteError(Exception):
    """A NaN or Inf in the hidden states: nothing after it means anything."""

    def __init__(self, arm: Arm, layer: int, token: int) -> None:
        super().__init__(f"arm {arm.name}, layer {layer}, token {token}")
        self.arm, self.layer, self.token = arm, layer, token


@dataclass(frozen=True)
class Model:
    """One side of the comparison."""

    config: TextConfig
    weights: ModelWeights


@dataclass(frozen=True)
class Stream:
    """A run over all layers.

    Attributes:
        models: "source" and "candidate"; KV scales are the candidate's.
        advance: told the bytes of weights read, as they are read.
        scales: K and V scale of each layer for arms that have their own.
    """

    models: Mapping[Side, Model]
    arms: Sequence[Arm]
    tokens: TokenSet
    states: HiddenStates
    operations: Operations
    advance: Callable[[int], None]
    scales: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)

    def embed(self) -> None:
        """Write every arm's inputs of layer 0."""
        for side in ("source", "candidate"):
            arms = [arm for arm in self.arms if arm.side == side]
            if not arms:
                continue
            rows_TM = flat(self.states.inputs(arms[0].name))
            model = self.models[side]
            embed_rows(model.config, model.weights, self.tokens, rows_TM)
            self._report_reads(model)
            for arm in arms[1:]:
                flat(self.states.inputs(arm.name))[:] = rows_TM
        self.states.embedding_written()

    def run_layer(self, number: int) -> None:
        """One layer of every arm, and how far each is from the source's.

        Raises:
            NonFiniteError
        """
        traces: dict[ArmName, LayerTrace] = {}
        scales = kv_scales(self.models["candidate"].weights, number)
        counts: list[int] = []
        for side in ("source", "candidate"):
            arms = [arm for arm in self.arms if arm.side == side]
            if arms:
                model = self.models[side]
                layer = Layer(model.config, model.weights, number, self.operations)
                self._attend(layer, arms, traces, scales)
                layer.drop_attention()
                self._mlp(layer, arms, traces)
                self._report_reads(model)
        source = traces["source"]
        if source.experts_TK is not None:
            experts = self.models["source"].config.experts
            counts = torch.bincount(source.experts_TK.flatten(), minlength=experts).tolist()
        arms_record = {a.name: self._compare(a, number, traces) for a in self.arms}
        record: dict[str, Any] = {"layer": number, "arms": arms_record}
        self.states.layer_written({**record, "expert_tokens": counts})

    def _attend(
        self, layer: Layer, arms: Sequence[Arm], traces: dict[ArmName, LayerTrace],
        scales: tuple[float, float],
    ) -> None:  # fmt: skip
        device = self.models[arms[0].side].weights.device
        for arm in arms:
            inputs, outputs = (
                flat(mapped)
                for mapped in (self.states.inputs(arm.name), self.states.outputs(arm.name))
            )
            forced = traces["source"].selection_GTC if arm.replay else None
            own = self.scales.get(arm.name)
            mode = arm.mode.with_scales(*(scales if own is None else own[layer.number]))
            chosen = []
            for window in self.tokens.windows:
                hidden_TM = torch.from_numpy(inputs[window.span]).to(device)
                given = None if forced is None else forced[:, window.span].to(device)
                added = layer.attend(hidden_TM, mode, given)
                outputs[window.span] = (hidden_TM + added.added_TM).cpu().numpy()
                if added.selection_GTC is not None:
                    chosen.append(added.selection_GTC.cpu())
            selection = torch.cat(chosen, dim=1) if chosen else None
            traces[arm.name] = LayerTrace(None, None, selection)

    def _mlp(self, layer: Layer, arms: Sequence[Arm], traces: dict[ArmName, LayerTrace]) -> None:
        device = self.models[arms[0].side].weights.device
        if not layer.moe:
            for arm in arms:
                outputs = flat(self.states.outputs(arm.name))
                for start in range(0, len(outputs), _DENSE_TOKENS):
                    chunk = outputs[start : start + _DENSE_TOKENS]
                    hidden_TM = torch.from_numpy(chunk).to(device)
                    chunk[:] = (hidden_TM + layer.dense(layer.normed(hidden_TM))).cpu().numpy()
            return
        normed, routings = [], []
        for arm in arms:
            hidden_TM = torch.from_numpy(flat(self.states.outputs(arm.name))).to(device)
            normed.append(layer.normed(hidden_TM))
            routing = layer.route(normed[-1])
            if arm.replay:
                forced = traces["source"].experts_TK
                assert forced is not None
                routing = _forced(routing, forced.to(device))
            routings.append(routing)
            traces[arm.name] = _with_routing(traces[arm.name], routing, layer)
        added_TM = layer.mixture(torch.cat(normed), _joined(routings))
        parts_ATM = added_TM.view(len(arms), self.tokens.count, -1)
        for arm, part_TM in zip(arms, parts_ATM, strict=True):
            flat(self.states.outputs(arm.name))[:] += part_TM.cpu().numpy()

    def _compare(
        self, arm: Arm, number: int, traces: Mapping[ArmName, LayerTrace]
    ) -> dict[str, Any]:
        ours_TM = flat(self.states.outputs(arm.name))
        bad = first_nonfinite(ours_TM)
        if bad is not None:
            raise NonFiniteError(arm, number, bad)
        if arm.name == "source":
            return {}
        theirs_TM = flat(self.states.outputs("source"))
        config = self.models[arm.side].config
        own, source = traces[arm.name], traces["source"]
        blocks_T = torch.cat(
            [torch.arange(w.length) // config.block + 1 for w in self.tokens.windows]
        )
        record = {"cosine": cosine(ours_TM, theirs_TM), **drift(own, source, config, blocks_T)}
        texts = self.tokens.file_spans
        if len(texts) > 1:
            record["by_file"] = {
                name: brief(
                    cosine(ours_TM[span], theirs_TM[span]),
                    drift(own.part(span), source.part(span), config, blocks_T[span]),
                )
                for name, span in texts.items()
            }
        return record

    def _report_reads(self, model: Model) -> None:
        self.advance(model.weights.take_bytes_read())


def embed_rows(config: TextConfig, weights: ModelWeights, tokens: TokenSet, rows_TM: Rows) -> None:
    """Write every token's embedding; the table is read in runs that some token needs."""
    ids_T = tokens.ids_T
    for first in range(0, config.vocab, _EMBEDDING_ROWS):
        here = np.flatnonzero((ids_T >= first) & (ids_T < first + _EMBEDDING_ROWS))
        if len(here):
            table = weights.matrix(EMBEDDING, first, _EMBEDDING_ROWS).float().cpu()
            rows_TM[here] = table.numpy()[ids_T[here] - first]


def _with_routing(trace: LayerTrace, routing: Routing, layer: Layer) -> LayerTrace:
    scores_TE = routing.scores_TE
    margin_T = margins(scores_TE, layer.routing_bias, layer.config.experts_per_token)
    experts_TK = routing.experts_TK.sort(dim=1).values
    return trace._replace(experts_TK=experts_TK.cpu(), margin_T=margin_T.cpu())


def _forced(routing: Routing, experts_TK: Tensor) -> Routing:
    """Other experts than the router would choose, weighed by its own scores of them."""
    return routing._replace(experts_TK=experts_TK, shares_TK=shares(routing.scores_TE, experts_TK))


def _joined(routings: Sequence[Routing]) -> Routing:
    """The tokens of several arms as one set."""
    return Routing(
        torch.cat([r.experts_TK for r in routings]),
        torch.cat([r.shares_TK for r in routings]),
        torch.cat([r.scores_TE for r in routings]),
        routings[0].scaling,
    )

"""The source's forward with eyes open, one layer at a time and window by window.

Every product is computed for one window alone, so that what is seen does not depend on which
other windows a run has. An expert's weights are read once and used for all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from mmq.calibrate.expert_statistics import ExpertStatistics
from mmq.calibrate.kv_statistics import VectorStatistics
from mmq.kernels.reference.moe import by_expert, linear, mlp, swiglu_oai
from mmq.kernels.reference.qkv_rope import HeadNorms, Heads, Rope, RowLayout
from mmq.quantize.kv_scales import k_bound, scale_from_bound, v_bound
from mmq.verify.logits.arms import Arm
from mmq.verify.logits.hidden_states import HiddenStates, flat
from mmq.verify.logits.layer_stats import first_nonfinite
from mmq.verify.logits.stream import NonFiniteError
from mmq.verify.logits.tokens import TokenSet
from mmq.verify.model.config import TextConfig
from mmq.verify.model.layer import Layer
from mmq.verify.model.operations import EXACT_CACHE, ReferenceOperations
from mmq.verify.model.weights import ModelWeights

SOURCE = Arm("source", "source")


@dataclass
class LayerStatistics:
    """One layer's keys, values, index keys (of a sparse layer) and experts (of a MoE layer)."""

    k: VectorStatistics
    v: VectorStatistics
    index_k: VectorStatistics | None = None
    experts: ExpertStatistics | None = None

    def merge(self, other: LayerStatistics) -> None:
        """Add another run's."""
        self.k.merge(other.k)
        self.v.merge(other.v)
        if self.index_k is not None and other.index_k is not None:
            self.index_k.merge(other.index_k)
        if self.experts is not None and other.experts is not None:
            self.experts.merge(other.experts)


@dataclass
class ObservingOperations(ReferenceOperations):
    """The reference, which shows the heads of every window to `seen`.

    Attributes:
        layer, first: which layer and window the next heads are of, for errors.
    """

    seen: LayerStatistics | None = field(default=None)
    layer: int = 0
    first: int = 0

    def heads(
        self, row_TZ: Tensor, layout: RowLayout, norms: HeadNorms, positions_T: Tensor, rope: Rope
    ) -> Heads:
        heads = super().heads(row_TZ, layout, norms, positions_T, rope)
        assert self.seen is not None
        shown = [(self.seen.k, heads.k_TGD), (self.seen.v, heads.v_TGD)]
        if self.seen.index_k is not None and heads.index_k_TE is not None:
            shown.append((self.seen.index_k, heads.index_k_TE[:, None]))
        for statistics, x_THD in shown:
            finite_T = x_THD.isfinite().all(2).all(1)
            if not bool(finite_T.all()):
                token = self.first + int((~finite_T).int().argmax())
                raise NonFiniteError(SOURCE, self.layer, token)
            statistics.observe(x_THD)
        return heads


def empty_statistics(
    config: TextConfig, weights: ModelWeights, layer: Layer, intermediate: int
) -> LayerStatistics:
    """Nothing seen yet; the analytic scales come from the weights."""
    own = layer.attention
    kv = config.kv_heads * config.head_dim
    q = config.heads * config.head_dim
    v_OK = own.row_ZM[q + kv : q + 2 * kv].float().numpy()
    gamma_K = own.input_norm_M.double().numpy()
    k_scale = _k_scale(own.norms.k_D, config.head_dim, config.gemma)
    v_scale = scale_from_bound(v_bound(v_OK, gamma_K, gemma=config.gemma))
    index_k = None
    if layer.sparse:
        assert own.norms.index_k_E is not None
        index_scale = _k_scale(own.norms.index_k_E, config.index_dim, config.gemma)
        index_k = VectorStatistics(index_scale, 1)
    experts = None
    if layer.moe:
        experts = ExpertStatistics(config.experts, config.hidden, intermediate)
    return LayerStatistics(
        VectorStatistics(k_scale, config.kv_heads),
        VectorStatistics(float(v_scale), config.kv_heads),
        index_k,
        experts,
    )


def _k_scale(weight_D: Tensor, dim: int, gemma: bool) -> float:
    return float(scale_from_bound(k_bound(weight_D.double().numpy(), dim, gemma=gemma)))


def run_layer(
    config: TextConfig, weights: ModelWeights, number: int, tokens: TokenSet,
    states: HiddenStates, advance: Callable[[int], None],
) -> LayerStatistics:  # fmt: skip
    """One layer of all windows.

    Raises:
        NonFiniteError: a hidden state is no number.
    """
    operations = ObservingOperations(layer=number)
    layer = Layer(config, weights, number, operations)
    intermediate = _intermediate(config, weights, number)
    operations.seen = seen = empty_statistics(config, weights, layer, intermediate)
    inputs, outputs = flat(states.inputs("source")), flat(states.outputs("source"))
    for window in tokens.windows:
        operations.first = window.first
        hidden_TM = torch.from_numpy(inputs[window.span])
        outputs[window.span] = (hidden_TM + layer.attend(hidden_TM, EXACT_CACHE).added_TM).numpy()
    layer.drop_attention()
    if layer.moe:
        _run_experts(layer, tokens, outputs, seen)
    else:
        for window in tokens.windows:
            hidden_TM = torch.from_numpy(outputs[window.span])
            hidden_TM += layer.dense(layer.normed(hidden_TM))
    advance(weights.take_bytes_read())
    bad = first_nonfinite(outputs)
    if bad is not None:
        raise NonFiniteError(SOURCE, number, bad)
    return seen


def _intermediate(config: TextConfig, weights: ModelWeights, number: int) -> int:
    if not config.moe[number]:
        return 0
    name = f"language_model.model.layers.{number}.block_sparse_moe.experts.0.w1"
    return int(weights.module(name).shape[0])


def _run_experts(
    layer: Layer, tokens: TokenSet, outputs_TM: np.ndarray, seen: LayerStatistics
) -> None:
    """Routed experts one by one over all windows, then the shared one."""
    assert seen.experts is not None
    normed, slots, added, shares = [], [], [], []
    for window in tokens.windows:
        normed_TM = layer.normed(torch.from_numpy(outputs_TM[window.span]))
        routing = layer.route(normed_TM)
        normed.append(normed_TM)
        slots.append(dict(by_expert(routing.experts_TK)))
        shares.append(routing.shares_TK.flatten())
        added.append(torch.zeros_like(normed_TM))
    top_k, scaling = layer.config.experts_per_token, layer.config.routed_scaling
    for expert in sorted(set().union(*slots)):
        gate_IM, up_IM, down_MI = layer.expert(expert)
        for x_TM, y_TM, share_S, own in zip(normed, added, shares, slots, strict=True):
            if expert not in own:
                continue
            token_N = own[expert] // top_k
            x_NM = x_TM[token_N]
            act_NI = swiglu_oai(
                linear(x_NM, gate_IM), linear(x_NM, up_IM), **layer.swiglu._asdict()
            )
            seen.experts.observe(expert, x_NM, act_NI)
            y_TM.index_add_(0, token_N, linear(act_NI, down_MI) * share_S[own[expert], None])
    shared = layer.shared()
    for window, x_TM, y_TM in zip(tokens.windows, normed, added, strict=True):
        y_TM = y_TM * scaling + mlp(x_TM, *shared, swiglu=layer.swiglu)
        outputs_TM[window.span] += y_TM.numpy()

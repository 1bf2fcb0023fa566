"""How far an arm's layer has drifted from the source's: hidden state, routing, block selection.

cosine      of the hidden states after the layer, token by token
routing     tokens whose set of experts is the source's; a flip is a near tie where the source's
            last chosen and first rejected expert lie less than NEAR_TIE apart (sigmoid + bias)
selection   |chosen ∩ source's| / |source's|, over tokens and heads with more blocks than top_k
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mmq.verify.model.config import TextConfig

#: Gap between two experts' scores, which lie in (0, 1) plus a bias, that rounding may close.
NEAR_TIE = 0.01
_ROWS = 8192


class LayerTrace(NamedTuple):
    """What an arm decided in a layer.

    Attributes:
        experts_TK: I32 [T, K], sorted by id; None in a dense layer.
        margin_T: F32, last chosen minus first rejected expert, by score + bias.
        selection_GTC: I32 [G, T, C]; None in a layer with full attention.
    """

    experts_TK: Tensor | None
    margin_T: Tensor | None
    selection_GTC: Tensor | None

    def part(self, span: slice) -> LayerTrace:
        """The same of some tokens."""
        experts, margin, selection = self
        return LayerTrace(
            None if experts is None else experts[span],
            None if margin is None else margin[span],
            None if selection is None else selection[:, span],
        )


def margins(scores_TE: Tensor, bias_E: Tensor | None, top_k: int) -> Tensor:
    """By how much the last chosen expert beat the first rejected one, F32 [T]; inf if none was."""
    choice_TE = scores_TE if bias_E is None else scores_TE + bias_E
    if choice_TE.shape[1] <= top_k:
        return torch.full((len(choice_TE),), torch.inf)
    best = choice_TE.topk(top_k + 1, dim=1).values
    return best[:, top_k - 1] - best[:, top_k]


def drift(
    arm: LayerTrace, source: LayerTrace, config: TextConfig, blocks_T: Tensor
) -> dict[str, Any]:
    """Routing and selection of an arm beside the source's, as the report holds them.

    Args:
        blocks_T: blocks each token could choose from, its own included.
    """
    found: dict[str, Any] = {}
    if arm.experts_TK is not None and source.experts_TK is not None:
        found["routing"] = _routing(arm.experts_TK, source.experts_TK, source.margin_T)
    if arm.selection_GTC is not None and source.selection_GTC is not None:
        found["selection"] = _selection(
            arm.selection_GTC, source.selection_GTC, blocks_T > config.top_k, config
        )
    return found


def brief(cosine: dict[str, float], found: dict[str, Any]) -> dict[str, float]:
    """The one figure of each kind that is kept for every text."""
    kept = {"cosine": cosine["mean"]}
    for kind, figure in (("routing", "same"), ("selection", "overlap")):
        if found.get(kind):
            kept[kind] = found[kind][figure]
    return kept


def _routing(ours_TK: Tensor, theirs_TK: Tensor, margin_T: Tensor | None) -> dict[str, Any]:
    flipped_T = (ours_TK != theirs_TK).any(1)
    assert margin_T is not None
    margin = margin_T[flipped_T]
    return {
        "same": 1.0 - flipped_T.double().mean().item(),
        "flips": int(flipped_T.sum()),
        "near_ties": int((margin < NEAR_TIE).sum()),
        "widest_flip": float(margin.max()) if len(margin) else 0.0,
    }


def _selection(
    ours_GTC: Tensor, theirs_GTC: Tensor, binds_T: Tensor, config: TextConfig
) -> dict[str, Any] | None:
    """None where every block is chosen anyway."""
    if not bool(binds_T.any()):
        return None
    ours_GTC, theirs_GTC = ours_GTC[:, binds_T], theirs_GTC[:, binds_T]
    common = torch.zeros(ours_GTC.shape[:2], dtype=torch.int32)
    for choice_GT in ours_GTC.unbind(2):
        common += ((theirs_GTC == choice_GT[..., None]) & (choice_GT[..., None] >= 0)).any(2).int()
    share = (common.double() / config.top_k).flatten()
    return {
        "overlap": share.mean().item(),
        "p1": torch.quantile(share[: 1 << 24], 0.01).item(),
        "exact": (share == 1).double().mean().item(),
        "rows": share.numel(),
    }


def cosine(
    ours_TM: npt.NDArray[np.float32], theirs_TM: npt.NDArray[np.float32]
) -> dict[str, float]:
    """Mean and least cosine between two sets of hidden states, in F64 sums."""
    total, least = 0.0, 1.0
    for start in range(0, len(ours_TM), _ROWS):
        a = torch.from_numpy(ours_TM[start : start + _ROWS])
        b = torch.from_numpy(theirs_TM[start : start + _ROWS])
        dot, aa, bb = ((x * y).sum(1, dtype=torch.float64) for x, y in ((a, b), (a, a), (b, b)))
        cos = dot / (aa * bb).sqrt().clamp(min=1e-300)
        total += cos.sum().item()
        least = min(least, cos.min().item())
    return {"mean": total / len(ours_TM), "min": least}


def first_nonfinite(values_TM: npt.NDArray[np.float32]) -> int | None:
    """The first token with a NaN or Inf in it; None when all are finite."""
    for start in range(0, len(values_TM), _ROWS):
        finite = np.isfinite(values_TM[start : start + _ROWS]).all(1)
        if not finite.all():
            return start + int(np.argmin(finite))
    return None

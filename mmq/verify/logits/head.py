"""Scores of every predicted token, streamed over the vocabulary: no token's logits are ever stored.

    NLL  = ln Σ_v exp(a_v) − a_target                                  natural log, full vocabulary
    KLD  = Σ_v p_v (a_v − b_v) − ln Σ exp(a) + ln Σ exp(b)             p = softmax(a), source ‖ arm

a are the source's logits, b an arm's. The head is read in runs of rows; for each run the sums are
extended about a running maximum, so that nothing grows with the vocabulary: 16,384 tokens of
200,064 logits would be 13 GB. Logits are F32, sums F64.

Four numbers: a = (0, ln 3), b = (0, 0), target 1. NLL of a is ln 4 − ln 3 = 0.288, of b 0.693;
KLD = 0.75 · ln 3 − ln 4 + ln 2 = 0.131.

Dimensions: R predicted tokens, M hidden, V vocabulary (v, a run of it).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mmq.kernels.reference.qkv_rope import gemma_norm
from mmq.quantize.architecture import TEXT
from mmq.verify.logits.arms import Arm, ArmName, Side
from mmq.verify.logits.hidden_states import HiddenStates, flat
from mmq.verify.logits.stream import EMBEDDING, Model
from mmq.verify.logits.tokens import TokenSet
from mmq.verify.model.config import TextConfig

LM_HEAD = TEXT + "lm_head"
FINAL_NORM = TEXT + "model.norm"
#: The longest list of best tokens that is compared.
TOP = 5
#: Rows of the head at a time: 200 MB of F32 at M3's width.
VOCAB_ROWS = 8192
_TOKENS = 1024


@dataclass
class ArmScores:
    """One arm's scores, by predicted token.

    Attributes:
        nll_R: F64, nats.
        kld_R: F64, nats, from the source's distribution to this arm's; zero for the source.
        top_R5: I64, the most likely tokens, best first.
    """

    nll_R: Tensor
    kld_R: Tensor
    top_R5: Tensor

    @property
    def p_target_R(self) -> Tensor:
        """Probability of the token that came, F64."""
        return (-self.nll_R).exp()


class _Running:
    """Sums over the part of the vocabulary seen so far, for one arm."""

    def __init__(self, rows: int) -> None:
        self.max_R = torch.full((rows,), -torch.inf, dtype=torch.float64)
        self.sum_R = torch.zeros(rows, dtype=torch.float64)
        #: By what the last run's new maximum shrank the sums before it.
        self.shrunk_R = torch.ones(rows, dtype=torch.float64)
        self.cross_R = torch.zeros(rows, dtype=torch.float64)  # Σ exp(a − max a) · (a − b)
        self.target_R = torch.full((rows,), torch.nan, dtype=torch.float64)
        self.best_R5 = torch.full((rows, TOP), -torch.inf)
        self.top_R5 = torch.zeros((rows, TOP), dtype=torch.int64)

    def extend(
        self, span: slice, logits_Rv: Tensor, first: int, targets_R: Tensor,
        source: _Running, source_Rv: Tensor,
    ) -> None:  # fmt: skip
        """Take in the logits of tokens `first` … of the vocabulary.

        Args:
            source: the source's sums, which have taken in `source_Rv`, its logits of these tokens.
        """
        if source is not self:
            weights_Rv = (source_Rv - source.max_R[span, None].float()).exp_()
            weights_Rv.mul_(source_Rv - logits_Rv)
            self.cross_R[span] *= source.shrunk_R[span]
            self.cross_R[span] += weights_Rv.sum(1, dtype=torch.float64)
        new_R = torch.maximum(self.max_R[span], logits_Rv.amax(1).double())
        self.shrunk_R[span] = (self.max_R[span] - new_R).exp()
        self.sum_R[span] *= self.shrunk_R[span]
        exponentials_Rv = (logits_Rv - new_R[:, None].float()).exp_()
        self.sum_R[span] += exponentials_Rv.sum(1, dtype=torch.float64)
        self.max_R[span] = new_R
        self._take_target(span, logits_Rv, first, targets_R)
        self._take_best(span, logits_Rv, first)

    def _take_best(self, span: slice, logits_Rv: Tensor, first: int) -> None:
        ids_v = torch.arange(first, first + logits_Rv.shape[1])
        values = torch.cat([self.best_R5[span], logits_Rv], 1)
        ids = torch.cat([self.top_R5[span], ids_v.expand(len(logits_Rv), -1)], 1)
        best = values.topk(TOP, dim=1)
        self.best_R5[span] = best.values
        self.top_R5[span] = ids.gather(1, best.indices)

    def _take_target(self, span: slice, logits_Rv: Tensor, first: int, targets_R: Tensor) -> None:
        column_R = targets_R - first
        inside_R = (column_R >= 0) & (column_R < logits_Rv.shape[1])
        at_R = logits_Rv.gather(1, column_R.clamp(0, logits_Rv.shape[1] - 1)[:, None])[:, 0]
        self.target_R[span] = torch.where(inside_R, at_R.double(), self.target_R[span])

    @property
    def lse_R(self) -> Tensor:
        return self.max_R + self.sum_R.log()


def predicted_rows(tokens: TokenSet) -> tuple[Tensor, Tensor]:
    """Rows whose next token is scored, and those tokens: I64 [R] each, window by window."""
    rows = [torch.arange(w.first, w.first + w.length - 1) for w in tokens.windows]
    rows_R = torch.cat(rows)
    return rows_R, torch.from_numpy(tokens.ids_T).long()[rows_R + 1]


def score(
    models: Mapping[Side, Model], arms: Sequence[Arm], tokens: TokenSet, states: HiddenStates,
    advance: Callable[[int], None],
) -> dict[ArmName, ArmScores]:  # fmt: skip
    """Final norm, head and scores of every arm; `arms` begin with the source's.

    The vocabulary is the source's: rows that OUT's head has beyond it, padding, are left out.
    """
    rows_R, targets_R = predicted_rows(tokens)
    running = {arm.name: _Running(len(rows_R)) for arm in arms}
    norms = {side: model.weights.vector(FINAL_NORM) for side, model in models.items()}
    for first, count in _runs(models["source"].config.vocab):
        heads = {
            side: model.weights.matrix(_head_name(model), first, count).float()
            for side, model in models.items()
        }
        for start in range(0, len(rows_R), _TOKENS):
            span = slice(start, start + _TOKENS)
            logits = {
                arm.name: _logits(models[arm.side].config, states, arm, rows_R[span],
                                  norms[arm.side], heads[arm.side])
                for arm in arms
            }  # fmt: skip
            for name, own in running.items():
                own.extend(
                    span, logits[name], first, targets_R[span], running[arms[0].name],
                    logits[arms[0].name],
                )  # fmt: skip
        advance(sum(model.weights.take_bytes_read() for model in models.values()))
    return _scores(running, arms)


def _logits(
    config: TextConfig, states: HiddenStates, arm: Arm, rows_R: Tensor, norm_M: Tensor,
    head_vM: Tensor,
) -> Tensor:  # fmt: skip
    hidden_RM = torch.from_numpy(flat(states.inputs(arm.name))[rows_R.numpy()])
    normed_RM = gemma_norm(hidden_RM.to(head_vM.device), norm_M, config.eps, config.gemma)
    return (normed_RM @ head_vM.T).cpu()


def _runs(vocab: int) -> Iterator[tuple[int, int]]:
    for first in range(0, vocab, VOCAB_ROWS):
        yield first, min(VOCAB_ROWS, vocab - first)


def _head_name(model: Model) -> str:
    return EMBEDDING if model.config.tied and not model.weights.has(LM_HEAD) else LM_HEAD


def _scores(running: Mapping[ArmName, _Running], arms: Sequence[Arm]) -> dict[ArmName, ArmScores]:
    source = running[arms[0].name]
    found: dict[ArmName, ArmScores] = {}
    for name, own in running.items():
        nll_R = own.lse_R - own.target_R
        if own is source:
            kld_R = torch.zeros_like(nll_R)
        else:
            kld_R = own.cross_R / source.sum_R - source.lse_R + own.lse_R
        found[name] = ArmScores(nll_R, kld_R, own.top_R5)
    return found

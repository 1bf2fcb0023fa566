"""What reached the experts of one layer: how large, and how much of it in each channel.

    amax       largest magnitude of each expert's input x, and of its activation act    maxima
    squares    Σ x² by expert and input channel of w1/w3, Σ act² by channel of w2       exact sums
    tokens     that reached each expert                                                 counts

Dimensions: N tokens of one expert, E experts, M hidden, I intermediate.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from torch import Tensor

from mmq.calibrate.exact_sums import ExactSums


@dataclass
class ExpertStatistics:
    """One layer's experts.

    Attributes:
        tokens_E: I64.
        input_amax_E, act_amax_E: F32.
        input_squares, act_squares: exact sums [E, M] and [E, I].
    """

    experts: int
    hidden: int
    intermediate: int
    tokens_E: npt.NDArray[np.int64] = field(init=False)
    input_amax_E: npt.NDArray[np.float32] = field(init=False)
    act_amax_E: npt.NDArray[np.float32] = field(init=False)
    input_squares: ExactSums = field(init=False)
    act_squares: ExactSums = field(init=False)

    def __post_init__(self) -> None:
        self.tokens_E = np.zeros(self.experts, np.int64)
        self.input_amax_E = np.zeros(self.experts, np.float32)
        self.act_amax_E = np.zeros(self.experts, np.float32)
        self.input_squares = ExactSums.zeros(self.experts, self.hidden)
        self.act_squares = ExactSums.zeros(self.experts, self.intermediate)

    def observe(self, expert: int, input_NM: Tensor, act_NI: Tensor) -> None:
        """Take in one window's tokens of one expert, F32."""
        if not len(input_NM):
            return
        self.tokens_E[expert] += len(input_NM)
        for amax_E, squares, values in (
            (self.input_amax_E, self.input_squares, input_NM),
            (self.act_amax_E, self.act_squares, act_NI),
        ):
            amax_E[expert] = max(amax_E[expert], np.float32(values.abs().max().item()))
            squares.add(values.double().square(), expert)

    def merge(self, other: ExpertStatistics) -> None:
        """Add another run's."""
        if self.input_squares.whole.shape != other.input_squares.whole.shape:
            raise ValueError("experts of another model")
        self.tokens_E += other.tokens_E
        self.input_amax_E = np.maximum(self.input_amax_E, other.input_amax_E)
        self.act_amax_E = np.maximum(self.act_amax_E, other.act_amax_E)
        self.input_squares.merge(other.input_squares)
        self.act_squares.merge(other.act_squares)

    def mean_squares(self) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """Mean x² by expert and channel, F32 [E, M] and [E, I].

        An expert that no token reached gets the mean over all others, so that its channels are
        weighed as the layer's are.
        """
        return (
            _means(self.input_squares.totals(), self.tokens_E),
            _means(self.act_squares.totals(), self.tokens_E),
        )

    def arrays(self) -> dict[str, npt.NDArray[np.generic]]:
        """All of it, for a .npz file."""
        return {
            "tokens": self.tokens_E, "input_amax": self.input_amax_E, "act_amax": self.act_amax_E,
            "input_whole": self.input_squares.whole, "input_fraction": self.input_squares.fraction,
            "act_whole": self.act_squares.whole, "act_fraction": self.act_squares.fraction,
        }  # fmt: skip

    @classmethod
    def from_arrays(cls, data: dict[str, npt.NDArray[np.generic]]) -> ExpertStatistics:
        """The inverse of `arrays`.

        Raises:
            ValueError, KeyError: shapes that do not fit, NaN, or numbers out of their range.
        """
        experts, hidden = data["input_whole"].shape
        own = cls(experts, hidden, data["act_whole"].shape[1])
        own.tokens_E = data["tokens"].astype(np.int64)
        own.input_amax_E = data["input_amax"].astype(np.float32)
        own.act_amax_E = data["act_amax"].astype(np.float32)
        own.input_squares = ExactSums(
            data["input_whole"].astype(np.int64), data["input_fraction"].astype(np.int64)
        )
        own.act_squares = ExactSums(
            data["act_whole"].astype(np.int64), data["act_fraction"].astype(np.int64)
        )
        own._check()
        return own

    def _check(self) -> None:
        per_expert = (self.tokens_E, self.input_amax_E, self.act_amax_E)
        if any(array.shape != (self.experts,) for array in per_expert):
            raise ValueError(f"not one number for each of {self.experts} experts")
        if not all(np.isfinite(a).all() and (a >= 0).all() for a in per_expert):
            raise ValueError("counts or amax are negative or not finite")
        for sums in (self.input_squares, self.act_squares):
            sums.check()


def _means(
    sums_EC: npt.NDArray[np.float64], tokens_E: npt.NDArray[np.int64]
) -> npt.NDArray[np.float32]:
    means_EC = sums_EC / np.maximum(tokens_E, 1)[:, None]
    total = tokens_E.sum()
    if total:
        means_EC[tokens_E == 0] = sums_EC.sum(0) / total
    return means_EC.astype(np.float32)

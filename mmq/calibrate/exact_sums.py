"""Sums of non-negative numbers that do not depend on the order of addition.

    x = whole + fraction · 2^−40          whole and fraction are integers, each added in I64

Floating-point sums depend on how data is cut into pieces; integers do not. So windows may be split
over runs, resumed and merged, and the result has the same bits. What lies below 2^−41 is lost, what
exceeds 2^40 counts as 2^40, and a sum may reach 2^62.

Four numbers: 1.5 is (1, 2^39); 2^−41 rounds to (0, 0); 0.75 added to 1.5 is (1, 2^39 + 3 · 2^38),
which is 2.25.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_BITS = 40
_LARGEST = 2.0**40

I64 = npt.NDArray[np.int64]


@dataclass
class ExactSums:
    """Many sums side by side.

    Attributes:
        whole, fraction: I64 of one shape; the sums are whole + fraction · 2^−40.
    """

    whole: I64
    fraction: I64

    @classmethod
    def zeros(cls, *shape: int) -> ExactSums:
        return cls(np.zeros(shape, np.int64), np.zeros(shape, np.int64))

    def add(self, values_NC: Tensor, row: int | None = None) -> None:
        """Add the values of each column.

        Args:
            values_NC: F32 or F64, finite and not negative; at most 2^22 rows.
            row: which row of two-dimensional sums is meant, such as an expert's.
        """
        values_NC = values_NC.double().clamp(max=_LARGEST)
        whole = values_NC.floor()
        fraction = ((values_NC - whole) * 2.0**_BITS).round()
        index = ... if row is None else row
        self.whole[index] += whole.to(torch.int64).sum(0).numpy()
        self.fraction[index] += fraction.to(torch.int64).sum(0).numpy()
        self._carry()

    def merge(self, other: ExactSums) -> None:
        """Add another run's sums."""
        self.whole += other.whole
        self.fraction += other.fraction
        self._carry()

    def check(self) -> None:
        """Raise ValueError unless these are sums: not negative, in the one form each has."""
        if self.whole.shape != self.fraction.shape:
            raise ValueError("sums of two shapes")
        if (self.whole < 0).any() or (self.fraction < 0).any() or (self.fraction >> _BITS).any():
            raise ValueError("sums out of their range")

    def _carry(self) -> None:
        """Fractions below 1 again: one form for each sum, and room for the next addition."""
        carry = self.fraction >> _BITS
        self.whole += carry
        self.fraction -= carry << _BITS

    def totals(self) -> npt.NDArray[np.float64]:
        """The sums as F64."""
        return self.whole.astype(np.float64) + self.fraction.astype(np.float64) / 2.0**_BITS

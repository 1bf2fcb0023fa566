"""What a kernel gave beside what the reference gives: equal bits, or a difference and its bound.

    exact      worst = values whose bits differ             bound 0
    bounded    worst = |got − expected| where it is largest beside its own bound, and that bound

Four numbers: got [1, 2, 3, 4], expected [1, 2.5, 3, 4], bounds [1, 1, 1, 1]: worst 0.5, bound 1.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

_T = TypeVar("_T")
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Comparison(NamedTuple):
    """One case of an operation.

    Attributes:
        values: how many were compared.
        worst, bound: see the module.
    """

    case: str
    exact: bool
    values: int
    worst: float
    bound: float

    @property
    def ratio(self) -> float:
        """`worst` over `bound`; up to 1 is right."""
        if self.worst == 0:
            return 0.0
        return self.worst / self.bound if self.bound else math.inf


def exactly(case: str, got: Any, expected: Any) -> Comparison:
    """Tensors of one type and shape, or tuples of them with None in the same places.

    Bits must be equal; NaN is NaN, whatever its sign and payload.
    """
    pairs = list(zip(_tensors(got), _tensors(expected), strict=True))
    differing = sum(_differing(*pair) for pair in pairs)
    return Comparison(case, True, sum(e.numel() for _, e in pairs), float(differing), 0.0)


def within(case: str, got: Tensor, expected: Tensor, bound: Tensor) -> Comparison:
    """Each value no farther from the expected one than its bound; NaN and Inf are never right."""
    if got.shape != expected.shape:
        return Comparison(case, False, expected.numel(), math.inf, 0.0)
    if not expected.numel():
        return Comparison(case, False, 0, 0.0, 0.0)
    error = (got.double() - expected.double()).abs()
    error = error.where(got.isfinite(), math.inf).where(expected.isfinite(), math.inf)
    # Where both are the same infinity, as scores of blocks without keys are.
    error = error.where(got.double() != expected.double(), 0.0)
    # Where there is nothing to see there is no bound either: equal, or wrong.
    bound = bound.double().expand_as(error).nan_to_num(0.0, 0.0, 0.0).clamp(min=0)
    ratio = (error / bound).where(error > 0, 0.0)
    at = int(ratio.argmax())
    return Comparison(
        case, False, expected.numel(), float(error.flatten()[at]), float(bound.flatten()[at])
    )


def _tensors(value: Any) -> list[Tensor]:
    values = value if isinstance(value, tuple | list) else (value,)
    return [torch.as_tensor(v) for v in values if v is not None]


def _differing(got: Tensor, expected: Tensor) -> int:
    if (got.dtype, got.shape) != (expected.dtype, expected.shape):
        return max(1, expected.numel())
    bits = _BITS[got.element_size()]
    apart = got.contiguous().view(bits) != expected.contiguous().view(bits)
    if got.is_floating_point():
        apart &= ~(got.isnan() & expected.isnan())
    return int(apart.sum())


def moved(value: _T, device: torch.device) -> _T:
    """The same with every tensor in it on `device`."""
    found: Any = value
    if isinstance(found, Tensor):
        return found.to(device)  # type: ignore[return-value]
    if dataclasses.is_dataclass(found) and not isinstance(found, type):
        fields = {f.name: moved(getattr(found, f.name), device) for f in dataclasses.fields(found)}
        return dataclasses.replace(found, **fields)  # type: ignore[return-value]
    if isinstance(found, tuple):
        items = [moved(item, device) for item in found]
        again: Any = type(found)(*items) if hasattr(found, "_fields") else tuple(items)
        return again  # type: ignore[no-any-return]
    return [moved(item, device) for item in found] if isinstance(found, list) else found  # type: ignore[return-value]


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Memory that is not initialised holds NaN, and the largest integers, so that an element which
    no program writes shows."""
    before = torch.are_deterministic_algorithms_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before)

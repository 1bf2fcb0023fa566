"""What carrying out a task needs, and the row that it leaves in tensors.csv."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from mmq.convert.stream import SourceReader

Emit = Callable[[Any], None]


class TensorRow(NamedTuple):
    """One line of tensors.csv: what became of a weight, and with which error.

    Attributes:
        global_scale: s2 as a multiplier, F32; NaN when there is none.
        signal / noise: Σx² and Σ(x − q)² against the source's values.
        nonfinite: NaN/Inf elements let through by --allow-nonfinite-passthrough.
        other_scalars: (name, hex) of each scalar of the other NVFP4 layout that 1/x does not give.
    """

    name: str
    action: str
    dtype_in: str
    dtype_out: str
    shape: tuple[int, ...]
    bytes_in: int
    bytes_out: int
    global_scale: float = math.nan
    signal: float = 0.0
    noise: float = 0.0
    max_error: float = 0.0
    nonfinite: int = 0
    other_scalars: tuple[tuple[str, str], ...] = ()


@dataclass
class TaskContext:
    """What tasks need besides themselves; `backend` is one of `kernels.ops`."""

    reader: SourceReader
    allow_nonfinite: bool
    gemma_norm: bool
    emit: Emit
    rows: list[TensorRow] = field(default_factory=list)
    backend: str = "auto"


def scalar_bytes(value: float | np.float32) -> bytes:
    """An F32 scalar as it is stored."""
    return np.array([value], "<f4").tobytes()

"""What the interpreting process runs of attention; functions travel by name.

Torch fills memory that is not initialised with NaN here, so that an element which no program writes
shows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from mutation import load_mutant
from torch import Tensor

from mmq.kernels.triton import block_attention
from mmq.kernels.triton.launch import pretended


@contextmanager
def poisoned_memory() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(1).isnan()
        assert torch.zeros(1).new_empty(1).isnan()
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def attend(
    arguments: tuple[Any, ...],
    selection_GTC: Tensor | None = None,
    target: str = "sm_90",
    module: ModuleType = block_attention,
    **options: Any,
) -> Tensor:
    """`attend_pages` as launched for `target`; F32 unless `options` say otherwise."""
    with poisoned_memory(), pretended(target):
        options = {"dtype": torch.float32} | options
        return module.attend_pages(*arguments, selection_GTC, **options)


def attend_wrongly(mistake: tuple[str, str], folder: Path, *arguments: Any, **options: Any) -> Any:
    """The same by kernels with one mistake in their source."""
    module = load_mutant(block_attention, *mistake, folder)
    return attend(*arguments, module=module, **options)


def merge(parts_XTHD: Tensor, lse_XTH: Tensor, v_scale: float = 1.0) -> Tensor:
    with poisoned_memory():
        out_THD = torch.empty(parts_XTHD.shape[1:])
        block_attention.merge_partials(parts_XTHD, lse_XTH, out_THD, v_scale)
    return out_THD

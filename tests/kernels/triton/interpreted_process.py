"""What the interpreting process runs; a module of its own, since functions travel by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mmq.kernels.triton import backend


def call_with_tile(tile: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call with programs that take `tile` elements."""
    backend.TILE, backend.PACKED_TILE = tile, 2 * tile
    return function(*arguments)

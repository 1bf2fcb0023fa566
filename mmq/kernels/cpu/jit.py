"""numba's compiler with the settings that bit-equality and worker processes need."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

Function = TypeVar("Function", bound=Callable[..., Any])

# Without fastmath every F32 operation is the IEEE one, in the order written, and none is contracted
# to an FMA. With error_model="numpy" division follows IEEE as well, without a branch that raises.
_SETTINGS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": False}


def jit(function: Function) -> Function:
    """Compile at the first call, cached on disk where a writable place can be found."""
    try:
        return cast(Function, numba.njit(cache=True, **_SETTINGS)(function))
    except RuntimeError:
        # Neither the package nor a user cache folder is writable: compile in every process.
        return cast(Function, numba.njit(**_SETTINGS)(function))

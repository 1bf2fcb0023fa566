"""How this package is compiled, and where compiled code is kept.

numba keeps compiled code on disk and drops it when the file of that very function changes. It does
not notice a change in what the function calls, in the intrinsics it uses or in the tables it reads.
So the code is kept in a folder named after the contents of all files of this package: whatever
changes, everything is compiled anew, and two versions never see each other's code.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, cast

import numba

Function = TypeVar("Function", bound=Callable[..., Any])

# Without fastmath every operation on floats is the IEEE one, in the order written, and none is
# contracted to an FMA. With error_model="numpy" division follows IEEE as well, without a branch
# that raises.
SETTINGS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": False}

#: A 64-bit integer of compiled code, Python's or numpy's before that.
Int: TypeAlias = Any

_HERE = Path(__file__).parent


_config: Any = numba.config


def jit(function: Function) -> Function:
    """Compile at the first call, cached on disk where a writable place can be found."""
    chosen = _config.CACHE_DIR
    folder = cache_folder()
    try:
        if folder is None:
            return cast(Function, numba.njit(**SETTINGS)(function))
        # numba looks at this setting when it decorates; what others decorate is not affected.
        _config.CACHE_DIR = str(folder)
        return cast(Function, numba.njit(cache=True, **SETTINGS)(function))
    except RuntimeError:
        # numba's own check: the place cannot be written after all. Compile in every process.
        return cast(Function, numba.njit(**SETTINGS)(function))
    finally:
        _config.CACHE_DIR = chosen


def cache_folder() -> Path | None:
    """Where compiled code of exactly these sources is kept; None where nothing can be written.

    In $NUMBA_CACHE_DIR if that is set, else in __pycache__ beside the sources, else in the user's
    cache folder.
    """
    for base in _bases():
        if _is_writable(base):
            return base / f"numba-{_DIGEST}"
    return None


def source_digest(folder: Path) -> str:
    """16 hex digits that change when any Python file in `folder` does."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()[:16]


_DIGEST = source_digest(_HERE)


def _bases() -> list[Path]:
    if _config.CACHE_DIR:
        return [Path(_config.CACHE_DIR)]
    default = "~/Library/Caches" if sys.platform == "darwin" else "~/.cache"
    user = os.environ.get("LOCALAPPDATA") or os.environ.get("XDG_CACHE_HOME") or default
    return [_HERE / "__pycache__", Path(user).expanduser() / "mmq"]


def _is_writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)

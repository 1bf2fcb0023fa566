"""How this package is compiled, and where compiled code is kept.

numba keeps compiled code on disk and drops it when the file of that very function changes. It does
not notice a change in what the function calls, in the intrinsics it uses or in the tables it reads.
So the code is kept in a folder named after the contents of all files of this package: whatever
changes, everything is compiled anew, and two versions never see each other's code. Folders of other
versions are removed when nothing has started with them for a day.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import suppress
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
_IDLE_SECONDS = 24 * 3600


_config: Any = numba.config
if _config.DISABLE_JIT:
    # vectors exist in compiled code alone: there is nothing to interpret
    raise ImportError("NUMBA_DISABLE_JIT is set, and these functions have to be compiled")


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


def tidy(folder: Path) -> None:
    """Mark a folder of compiled code as used now, and remove its neighbours that are idle.

    A process that still runs on one of those compiles again what it has not loaded yet.
    """
    with suppress(OSError):
        folder.mkdir(exist_ok=True)
        os.utime(folder)
        for other in folder.parent.glob("numba-" + "[0-9a-f]" * 16):
            if other != folder and time.time() - other.stat().st_mtime > _IDLE_SECONDS:
                shutil.rmtree(other, ignore_errors=True)


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


_folder = cache_folder()
if _folder is not None:
    tidy(_folder)

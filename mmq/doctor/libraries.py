"""The libraries mmq stands on, and where numba keeps what it compiled."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from mmq import __version__
from mmq.doctor.facts import Fact, first_line, load, version

#: Libraries that a part of mmq needs: name, and for what.
LIBRARIES = {
    "numpy": "everything",
    "torch": "references, the forward of verify and calibrate, every GPU",
    "numba": "fast conversion on the CPU",
    "triton": "the GPU's kernels, and level kernels",
    "tokenizers": "verify --level logits, calibrate",
    "huggingface_hub": "sources on the Hub, publish",
}
_CACHE = "numba's cache"


def library_facts() -> list[Fact]:
    """Versions, then numba's cache."""
    return [Fact("mmq", True, __version__), *map(library, LIBRARIES), _xet(), numba_cache()]


def library(name: str) -> Fact:
    """Whether one of `LIBRARIES` can be imported."""
    try:
        load(name)
    except Exception as error:  # a library that is there and broken raises anything
        text = f"{first_line(error)}; needed for {LIBRARIES[name]}"
        return Fact(name, False, text, remedy_for(name))
    return Fact(name, True, version(name) or "of unknown version")


def remedy_for(name: str) -> str:
    """How to get a library that is missing, or whole again one that is broken."""
    if name == "triton":
        if platform.system() != "Linux":
            return "Triton has wheels for Linux only; --device cpu needs none, with the same bytes"
        return "pip install --upgrade 'mmq-toolkit[gpu]'"
    return f"pip install --force-reinstall {name}" if version(name) else f"pip install {name}"


def _xet() -> Fact:
    found = version("hf_xet")
    return Fact("hf_xet", True if found else None, found or "not there: publish uploads over HTTP")


def numba_cache() -> Fact:
    """Where compiled code is kept, and whether it can be."""
    try:
        jit = load("mmq.kernels.cpu.jit")
        folder = jit.cache_folder()
    except Exception as error:
        # numba's own line has the remedy
        return Fact(_CACHE, None, f"not looked for: {first_line(error)}")
    if folder is None:
        chosen = os.environ.get("NUMBA_CACHE_DIR")
        where = f"NUMBA_CACHE_DIR={chosen}" if chosen else "mmq's folder and the user's cache"
        return Fact(
            _CACHE, False, f"{where} cannot be written: every process compiles anew",
            "export NUMBA_CACHE_DIR=/a/folder/that/can/be/written",
        )  # fmt: skip
    return Fact(_CACHE, True, f"{_size(folder) / 1e6:.1f} MB in {folder}, which can be written")


def _size(folder: Path) -> int:
    """Bytes of its files; other processes may remove some meanwhile."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:
            continue
    return total

"""System, Python, processor, memory."""

from __future__ import annotations

import contextlib
import os
import platform
from pathlib import Path

from mmq.doctor.facts import Fact, first_line, load

#: Vector extensions that LLVM's names stand for, widest first.
_EXTENSIONS = {
    "avx512f": "AVX-512", "avx512bf16": "AVX-512 BF16", "amx-bf16": "AMX", "avx2": "AVX2",
    "sve": "SVE", "neon": "NEON",
}  # fmt: skip


def machine_facts() -> list[Fact]:
    """What cannot be wrong."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    return [
        Fact("system", None, f"{platform.system()} {platform.machine()}"),
        Fact("python", True, platform.python_version()),
        Fact("processor", None, f"{cores} cores for this process; {_vector_units()}"),
        _memory(),
    ]


def _vector_units() -> str:
    """Of the processor, as LLVM sees it; numba's code is compiled for them."""
    try:
        features = load("llvmlite.binding").get_host_cpu_features()
    except Exception as error:
        return f"vector units unknown ({first_line(error)})"
    found = [text for name, text in _EXTENSIONS.items() if features.get(name)]
    return ", ".join(found) or "no vector units that are known here"


def _memory() -> Fact:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        page = os.sysconf("SC_PAGE_SIZE")
        total = os.sysconf("SC_PHYS_PAGES") * page
        free = _available() or os.sysconf("SC_AVPHYS_PAGES") * page
        return Fact("memory", None, f"{free / 1e9:.1f} of {total / 1e9:.1f} GB available")
    return Fact("memory", None, "unknown")


def _available() -> int | None:
    """Memory that can be had without swapping, where Linux says it."""
    path = Path("/proc/meminfo")
    if not path.exists():
        return None
    fields = dict(line.split(":", 1) for line in path.read_text("ascii").splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in fields else None

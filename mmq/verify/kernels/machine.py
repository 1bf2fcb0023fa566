"""What this machine has and what of mmq works on it, each with the reason where it does not."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import os
import platform
import shutil
import warnings
from pathlib import Path
from typing import Any, NamedTuple

from mmq import __version__
from mmq.kernels import ops

#: Libraries that a part of mmq needs: name, and for what.
LIBRARIES = {
    "numpy": "everything",
    "torch": "references, the forward of verify and calibrate, every GPU",
    "numba": "fast conversion on the CPU",
    "triton": "the GPU's kernels, and level kernels",
    "tokenizers": "verify --level logits, calibrate",
}
#: Vector extensions that LLVM's names stand for, widest first.
_EXTENSIONS = {
    "avx512f": "AVX-512", "avx512bf16": "AVX-512 BF16", "amx-bf16": "AMX", "avx2": "AVX2",
    "sve": "SVE", "neon": "NEON",
}  # fmt: skip


class Fact(NamedTuple):
    """One line of `mmq doctor`.

    Attributes:
        ok: None where it is neither good nor bad.
        text: what is there, or why not.
    """

    name: str
    ok: bool | None
    text: str


def machine_facts(folder: Path) -> dict[str, list[Fact]]:
    """Facts by section; nothing is compiled, and no kernel runs."""
    return {
        "machine": [*_processor(), _memory(), _disk(folder)],
        "libraries": [Fact("mmq", True, __version__), *map(_library, LIBRARIES)],
        "GPUs": _gpus(),
        "backends of weight operations": _backends(),
        "what works": _abilities(),
    }


def _processor() -> list[Fact]:
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    return [
        Fact("system", None, f"{platform.system()} {platform.machine()}"),
        Fact("python", True, platform.python_version()),
        Fact("processor", None, f"{cores} cores for this process; {_vector_units()}"),
    ]


def _vector_units() -> str:
    """Of the processor, as LLVM sees it; numba's code is compiled for them."""
    try:
        binding: Any = importlib.import_module("llvmlite.binding")
        features = binding.get_host_cpu_features()
    except Exception as error:
        return f"vector units unknown ({error})"
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


def _disk(folder: Path) -> Fact:
    usage = shutil.disk_usage(folder)
    return Fact("disk here", None, f"{usage.free / 1e9:.1f} of {usage.total / 1e9:.1f} GB free")


def _library(name: str) -> Fact:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module(name)
        return Fact(name, True, importlib.metadata.version(name))
    except Exception as error:  # a library that is there and broken raises anything
        return Fact(name, False, f"{_first_line(error)}; needed for {LIBRARIES[name]}")


def _gpus() -> list[Fact]:
    try:
        torch: Any = importlib.import_module("torch")
    except Exception as error:
        return [Fact("none", None, f"torch cannot be imported: {_first_line(error)}")]
    build = "ROCm" if torch.version.hip else "CUDA" if torch.version.cuda else "CPU"
    if not torch.cuda.is_available():
        why = "this PyTorch is built for the CPU" if build == "CPU" else "PyTorch sees no device"
        return [Fact("none", None, f"{why} (torch {torch.__version__})")]
    return [_gpu(torch, index) for index in range(torch.cuda.device_count())]


def _gpu(torch: Any, index: int) -> Fact:
    properties = torch.cuda.get_device_properties(index)
    arch = getattr(properties, "gcnArchName", "").partition(":")[0]
    target = arch if torch.version.hip else f"sm_{properties.major}{properties.minor}"
    memory = f"{properties.total_memory / 2**30:.0f} GiB"
    known, why = _targets()
    note = why if why else "" if target in known else "; kernels were never compiled for it"
    return Fact(f"{index}: {properties.name}", target in known, f"{target}, {memory}{note}")


def _targets() -> tuple[tuple[str, ...], str]:
    try:
        launch: Any = importlib.import_module("mmq.kernels.triton.launch")
    except Exception as error:
        return (), f"; no Triton: {_first_line(error)}"
    return tuple(launch.TARGETS), ""


def _backends() -> list[Fact]:
    """Each backend of `mmq.kernels.ops`, and which one "auto" is."""
    facts = []
    for name, module in ops.BACKENDS.items():
        try:
            importlib.import_module(module)
            facts.append(Fact(name, True, "can be imported"))
        except Exception as error:
            facts.append(Fact(name, False, _first_line(error)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        chosen = ops.resolve_backend("auto")
    speed = "" if chosen == "cpu" else ": the same bytes, slowly"
    return [*facts, Fact("auto", chosen == "cpu", f"is {chosen}{speed}")]


def _abilities() -> list[Fact]:
    """What a user would ask for, and why not."""
    torch_works, triton_works = (_library(name).ok for name in ("torch", "triton"))
    gpu = bool(torch_works) and importlib.import_module("torch").cuda.is_available()
    no_gpu = "no GPU" if triton_works else "triton cannot be imported"
    usable = bool(gpu and triton_works)
    emulated = "" if triton_works else "needs triton: every operation is skipped"
    how = "executed natively" if usable else emulated or "emulated by Triton's interpreter"
    return [
        Fact("convert --device cpu", True, "yes"),
        Fact("convert --device cuda", usable, "yes" if usable else f"no: {no_gpu}"),
        Fact("verify --level structure, weights, logits", bool(torch_works), "on the CPU"),
        Fact("verify --level kernels", bool(triton_works), how),
        Fact("bench --kernels --device cuda", usable, "yes" if usable else f"no: {no_gpu}"),
    ]


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).partition("\n")[0]

"""The GPUs that PyTorch sees, and which of mmq's kernels run on each."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from mmq.doctor.facts import Fact, first_line, load, version
from mmq.doctor.libraries import remedy_for

_CPU_WILL_DO = "--device cpu gives the same bytes"
#: What the drivers of NVIDIA and AMD put there.
_DEVICE_FILES = (Path("/dev/nvidiactl"), Path("/dev/kfd"))


class Gpu(NamedTuple):
    """A GPU as PyTorch tells of it; `target` is Triton's name for its architecture."""

    name: str
    target: str
    nbytes: int


def gpu_facts() -> list[Fact]:
    """Two lines for each GPU, or why there is none."""
    try:
        torch = load("torch")
        gpus = _gpus(torch)
    except Exception as error:
        text = f"torch cannot tell: {first_line(error)}"
        return [Fact("none", None, text)]  # torch's own line has the remedy
    if not gpus:
        return [_none(torch)]
    return [fact for index, gpu in enumerate(gpus) for fact in _two_lines(index, gpu)]


def _gpus(torch: Any) -> list[Gpu]:
    if not torch.cuda.is_available():
        return []
    return [_gpu(torch, index) for index in range(torch.cuda.device_count())]


def _gpu(torch: Any, index: int) -> Gpu:
    properties = torch.cuda.get_device_properties(index)
    arch = getattr(properties, "gcnArchName", "").partition(":")[0]
    target = arch if torch.version.hip else f"sm_{properties.major}{properties.minor}"
    return Gpu(properties.name, target, properties.total_memory)


def _none(torch: Any) -> Fact:
    """No GPU is no fault, unless a driver says that there is one."""
    for_cpu = not (torch.version.hip or torch.version.cuda)
    why = "this PyTorch is built for the CPU" if for_cpu else "PyTorch sees no device"
    text = f"{why} (torch {torch.__version__})"
    drivers = [str(path) for path in _DEVICE_FILES if path.exists()]
    if not drivers:
        return Fact("none", None, text)
    remedy = (
        "install PyTorch for this GPU: https://pytorch.org/get-started/locally"
        if for_cpu
        else "nvidia-smi or rocminfo must list the GPU; see CUDA_VISIBLE_DEVICES and /dev/kfd"
    )
    return Fact("none", False, f"{text}, but a driver is loaded: {drivers[0]}", remedy)


def _two_lines(index: int, gpu: Gpu) -> list[Fact]:
    memory = f"{gpu.target}, {gpu.nbytes / 2**30:.0f} GiB"
    paths, why = _paths(gpu.target)
    head = Fact(f"{index}: {gpu.name}", not why, memory)
    if why:
        head = head._replace(text=f"{memory}; {why.text}", remedy=why.remedy)
        return [head]
    counts = ", ".join(
        f"{paths[path]} {said}"
        for path, said in (("native", "native"), ("fallback", "by fallback"),
                           ("unsupported", "not at all"))
    )  # fmt: skip
    text = f"Triton {version('triton')}, {paths.total()} operations: {counts}"
    missing = paths["unsupported"] > 0
    remedy = "mmq doctor --kernels tells which, and why" if missing else None
    return [head, Fact(f"{index}: kernels", not missing, text, remedy)]


class _Why(NamedTuple):
    text: str
    remedy: str


def _paths(target: str) -> tuple[Counter[str], _Why | None]:
    """How many operations go which way on a target; or why none does."""
    try:
        cells = load("mmq.verify.kernels.support_table").support_cells()
    except Exception as error:
        return Counter(), _Why(f"no Triton: {first_line(error)}", remedy_for("triton"))
    paths = Counter(cell.path for cell in cells if cell.target == target)
    if not paths:
        return paths, _Why("kernels were never compiled for it", _CPU_WILL_DO)
    return paths, None

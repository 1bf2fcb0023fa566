"""Where kernels run, for which target, and with which options.

With TRITON_INTERPRET=1 in the environment before the first import of Triton, they run on the CPU
in Triton's interpreter, repaired: slow, for tests.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import triton
from triton.backends.compiler import GPUTarget

from .interpreter import repair

# The ptxas of 3.6 contracts paired products and sums on Blackwell although told not to:
# `weight_variants.faults` finds it in the weighted search.
_MIN_TRITON = (3, 7)
if tuple(int(part) for part in triton.__version__.split(".")[:2]) < _MIN_TRITON:
    raise ImportError(f"Triton {triton.__version__} may fuse multiply-adds: 3.7 or newer is needed")

if triton.knobs.runtime.interpret:
    repair()

#: The targets that every kernel is compiled for in the tests.
TARGETS = {
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_103": GPUTarget("cuda", 103, 32),
    "sm_107": GPUTarget("cuda", 107, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx950": GPUTarget("hip", "gfx950", 64),
}

_pretended = TARGETS["sm_90"]


class NoDeviceError(RuntimeError):
    """PyTorch sees neither a CUDA nor a ROCm device."""


@functools.cache
def device() -> torch.device:
    """Where the kernels run: the current GPU, or the CPU under TRITON_INTERPRET=1.

    Raises:
        NoDeviceError: there is no GPU.
    """
    if triton.knobs.runtime.interpret:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise NoDeviceError(
            "PyTorch sees no CUDA or ROCm device; TRITON_INTERPRET=1 runs the kernels on the CPU"
        )
    return torch.device("cuda")


def gpu_target() -> GPUTarget:
    """What the current device is to Triton; in the interpreter sm_90, or what is pretended."""
    if device().type == "cpu":
        return _pretended
    return triton.runtime.driver.active.get_current_target()


def target_name(target: GPUTarget | None = None) -> str:
    """`sm_100`, `gfx950`: the name of a target, by default of the current device's."""
    target = target or gpu_target()
    return f"sm_{target.arch}" if target.backend == "cuda" else str(target.arch)


@contextmanager
def pretended(name: str) -> Iterator[GPUTarget]:
    """In the interpreter, which has no target of its own, run as launches for `name` would.

    Raises:
        RuntimeError: kernels run on a GPU here.
    """
    global _pretended
    if device().type != "cpu":
        raise RuntimeError(f"the kernels run on {target_name()}, not on {name}")
    former, _pretended = _pretended, TARGETS[name]
    try:
        yield _pretended
    finally:
        _pretended = former


def launch_options(
    threads: int, target: GPUTarget | None = None, **more: object
) -> dict[str, object]:
    """Launch options for programs of `threads` threads, by default on the current device.

    No operation may be fused, or bits would depend on the device.

    Args:
        more: other options of Triton, as they are.
    """
    target = target or gpu_target()
    return {"num_warps": max(1, threads // target.warp_size), "enable_fp_fusion": False} | more

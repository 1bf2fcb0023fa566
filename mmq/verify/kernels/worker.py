"""What runs in the process that has the kernels: a device, and one operation at a time.

The process is fresh, since Triton reads TRITON_INTERPRET when it is imported, and since a kernel
that reads outside its memory takes the whole process's GPU with it. Functions travel by name.
"""

from __future__ import annotations

import functools
import importlib
import time
import traceback
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from mmq.verify.kernels.compare import Comparison

#: What the interpreter pretends to be: the target with an instruction of its own for everything.
EMULATED = "sm_100"


class Device(NamedTuple):
    """Where kernels run in this process.

    Attributes:
        backend: "cuda" or "rocm"; "interpreter" on a CPU.
        target: `sm_100`, `gfx950`; in the interpreter the one that is pretended.
    """

    name: str
    backend: str
    target: str
    triton: str
    torch: str

    @property
    def native(self) -> bool:
        return self.backend != "interpreter"


class Outcome(NamedTuple):
    """One operation.

    Attributes:
        path, reason: what its module's `supports` says of the target.
        left_out: why it did not run.
        error: what a kernel raised.
    """

    op: str
    path: str
    reason: str
    comparisons: list[Comparison]
    seconds: float
    left_out: str | None = None
    error: str | None = None


def describe() -> Device | str:
    """The device of this process, or why there is none."""
    try:
        launch: Any = importlib.import_module("mmq.kernels.triton.launch")
    except ImportError as error:
        return f"needs triton: {error}"
    import torch
    import triton

    try:
        on_cpu = launch.device().type == "cpu"
    except launch.NoDeviceError as error:
        return f"needs a GPU: {error}"
    versions = triton.__version__, torch.__version__
    if on_cpu:
        return Device("Triton's interpreter on the CPU", "interpreter", EMULATED, *versions)
    backend = "rocm" if torch.version.hip else "cuda"
    return Device(torch.cuda.get_device_name(), backend, launch.target_name(), *versions)


def prepare(out: str | None, large: bool) -> list[str]:
    """Names of the weights that operations will run on; see `run_operation`.

    Raises:
        BadInputError: the checkpoint has no layer to run them on.
    """
    return [material.name for material in _materials(out, large)]


def run_operation(op: str, out: str | None, large: bool) -> Outcome:
    """Run all cases of one operation: made-up weights, and those of a checkpoint.

    Args:
        out: a checkpoint's location.
        large: M3's sizes too, which a GPU has in seconds and the interpreter never.
    """
    from mmq.verify.kernels import parity
    from mmq.verify.kernels.support_table import SUPPORTS

    device = describe()
    assert isinstance(device, Device)
    path, reason = SUPPORTS[op](device.target)
    outcome = Outcome(op, path, reason, [], 0.0)
    if path == "unsupported":
        return outcome._replace(left_out=f"unsupported on {device.target}: {reason}")
    started, found, left_out = time.monotonic(), [], None
    try:
        with _pretending(device):
            for material in _materials(out, large):
                left_out = parity.left_out(op, material)
                if left_out is None:
                    found += parity.run_check(op, material)
    except Exception as error:
        text = "".join(traceback.format_exception_only(error)).strip()
        return outcome._replace(error=text, seconds=time.monotonic() - started)
    return outcome._replace(
        comparisons=found, seconds=time.monotonic() - started, left_out=left_out
    )


def _pretending(device: Device) -> AbstractContextManager[Any]:
    if device.native:
        return nullcontext()
    from mmq.kernels.triton.launch import pretended

    context: AbstractContextManager[Any] = pretended(device.target)
    return context


@functools.lru_cache(maxsize=1)
def _materials(out: str | None, large: bool) -> list[Any]:
    """Weights to run on; read once, since operations come one after the other."""
    import torch

    from mmq.verify.kernels.geometry import M3, SMALL
    from mmq.verify.kernels.material import layer_of, made_up

    if not large:
        torch.set_num_threads(1)  # the interpreter is NumPy, one small operation after the other
    materials = [made_up(SMALL, "small")]
    if large:
        materials.append(made_up(M3, "M3's sizes"))
    if out is not None:
        materials.append(layer_of(out, cut=not large))
    return materials

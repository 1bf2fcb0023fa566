"""Where a conversion computes: `--device` as a backend of `kernels.ops` that works on this machine.

The bytes are the same on every device, so the device is no part of a run's fingerprint: what one
began another may finish.
"""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

from mmq.errors import MachineError
from mmq.kernels import ops

#: ROCm's devices are called cuda too, by PyTorch and here.
DEVICES = ("cpu", "cuda")

_BACKENDS = {"cpu": "auto", "cuda": "triton"}


class Place(NamedTuple):
    """Where the arithmetic of a run happens.

    Attributes:
        device: "cpu", or the GPU's name.
        backend: a name in `ops.BACKENDS`, "auto" resolved.
    """

    device: str
    backend: str


def find_place(device: str) -> Place:
    """The backend for a device, after making sure that both are there.

    Raises:
        MachineError: no such device, or what drives it is not installed.
    """
    try:
        backend = ops.resolve_backend(_BACKENDS[device])
    except ImportError as error:
        raise MachineError(
            "backend-missing",
            f"the kernels for --device {device} cannot be loaded: {error}",
            where=f"--device {device}",
            hint="pip install 'mmq-toolkit[gpu]', or --device cpu",
        ) from error
    return Place("cpu" if device == "cpu" else _gpu_name(), backend)


def _gpu_name() -> str:
    launch: Any = importlib.import_module("mmq.kernels.triton.launch")
    torch: Any = importlib.import_module("torch")
    try:
        kind = launch.device().type
    except launch.NoDeviceError as error:
        raise MachineError(
            "device-missing",
            "PyTorch sees no CUDA or ROCm device",
            where="--device cuda",
            got=f"torch {torch.__version__}",
            hint="a PyTorch built for this GPU (pytorch.org), or --device cpu",
        ) from error
    return "cpu, Triton's interpreter" if kind == "cpu" else str(torch.cuda.get_device_name())


def device_error(error: Exception) -> MachineError | None:
    """What a GPU's driver said, as an error of the machine; None for any other exception.

    PyTorch and Triton raise RuntimeError for all of it, and name the class where there is one.
    """
    kind, text = type(error).__name__, str(error)
    if kind == "OutOfMemoryError":
        return MachineError(
            "device-memory", "the GPU has not enough memory", got=text.partition("\n")[0],
            hint="--jobs 1, or another GPU (CUDA_VISIBLE_DEVICES)",
        )  # fmt: skip
    if kind == "AcceleratorError" or text.startswith(("CUDA error", "HIP error", "Triton Error")):
        return MachineError(
            "device-failed", "the GPU failed", got=text.partition("\n")[0],
            hint="run the same command again with --device cpu: finished shards are kept",
        )  # fmt: skip
    return None

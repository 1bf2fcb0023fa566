"""Channel importance: how much a squared error in each input column of an expert counts.

A safetensors file with one F32 [K] tensor per projection, `<module>.importance`, finite and not
negative; a mean squared activation per input channel, as a rule. Read by `--scale-search mse`.
"""

from __future__ import annotations

from pathlib import Path

from mmq.convert.checkpoint import Checkpoint, open_checkpoint
from mmq.convert.modules import Module
from mmq.convert.safetensors_header import TensorInfo
from mmq.errors import BadInputError, UsageError

SUFFIX = "importance"
#: Key of the file's metadata under which a calibration tells where it comes from, as JSON.
METADATA_KEY = "mmq_calibration"


def open_importance(path: str) -> Checkpoint:
    """The file's header.

    Raises:
        UsageError: no such file.  BadInputError: not a sound safetensors file.
    """
    if not Path(path).expanduser().is_file():
        raise UsageError("option-value", f"--importance {path} is no such file", got=path)
    return open_checkpoint(path)


def importance_of(file: Checkpoint, module: Module) -> TensorInfo:
    """The weights of a module's input columns.

    Raises:
        BadInputError: absent, or of another shape or dtype.
    """
    name = f"{module.name}.{SUFFIX}"
    tensor = file.tensors.get(name)
    expected = f"F32 [{module.shape[1]}]"
    if tensor is None or tensor.dtype != "F32" or tensor.shape != (module.shape[1],):
        raise BadInputError(
            "importance-mismatch",
            f"{file.location} has no fitting {name}",
            where=name,
            got="absent" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}",
            expected=expected,
        )
    return tensor

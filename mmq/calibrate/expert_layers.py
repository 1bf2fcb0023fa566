"""The experts of all layers, one layer in memory at a time, and the file that keeps their sums.

    layers.N.tokens            I64 [E]        layers.N.input_amax, .act_amax          F32 [E]
    layers.N.input_whole, .input_fraction     I64 [E, M]                 exact sums of x²
    layers.N.act_whole, .act_fraction         I64 [E, I]                 exact sums of act²

The file (`--experts-out`, safetensors) is what runs are merged from: 18.9 MB a layer in M3.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mmq.calibrate.expert_statistics import ExpertStatistics
from mmq.calibrate.runs import merged_runs
from mmq.convert.checkpoint import Checkpoint, open_checkpoint
from mmq.convert.safetensors_header import header_bytes
from mmq.convert.stream import SourceReader
from mmq.convert.work import SOURCE
from mmq.convert.writer import AtomicFile
from mmq.errors import BadInputError, UsageError

METADATA_KEY = "mmq_experts"
FORMAT = "mmq-expert-statistics/1"
_TYPES = {
    "tokens": "I64", "input_amax": "F32", "act_amax": "F32", "input_whole": "I64",
    "input_fraction": "I64", "act_whole": "I64", "act_fraction": "I64",
}  # fmt: skip
_NUMPY = {"I64": "<i8", "F32": "<f4"}


class ExpertShape(NamedTuple):
    """Of every MoE layer."""

    experts: int
    hidden: int
    intermediate: int


@dataclass(frozen=True)
class ExpertLayers:
    """Where each MoE layer's statistics are found.

    Attributes:
        model, runs: as a `Calibration` has them.
        load: reads one layer.
        unreached: layer → experts that no token reached.
    """

    model: Mapping[str, Any]
    runs: list[dict[str, Any]]
    shape: ExpertShape
    unreached: Mapping[int, int]
    load: Callable[[int], ExpertStatistics]

    @property
    def numbers(self) -> list[int]:
        return sorted(self.unreached)

    def provenance(self) -> dict[str, Any]:
        """What the files made from these say about themselves."""
        told = {k: v for k, v in self.model.items() if k != "location"}
        unreached = sum(self.unreached.values())
        return {"model": told, "runs": list(self.runs), "unreached_experts": unreached}

    def summary(self) -> dict[str, Any]:
        """For the command's result."""
        few = {str(n): count for n, count in sorted(self.unreached.items()) if count}
        return {
            "layers": len(self.unreached), "unreached": sum(self.unreached.values()),
            "unreached_by_layer": few,
        }  # fmt: skip


def expert_layers(
    model: Mapping[str, Any], runs: list[dict[str, Any]], numbers: Sequence[int],
    load: Callable[[int], ExpertStatistics],
) -> ExpertLayers | None:  # fmt: skip
    """The layers `numbers`, each looked at once; None where there are none."""
    unreached, shape = {}, None
    for number in numbers:
        seen = load(number)
        shape = ExpertShape(seen.experts, seen.hidden, seen.intermediate)
        unreached[number] = int((seen.tokens_E == 0).sum())
    return None if shape is None else ExpertLayers(model, runs, shape, unreached, load)


def write_experts(path: Path, layers: ExpertLayers) -> None:
    """The statistics file, one layer at a time."""
    experts, hidden, intermediate = layers.shape
    specs = []
    for number in layers.numbers:
        for key, dtype in _TYPES.items():
            width = {"input": (hidden,), "act": (intermediate,)}.get(key.partition("_")[0], ())
            shape = (experts, *(() if key.endswith(("amax", "tokens")) else width))
            nbytes = int(np.prod(shape)) * int(dtype[1:]) // 8
            specs.append((f"layers.{number}.{key}", dtype, shape, nbytes))
    told = {"format": FORMAT, "model": dict(layers.model), "runs": layers.runs}
    metadata = {"format": "pt", METADATA_KEY: json.dumps(told, ensure_ascii=False)}
    with AtomicFile(path) as file:
        file.write(header_bytes(specs, metadata))
        for number in layers.numbers:
            arrays = layers.load(number).arrays()
            for key, dtype in _TYPES.items():
                file.write(np.ascontiguousarray(arrays[key], _NUMPY[dtype]).tobytes())
        file.commit()


def read_experts(paths: Sequence[Path]) -> ExpertLayers:
    """Files of several runs as one; each layer is read, and added up, when it is asked for.

    Raises:
        UsageError: they do not belong together.  BadInputError: one is damaged or no such file.
    """
    files = [_open(path) for path in paths]
    first = files[0]
    model, runs = first.told["model"], first.told["runs"]
    for path, file in zip(paths[1:], files[1:], strict=True):
        runs = merged_runs(model, runs, file.told["model"], file.told["runs"], str(path))
        if file.numbers != first.numbers:
            raise UsageError(
                "calibrations-differ", f"{path} has other MoE layers", where=str(path),
                got=len(file.numbers), expected=len(first.numbers),
            )  # fmt: skip

    def load(number: int) -> ExpertStatistics:
        merged = first.load(number)
        for file in files[1:]:
            merged.merge(file.load(number))
        return merged

    found = expert_layers(model, runs, first.numbers, load)
    assert found is not None  # `_open` refuses files without layers
    return found


class _File(NamedTuple):
    checkpoint: Checkpoint
    told: dict[str, Any]
    numbers: list[int]

    def load(self, number: int) -> ExpertStatistics:
        paths = {n: s.path for n, s in self.checkpoint.shards.items()}
        reader = SourceReader({SOURCE: paths})
        try:
            arrays: dict[str, npt.NDArray[np.generic]] = {}
            for key, dtype in _TYPES.items():
                tensor = self.checkpoint.tensors[f"layers.{number}.{key}"]
                if tensor.dtype != dtype:
                    raise ValueError(f"{tensor.name} is {tensor.dtype}")
                arrays[key] = reader.whole(tensor).view(_NUMPY[dtype]).reshape(tensor.shape)
            return ExpertStatistics.from_arrays(arrays)
        except (KeyError, ValueError, IndexError) as error:
            raise _damaged(self.checkpoint.location, f"layer {number}: {error}") from None
        finally:
            reader.close()


def _open(path: Path) -> _File:
    if not path.is_file():
        raise UsageError("option-value", f"--merge-experts {path} is no such file", got=str(path))
    checkpoint = open_checkpoint(path)
    shard = next(iter(checkpoint.shards.values()))
    try:
        told = json.loads(shard.metadata[METADATA_KEY])
        sound = told["format"] == FORMAT and isinstance(told["model"]["norms_sha256"], str)
        runs = [dict(run, tokens_sha256=str(run["tokens_sha256"])) for run in told["runs"]]
        numbers = sorted({int(name.split(".")[1]) for name in checkpoint.tensors})
        if not (sound and numbers and runs):
            raise ValueError(f"format {told['format']}, {len(numbers)} layers")
    except (KeyError, ValueError, TypeError, IndexError) as error:
        raise _damaged(str(path), repr(error)) from None
    return _File(checkpoint, {**told, "runs": runs}, numbers)


def _damaged(path: str, why: str) -> BadInputError:
    return BadInputError(
        "calibration-damaged", f"{path} holds no statistics of experts: {why}", where=path,
        expected=f"{FORMAT}, as --experts-out writes it",
    )  # fmt: skip

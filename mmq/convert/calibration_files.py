"""Files that a calibration left for a conversion: KV scales, activation scales, importance.

Each may say which model it was made from (`model_identity`); then it is refused for another one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mmq.convert.checkpoint import Checkpoint
from mmq.convert.importance import METADATA_KEY, open_importance
from mmq.convert.modules import Module
from mmq.convert.options import INPUT_SCALES, KV_SCALES, ConvertOptions
from mmq.convert.writer import file_sha256

if TYPE_CHECKING:
    from mmq.convert.kv_scales_file import ScalesFile


@dataclass(frozen=True)
class CalibrationFiles:
    """What the options name, read and checked; None where they name no file.

    Attributes:
        told: option → what manifest and report keep of its file.
    """

    kv_scales: Mapping[str, float] | None = None
    input_scales: Mapping[str, float] | None = None
    importance: Checkpoint | None = None
    told: Mapping[str, Any] = field(default_factory=dict)


def open_calibration_files(
    source: Checkpoint, modules: Mapping[str, Module], options: ConvertOptions
) -> CalibrationFiles:
    """The files of `options`, which are resolved.

    Raises:
        UsageError: no such file.  BadInputError: damaged, or of another model.
    """
    kv, inputs = str(options.kv_scales), str(options.input_scales)
    from_kv, from_inputs = kv not in KV_SCALES, inputs not in INPUT_SCALES
    if not (from_kv or from_inputs or options.importance):
        return CalibrationFiles()
    # NumPy comes with these; plans that name no file do without it
    from mmq.convert.input_scales_file import read_input_scales
    from mmq.convert.kv_scales_file import read_kv_scales
    from mmq.convert.model_identity import norms_digest

    norms = norms_digest(source, modules)
    kv_file = read_kv_scales(kv, source, norms) if from_kv else None
    input_file = read_input_scales(inputs, modules.values(), norms) if from_inputs else None
    importance, weighed = _importance(options.importance, norms)
    files: dict[str, ScalesFile | None] = {"kv_scales": kv_file, "input_scales": input_file}
    told = {option: dict(file.provenance) for option, file in files.items() if file is not None}
    return CalibrationFiles(
        None if kv_file is None else kv_file.values,
        None if input_file is None else input_file.values,
        importance,
        told | weighed,
    )


def _importance(
    path: str | None, norms: str | None
) -> tuple[Checkpoint | None, dict[str, dict[str, Any]]]:
    from mmq.convert.model_identity import check_model, provenance

    if not path:
        return None, {}
    file = open_importance(path)
    shard = next(iter(file.shards.values()))
    try:
        calibration = json.loads(shard.metadata.get(METADATA_KEY, "{}"))
    except ValueError:
        calibration = {}
    check_model(calibration, norms, path)
    sha256 = file_sha256(shard.path, lambda nbytes: None)
    return file, {"importance": provenance(calibration, sha256)}

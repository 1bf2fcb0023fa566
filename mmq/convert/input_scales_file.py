"""Activation scales from a file: one positive F32 for each projection of a routed expert.

    {"format": "mmq-input-scales/1",
     "scales": {"language_model.model.layers.3.block_sparse_moe.experts.0.w1": 0.0021, …},
     "calibration": {"model": {"norms_sha256": …}, …}}

A scale is a multiplier, amax / (6 · 448): the modelopt layout stores it as `input_scale`, the
minimax layout its reciprocal as `input_global_scale`. Engines quantise an expert's input once for
w1 and w3, so the two must be equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mmq.convert.checkpoint import read_json_object
from mmq.convert.kv_scales_file import ScalesFile
from mmq.convert.model_identity import check_model, provenance
from mmq.convert.modules import Module
from mmq.convert.writer import file_sha256
from mmq.errors import BadInputError, UsageError
from mmq.quantize.architecture import FUSED_GATE_UP
from mmq.quantize.global_scale import MIN_GLOBAL_SCALE

FORMAT = "mmq-input-scales/1"


def read_input_scales(path: str, modules: Iterable[Module], norms: str | None) -> ScalesFile:
    """Scales by module name, as F32 values.

    Args:
        modules: the source's; MTP experts need none, no forward ever calibrates them.
        norms: the source's hash of norms, None where unknown (see `model_identity`).

    Raises:
        UsageError: no such file.  BadInputError: another format or model, projections missing or
            unknown, values that are no usable F32, w1 unlike w3.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise UsageError(
            "option-value", f"--input-scales {path} is no such file", got=path,
            expected="unit, none or a file",
        )  # fmt: skip
    data = read_json_object(file)
    scales = data.get("scales")
    if data.get("format") != FORMAT or not isinstance(scales, dict):
        raise BadInputError(
            "input-scales-format", f"{path} is no input-scales file", where=path,
            got=data.get("format"), expected=FORMAT,
        )  # fmt: skip
    wanted = {m.name for m in modules if m.role.is_routed_expert and not m.role.mtp}
    missing, unknown = sorted(wanted - set(scales)), sorted(set(scales) - wanted)
    if missing or unknown:
        name = (missing or unknown)[0]
        raise BadInputError(
            "input-scales-modules",
            f"{path} does not fit this model: {len(missing)} scale(s) missing, {len(unknown)}"
            f" unknown, such as {name}", where=name, got=len(scales), expected=len(wanted),
        )  # fmt: skip
    values = {name: _value(name, value) for name, value in scales.items()}
    _check_pairs(values)
    calibration = data.get("calibration")
    check_model(calibration, norms, path)
    sha256 = file_sha256(file, lambda nbytes: None)
    return ScalesFile(values, provenance(calibration, sha256))


def _value(name: str, value: Any) -> float:
    sound = type(value) in (int, float) and MIN_GLOBAL_SCALE <= value <= 1 / MIN_GLOBAL_SCALE
    if not sound:
        raise BadInputError(
            "input-scales-value", f"{name} must be a normal F32 above zero", where=name,
            got=value, expected="2^-126 to 2^126",
        )  # fmt: skip
    return float(np.float32(value))


def _check_pairs(values: Mapping[str, float]) -> None:
    gate, up = FUSED_GATE_UP
    for name, value in values.items():
        expert, _, projection = name.rpartition(".")
        other = values.get(f"{expert}.{up}", value) if projection == gate else value
        if other != value:
            raise BadInputError(
                "input-scales-value", f"{expert}: w1 and w3 have one input, so one scale",
                where=f"{expert}.{up}", got=other, expected=value,
            )  # fmt: skip

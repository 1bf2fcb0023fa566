"""KV scales from a file: one positive F32 per layer and side.

{"format": "mmq-kv-scales/1",
     "scales": {"language_model.model.layers.0.self_attn.k_proj.k_scale": 0.12, …},
     "calibration": {"model": {"norms_sha256": …}, …}}             where they come from, if known
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mmq.convert.checkpoint import Checkpoint, read_json_object
from mmq.convert.completeness import config_count
from mmq.convert.model_identity import check_model, provenance
from mmq.convert.writer import file_sha256
from mmq.errors import BadInputError, UsageError
from mmq.quantize.architecture import TEXT
from mmq.quantize.layouts import K_SCALE, V_SCALE

FORMAT = "mmq-kv-scales/1"
_MIN, _MAX = 2.0**-126, 3.4e38


class ScalesFile(NamedTuple):
    """Scales by name, and what manifest and report keep of where they come from."""

    values: Mapping[str, float]
    provenance: Mapping[str, Any]


def read_kv_scales(path: str, source: Checkpoint, norms: str | None) -> ScalesFile:
    """Scales by tensor name, for every layer of the source.

    Args:
        norms: the source's hash of norms, None where unknown (see `model_identity`).

    Raises:
        UsageError: no such file.  BadInputError: another format or model, layers missing, values
            that are not finite and positive.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise UsageError(
            "option-value", f"--kv-scales {path} is no such file", got=path,
            expected="analytic, unit, none, calibrate or a file",
        )  # fmt: skip
    data = read_json_object(file)
    scales = data.get("scales")
    if data.get("format") != FORMAT or not isinstance(scales, dict):
        raise BadInputError(
            "kv-scales-format", f"{path} is no KV-scales file", where=path,
            got=data.get("format"), expected=FORMAT,
        )  # fmt: skip
    _check_values(scales, source, path)
    calibration = data.get("calibration")
    check_model(calibration, norms, path)
    sha256 = file_sha256(file, lambda nbytes: None)
    values = {name: float(value) for name, value in scales.items()}
    return ScalesFile(values, provenance(calibration, sha256))


def _check_values(scales: Mapping[str, Any], source: Checkpoint, path: str) -> None:
    """One sound value for K and V of each layer, and nothing else."""
    layers = config_count(source.text_config, "num_hidden_layers")
    wanted = {
        f"{TEXT}model.layers.{layer}.{suffix}" for layer in range(layers)
        for suffix in (K_SCALE, V_SCALE)
    }  # fmt: skip
    missing, unknown = sorted(wanted - set(scales)), sorted(set(scales) - wanted)
    if missing or unknown:
        name = (missing or unknown)[0]
        raise BadInputError(
            "kv-scales-layers",
            f"{path} does not fit this model: {len(missing)} scale(s) missing, {len(unknown)}"
            f" unknown, such as {name}",
            where=name,
            got=len(scales),
            expected=len(wanted),
        )
    for name, value in scales.items():
        if type(value) not in (int, float) or not _MIN <= value <= _MAX:
            raise BadInputError(
                "kv-scales-value", f"{name} must be a normal F32 above zero", where=name,
                got=value, expected="2^-126 to 3.4e38",
            )  # fmt: skip

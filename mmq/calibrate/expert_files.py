"""Files that convert takes for the experts: channel importance and activation scales.

Importance, safetensors: `<module>.importance` F32 [K], the mean squared activation of each input
channel of w1, w2 and w3. Activation scales, JSON: `{"format": "mmq-input-scales/1", "scales":
{module: F32}}` with scale = amax / (6 · 448), ModelOpt's `input_scale`, the multiplier under which
a dynamically quantised activation's block scales fit E4M3.

w1 and w3 read the same x and share a scale: engines quantise x once for all experts of a layer, so
theirs is the layer's. w2's is each expert's own. An expert that no token reached gets the layer's
largest: a floor that saturates nothing that was seen.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mmq.calibrate.expert_statistics import ExpertStatistics
from mmq.convert.importance import SUFFIX
from mmq.convert.safetensors_header import header_bytes
from mmq.convert.writer import write_file
from mmq.quantize.architecture import DOWN, GATE, TEXT, UP

INPUT_SCALES_FORMAT = "mmq-input-scales/1"
#: Largest E2M1 times largest E4M3.
_RANGE = 6.0 * 448.0
_MIN_NORMAL = np.float32(2.0**-126)


def _module(layer: int, expert: int, projection: str) -> str:
    return f"{TEXT}model.layers.{layer}.block_sparse_moe.experts.{expert}.{projection}"


def write_importance(path: Path, experts: Mapping[int, ExpertStatistics]) -> None:
    """The importance file."""
    tensors: list[tuple[str, np.ndarray[Any, np.dtype[np.float32]]]] = []
    for layer, seen in sorted(experts.items()):
        input_EM, act_EI = seen.mean_squares()
        for expert in range(seen.experts):
            for projection, values in (
                (GATE, input_EM[expert]), (DOWN, act_EI[expert]), (UP, input_EM[expert]),
            ):  # fmt: skip
                name = f"{_module(layer, expert, projection)}.{SUFFIX}"
                tensors.append((name, np.ascontiguousarray(values, "<f4")))
    specs = [(name, "F32", values.shape, values.nbytes) for name, values in tensors]
    data = b"".join(values.tobytes() for _, values in tensors)
    write_file(path, header_bytes(specs, {"format": "pt"}) + data)


def input_scales(experts: Mapping[int, ExpertStatistics]) -> dict[str, float]:
    """F32 scales by module name."""
    found = {}
    for layer, seen in sorted(experts.items()):
        shared = _scale(seen.input_amax_E.max(initial=np.float32(0)))
        floor = seen.act_amax_E.max(initial=np.float32(0))
        for expert in range(seen.experts):
            own = seen.act_amax_E[expert] if seen.tokens_E[expert] else floor
            found[_module(layer, expert, GATE)] = shared
            found[_module(layer, expert, UP)] = shared
            found[_module(layer, expert, DOWN)] = _scale(own)
    return found


def _scale(amax: np.float32) -> float:
    """amax / 2688, rounded up to F32; 1 where nothing but zeros was seen."""
    if not amax > 0:
        return 1.0
    scale = np.float32(float(amax) / _RANGE)
    if float(scale) * _RANGE < float(amax):
        scale = np.nextafter(scale, np.float32(np.inf))
    return float(max(scale, _MIN_NORMAL))


def write_input_scales(
    path: Path, experts: Mapping[int, ExpertStatistics], runs: Sequence[Mapping[str, Any]],
    model: Mapping[str, Any],
) -> None:  # fmt: skip
    """The activation scales with their provenance."""
    unreached = sum(int((seen.tokens_E == 0).sum()) for seen in experts.values())
    data = {
        "format": INPUT_SCALES_FORMAT, "scales": input_scales(experts),
        "calibration": {"model": dict(model), "runs": list(runs), "unreached_experts": unreached},
    }  # fmt: skip
    write_file(path, (json.dumps(data, ensure_ascii=False) + "\n").encode("utf-8"))

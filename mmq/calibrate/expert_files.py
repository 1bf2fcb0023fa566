"""Files that convert takes for the experts: channel importance and activation scales.

Importance, safetensors: `<module>.importance` F32 [K], the mean squared activation of each input
channel of w1, w2 and w3. Activation scales, JSON: `{"format": "mmq-input-scales/1", "scales":
{module: F32}}` with scale = amax / (6 · 448), ModelOpt's `input_scale`, the multiplier under which
a dynamically quantised activation's block scales fit E4M3.

w1 and w3 read the same x and share a scale: engines quantise x once for all experts of a layer, so
theirs is the layer's. w2's is each expert's own. An expert that no token reached gets the layer's
largest: a floor that saturates nothing that was seen.

Four numbers: x of 2.0 and 5.376 at two experts gives both 0.002; act of 1.344 at the first gives
its w2 0.0005, and so the w2 of the second, if no token reached it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mmq.calibrate.expert_layers import ExpertLayers
from mmq.calibrate.expert_statistics import ExpertStatistics
from mmq.convert.importance import METADATA_KEY, SUFFIX
from mmq.convert.input_scales_file import FORMAT
from mmq.convert.safetensors_header import header_bytes
from mmq.convert.writer import AtomicFile, write_file
from mmq.quantize.architecture import DOWN, GATE, TEXT, UP

#: Largest E2M1 times largest E4M3.
_RANGE = 6.0 * 448.0
_MIN_NORMAL = np.float32(2.0**-126)


def _module(layer: int, expert: int, projection: str) -> str:
    return f"{TEXT}model.layers.{layer}.block_sparse_moe.experts.{expert}.{projection}"


def write_importance(path: Path, experts: ExpertLayers) -> None:
    """The importance file, one layer at a time."""
    specs = []
    for layer in experts.numbers:
        for expert in range(experts.shape.experts):
            for projection, width in zip(
                (GATE, DOWN, UP),
                (experts.shape.hidden, experts.shape.intermediate, experts.shape.hidden),
                strict=True,
            ):
                name = f"{_module(layer, expert, projection)}.{SUFFIX}"
                specs.append((name, "F32", (width,), 4 * width))
    told = json.dumps(experts.provenance(), ensure_ascii=False, sort_keys=True)
    with AtomicFile(path) as file:
        file.write(header_bytes(specs, {"format": "pt", METADATA_KEY: told}))
        for layer in experts.numbers:
            for values in _importance(experts.load(layer)):
                file.write(np.ascontiguousarray(values, "<f4").tobytes())
        file.commit()


def _importance(seen: ExpertStatistics) -> Iterator[npt.NDArray[np.float32]]:
    input_EM, act_EI = seen.mean_squares()
    for expert in range(seen.experts):
        yield from (input_EM[expert], act_EI[expert], input_EM[expert])


def input_scales(layers: Mapping[int, ExpertStatistics]) -> dict[str, float]:
    """F32 scales by module name."""
    found = {}
    for layer, seen in sorted(layers.items()):
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


def write_input_scales(path: Path, experts: ExpertLayers) -> None:
    """The activation scales with their provenance."""
    scales: dict[str, Any] = {}
    for layer in experts.numbers:
        scales |= input_scales({layer: experts.load(layer)})
    data = {"format": FORMAT, "scales": scales, "calibration": experts.provenance()}
    write_file(path, (json.dumps(data, ensure_ascii=False) + "\n").encode("utf-8"))

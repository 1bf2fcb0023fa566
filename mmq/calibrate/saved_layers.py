"""Statistics of finished layers in the work folder, so that a killed run goes on behind them.

layer-N.json      keys, values and index keys
experts-N.npz     experts of a MoE layer: 19 MB in M3, so they are read one layer at a time
"""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path

import numpy as np

from mmq.calibrate.collect import LayerStatistics
from mmq.calibrate.expert_statistics import ExpertStatistics
from mmq.calibrate.kv_statistics import VectorStatistics
from mmq.calibrate.scales_file import KINDS
from mmq.convert.writer import json_bytes, write_file
from mmq.errors import BadInputError


def vectors_of(layer: LayerStatistics) -> dict[str, VectorStatistics]:
    """Keys, values and index keys by the name of their kind."""
    found = {kind: getattr(layer, kind) for kind in KINDS}
    return {kind: stats for kind, stats in found.items() if stats is not None}


def save_layer(work: Path, number: int, seen: LayerStatistics) -> None:
    """Whole files on disk, before the state says that the layer is done."""
    if seen.experts is not None:
        buffer = io.BytesIO()
        np.savez(buffer, allow_pickle=False, **seen.experts.arrays())
        write_file(_experts(work, number), buffer.getbuffer())
    kinds = {kind: stats.as_json() for kind, stats in vectors_of(seen).items()}
    write_file(_vectors(work, number), json_bytes(kinds))


def load_vectors(work: Path, number: int) -> dict[str, VectorStatistics]:
    """A finished layer's keys, values and index keys.

    Raises:
        BadInputError: the file is damaged or gone.
    """
    path = _vectors(work, number)
    try:
        kinds = json.loads(path.read_bytes())
        return {kind: VectorStatistics.from_json(data) for kind, data in kinds.items()}
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise _damaged(path, error) from None


def load_experts(work: Path, number: int) -> ExpertStatistics:
    """A finished MoE layer's experts.

    Raises:
        BadInputError: the file is damaged or gone.
    """
    path = _experts(work, number)
    try:
        with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as arrays:
            return ExpertStatistics.from_arrays(dict(arrays))
    except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
        raise _damaged(path, error) from None


def _vectors(work: Path, number: int) -> Path:
    return work / f"layer-{number}.json"


def _experts(work: Path, number: int) -> Path:
    return work / f"experts-{number}.npz"


def _damaged(path: Path, error: Exception) -> BadInputError:
    return BadInputError(
        "calibration-damaged", f"{path}: the statistics are damaged: {error!r}", where=str(path),
        hint=f"remove {path.parent} to begin again",
    )  # fmt: skip

"""mmq calibrate with every file it can write."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from in_process import run_mmq

from mmq.demo.bundled import bundled_model

#: Blocks of 16, four of them chosen: selection leaves blocks out from position 64 on.
LENGTH, WINDOWS = 96, 4
FILES = {"importance": "i.safetensors", "input-scales": "a.json", "experts": "e.safetensors"}


def run_calibrate(folder: Path, ids_WT: np.ndarray, *options, source: Path | None = None):
    """All files go into `folder`; returns (exit code, events)."""
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / "ids.npy", ids_WT)
    outs = [word for kind, name in FILES.items() for word in (f"--{kind}-out", folder / name)]
    return run_mmq(
        "calibrate", source or bundled_model(), "-o", folder / "s.json", "--tokens",
        folder / "ids.npy", *outs, *options,
    )[:2]  # fmt: skip

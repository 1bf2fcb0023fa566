"""Which mantissa the global scales of the search should have: the one that leaves least error.

    python scripts/choose_global_mantissa.py [--all]

For s2 = c · 2^−n, n the largest integer with amax ≤ 6 · 256 · s2, prints the relative MSE of the
`mse` search on MXFP8 weights for c = j / 2^bits. Only c whose scales survive fl(1 / fl(1 / s2)) are
looked at. Few bits are worth something: they keep every product e2m1 · e4m3 · s2 short. So the
fewest bits win that come within 0.0005 percentage points of the best of 7 bits. `--all` prints all
mantissas of 7 bits, and 4/3 (s2 = 2^−n / 6) and 1 for comparison.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import numpy as np
from weight_samples import samples

from mmq.kernels import ops
from mmq.quantize.global_scale import SEARCH_MANTISSA, SEARCH_RANGE

SEED = 2026
ROWS, COLUMNS = 512, 2048
BITS = 7
MARGIN = 0.0005


def survives(c: float) -> bool:
    """Whether s2 and 1 / s2 restore each other; powers of two make no difference to that."""
    one, scale = np.float32(1), np.float32(c)
    divisor = one / scale
    return float(scale) == c and one / divisor == scale and one / (one / divisor) == divisor


def global_scale(amax: float, c: float) -> np.float32:
    """c · 2^−n, n the largest integer with amax ≤ 6 · 256 · s2."""
    return np.float32(math.ldexp(c, math.ceil(math.log2(amax / (SEARCH_RANGE * c)))))


def relative_mse(c: float, tensors: dict[str, Any]) -> list[float]:
    """Percent, for each distribution."""
    out = []
    for codes, scale, amax in tensors.values():
        s2 = global_scale(float(amax), c)
        error = ops.quantize_nvfp4_from_mxfp8(codes, scale, s2, search="mse").error
        out.append(100 * error.noise / error.signal)
    return out


def show(c: float, figures: list[float], note: str = "") -> None:
    """One line of the table."""
    cells = " | ".join(f"{figure:.4f}" for figure in [*figures, sum(figures) / len(figures)])
    print(f"| {c:.7g} | {cells} |{note}")


def main() -> None:
    """Measure all mantissas, and choose."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--all", action="store_true", help="print all mantissas of 7 bits")
    arguments = parser.parse_args()
    tensors = {}
    for name, values in samples(SEED, ROWS, COLUMNS).items():
        codes, scale, _ = ops.quantize_mxfp8(values, "F32")
        tensors[name] = codes, scale, ops.mxfp8_amax(codes, scale)
    mantissas = [j / 2**BITS for j in range(2**BITS, 2 ** (BITS + 1))]
    figures = {c: relative_mse(c, tensors) for c in mantissas if survives(c)}
    means = {c: sum(f) / len(f) for c, f in figures.items()}
    print(f"relative MSE in %, {ROWS * COLUMNS / 1e6:.1f} M weights each, seed {SEED}\n")
    print(f"| c | {' | '.join(tensors)} | mean |")
    print("|---|---|---|---|---|---|")
    if arguments.all:
        for c in figures:
            show(c, figures[c])
    for c in (1.0, float(np.float32(4 / 3))):
        show(c, relative_mse(c, tensors), "" if survives(c) else " does not survive 1 / s2")
    best = min(means.values())
    chosen = None
    for bits in range(BITS + 1):
        short = [c for c in means if (c * 2**bits).is_integer()]
        c = min(short, key=lambda c: means[c])
        note = f" best of {bits} bits"
        if chosen is None and means[c] <= best + MARGIN:
            chosen, note = c, note + ", chosen"
        show(c, figures[c], note)
    print(f"\nchosen: {chosen}, in use: {SEARCH_MANTISSA}")


if __name__ == "__main__":
    main()

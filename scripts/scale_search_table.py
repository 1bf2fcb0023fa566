"""The table of docs/numerics.md: how much error each scale search leaves.

    python scripts/scale_search_table.py             print it
    python scripts/scale_search_table.py --write     put it into the docs

Relative MSE in percent, Σ(x − q)² / Σx², against the MXFP8 values that are quantised and against
the weights before MXFP8; then straight from those weights; then under a global scale made for a
partner ten times as large. Seed and distributions are committed (`weight_samples.py`).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from weight_samples import samples

from mmq.kernels import ops
from mmq.quantize.global_scale import nvfp4_global_scale

SEED = 7
ROWS, COLUMNS = 1024, 2048
SEARCHES = ("max", "four-over-six", "mse")
DOCS = Path(__file__).parents[1] / "docs" / "numerics.md"
BEGIN, END = "<!-- scale-search-table -->", "<!-- end of scale-search-table -->"


def relative_mse(values: Any, restored: Any) -> float:
    """Percent, in F64."""
    wide = values.astype(np.float64)
    return float(100 * ((wide - restored) ** 2).sum() / (wide**2).sum())


def figures(values: Any, search: str, partner: float = 1.0) -> tuple[float, float, float]:
    """Against MXFP8, against the original by way of MXFP8, and straight from the original."""
    codes, exponents, _ = ops.quantize_mxfp8(values, "F32")
    factor = np.float32(partner)
    s2 = nvfp4_global_scale(ops.mxfp8_amax(codes, exponents) * factor, search)
    out = ops.quantize_nvfp4_from_mxfp8(codes, exponents, s2, search=search)
    restored = ops.dequantize_nvfp4_f32(out.packed, out.scale, s2)
    s2 = nvfp4_global_scale(ops.float_amax(values, "F32") * factor, search)
    direct = ops.quantize_nvfp4_from_float(values, "F32", s2, search=search)
    return (
        100 * out.error.noise / out.error.signal,
        relative_mse(values, restored),
        100 * direct.error.noise / direct.error.signal,
    )


def table() -> str:
    """The Markdown."""
    tensors = samples(SEED, ROWS, COLUMNS)
    lines = [
        f"Relative MSE in %, {ROWS * COLUMNS / 1e6:.1f} M weights each: against the MXFP8 values / "
        "against the weights before MXFP8 / straight from those weights.",
        "",
        f"| search | {' | '.join(tensors)} |",
        f"|---|{'---|' * len(tensors)}",
    ]
    for search in SEARCHES:
        cells = [" / ".join(f"{x:.3f}" for x in figures(v, search)) for v in tensors.values()]
        lines.append(f"| `{search}` | {' | '.join(cells)} |")
    for search in ("max", "mse"):
        cells = [" / ".join(f"{x:.3f}" for x in figures(v, search, 10)) for v in tensors.values()]
        lines.append(f"| `{search}`, s2 of a partner ten times as large | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Print, or write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="put the table into docs/numerics.md")
    text = table()
    if not parser.parse_args().write:
        print(text)
        return
    page = DOCS.read_text("utf-8")
    before, after = page.split(BEGIN)[0], page.split(END)[1]
    DOCS.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", "utf-8")


if __name__ == "__main__":
    main()

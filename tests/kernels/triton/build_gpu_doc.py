"""Write the table in docs/gpu.md: what every kernel became on every target.

python tests/kernels/triton/build_gpu_doc.py
"""

from __future__ import annotations

from pathlib import Path

import triton

from mmq.kernels.triton.cross_compile import Compiled
from mmq.kernels.triton.launch import TARGETS
from mmq.kernels.triton.weight_variants import VARIANTS, Variant, compile_variant, faults

TARGET = Path(__file__).parents[3] / "docs" / "gpu.md"
_START, _END = "<!-- kernels -->\n", "<!-- /kernels -->\n"


def _row(variant: Variant, compiled: list[Compiled]) -> str:
    """One operation: what all targets share, then each target's own numbers."""
    (divisions,) = {c.divisions for c in compiled}
    loads = " + ".join(f"{size}" for size in sorted(variant.loads, reverse=True))
    cells = [
        f"{c.registers} / {c.spilled} / {c.shared} / {c.machine.total() if c.machine else '–'}"
        + "".join(f" **{fault}**" for fault in faults(c, variant))
        for c in compiled
    ]
    return f"| {variant.name} | {loads} | {divisions or '–'} | {' | '.join(cells)} |\n"


def table() -> str:
    """The table, in Markdown."""
    heads = ["operation", "loads, bytes", "IEEE divisions", *TARGETS]
    version = ".".join(triton.__version__.split(".")[:2])
    lines = [
        f"Triton {version}. Cells: registers a thread / spilled / bytes of shared memory /"
        " instructions.\n\n",
        f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}\n",
        *(_row(v, [compile_variant(v, target) for target in TARGETS]) for v in VARIANTS),
    ]
    return "".join(lines)


def with_table(page: str) -> str:
    """The page with its table replaced."""
    before, rest = page.split(_START)
    _, after = rest.split(_END)
    return before + _START + table() + _END + after


if __name__ == "__main__":
    TARGET.write_text(with_table(TARGET.read_text("utf-8")), encoding="utf-8")

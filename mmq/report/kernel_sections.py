"""The section of level kernels: each operation beside its reference."""

from __future__ import annotations

from mmq.report import document as doc
from mmq.report.document import Cell, Column, Section, Table
from mmq.report.figures import significant
from mmq.report.schema import KernelResult, KernelsReport

#: A skipped operation was not run, and a crashed one fails.
_SHOWN = {"native": "pass", "emulated": "pass", "skipped": "skipped", "crashed": "fail"}


def kernels_section(kernels: KernelsReport) -> Section:
    """Where the operations ran, and how far each was from its reference."""
    lines = [
        f"{kernels.device}: {kernels.backend}, target {kernels.target}; Triton {kernels.triton},"
        f" torch {kernels.torch}.",
        "Exact operations are held to the same bits (worst: values that differ); for the others"
        " worst is the largest difference beside its own bound.",
    ]
    columns = [
        *(Column(title, False) for title in ("operation", "executed", "path", "reason")),
        *map(Column, ("cases", "values", "worst", "allowed", "seconds")),
    ]
    table = Table("Operations", columns, list(map(_row, kernels.results)))
    return Section("kernels", "Kernels", lines, [table])


def within_bound(result: KernelResult) -> bool:
    """Whether it ran and stayed within its bound."""
    return result.status not in ("skipped", "crashed") and (
        result.worst is not None and result.worst <= result.bound
    )


def _row(result: KernelResult) -> list[Cell]:
    ran = result.status in ("native", "emulated")
    shown = "fail" if ran and not within_bound(result) else _SHOWN[result.status]
    worst = "not finite" if result.worst is None else significant(result.worst, 3)
    return [
        doc.name(result.op), doc.status(result.status, shown),
        doc.words(result.path), doc.words(result.reason),
        doc.figure(f"{result.cases:,}", result.cases),
        doc.figure(f"{result.values:,}", result.values),
        doc.figure(worst if ran else "–", result.worst if ran else None),
        doc.figure(significant(result.bound, 3) if ran else "–", result.bound if ran else None),
        doc.figure(f"{result.seconds:.1f}", result.seconds),
    ]  # fmt: skip

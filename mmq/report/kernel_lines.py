"""The level kernels as lines for a terminal, at most 100 columns wide."""

from __future__ import annotations

from mmq.report.escape import shortened
from mmq.report.figures import plural, significant
from mmq.report.schema import KernelResult, KernelsReport
from mmq.report.tables import columns

_HEAD = ("operation", "executed", "path", "cases", "values", "worst", "allowed")
#: Longest name of an operation that leaves room for its figures.
_NAME = 42


def kernel_lines(kernels: KernelsReport) -> list[str]:
    """Where it ran, a line for each operation, and how many ran natively."""
    ran: list[str] = [result.status for result in kernels.results]
    lines = [f"kernels  {_where(kernels)}", ""]
    body = [
        (
            shortened(result.op, _NAME), result.status, result.path or "–",
            f"{result.cases:,}", f"{result.values:,}", *_figures(result),
        )
        for result in kernels.results
    ]  # fmt: skip
    lines += columns([_HEAD, *body], left=3)
    counts = ", ".join(
        f"{ran.count(status)} {word}"
        for status, word in (
            ("native", "executed natively"), ("emulated", "emulated"), ("skipped", "skipped"),
            ("crashed", "crashed"),
        )
        if ran.count(status)
    )  # fmt: skip
    return [*lines, "", f"kernels  {plural(len(ran), 'operation')}: {counts}", ""]


def _where(kernels: KernelsReport) -> str:
    if kernels.backend == "none":
        return "none could run here"
    if kernels.backend == "interpreter":
        return f"emulated: Triton interpreter {kernels.triton}, as if for {kernels.target}"
    return f"{kernels.device}, {kernels.target}, Triton {kernels.triton}"


def _figures(result: KernelResult) -> tuple[str, str]:
    """The worst difference and what it may be."""
    if result.status in ("skipped", "crashed"):
        return "–", "–"
    worst = "not finite" if result.worst is None else significant(result.worst, 3)
    if result.exact:
        return "same bits" if result.worst == 0 else f"{worst} differ", "same bits"
    return worst, significant(result.bound, 3)

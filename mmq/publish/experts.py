"""What was done to the routed experts of an NVFP4 output, told from what they were before.

    before              after      told
    MXFP8               NVFP4      quantised from MXFP8 values; twice quantised
    BF16                NVFP4      quantised from BF16 values
    NVFP4               NVFP4      the same codes and block scales under this layout's names

`--experts-from` gives the experts of another checkpoint; the report tells of the source's only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from mmq.report.schema import ConvertReport

_ROUTED = "routed_experts"
_SEARCH = {
    "mse": "scales of least squared error", "max": "scales from the largest value",
    "four-over-six": "the better of a 4 and a 6 as largest code",
}  # fmt: skip
_TWICE = (
    "Quantised twice: the source's experts were MXFP8 already, so the error against the BF16"
    " release is larger than the SQNR above."
)
_AFTERWARDS = (
    "Rounded after training. M3.1's NVFP4 experts were trained as such; these were not, and equal"
    " size does not mean equal quality."
)
_BEFORE = "What the experts lost when the source's NVFP4 was made is not measured here."


class Experts(NamedTuple):
    """Words about the routed experts.

    Attributes:
        how: follows "in NVFP4" in a sentence; "" where nothing is known.
        limits: what not to expect of them.
    """

    how: str
    limits: tuple[str, ...]


def experts_of(
    report: ConvertReport | None, options: Mapping[str, Any], *, m31: bool = False
) -> Experts:
    """From the conversion's sizes by format, and its options.

    Args:
        m31: M3.1, whose experts are trained in NVFP4 and may lose nothing by the rounding.
    """
    afterwards = () if m31 else (_AFTERWARDS,)
    how = f" (blocks of 16{_search(options)})"
    if options.get("experts_from"):
        return Experts(f"{how}, quantised from the BF16 values of `--experts-from`", afterwards)
    before = _formats(report)
    if before == {"NVFP4"}:
        return Experts(" (blocks of 16), with the source's own codes and block scales", (_BEFORE,))
    if "NVFP4" in before or not before:
        return Experts("", (*afterwards, *((_BEFORE,) if before else ())))
    told = " and ".join(sorted(before))
    twice = (_TWICE,) if "MXFP8" in before else ()
    return Experts(f"{how}, quantised from their {told} values", (*twice, *afterwards))


def _search(options: Mapping[str, Any]) -> str:
    told = _SEARCH.get(str(options.get("scale_search")), "")
    return f", {told}" if told else ""


def _formats(report: ConvertReport | None) -> set[str]:
    """Formats that the source's routed experts had; empty where the report has no formats."""
    sizes = report.sizes if report else []
    return {s.format for s in sizes if s.component == _ROUTED and s.before_bytes}

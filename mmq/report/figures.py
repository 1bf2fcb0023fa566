"""Measured figures as text: as many digits as their standard error justifies.

13.4827 ± 0.0713   →   13.483 ± 0.071      (the error has two digits, the value as many places)
"""

from __future__ import annotations

import math

from mmq.report.schema import Measure

MINUS = "−"


def with_error(value: float, se: float | None, *, signed: bool = False) -> str:
    """`value ± se`; without an error four significant digits of the value."""
    if se is None or not math.isfinite(se) or not math.isfinite(value):
        return significant(value, signed=signed)
    if se <= 0:
        return f"{significant(value, signed=signed)} ± 0"
    places = _places(se)
    if abs(value) >= 1e7 or places > 9:
        return f"{significant(value, signed=signed)} ± {significant(se, 2)}"
    return f"{_fixed(value, places, signed)} ± {_fixed(se, places)}"


def measure(figure: Measure, scale: float = 1.0, *, signed: bool = False) -> str:
    """A `Measure`, multiplied by `scale` (100 for percent)."""
    se = None if figure.se is None else figure.se * scale
    return with_error(figure.value * scale, se, signed=signed)


def quantile(figure: Measure) -> str:
    """A quantile; an error of 0 says that windows are too few to have one, not that it is exact."""
    return with_error(figure.value, figure.se or None)


def significant(value: float, digits: int = 4, *, signed: bool = False) -> str:
    """The value to some significant digits, without an exponent where people need none."""
    if not math.isfinite(value):
        return str(value).replace("-", MINUS)
    if value == 0:
        return "0"
    exponent = math.floor(math.log10(abs(value)))
    if exponent < -4 or exponent > 9:
        return f"{value:{'+' if signed else ''}.{digits - 1}e}".replace("-", MINUS)
    return _fixed(value, max(0, digits - 1 - exponent), signed)


def fixed(value: float, places: int, *, signed: bool = False) -> str:
    """The value with this many places; NaN and infinities by name, huge ones with an exponent."""
    return _fixed(value, places, signed) if abs(value) < 1e15 else significant(value)


def percent(share: float | None, places: int = 2) -> str:
    """A share of 1 in percent, without the sign; nothing for None."""
    return "" if share is None else fixed(100 * share, places)


def number(value: float) -> str:
    """Counts as counts, measurements with three decimals."""
    if not math.isfinite(value) or abs(value) >= 1e15:
        return significant(value)
    return f"{int(value):,}" if value == int(value) else fixed(value, 3)


def plural(count: int, noun: str) -> str:
    """`1 error`, `2 errors`."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def _fixed(value: float, places: int, signed: bool = False) -> str:
    return f"{value:{'+' if signed else ''},.{places}f}".replace("-", MINUS)


def _places(se: float) -> int:
    """Decimals that leave two significant digits of `se`; rounding up to 0.1 keeps its digits."""
    return max(0, 1 - math.floor(math.log10(float(f"{se:.1e}"))))

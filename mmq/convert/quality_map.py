"""Where the quantisation error is: SQNR by layer and projection, and how tensors spread.

    SQNR of a group = 10·log10(Σ signal / Σ noise)

so that (100, 1) and (100, 3), which are 20 and 15.2 dB, give 10·log10(200/4) = 17 dB together.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable

from mmq.convert.finalize import sqnr_db
from mmq.convert.task_context import TensorRow
from mmq.quantize.architecture import role_of
from mmq.report.schema import FormatSize, Histogram, ModuleQuality
from mmq.report.tables import SizeRow

#: Widths of a histogram's bins, in dB: the first that needs at most `_MOST_BINS` of them.
_BIN_WIDTHS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0)
_MOST_BINS = 40


def by_module(rows: Iterable[TensorRow]) -> list[ModuleQuality]:
    """Quantised weights with an error, by layer and projection; experts of a layer together."""
    groups: dict[tuple[int | None, str], list[TensorRow]] = defaultdict(list)
    for row in _with_error(rows):
        role = role_of(row.name.rpartition(".")[0])
        module = f"{role.linear or role.component} {role.projection}".strip()
        layer = role.layer if role.layer >= 0 else None
        groups[layer, f"mtp {module}" if role.mtp else module].append(row)
    return [
        ModuleQuality(
            layer=layer,
            module=module,
            tensors=len(found),
            sqnr_db=round(sqnr_db(sum(r.signal for r in found), sum(r.noise for r in found)), 3),
            worst_tensor_sqnr_db=round(min(sqnr_db(r.signal, r.noise) for r in found), 3),
        )
        for (layer, module), found in groups.items()
    ]


def histogram(rows: Iterable[TensorRow]) -> Histogram | None:
    """Of the tensors' SQNR in dB; None where nothing was quantised with an error."""
    values = [sqnr_db(row.signal, row.noise) for row in _with_error(rows)]
    if not values:
        return None
    width = next(
        (w for w in _BIN_WIDTHS if (max(values) - min(values)) / w < _MOST_BINS - 1),
        _BIN_WIDTHS[-1],
    )
    counts = Counter(math.floor(value / width) for value in values)
    first, last = min(counts), max(counts)
    edges = [round(number * width, 6) for number in range(first, last + 2)]
    return Histogram(edges=edges, counts=[counts[n] for n in range(first, last + 1)])


def format_sizes(before: Iterable[SizeRow], after: Iterable[SizeRow]) -> list[FormatSize]:
    """Bytes by component and format, the source's order first."""
    sizes: dict[tuple[str, str], list[int]] = {}
    for side, rows in enumerate((before, after)):
        for row in rows:
            sizes.setdefault((row.component, row.format), [0, 0])[side] += row.nbytes
    rank = {component: n for n, component in enumerate(dict.fromkeys(c for c, _ in sizes))}
    return [
        FormatSize(component=component, format=format, before_bytes=old, after_bytes=new)
        for (component, format), (old, new) in sorted(sizes.items(), key=lambda s: rank[s[0][0]])
    ]


def _with_error(rows: Iterable[TensorRow]) -> Iterable[TensorRow]:
    """An all-zero or exactly kept weight has no noise, so no SQNR."""
    return (row for row in rows if row.action == "quantize" and row.noise > 0 and row.signal > 0)

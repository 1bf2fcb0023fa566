"""The sections of a conversion: sizes, quality, settings."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mmq.report import document as doc
from mmq.report.charts import BarChart, Chart, HeatMap, HistogramChart
from mmq.report.document import Cell, Column, Section, Table
from mmq.report.figures import fixed, plural
from mmq.report.schema import ConvertReport, ModuleQuality, Quality
from mmq.report.settings import flat
from mmq.report.tables import percent_change, percent_text, short_size, size_text, unit_for


def sizes_section(report: ConvertReport) -> Section:
    """Bytes before and after, by component and format."""
    before, kv = report.source.payload_bytes, report.kv_scale_bytes
    weights = report.output.payload_bytes - kv
    unit = unit_for(before)
    sizes = [(s.component, s.format, s.before_bytes, s.after_bytes) for s in report.sizes] or [
        (c.component, "", c.before_bytes, c.after_bytes) for c in report.components
    ]
    rows = [_size_row(*size) for size in sizes]
    rows.append(_size_row("total", "", before, report.output.payload_bytes))
    columns = [
        Column("component", False), Column("format", False), Column("before, bytes"),
        Column(f"{unit.name}"), Column("after, bytes"), Column(f"{unit.name}"), Column("change"),
    ]  # fmt: skip
    rows = [
        [*row[:3], _scaled(row[2], unit.nbytes), row[3], _scaled(row[3], unit.nbytes), row[4]]
        for row in rows
    ]
    change = percent_text(percent_change(before, weights))
    lines = [f"Weights {size_text(before)} → {size_text(weights)} ({change})."]
    if kv:
        lines.append(f"KV scales apart, {kv:,} B.")
    lines += [
        f"{c.component}: {short_size(c.before_bytes)} → {short_size(c.after_bytes)}"
        f" ({percent_text(percent_change(c.before_bytes, c.after_bytes))})."
        for c in report.components
        if c.before_bytes and abs(percent_change(c.before_bytes, c.after_bytes) or 0) >= 0.1
    ]
    lines += [
        f"{name}/ copied whole, {size_text(nbytes)}."
        for name, nbytes in report.side_folder_bytes.items()
    ]
    chart = BarChart(
        "Size before and after", ("before", "after"),
        [(f"{c} {f}".strip(), (float(old), float(new))) for c, f, old, new in sizes],
        unit.name, unit.nbytes, f"{lines[0]} The table has the figures.",
    )  # fmt: skip
    table = Table("Size by component and format", columns, rows)
    return Section("sizes", "Size", lines, [table], [chart])


def _size_row(component: str, format: str, before: int, after: int) -> list[Cell]:
    change = percent_change(before, after) if before != after else None
    return [
        doc.words(component), doc.words(format), doc.figure(f"{before:,}", before),
        doc.figure(f"{after:,}", after), doc.figure(percent_text(change), change or 0.0),
    ]  # fmt: skip


def _scaled(cell: Cell, unit: int) -> Cell:
    return doc.figure(f"{(cell.order or 0) / unit:.3f}", cell.order)


def quality_section(quality: Quality) -> Section:
    """Error of the quantised weights, by layer and module, and how tensors spread."""
    if quality.sqnr_db is None:
        return Section("quality", "Quality", ["Nothing was quantised with an error."])
    lines = [
        f"SQNR {quality.sqnr_db:.2f} dB over all values of"
        f" {plural(quality.tensors, 'quantised tensor')}."
    ]
    if quality.worst_tensor is not None and quality.worst_tensor_sqnr_db is not None:
        lines.append(f"Worst: {quality.worst_tensor_sqnr_db:.2f} dB in {quality.worst_tensor}.")
    if quality.max_error is not None:
        lines.append(f"Largest error of one value: {quality.max_error:g},"
                     f" in {quality.max_error_tensor}.")  # fmt: skip
    charts: list[Chart] = []
    tables: list[Table] = []
    if quality.by_module:
        charts.append(_heat_map(quality.by_module))
        tables.append(_module_table(quality.by_module))
    if quality.histogram is not None and quality.histogram.counts:
        counts, edges = quality.histogram.counts, quality.histogram.edges
        charts.append(
            HistogramChart(
                "SQNR of each tensor", "SQNR, dB", edges, counts,
                f"{plural(sum(counts), 'tensor')} between {edges[0]:g} and {edges[-1]:g} dB.",
            )
        )  # fmt: skip
    if not charts:
        lines.append("The report does not hold SQNR by layer; tensors.csv has it by tensor.")
    return Section("quality", "Quality", lines, tables, charts)


def _heat_map(modules: Sequence[ModuleQuality]) -> HeatMap:
    kinds = _kinds(modules)
    layers = sorted({m.layer for m in modules}, key=lambda n: -1 if n is None else n)
    values = {(m.layer, m.module): m.sqnr_db for m in modules}
    worst = min(modules, key=lambda m: math.inf if math.isnan(m.sqnr_db) else m.sqnr_db)
    return HeatMap(
        "SQNR by layer and module", "layer", "module",
        list(map(_layer, layers)), kinds,
        [[values.get((layer, kind)) for kind in kinds] for layer in layers], "dB", 2,
        f"Lowest in {worst.module} of layer {worst.layer}: {worst.sqnr_db:.2f} dB.",
    )  # fmt: skip


def _kinds(modules: Sequence[ModuleQuality]) -> list[str]:
    """The modules, each component's together and in the order of their names."""
    parts = {part: n for n, part in enumerate(dict.fromkeys(map(_part, modules)))}
    kinds = {m.module: (parts[_part(m)], m.module) for m in modules}
    return sorted(kinds, key=kinds.__getitem__)


def _part(module: ModuleQuality) -> str:
    return module.module.rpartition(" ")[0]


def _layer(number: int | None) -> str:
    return "–" if number is None else str(number)


def _module_table(modules: Sequence[ModuleQuality]) -> Table:
    """Rows in the order of the heat map's cells."""
    rank = {kind: n for n, kind in enumerate(_kinds(modules))}
    ordered = sorted(modules, key=lambda m: (-1 if m.layer is None else m.layer, rank[m.module]))
    rows = [
        [
            doc.figure(_layer(m.layer), -1 if m.layer is None else m.layer),
            doc.words(m.module), doc.figure(f"{m.tensors:,}", m.tensors),
            doc.figure(fixed(m.sqnr_db, 2), m.sqnr_db),
            doc.figure(fixed(m.worst_tensor_sqnr_db, 2), m.worst_tensor_sqnr_db),
        ]
        for m in ordered
    ]  # fmt: skip
    columns = [Column("layer"), Column("module", False), Column("tensors"), Column("SQNR, dB"),
               Column("worst tensor, dB")]  # fmt: skip
    return Table("SQNR by layer and module", columns, rows)


def conversion_section(report: ConvertReport) -> Section:
    """What it took, what it left out or changed, and its options."""
    timing = report.timing
    options = [
        [doc.words(k), doc.words(v)]
        for k, v in flat({**report.options, "calibration": report.calibration})
    ]
    jobs = plural(timing.jobs, "job")
    where = f" on {timing.device}" + (
        f" ({timing.backend})" if timing.backend not in ("", timing.device) else ""
    )
    lines = [f"{timing.seconds:.1f} s, {timing.read_gb_per_s:.2f} GB/s read, {jobs}{where}."]
    if timing.spent:
        spent = ", ".join(f"{what} {seconds:.1f} s" for what, seconds in timing.spent.items())
        lines.append(f"All jobs together: {spent}.")
    if timing.peak_pss_bytes:
        lines.append(f"Peak memory {timing.peak_pss_bytes / 1e9:.2f} GB (summed PSS).")
    lines += [f"Dropped {plural(n, 'tensor')}: {why}" for why, n in report.dropped.items()]
    lines += [f"Config: {edit}" for edit in report.config_edits]
    table = Table("Options", [Column("option", False), Column("value", False)], options)
    return Section("settings", "Conversion", lines, [table], detail=True)

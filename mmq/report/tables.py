"""Sizes and plans as lines of text: pure functions of plain data, no printing.

Sizes are shown in GB (10⁹ bytes) and GiB (2³⁰ bytes), because both are quoted for this model;
small models in MB and MiB or kB and KiB.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from mmq.report.hub_lines import commit_lines, download_lines, next_line

_EMPTY = "–"


class SizeRow(NamedTuple):
    """Tensors of one component in one format and dtype.

    Attributes:
        format: MXFP8, NVFP4, or the dtype of what is not quantised; scales count as the format
            of their weight.
        dtype: safetensors tag as stored.
    """

    component: str
    format: str
    dtype: str
    tensors: int
    nbytes: int


class KvBytes(NamedTuple):
    """KV-cache bytes per token, all layers together; None where a format does not apply.

    Attributes:
        sparse_layers: layers with sparse attention, None when config does not say.
        hybrid: sparse layers NVFP4, dense-attention layers FP8.
        index_*: the index-key cache of the sparse layers, which the others do not include.
    """

    layers: int
    sparse_layers: int | None
    heads: int
    head_dim: int
    bf16: int
    fp8: int
    nvfp4: int | None
    hybrid: int | None
    index_bf16: int | None
    index_fp8: int | None
    index_nvfp4: int | None


class Unit(NamedTuple):
    """A decimal unit and its binary counterpart."""

    name: str
    nbytes: int
    binary_name: str
    binary_nbytes: int

    def decimal(self, nbytes: int) -> str:
        """The size in this unit, three decimals."""
        return f"{nbytes / self.nbytes:.3f}"

    def binary(self, nbytes: int) -> str:
        """The size in the binary unit, three decimals."""
        return f"{nbytes / self.binary_nbytes:.3f}"


_UNITS = (
    Unit("GB", 10**9, "GiB", 2**30),
    Unit("MB", 10**6, "MiB", 2**20),
    Unit("kB", 10**3, "KiB", 2**10),
)


def unit_for(nbytes: int) -> Unit:
    """The unit a table with this total is shown in: GB, or less for small test models."""
    return next((unit for unit in _UNITS if nbytes >= unit.nbytes), _UNITS[-1])


def size_text(nbytes: int) -> str:
    """Bytes, then in the decimal and the binary unit; under 1 kB in bytes only."""
    if nbytes < 1000:
        return f"{nbytes:,} B"
    unit = unit_for(nbytes)
    decimal, binary = unit.decimal(nbytes), unit.binary(nbytes)
    return f"{nbytes:,} B = {decimal} {unit.name} = {binary} {unit.binary_name}"


def short_size(nbytes: int) -> str:
    """The size in its decimal unit alone."""
    unit = unit_for(nbytes)
    return f"{nbytes} B" if nbytes < 1000 else f"{unit.decimal(nbytes)} {unit.name}"


def percent_change(before: int, after: int) -> float | None:
    """Signed change in percent, one decimal; None when there was nothing before."""
    return round(100 * (after / before - 1), 1) if before else None


def percent_text(change: float | None) -> str:
    """The change with a true minus sign."""
    return "" if change is None else f"{change:+.1f} %".replace("-", "−")


def columns(rows: Iterable[Sequence[str]], left: int) -> list[str]:
    """Rows as aligned columns: the first `left` flush left, the others flush right."""
    table = [list(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for row in table:
        cells = [
            cell.ljust(width) if index < left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def size_table(rows: Sequence[SizeRow]) -> list[str]:
    """Bytes by component × dtype, with a total."""
    total = _total(rows)
    unit = unit_for(total.nbytes)

    def amounts(row: SizeRow) -> tuple[str, str, str, str]:
        size = row.nbytes
        return f"{row.tensors:,}", f"{size:,}", unit.decimal(size), unit.binary(size)

    head = ("component", "format", "dtype", "tensors", "bytes", unit.name, unit.binary_name)
    return columns([head, *((*row[:3], *amounts(row)) for row in (*rows, total))], left=3)


def change_table(before: Sequence[SizeRow], after: Sequence[SizeRow]) -> list[str]:
    """Bytes by component × dtype before and after, with totals."""
    unit = unit_for(_total(before).nbytes)

    def sizes(row: SizeRow | None) -> tuple[str, str]:
        return (unit.decimal(row.nbytes), unit.binary(row.nbytes)) if row else (_EMPTY, _EMPTY)

    old = {row[:3]: row for row in before}
    new = {row[:3]: row for row in after}
    rank = {component: i for i, component in enumerate(dict.fromkeys(r.component for r in before))}
    keys = sorted({**old, **new}, key=lambda k: rank.get(k[0], len(rank)))
    body = [(*key, *sizes(old.get(key)), *sizes(new.get(key))) for key in keys]
    totals = (*sizes(_total(before)), *sizes(_total(after)))
    units = (unit.name, unit.binary_name)
    head = (
        "component",
        "format",
        "dtype",
        f"before {units[0]}",
        units[1],
        f"after {units[0]}",
        units[1],
    )
    return columns([head, *body, ("total", "", "", *totals)], left=3)


def _total(rows: Sequence[SizeRow]) -> SizeRow:
    return SizeRow("total", "", "", sum(r.tensors for r in rows), sum(r.nbytes for r in rows))


def kv_lines(kv: KvBytes | None) -> list[str]:
    """KV-cache bytes per token for each format."""
    if kv is None:
        return ["KV cache: unknown, config.json lacks layers, KV heads or head_dim"]
    formats = [("BF16", kv.bf16), ("FP8", kv.fp8), ("NVFP4", kv.nvfp4)]
    if kv.hybrid is not None and kv.sparse_layers is not None and kv.sparse_layers < kv.layers:
        dense = kv.layers - kv.sparse_layers
        formats.append((f"hybrid: {kv.sparse_layers} NVFP4, {dense} FP8 (dense)", kv.hybrid))
    rows = [("  " + name, "" if n is None else f"{n:,} B") for name, n in formats]
    index = [("BF16", kv.index_bf16), ("FP8", kv.index_fp8), ("NVFP4", kv.index_nvfp4)]
    stored = [f"{name} {n:,} B" for name, n in index if n]
    head = f"KV cache per token ({kv.layers} layers, {kv.heads} KV heads × {kv.head_dim}):"
    lines = [head, *columns([row for row in rows if row[1]], left=1)]
    if stored:
        lines.append(f"  index keys apart ({kv.sparse_layers} layers): {', '.join(stored)}")
    return lines


def inspect_lines(data: Mapping[str, Any]) -> list[str]:
    """What `mmq inspect` prints about a source; `data` is convert.summary.checkpoint_summary."""
    shards = data["shards"]
    lines = [
        f"source   {data['source']}" + (f" ({data['release']})" if data["release"] else ""),
        f"holds    {data['tensors']:,} tensors"
        + (f" in {shards:,} shard{'s' if shards != 1 else ''}" if shards else "")
        + f", {size_text(data['bytes'])}",
    ]
    lines += commit_lines(data) + ([f"inferred {data['inferred']}"] if data["inferred"] else [])
    rows = [SizeRow(**row) for row in data["components"]]
    kv = data["kv_bytes_per_token"]
    return [*lines, "", *size_table(rows), "", *kv_lines(KvBytes(**kv) if kv else None)]


def outcome_lines(data: Mapping[str, Any]) -> list[str]:
    """What convert makes of a source, in short; `data` is convert.summary.plan_summary."""
    out = data["output"]
    change = percent_text(data["change_percent"])
    lines = [
        f"convert  {data['target']}: {short_size(data['source']['bytes'])} →"
        f" {short_size(out['weights_bytes'])} of weights ({change})",
        f"weights  {size_text(out['weights_bytes'])}",
    ]
    if out["kv_scales"]:
        lines.append(
            f"KV       {out['kv_scales']} scales, {size_text(out['kv_scale_bytes'])} apart"
        )
    lines.append(
        f"files    {size_text(out['file_bytes'])} with headers, in {out['shards']} shard"
        + ("s" if out["shards"] != 1 else "")
    )
    return lines + announced_lines(data)


def announced_lines(data: Mapping[str, Any]) -> list[str]:
    """The announced sizes beside the measured ones; nothing for other models than the release."""
    announced = data["announced"]
    if not announced:
        return []
    before, after = announced["before_gb"], announced["after_gb"]
    change = percent_text(round(100 * (after / before - 1), 1))
    lines = [
        f"claimed  {before} → {after} GB announced ({change}); measured"
        f" {data['source']['bytes'] / 1e9:.1f} → {data['output']['weights_bytes'] / 1e9:.1f} GB"
        f" ({percent_text(data['change_percent'])})"
    ]
    if announced["note"]:
        lines.append(f"         {announced['note']}")
    return lines


def plan_lines(data: Mapping[str, Any]) -> list[str]:
    """What `mmq convert --dry-run` prints; `data` is convert.summary.plan_summary."""
    source, out = data["source"], data["output"]
    before = [SizeRow(**row) for row in source["components"]]
    after = [SizeRow(**row) for row in out["components"]]
    lines = [
        f"source   {source['location']}: {source['tensors']:,} tensors,"
        f" {size_text(source['bytes'])}",
        *([f"inferred {source['inferred']}"] if source["inferred"] else []),
        *outcome_lines(data),
        "",
        *change_table(before, after),
    ]
    for title, items in (
        ("formats", data["formats"]),
        ("dropped", [_dropped_line(d) for d in data["dropped"]]),
        ("--ignore", [_ignore_line(i) for i in data["ignored"]]),
        ("config", data["config_edits"]),
        ("KV cache in NVFP4", [f"{engine}: {how}" for engine, how in data["kv_notes"].items()]),
    ):
        if items:
            lines += ["", f"{title}:", *(f"  {item}" for item in items)]
    return [*lines, "", *_resource_lines(data["resources"])]


def _dropped_line(dropped: Mapping[str, Any]) -> str:
    return (
        f"{dropped['tensors']:,} tensors, {short_size(dropped['bytes'])}: {dropped['reason']}"
        f" (such as {dropped['example']})"
    )


def _ignore_line(ignored: Mapping[str, Any]) -> str:
    return (
        f"{ignored['pattern']}: matches {ignored['modules']:,} modules,"
        f" {ignored['would_be_quantised']:,} of which would have been quantised"
    )


def _resource_lines(resources: Mapping[str, Any]) -> list[str]:
    """Disk, memory and work; time is left as bytes, since only a benchmark knows the disk."""
    spare = f"{resources['spare_bytes'] / 1e6:.0f} MB to spare"
    lines = [f"disk     {size_text(resources['needed_bytes'])} needed, and {spare}"]
    if resources["side_files"]:
        lines.insert(0, _side_line(resources))
    if resources["free_bytes"] is not None:
        short = resources["free_bytes"] < resources["needed_bytes"] + resources["spare_bytes"]
        free = f", {size_text(resources['free_bytes'])} free at {resources['disk']}"
        lines[-1] += free + (": NOT ENOUGH" if short else "")
    jobs = resources["jobs"]
    return [
        *lines,
        *download_lines(resources),
        f"memory   about {resources['peak_memory_bytes'] / 1e9:.1f} GB at most (summed PSS) with"
        f" {jobs} job{'s' if jobs != 1 else ''}",
        f"work     {short_size(resources['read_bytes'])} to read,"
        f" {short_size(resources['write_bytes'])} to write, each once",
    ]


def _side_line(resources: Mapping[str, Any]) -> str:
    line = f"beside   {resources['side_files']:,} other files, {size_text(resources['side_bytes'])}"
    for folder, nbytes in resources["side_folders"].items():
        line += f"; {folder}/ whole, {size_text(nbytes)}"
    return line


def convert_lines(report: Mapping[str, Any], src: str, out: str) -> list[str]:
    """What `mmq convert` prints at the end; `report` is a report.schema.ConvertReport as a dict."""
    before, output = report["source"]["payload_bytes"], report["output"]
    kv = report["kv_scale_bytes"]
    weights = output["payload_bytes"] - kv
    unit = unit_for(before)
    head = ("component", f"before {unit.name}", f"after {unit.name}")
    sizes = [(c["component"], c["before_bytes"], c["after_bytes"]) for c in report["components"]]
    total = ("total", before, output["payload_bytes"])
    rows = [(name, unit.decimal(a), unit.decimal(b)) for name, a, b in (*sizes, total)]
    change = percent_text(percent_change(before, weights))
    folders = report["side_folder_bytes"].items()
    return [
        *columns([head, *rows], left=1),
        "",
        f"weights  {short_size(before)} → {short_size(weights)} ({change}), {size_text(weights)}",
        f"files    {size_text(output['file_bytes'])} with headers, shards: {output['shards']}"
        + (f", {kv} B of them KV scales" if kv else ""),
        *(f"beside   {name}/ copied whole, {size_text(nbytes)}" for name, nbytes in folders),
        *_quality_lines(report["quality"]),
        *(f"dropped  {count:,} tensors: {reason}" for reason, count in report["dropped"].items()),
        _timing_line(report["timing"]),
        next_line(report, src, out),
    ]


def _quality_lines(quality: Mapping[str, Any]) -> list[str]:
    if quality["sqnr_db"] is None:
        return []
    line = f"quality  SQNR {quality['sqnr_db']:.2f} dB over {quality['tensors']:,} weights"
    worst, name = quality["worst_tensor_sqnr_db"], quality["worst_tensor"]
    if worst is not None and name is not None:
        line += f", worst {worst:.2f} dB in {name}"
    return [line]


def _timing_line(timing: Mapping[str, Any]) -> str:
    jobs, peak = timing["jobs"], timing["peak_pss_bytes"]
    line = (
        f"time     {timing['seconds']:.1f} s, {timing['read_gb_per_s']:.2f} GB/s read,"
        f" {jobs} job{'s' if jobs != 1 else ''}"
    )
    if timing["device"] != "cpu":
        line += f" on {timing['device']}"
    if timing["resumed_shards"]:
        line += f", done before: {timing['resumed_shards']}"
    return line + (f", peak memory {peak / 1e9:.2f} GB (summed PSS)" if peak else "")

"""mmq-convert.json: what a conversion did, measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from mmq.convert.configs import config_edits
from mmq.convert.device import Place
from mmq.convert.finalize import ShardRecord, sqnr_db, versions
from mmq.convert.plan import ConversionPlan
from mmq.convert.quality_map import by_module, format_sizes, histogram
from mmq.convert.side_files import SideFile
from mmq.convert.sizes import size_rows
from mmq.convert.source_revision import source_revision
from mmq.convert.tasks import TensorRow
from mmq.convert.work import WorkUnit
from mmq.convert.writer import FileRecord
from mmq.quantize.architecture import COMPONENTS
from mmq.quantize.version import NUMERICS_VERSION
from mmq.report.findings import Finding
from mmq.report.schema import (
    ComponentSize,
    ConvertReport,
    Endpoint,
    FileEntry,
    FindingEntry,
    Quality,
    Timing,
)


def convert_report(
    plan: ConversionPlan,
    shards: list[ShardRecord],
    files: list[tuple[str, FileRecord]],
    side_files: list[SideFile],
    findings: list[Finding],
    timing: Timing,
) -> ConvertReport:
    """The report of one run; sizes and quality cover the whole output, timing this run only."""
    source_bytes = plan.source.nbytes
    weights = plan.output_bytes - plan.kv_scale_bytes
    source, output = _endpoints(plan)
    return ConvertReport(
        versions=versions(),
        numerics_version=NUMERICS_VERSION,
        options=plan.options.as_dict(),
        source=source,
        output=output,
        kv_scale_bytes=plan.kv_scale_bytes,
        side_folder_bytes=_folders(side_files),
        reduction=1 - weights / source_bytes if source_bytes else 0.0,
        components=_components(plan),
        sizes=format_sizes(
            size_rows(plan.source.tensors.values()),
            size_rows([o for u in plan.units for o in u.outputs]),
        ),
        quality=quality(row for shard in shards for row in shard.rows),
        dropped=dict(Counter(d.reason for d in plan.dropped)),
        calibration=dict(plan.calibration),
        config_edits=config_edits(plan),
        findings=[FindingEntry(**f.as_dict()) for f in findings],
        timing=timing,
        files=[FileEntry(name=n, bytes=r.size, sha256=r.sha256) for n, r in sorted(files)],
    )


def _endpoints(plan: ConversionPlan) -> tuple[Endpoint, Endpoint]:
    source = Endpoint(
        location=plan.source.location,
        tensors=len(plan.source.tensors),
        shards=len(plan.source.shards),
        payload_bytes=plan.source.nbytes,
        file_bytes=sum(s.file_bytes for s in plan.source.shards.values()),
        **source_revision(plan.source)._asdict(),
    )
    output = Endpoint(
        location=".",
        tensors=sum(len(u.outputs) for u in plan.units),
        shards=len(plan.units),
        payload_bytes=plan.output_bytes,
        file_bytes=plan.file_bytes,
    )
    return source, output


def run_timing(
    run_units: list[WorkUnit],
    *,
    seconds: float,
    jobs: int,
    resumed: int,
    peak_pss: int | None,
    place: Place,
    spent: Mapping[str, float],
) -> Timing:
    """What this run took; shards that an earlier run had done are not in it."""
    read = sum(u.read_bytes for u in run_units)
    return Timing(
        seconds=round(seconds, 3),
        read_bytes=read,
        written_bytes=sum(u.file_bytes for u in run_units),
        read_gb_per_s=round(read / seconds / 1e9, 4) if seconds > 0 else 0.0,
        jobs=jobs,
        resumed_shards=resumed,
        peak_pss_bytes=peak_pss,
        device=place.device,
        backend=place.backend,
        spent={what: round(value, 3) for what, value in spent.items()},
    )


def quality(rows: Iterable[TensorRow]) -> Quality:
    """Error summary over quantised weights."""
    found = [r for r in rows if r.action == "quantize"]
    if not found:
        return Quality(
            tensors=0, sqnr_db=None, mean_tensor_sqnr_db=None, worst_tensor_sqnr_db=None,
            worst_tensor=None, max_error=None, max_error_tensor=None,
        )  # fmt: skip
    # an all-zero weight has no signal and no noise: nothing to rank
    ranked = [(sqnr_db(r.signal, r.noise), r.name) for r in found if r.noise > 0]
    worst = min(ranked, default=(None, None))
    loudest = max(found, key=lambda r: r.max_error)
    noise = sum(r.noise for r in found)
    return Quality(
        tensors=len(found),
        sqnr_db=round(sqnr_db(sum(r.signal for r in found), noise), 3) if noise > 0 else None,
        mean_tensor_sqnr_db=round(sum(db for db, _ in ranked) / len(ranked), 3) if ranked else None,
        worst_tensor_sqnr_db=None if worst[0] is None else round(worst[0], 3),
        worst_tensor=worst[1],
        max_error=loudest.max_error,
        max_error_tensor=loudest.name,
        by_module=by_module(found),
        histogram=histogram(found),
    )


def _components(plan: ConversionPlan) -> list[ComponentSize]:
    before: Counter[str] = Counter()
    after: Counter[str] = Counter()
    for row in size_rows(plan.source.tensors.values()):
        before[row.component] += row.nbytes
    for row in size_rows([o for u in plan.units for o in u.outputs]):
        after[row.component] += row.nbytes
    return [
        ComponentSize(component=c, before_bytes=before[c], after_bytes=after[c])
        for c in COMPONENTS
        if before[c] or after[c]
    ]


def _folders(side_files: list[SideFile]) -> dict[str, int]:
    sizes: Counter[str] = Counter()
    for side in side_files:
        if side.folder:
            sizes[side.folder] += side.nbytes
    return dict(sizes)


def streaming_findings(shards: list[ShardRecord]) -> list[Finding]:
    """What only reading the data could tell: NaN let through, scalars without an exact inverse."""
    rows = [row for shard in shards for row in shard.rows]
    found = [
        Finding("nonfinite-passthrough", "warning",
                f"{r.name} was copied with {r.nonfinite} NaN/Inf element(s)", where=r.name,
                got=str(r.nonfinite), expected="0")
        for r in rows if r.nonfinite
    ]  # fmt: skip
    inexact = [name for r in rows if r.action == "relayout" for name, _ in r.other_scalars]
    if inexact:
        found.append(
            Finding("relayout-inexact", "note",
                    f"{len(inexact)} scale(s), such as {inexact[0]}, have no exact reciprocal in"
                    " F32: they are one unit in the last place off in this layout, and the manifest"
                    " keeps them for the way back", where=inexact[0], got=str(len(inexact)))
        )  # fmt: skip
    return found

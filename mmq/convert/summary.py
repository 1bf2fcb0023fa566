"""Checkpoints and plans as plain data: what inspect and --dry-run print, and what --json writes."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mmq.convert.checkpoint import Checkpoint
from mmq.convert.configs import config_edits, declared_kv_format, nvfp4_kv_notes
from mmq.convert.downloads import SPARE_BYTES, DownloadSettings, download_summary
from mmq.convert.kv_budget import per_million
from mmq.convert.plan import ConversionPlan
from mmq.convert.side_files import list_side_files
from mmq.convert.sizes import ANNOUNCED_GB, kv_bytes, release_of, size_rows
from mmq.hub.download import BUFFER_BYTES
from mmq.quantize.policy import SCHEMES
from mmq.report.tables import SizeRow, percent_change

#: Peak PSS, rounded up from what was measured: 298 MB for a plan of the release, 178 MB for a
#: worker at M3's tensor sizes.
PARENT_BYTES = 350_000_000
WORKER_BYTES = 250_000_000


def checkpoint_summary(source: Checkpoint) -> dict[str, Any]:
    """A source by its headers: totals, bytes by component × dtype, KV bytes per token."""
    rows = size_rows(source.tensors.values())
    kv = kv_bytes(source.text_config)
    nbytes = sum(row.nbytes for row in rows)
    return {
        "source": source.location,
        "release": release_of(len(source.tensors), nbytes),
        "tensors": len(source.tensors),
        "shards": len(source.shards) or source.extra.get("shard_count") or 0,
        "bytes": nbytes,
        "components": _rows(rows),
        "kv_bytes_per_token": None if kv is None else kv._asdict(),
        "kv_bytes_per_million_tokens": None if kv is None else per_million(kv),
        "inferred": source.inferred,
        "hub": None if source.hub is None else source.hub.as_dict(),
        "findings": [f.as_dict() for f in source.notes],
    }


def plan_summary(plan: ConversionPlan, resources: dict[str, Any]) -> dict[str, Any]:
    """A plan: sizes before and after, what is dropped and why, and what it will cost.

    Args:
        resources: see `resource_summary`.
    """
    before = size_rows(plan.source.tensors.values())
    after = size_rows([o for unit in plan.units for o in unit.outputs])
    source_bytes = sum(row.nbytes for row in before)
    kv_scales = [row for row in after if row.component == "kv_scales"]
    weights = sum(row.nbytes for row in after if row.component != "kv_scales")
    target = plan.options.to.upper()
    return {
        "target": f"{target}, {plan.options.layout} layout" if target == "NVFP4" else target,
        "options": plan.options.as_dict(),
        "source": {
            "location": plan.source.location,
            "tensors": len(plan.source.tensors),
            "bytes": source_bytes,
            "components": _rows(before),
            "inferred": plan.source.inferred,
        },
        "output": {
            "tensors": sum(row.tensors for row in after),
            "weights_bytes": weights,
            "kv_scales": sum(row.tensors for row in kv_scales),
            "kv_scale_bytes": sum(row.nbytes for row in kv_scales),
            "file_bytes": plan.file_bytes,
            "shards": len(plan.units),
            "components": _rows(after),
        },
        "change_percent": percent_change(source_bytes, weights),
        "announced": _announced(plan, before),
        "quantised_modules": len(plan.quantised),
        "formats": _formats(plan),
        "dropped": _dropped(plan),
        "ignored": [
            {"pattern": i.pattern, "modules": i.modules, "would_be_quantised": len(i.quantised)}
            for i in plan.ignored
        ],
        "config_edits": _config_lines(plan),
        "kv_notes": nvfp4_kv_notes(plan.options),
        "findings": [*(f.as_dict() for f in plan.findings), *resources.pop("findings", [])],
        "resources": resources,
    }


def resource_summary(
    plan: ConversionPlan, out: Path | None, jobs: int, downloads: DownloadSettings | None = None
) -> dict[str, Any]:
    """Disk, memory and work of a plan.

    Args:
        out: free space is asked of the nearest folder above it that exists; None: do not ask.
    """
    side_files, notes = list_side_files(plan.source)
    folders: Counter[str] = Counter()
    for side in side_files:
        folders[side.folder or ""] += side.nbytes
    disk = None if out is None else _existing(out)
    jobs = min(jobs, len(plan.units))
    settings = downloads or DownloadSettings()
    fetched = download_summary(plan, side_files, out or Path("OUT"), settings, jobs)
    elsewhere = settings.folder is not None
    held = fetched["least_bytes"] if fetched is not None and not elsewhere else 0
    return {
        "side_files": len(side_files),
        "side_bytes": folders.pop("", 0),
        "side_folders": dict(folders),
        "needed_bytes": plan.file_bytes + sum(side.nbytes for side in side_files) + held,
        "spare_bytes": SPARE_BYTES,
        "download": fetched,
        "free_bytes": None if disk is None else shutil.disk_usage(disk).free,
        "disk": None if disk is None else str(disk),
        "jobs": jobs,
        "peak_memory_bytes": PARENT_BYTES + jobs * WORKER_BYTES + (BUFFER_BYTES if fetched else 0),
        "read_bytes": plan.read_bytes,
        "write_bytes": plan.file_bytes,
        "findings": [f.as_dict() for f in notes],
    }


def default_jobs() -> int:
    """min(4, cores this process may use)."""
    affinity = getattr(os, "sched_getaffinity", None)
    return min(4, len(affinity(0)) if affinity else os.cpu_count() or 1)


def _existing(path: Path) -> Path:
    path = path.absolute()
    return next(p for p in (path, *path.parents) if p.is_dir())


def _rows(rows: Iterable[SizeRow]) -> list[dict[str, Any]]:
    return [row._asdict() for row in rows]


def _announced(plan: ConversionPlan, before: list[SizeRow]) -> dict[str, Any] | None:
    """The announced sizes, when the source is the release they speak of and the target NVFP4."""
    release = release_of(sum(r.tensors for r in before), sum(r.nbytes for r in before))
    if release is None or plan.options.to != "nvfp4":
        return None
    with_mtp = any(row.component == "mtp" for row in before)
    note = "" if with_mtp else "451.5 GB fits this release plus one MTP layer (451.470 GB)"
    return {"before_gb": ANNOUNCED_GB[0], "after_gb": ANNOUNCED_GB[1], "note": note}


def _formats(plan: ConversionPlan) -> list[str]:
    """What changes format and what does not, with the reason."""
    gone = Counter(tensor.name.rpartition(".")[0] for tensor, _ in plan.dropped)
    dropped = sum(
        name not in plan.quantised and count == len(plan.modules[name].tensors)
        for name, count in gone.items()
    )
    kept = len(plan.modules) - len(plan.quantised) - dropped
    return [
        f"{plan.options.to.upper()}: {len(plan.quantised):,} modules",
        f"as in the source: {kept:,} modules ({SCHEMES[plan.options.to].reason})",
    ]


def _dropped(plan: ConversionPlan) -> list[dict[str, Any]]:
    """Dropped tensors by reason."""
    count: Counter[str] = Counter()
    nbytes: Counter[str] = Counter()
    example: dict[str, str] = {}
    for tensor, reason in plan.dropped:
        count[reason] += 1
        nbytes[reason] += tensor.nbytes
        example.setdefault(reason, tensor.name)
    return [
        {"reason": r, "tensors": n, "bytes": nbytes[r], "example": example[r]}
        for r, n in count.items()
    ]


def _config_lines(plan: ConversionPlan) -> list[str]:
    """What the output's config.json says differently from the source's."""
    kv = declared_kv_format(plan.options)
    declared = f", KV cache declared {kv.upper()}" if kv else ", no KV cache declared"
    block = {
        "nvfp4 modelopt": "quant_method modelopt, MIXED_PRECISION" + declared
        + "; hf_quant_config.json says the same",
        "nvfp4 minimax": "the vendor's mxfp8 block with moe_quant_algo NVFP4" + declared,
        "mxfp8 modelopt": "the vendor's mxfp8 block",
        "bf16 modelopt": "removed",
    }  # fmt: skip
    options = plan.options
    layout = options.layout if options.to == "nvfp4" else "modelopt"
    return [f"quantization_config: {block[f'{options.to} {layout}']}", *config_edits(plan)]

"""The end of a conversion: side files, configs, tables, manifest, report; then the index.

The index is the one commit point. It is written last, by rename; a folder without it is unfinished.
"""

from __future__ import annotations

import csv
import io
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mmq import __version__
from mmq.convert.checkpoint import INDEX_NAME, read_json_object
from mmq.convert.configs import build_configs
from mmq.convert.journal import fingerprint, lasting
from mmq.convert.plan import ConversionPlan
from mmq.convert.relayout import MANIFEST_NAME, STORED_KEY, VENDOR_KEY, vendor_block
from mmq.convert.safetensors_header import unreadable
from mmq.convert.side_files import SideFile
from mmq.convert.source_revision import recorded_source, source_revision
from mmq.convert.stream import CHUNK_BYTES
from mmq.convert.tasks import TensorRow
from mmq.convert.work import SOURCE
from mmq.convert.writer import AtomicFile, FileRecord, json_bytes, write_file
from mmq.quantize.version import NUMERICS_VERSION

MANIFEST_FORMAT = "mmq-manifest/1"
TABLE_NAME = "tensors.csv"


class ShardRecord(NamedTuple):
    """A finished shard, of this run or an earlier one."""

    unit: int
    name: str
    bytes: int
    sha256: str
    rows: list[TensorRow]


def row_from_json(values: Iterable[Any]) -> TensorRow:
    """A `TensorRow` as the journal stored it."""
    row = TensorRow(*values)
    others = tuple((name, value) for name, value in row.other_scalars)
    return row._replace(shape=tuple(row.shape), other_scalars=others)


def write_everything_but_index(
    plan: ConversionPlan, out: Path, shards: list[ShardRecord], side_files: list[SideFile],
    source_hashes: Mapping[str, str],
) -> list[tuple[str, FileRecord]]:  # fmt: skip
    """All files after the shards; the manifest last, naming every other one.

    Returns:
        (name, record) of every file of the checkpoint, the index included (not yet written).
    """
    files = [(s.name, FileRecord(s.bytes, s.sha256)) for s in shards]
    files += [(side.name, _copy(side, out)) for side in side_files]
    files += [(name, write_file(out / name, json_bytes(value)))
              for name, value in build_configs(plan).items()]  # fmt: skip
    files.append((TABLE_NAME, write_file(out / TABLE_NAME, _table(shards))))
    index = index_bytes(plan)
    files.append((INDEX_NAME, _record(index)))
    write_file(out / MANIFEST_NAME, json_bytes(_manifest(plan, shards, files, source_hashes)))
    return files


def commit_index(plan: ConversionPlan, out: Path) -> None:
    """The commit point: from here on the folder is a checkpoint."""
    write_file(out / INDEX_NAME, index_bytes(plan))


def index_bytes(plan: ConversionPlan) -> bytes:
    """The index, made from the very units the shard headers were made from."""
    weight_map = {o.name: unit.filename for unit in plan.units for o in unit.outputs}
    return json_bytes(
        {
            "metadata": {"total_size": plan.output_bytes},
            "weight_map": dict(sorted(weight_map.items())),
        }
    )


def versions() -> dict[str, str]:
    """Versions of what had a part in the output bytes."""
    import numpy

    found = {"mmq": __version__, "python": platform.python_version(), "numpy": numpy.__version__}
    try:
        import numba

        found["numba"] = numba.__version__
    except ImportError:
        pass
    return found


def _record(data: bytes) -> FileRecord:
    import hashlib

    return FileRecord(len(data), hashlib.sha256(data).hexdigest())


def _copy(side: SideFile, out: Path) -> FileRecord:
    try:
        with side.path.open("rb") as source, AtomicFile(out / side.name) as target:
            while chunk := source.read(CHUNK_BYTES):
                target.write(chunk)
            return target.commit()
    except OSError as error:
        raise unreadable(side.path, error) from error


def _manifest(
    plan: ConversionPlan, shards: list[ShardRecord], files: list[tuple[str, FileRecord]],
    source_hashes: Mapping[str, str],
) -> dict[str, Any]:  # fmt: skip
    stored = dict(pair for s in shards for row in s.rows for pair in row.other_scalars)
    return {
        "format": MANIFEST_FORMAT,
        "numerics_version": NUMERICS_VERSION,
        "versions": versions(),
        "options": plan.options.as_dict(),
        "source": _source(plan, source_hashes),
        **_hub(plan),
        "calibration": plan.calibration,
        "dropped": [{"name": d.tensor.name, "reason": d.reason} for d in plan.dropped],
        "files": [{"name": n, "bytes": r.size, "sha256": r.sha256} for n, r in sorted(files)],
        STORED_KEY: dict(sorted(stored.items())),
        VENDOR_KEY: vendor_block(plan.source),
        "fingerprint": lasting(fingerprint(plan)),
    }


def _hub(plan: ConversionPlan) -> dict[str, Any]:
    """Repositories and commits, for what came from the Hub."""
    found = {SOURCE: plan.source, **plan.others}
    hub = {o: c.hub.snapshot.as_dict() for o, c in found.items() if c.hub is not None}
    return {"hub": hub} if hub else {}


def pinned_source(out: Path, typed: str) -> str:
    """Where a finished OUT came from: `org/name@commit` for a Hub source, else as typed."""
    return recorded_source(read_json_object(out / MANIFEST_NAME)) or typed


def _source(plan: ConversionPlan, hashes: Mapping[str, str]) -> dict[str, Any]:
    return {
        **source_revision(plan.source)._asdict(),
        "payload_bytes": plan.source.nbytes,
        "tensors": len(plan.source.tensors),
        "shards": [
            {
                "name": s.name,
                "bytes": s.file_bytes,
                "header_sha256": s.header_sha256,
                "sha256": hashes.get(s.name) or s.sha256,
            }
            for s in plan.source.shards.values()
        ],
    }


_COLUMNS = ("name", "action", "dtype_in", "dtype_out", "shape", "bytes_in", "bytes_out",
            "global_scale", "sqnr_db", "max_error", "nonfinite")  # fmt: skip


def _table(shards: list[ShardRecord]) -> bytes:
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_COLUMNS)
    for shard in shards:
        for row in shard.rows:
            quantised = row.action == "quantize"
            scale = "" if row.global_scale != row.global_scale else repr(row.global_scale)
            writer.writerow(
                (
                    row.name, row.action, row.dtype_in, row.dtype_out,
                    "×".join(map(str, row.shape)), row.bytes_in, row.bytes_out, scale,
                    f"{sqnr_db(row.signal, row.noise):.3f}" if quantised else "",
                    repr(row.max_error) if quantised else "", row.nonfinite,
                )
            )  # fmt: skip
    return text.getvalue().encode("utf-8")


def sqnr_db(signal: float, noise: float) -> float:
    """Signal to quantisation noise in dB: 10·log10(Σx²/Σ(x−q)²); inf without noise."""
    import math

    if noise <= 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal > 0 else -math.inf

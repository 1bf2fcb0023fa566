"""Header manifests: a checkpoint's tensor list as JSON, to inspect and plan without its weights.

    {"shard_count": 31,                          optional; for display
     "config": {...},                            optional; config.json
     "inferred": "the MTP layer",                optional; what nobody has read from a real file
     "totals": {"tensors": 3, "payload_bytes": 540},   optional; checked when present
     "tensors": [
       {"name": "model.norm.weight", "dtype": "BF16", "shape": [6], "shard": "a.safetensors"},
       {"name": "model.layers.{L}.experts.{E}.w1.weight", "dtype": "F8_E4M3", "shape": [8, 32],
        "layers": [3, 4], "experts": [0, 0]}]}

`{L}` and `{E}` run over the inclusive ranges `layers` and `experts`; one without the other is an
error. `shard` is optional and may hold `{L}` too. Unknown keys are ignored. dtypes are safetensors
tags. The built-in sources are two such files beside this module, written by
scripts/build_manifest.py; their shard names are unknown, so `TensorInfo.shard` is "".
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from mmq.convert.checkpoint import Checkpoint, read_json_object
from mmq.convert.safetensors_header import TensorInfo
from mmq.errors import BadInputError
from mmq.quantize.formats import DTYPE_BITS, tensor_nbytes

_DATA = Path(__file__).parent / "data"
_RELEASE = "minimax-m3-mxfp8.json"

#: Built-in sources: name → data files, read in this order. Later files add tensors and notes.
BUILTIN: dict[str, tuple[str, ...]] = {
    "minimax-m3-mxfp8": (_RELEASE,),
    "minimax-m3-mxfp8-mtp": (_RELEASE, "minimax-m3-mtp-layer.json"),
}

#: A manifest is a few kilobytes that can name any number of tensors; the release has 45,838.
MAX_TENSORS = 2_000_000
_MAX_DIMS = 64


class _Entry(NamedTuple):
    """One validated line of a manifest: `layers` and `experts` have one element when not used."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    shard: str
    layers: range
    experts: range
    nbytes: int


def open_builtin(name: str) -> Checkpoint:
    """One of the `BUILTIN` sources, at the release's true scale.

    Raises:
        KeyError: no such name.
    """
    tensors: dict[str, TensorInfo] = {}
    inferred: list[str] = []
    config: dict[str, Any] = {}
    shard_count = 0
    for file in BUILTIN[name]:
        manifest = read_json_object(_DATA / file)
        tensors.update(_expand(manifest, file))
        config = manifest.get("config") or config
        shard_count = manifest.get("shard_count") or shard_count
        inferred += [manifest["inferred"]] if "inferred" in manifest else []
    return Checkpoint(
        location=name, root=None, tensors=tensors, shards={}, config=config,
        inferred="; ".join(inferred), extra={"shard_count": shard_count},
    )  # fmt: skip


def open_manifest(path: Path, location: str) -> Checkpoint:
    """A header manifest written by someone else.

    Raises:
        BadInputError: not JSON, no tensor list, or an entry that describes no tensor.
    """
    manifest = read_json_object(path)
    tensors = _expand(manifest, path.name)
    config, inferred = manifest.get("config", {}), manifest.get("inferred", "")
    if not isinstance(config, dict) or not isinstance(inferred, str):
        raise BadInputError(
            "manifest-invalid",
            f"{path.name}: config must be an object and inferred a string",
            where=str(path),
        )
    count = manifest.get("shard_count")
    if not _is_count(count):
        count = len({t.shard for t in tensors.values() if t.shard})
    return Checkpoint(
        location=location, root=None, tensors=tensors, shards={}, config=config,
        inferred=inferred, extra={"shard_count": count},
    )  # fmt: skip


def _expand(manifest: dict[str, Any], file: str) -> dict[str, TensorInfo]:
    """All tensors of a manifest; `file` names it in errors."""
    lines = manifest.get("tensors")
    if not isinstance(lines, list) or not lines:
        raise BadInputError(
            "manifest-invalid",
            f"{file} is no header manifest: it has no list of tensors",
            where=file,
            expected='{"tensors": [{"name": …, "dtype": …, "shape": […]}, …]}',
            hint="name the checkpoint's folder instead of a file in it"
            if "weight_map" in manifest or "model_type" in manifest else None,
        )  # fmt: skip
    entries = [_entry(line, f"{file}: tensors[{i}]") for i, line in enumerate(lines)]
    count = sum(len(e.layers) * len(e.experts) for e in entries)
    if count > MAX_TENSORS:
        raise BadInputError(
            "manifest-too-large", f"{file} describes {count:,} tensors", where=file,
            got=f"{count:,}", expected=f"at most {MAX_TENSORS:,}",
        )  # fmt: skip
    tensors: dict[str, TensorInfo] = {}
    for index, entry in enumerate(entries):
        _add(tensors, entry, f"{file}: tensors[{index}]")
    _check_totals(manifest, tensors, file)
    return tensors


def _add(tensors: dict[str, TensorInfo], entry: _Entry, where: str) -> None:
    _, dtype, shape, _, layers, experts, nbytes = entry
    numbers = [str(expert) for expert in experts]
    for layer in layers:
        parts = entry.name.replace("{L}", str(layer)).split("{E}")
        shard = entry.shard.replace("{L}", str(layer))
        for number in numbers:
            name = number.join(parts)
            if name in tensors:
                raise BadInputError("tensor-twice", f"{name} is described twice", where=where)
            tensors[name] = TensorInfo(name, dtype, shape, shard, 0, nbytes)


def _entry(line: Any, where: str) -> _Entry:
    if not isinstance(line, dict) or not isinstance(line.get("name"), str) or not line["name"]:
        raise _invalid("tensor entries are objects with a name", where, line)
    name, dtype, shape, shard = (
        line["name"],
        line.get("dtype"),
        line.get("shape"),
        line.get("shard"),
    )
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise BadInputError(
            "dtype-unknown", f"{name} has dtype {dtype!r}, which mmq does not know", where=where,
            got=dtype, expected=", ".join(sorted(DTYPE_BITS)),
        )  # fmt: skip
    if not isinstance(shape, list) or len(shape) > _MAX_DIMS or not all(map(_is_count, shape)):
        raise BadInputError(
            "manifest-shape", f"{name} has no valid shape", where=where, got=shape,
            expected="a list of non-negative integers",
        )  # fmt: skip
    try:
        nbytes = tensor_nbytes(dtype, tuple(shape))
    except ValueError as error:
        raise BadInputError("manifest-shape", f"{name}: {error}", where=where) from None
    if not _is_count(nbytes):
        raise BadInputError("manifest-shape", f"{name} is impossibly large", where=where, got=shape)
    if not isinstance(shard, str | None):
        raise _invalid(f"shard of {name} must be a file name", where, shard)
    layers, experts = _range(line, "{L}", "layers", where), _range(line, "{E}", "experts", where)
    return _Entry(name, dtype, tuple(shape), shard or "", layers, experts, nbytes)


def _range(line: dict[str, Any], placeholder: str, key: str, where: str) -> range:
    """The inclusive range under `key` as a Python range; one unused element when absent."""
    name, bounds = line["name"], line.get(key)
    if (bounds is not None) != (placeholder in name):
        problem = f"no {placeholder} to fill" if bounds is not None else f"no range {key!r}"
        raise _invalid(f"{name} has {problem}", where, bounds)
    if bounds is None:
        return range(1)
    if (
        not isinstance(bounds, list)
        or len(bounds) != 2
        or not all(map(_is_count, bounds))
        or bounds[0] > bounds[1]
        or bounds[1] >= MAX_TENSORS
    ):
        raise BadInputError(
            "manifest-range", f"{name}: {key} is no inclusive range", where=where, got=bounds,
            expected=f"[first, last] with 0 ≤ first ≤ last < {MAX_TENSORS:,}",
        )  # fmt: skip
    return range(bounds[0], bounds[1] + 1)


def _check_totals(manifest: dict[str, Any], tensors: dict[str, TensorInfo], file: str) -> None:
    totals = manifest.get("totals")
    if not isinstance(totals, dict):
        return
    got = {"tensors": len(tensors), "payload_bytes": sum(t.nbytes for t in tensors.values())}
    for key, value in got.items():
        if key in totals and totals[key] != value:
            raise BadInputError(
                "manifest-totals", f"{file} describes other totals than it claims",
                where=f"{file}: totals.{key}", got=f"{value:,}", expected=totals[key],
            )  # fmt: skip


def _is_count(value: object) -> bool:
    """A non-negative integer that fits 63 bits (a bool is none)."""
    return type(value) is int and 0 <= value < 1 << 63


def _invalid(message: str, where: str, got: object) -> BadInputError:
    return BadInputError("manifest-invalid", message, where=where, got=repr(got)[:200])

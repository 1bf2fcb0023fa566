"""Which model a calibration belongs to: a hash of its norms.

Norm weights are small (under 2 MB in M3), are copied by every conversion, and differ between any
two fine-tunes. So a file made from one model is refused for another, but serves all of its formats.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from mmq.convert.checkpoint import Checkpoint
from mmq.convert.hub_source import read_small
from mmq.convert.modules import Module
from mmq.convert.safetensors_header import TensorInfo
from mmq.convert.stream import Bytes, SourceReader
from mmq.convert.work import SOURCE
from mmq.errors import BadInputError
from mmq.quantize.floats import to_float32

_FLOATS = ("BF16", "F16", "F32")


def norms_digest(source: Checkpoint, modules: Mapping[str, Module]) -> str | None:
    """SHA-256 over names and F32 values of the language model's norms.

    None of a header manifest. On the Hub, shards that are not here are read by ranges.
    """
    if source.root is None:
        return None
    norms = {
        name: module.weight for name, module in sorted(modules.items())
        if module.role.component == "norms" and module.weight is not None
        and module.weight.dtype in _FLOATS
    }  # fmt: skip
    digest = hashlib.sha256()
    for (name, tensor), raw in zip(norms.items(), _contents(source, norms.values()), strict=True):
        digest.update(name.encode() + to_float32(raw, tensor.dtype).astype("<f4").tobytes())
    return digest.hexdigest()


def _contents(source: Checkpoint, tensors: Iterable[TensorInfo]) -> Iterator[Bytes]:
    """Small tensors' bytes, in order."""
    tensors = list(tensors)
    here = [t for t in tensors if source.shards[t.shard].path.is_file()]
    if source.hub is not None and len(here) < len(tensors):
        yield from read_small(source.hub, tensors)
        return
    reader = SourceReader({SOURCE: {n: s.path for n, s in source.shards.items()}})
    try:
        for tensor in tensors:
            yield reader.whole(tensor)
    finally:
        reader.close()


def check_model(calibration: Any, norms: str | None, path: str) -> None:
    """Refuse a file that says it was made from another model; files that say nothing pass.

    Args:
        calibration: what the file tells about where it comes from.
        norms: the source's, None where they cannot be read.

    Raises:
        BadInputError
    """
    model = calibration.get("model") if isinstance(calibration, Mapping) else None
    recorded = model.get("norms_sha256") if isinstance(model, Mapping) else None
    if recorded is not None and norms is not None and recorded != norms:
        raise BadInputError(
            "calibration-other-model", f"{path} was made from another model: its norms differ",
            where=path, got=recorded, expected=norms,
            hint="mmq calibrate SRC -o FILE --text TEXT",
        )  # fmt: skip


def provenance(calibration: Any, sha256: str) -> dict[str, Any]:
    """What manifest and report keep of a file: its hash, and what it tells of its making."""
    told = calibration if isinstance(calibration, Mapping) else {}
    kept = {k: told[k] for k in ("observer", "percentile", "kv_format", "unreached_experts")
            if told.get(k) is not None}  # fmt: skip
    runs = told.get("runs")
    sound = [r for r in runs if isinstance(r, Mapping)] if isinstance(runs, list) else []
    texts: dict[str, Any] = {}
    for run in sound:
        convention = run.get("convention")
        hashes = convention.get("text_sha256") if isinstance(convention, Mapping) else None
        texts |= hashes if isinstance(hashes, Mapping) else {}
    counts = [run.get("tokens") for run in sound]
    tokens = sum(n for n in counts if type(n) is int)
    if sound:
        kept |= {"tokens": tokens, "tokens_sha256": [r.get("tokens_sha256") for r in sound],
                 "text_sha256": texts}  # fmt: skip
    return {"sha256": sha256, **kept}

"""What a repository holds of the model that was there before: it must not speak for the new one.

removed   names that mmq writes (reports, recipe, scores, the quantisation's second file),
          shards that the old index names or an earlier attempt left,
          files of the old mmq-manifest.json that nobody has changed since
told of   other weights, which mmq did not put there
kept      everything else: an author's texts, .gitattributes, README.md
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from mmq.convert.checkpoint import HF_QUANT_CONFIG_NAME, INDEX_NAME
from mmq.convert.relayout import MANIFEST_NAME
from mmq.publish.eval_results import EVAL_NAME
from mmq.publish.folder import CONVERT_NAME, VERIFY_NAME
from mmq.publish.hub import Hub, RemoteFile, RepoState
from mmq.publish.recipe import RECIPE_NAME

#: True of one model alone, so never left to another.
OWNED = (
    CONVERT_NAME, VERIFY_NAME, MANIFEST_NAME, RECIPE_NAME, EVAL_NAME, HF_QUANT_CONFIG_NAME
)  # fmt: skip
#: The repository's own, whoever wrote them.
_NEVER = frozenset({".gitattributes", ".gitignore"})
_SHARD_NAME = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".ckpt", ".h5", ".msgpack", ".onnx")
#: An index or manifest larger than this is none of mmq's.
_MOST_BYTES = 100_000_000


class Leftovers(NamedTuple):
    """Names, sorted: files to delete, and weights that stay beside the new model."""

    removed: tuple[str, ...]
    foreign: tuple[str, ...]


def leftovers(hub: Hub, state: RepoState, names: Collection[str]) -> Leftovers:
    """What is there and will not be written anew.

    Args:
        names: the files that the repository is to have.
    """
    old = {n: f for n, f in state.files.items() if n not in names and n not in _NEVER}
    found = {name for name in old if name in OWNED or _SHARD_NAME.fullmatch(name)}
    found |= {name for name in _indexed(hub, state) if name in old}
    found |= {name for name, sha256 in _recorded(hub, state) if name in old
              and _digest(hub, state, old[name]) == sha256}  # fmt: skip
    foreign = [name for name in old if name not in found and name.endswith(_WEIGHTS)]
    return Leftovers(tuple(sorted(found)), tuple(sorted(foreign)))


def _indexed(hub: Hub, state: RepoState) -> Iterator[str]:
    """Weight files that the old index names; it is somebody's text, and may name anything."""
    weight_map = _json(hub, state, INDEX_NAME).get("weight_map")
    for name in set(map(str, weight_map.values())) if isinstance(weight_map, dict) else ():
        if name.endswith(".safetensors") and ".." not in PurePosixPath(name).parts:
            yield name


def _recorded(hub: Hub, state: RepoState) -> Iterator[tuple[str, str]]:
    """(name, SHA-256) of the files of the old manifest."""
    files = _json(hub, state, MANIFEST_NAME).get("files")
    for entry in files if isinstance(files, list) else ():
        fields = entry if isinstance(entry, dict) else {}
        name, sha256 = fields.get("name"), fields.get("sha256")
        if isinstance(name, str) and isinstance(sha256, str):
            yield name, sha256


def _json(hub: Hub, state: RepoState, name: str) -> Mapping[str, Any]:
    if name not in state.files or state.files[name].bytes > _MOST_BYTES:
        return {}
    try:
        value = json.loads(hub.read(name, state.at))
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _digest(hub: Hub, state: RepoState, file: RemoteFile) -> str:
    if file.sha256 is not None:
        return file.sha256
    return hashlib.sha256(hub.read(file.name, state.at)).hexdigest()

"""Scalars that a change of NVFP4 layout cannot recompute exactly.

modelopt stores s2, minimax stores 1/s2. fl(1/fl(1/s2)) differs from s2 for 14 % of all values, so
the manifest of a conversion records the exact other side where the double reciprocal is inexact.
A conversion back takes it from there, and so restores the first file's bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmq.convert.checkpoint import Checkpoint, read_json_object

MANIFEST_NAME = "mmq-manifest.json"
#: Key in the manifest: name of the tensor in the *other* layout → its F32 value as hex.
STORED_KEY = "other_layout_scalars"

StoredScalars = Mapping[str, float]


def read_stored_scalars(source: Checkpoint) -> StoredScalars:
    """The exact scalars of the layout the source was, or could have been, made from."""
    if source.root is None or not (source.root / MANIFEST_NAME).is_file():
        return {}
    stored: Any = read_json_object(source.root / MANIFEST_NAME).get(STORED_KEY, {})
    if not isinstance(stored, dict):
        return {}
    return {str(name): float.fromhex(str(value)) for name, value in stored.items()}

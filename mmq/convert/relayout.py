"""Scalars that a change of NVFP4 layout cannot recompute exactly.

modelopt stores s2, minimax stores 1/s2. fl(1/fl(1/s2)) differs from s2 for 14 % of all values, so
the manifest of a conversion records the exact other side where the double reciprocal is inexact.
A conversion back takes it from there, and so restores the first file's bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmq.convert.checkpoint import Checkpoint, read_json_object
from mmq.errors import BadInputError

MANIFEST_NAME = "mmq-manifest.json"
#: Key in the manifest: name of the tensor in the *other* layout → its F32 value as hex.
STORED_KEY = "other_layout_scalars"
#: Key in the manifest: the vendor's quantization_config, which the modelopt layout has no room for.
VENDOR_KEY = "vendor_quantization_config"

StoredScalars = Mapping[str, float]


def read_stored_scalars(source: Checkpoint) -> StoredScalars:
    """The exact scalars of the layout the source was, or could have been, made from."""
    stored = _manifest(source).get(STORED_KEY, {})
    if not isinstance(stored, dict):
        return {}
    try:
        return {str(name): float.fromhex(str(value)) for name, value in stored.items()}
    except (ValueError, OverflowError):
        raise BadInputError(
            "manifest-invalid", f"{STORED_KEY} in {MANIFEST_NAME} holds what is no float",
            where=MANIFEST_NAME, hint=f"without {MANIFEST_NAME}, scales are reciprocals, 1 ulp off",
        ) from None  # fmt: skip


def vendor_block(source: Checkpoint) -> Mapping[str, Any] | None:
    """The vendor's quantization_config: the source's own, or what its manifest kept of it."""
    for block in (source.config.get("quantization_config"), _manifest(source).get(VENDOR_KEY)):
        if isinstance(block, dict) and block.get("quant_method") == "mxfp8":
            return block
    return None


def _manifest(source: Checkpoint) -> Mapping[str, Any]:
    if source.root is None or not (source.root / MANIFEST_NAME).is_file():
        return {}
    return read_json_object(source.root / MANIFEST_NAME)

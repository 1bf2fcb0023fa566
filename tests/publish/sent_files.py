"""What the tests of sending share: what was sent, what is there, and an old model."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from m3_source import INDEX

REPO = "org/model-NVFP4"
#: What the good source's card lacks; its licence is `other`.
CARD_OPTIONS = ("--base-model", "MiniMaxAI/MiniMax-M3-MXFP8", "--license-name", "minimax",
                "--license-link", "LICENSE")  # fmt: skip
COMMIT = r"POST /api/models/org/model-NVFP4/commit/"
PUT = r"^PUT /lfs/"


def shards_of(output: Path) -> list[str]:
    return sorted(p.name for p in output.glob("model-*.safetensors"))


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def is_model(files) -> bool:
    return INDEX in files or "config.json" in files or "README.md" in files


def old_model(hub):
    hub.add(
        REPO,
        {
            "model-00001-of-00002.safetensors": b"old 1",
            "model-00002-of-00002.safetensors": b"old 2",
            "other.safetensors": b"the author's",
            INDEX: json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors",
                                              "b": "model-00002-of-00002.safetensors"}}).encode(),
            "config.json": b"{}",
        },
    )  # fmt: skip

"""Files that `-o` names: a report may replace a report, never a file of a model."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path
from typing import overload

from mmq.commands.paths import optional_path
from mmq.errors import RefusedError

#: What checkpoints consist of, and what says how they came about.
_MODEL_FILES = (
    "*.safetensors", "*.safetensors.index.json", "*.bin", "*.pt", "*.pth", "*.gguf", "*.model",
    "*.jinja", "*.py", "*config.json", "tokenizer*", "vocab.*", "merges.txt", "added_tokens.json",
    "special_tokens_map.json", "README*", "LICENSE*", "NOTICE*", "mmq-manifest.json",
    "mmq-convert.json",
)  # fmt: skip


@overload
def output_file(path: str) -> Path: ...
@overload
def output_file(path: None) -> None: ...
def output_file(path: str | None) -> Path | None:
    """The file that `-o` names, which may be there already if it is no model's.

    Raises:
        RefusedError: it is one.
    """
    target = optional_path(path)
    if target is None or not target.exists():
        return target
    if any(fnmatchcase(target.name, pattern) for pattern in _MODEL_FILES):
        raise RefusedError(
            "output-is-model-file", f"-o would replace {target.name}, which belongs to a model",
            where=str(target), hint="-o FILE with a name that is free",
        )  # fmt: skip
    return target

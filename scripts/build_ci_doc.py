"""Put the inputs and outputs that action.yml declares into docs/ci.md.

python scripts/build_ci_doc.py
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml
from page_blocks import ROOT, filled

TARGET = ROOT / "docs" / "ci.md"
ACTION = ROOT / "action.yml"


def inputs_table(inputs: Mapping[str, Mapping[str, Any]]) -> str:
    rows = [
        f"| `{name}` | {_default(declared)} | {declared['description']} |"
        for name, declared in inputs.items()
    ]
    return "\n".join(["| input | default | |", "|---|---|---|", *rows])


def outputs_table(outputs: Mapping[str, Mapping[str, Any]]) -> str:
    rows = [f"| `{name}` | {declared['description']} |" for name, declared in outputs.items()]
    return "\n".join(["| output | |", "|---|---|", *rows])


def _default(declared: Mapping[str, Any]) -> str:
    if declared.get("required"):
        return "required"
    return f"`{declared['default']}`" if declared["default"] else ""


def document() -> str:
    """The page, with its tables as action.yml has them now."""
    action = yaml.safe_load(ACTION.read_text("utf-8"))
    text = filled(TARGET.read_text("utf-8"), "inputs", inputs_table(action["inputs"]))
    return filled(text, "outputs", outputs_table(action["outputs"]))


if __name__ == "__main__":
    TARGET.write_text(document(), "utf-8")

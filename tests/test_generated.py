"""Generated files are what their generators make of the code today."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]


def load(script: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(script, ROOT / "scripts" / f"{script}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[script] = module
    spec.loader.exec_module(module)
    return module


def test_report_schema_is_current() -> None:
    script = load("build_schema")
    assert json.loads(script.TARGET.read_text("utf-8")) == script.schema()


def test_errors_page_is_current() -> None:
    script = load("build_errors_doc")
    assert script.TARGET.read_text("utf-8") == script.document()

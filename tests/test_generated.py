"""Generated files are what their generators make of the code today."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import click
import pytest

from mmq.cli import cli

ROOT = Path(__file__).parents[1]
# scripts import each other
sys.path.append(str(ROOT / "scripts"))


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


def test_ids_that_no_call_spells_out_are_made() -> None:
    """Those that the errors page lists by hand: how runs end, and what gates say."""
    from test_invocation import ENDINGS

    from mmq.verify.gates import GateResult, gate_findings

    computed = load("build_errors_doc").COMPUTED
    stopped = {id: f"exit {code}" for _, code, id in ENDINGS if code > 7}
    results = [
        GateResult(gate="top1", value=0.9, se=0.1, target=0.95, fail=0.9, status=status)
        for status in ("pass", "warn", "inconclusive", "fail")
    ]
    gates = {f.id: f.severity for f in gate_findings(results, "out")}
    assert {id: what for id, (what, _) in computed.items()} == {**stopped, **gates}


def test_ci_page_is_current() -> None:
    script = load("build_ci_doc")
    assert script.TARGET.read_text("utf-8") == script.document()


def test_commands_page_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    script = load("build_cli_doc")
    for columns in ("40", "200"):
        monkeypatch.setenv("COLUMNS", columns)
        assert script.TARGET.read_text("utf-8") == script.document()


def test_commands_page_has_every_word() -> None:
    page = load("build_cli_doc").TARGET.read_text("utf-8")
    for name, command in cli.commands.items():
        section = page.partition(f"## mmq {name}\n")[2].partition("\n## ")[0]
        for parameter in command.params:
            if isinstance(parameter, click.Argument):
                assert f"| `{parameter.name.upper()}` |" in section
            elif parameter.expose_value:
                assert f"`{parameter.opts[0]}" in section
    assert "\b" not in page

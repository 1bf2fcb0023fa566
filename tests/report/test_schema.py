"""Reports as written obey the committed JSON Schema, and the schema is strict."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
from hostile import good
from in_process import run_mmq

import mmq.report

SCHEMA = json.loads((Path(mmq.report.__file__).parent / "data" / "report.schema.json").read_text())


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    root = tmp_path_factory.mktemp("reports")
    source, out = good().write(root / "src"), root / "out"
    assert run_mmq("convert", source, out, "--jobs", "1")[0] == 0
    assert run_mmq("verify", out, "--against", source)[0] == 0
    return {n: json.loads((out / f"mmq-{n}.json").read_bytes()) for n in ("convert", "verify")}


@pytest.mark.parametrize("kind", ["convert", "verify"])
def test_report_obeys_the_schema(reports, kind):
    assert reports[kind]["kind"] == kind
    jsonschema.validate(reports[kind], SCHEMA)


@pytest.mark.parametrize(
    "damage",
    [
        lambda r: r.pop("files"),
        lambda r: r.update(kind="other"),
        lambda r: r.update(extra=1),
        lambda r: r["files"][0].update(bytes="many"),
        lambda r: r["findings"].append({"id": "x", "severity": "loud", "message": ""}),
    ],
    ids=["missing", "kind", "extra", "type", "severity"],
)
def test_schema_refuses(reports, damage):
    report = json.loads(json.dumps(reports["convert"]))
    damage(report)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(report, SCHEMA)

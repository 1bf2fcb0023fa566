"""Published reports: no folders of the machine, sound JSON in UTF-8, the report that was judged."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from card_example import COMMIT, facts, logits, manifest

from mmq.publish.public_report import public_reports
from mmq.report.load import parse_report
from mmq.report.schema import Endpoint, FindingEntry

CONVERT, VERIFY = "mmq-convert.json", "mmq-verify.json"
HOME = "/home/jo doe"


def endpoint(location: str, repo: str = "") -> Endpoint:
    return Endpoint(location=location, tensors=1, shards=1, payload_bytes=1, repo=repo)


def folder(*, options: dict | None = None, hub: tuple[str, ...] = (), **report):
    """An output whose convert report has these fields."""
    value = manifest(**(options or {}))
    value["hub"] = {name: {"repo": "a/b"} for name in hub}
    base = facts(manifest_value=value).folder
    changes = {"options": value["options"], **report}
    return replace(base, convert=base.convert.model_copy(update=changes))


def published(made, name: str = CONVERT) -> dict:
    text = public_reports(made)[name].decode("utf-8")

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    value = json.loads(text, parse_constant=refuse)
    parse_report(value, name)
    return value


def told(message: str, **values) -> str:
    finding = FindingEntry(id="x", severity="note", message=message)
    return published(folder(findings=[finding], **values))["findings"][0]["message"]


@pytest.mark.parametrize(
    ("location", "shown"),
    [
        ("/data/client/src", "src"), (f"{HOME}/client/src", "src"), ("work/client/src", "src"),
        ("./src", "src"), ("../client/src", "src"), ("~/client/src", "src"), ("src", "src"),
        (".", "."), ("/data/client/src/", "src"), ("client/src", "src"),
    ],
)  # fmt: skip
def test_a_location_is_its_last_part(location, shown):
    made = folder(source=endpoint(location))
    assert published(made)["source"]["location"] == shown


@pytest.mark.parametrize("location", ["org/name", "org/name@main", f"hf://org/name@{COMMIT}"])
def test_a_repository_is_named_in_full(location):
    made = folder(source=endpoint(location, repo="org/name"))
    assert published(made)["source"]["location"] == location


@pytest.mark.parametrize(
    ("option", "value", "shown"),
    [
        ("kv_scales", f"{HOME}/kv.json", "kv.json"), ("kv_scales", "kv/mine.json", "mine.json"),
        ("importance", "/a/b.safetensors", "b.safetensors"), ("kv_scales", "analytic", "analytic"),
        ("experts_from", "work/secretclient/src", "src"), ("input_scales", "unit", "unit"),
        ("experts_from", "secretclient/src", "src"),
    ],
)  # fmt: skip
def test_an_options_path_is_its_last_part(option, value, shown):
    assert published(folder(options={option: value}))["options"][option] == shown


def test_a_path_that_only_the_report_has():
    value = published(folder(options={"experts_from": "work/secretclient/src"}))
    assert value["options"]["experts_from"] == "src"
    made = facts().folder
    options = {"experts_from": "work/secretclient/src"}
    made = replace(made, convert=made.convert.model_copy(update={"options": options}))
    assert published(made)["options"]["experts_from"] == "src"


def test_an_options_repository_is_named_in_full():
    made = folder(options={"experts_from": "MiniMaxAI/M3@main"}, hub=("experts_from",))
    assert published(made)["options"]["experts_from"] == "MiniMaxAI/M3@main"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("scales from /home/jo/kv.json were used", "scales from kv.json were used"),
        ("'/a/b/c.json' and \"/a/b/d.json\", /a/b/e.json.", "'c.json' and \"d.json\", e.json."),
        ("see ~/x/y.json (../z/w.json)", "see y.json (w.json)"),
        ("file:///a/b/c.json", "c.json"),
        ("in ./out/a.json: 3 of /x/y/z", "in a.json: 3 of z"),
        ("0.5 GB/s, and/or 1/2 of model/layers", "0.5 GB/s, and/or 1/2 of model/layers"),
        ("https://huggingface.co/org/name/tree", "https://huggingface.co/org/name/tree"),
        ("dspark/config.json is there", "dspark/config.json is there"),
        ("a.b.c: 3 → 4 / 5", "a.b.c: 3 → 4 / 5"),
        ("", ""),
    ],
)
def test_paths_inside_sentences(text, shown):
    assert told(text) == shown


def test_known_paths_with_spaces_and_relative_ones_inside_sentences():
    values = {
        "source": endpoint(f"{HOME}/client/src"),
        "options": {"kv_scales": f"{HOME}/kv scales.json", "experts_from": "work/secret/src"},
    }
    text = f"from {HOME}/kv scales.json, {HOME}/client/src/a.json, work/secret/src/b.json, {HOME}/x"
    assert told(text, **values) == "from kv scales.json, a.json, b.json, x"


def test_a_folder_inside_another_one():
    """The longer one is the whole path, and a name that only begins alike is another one."""
    values = {"source": endpoint("/d ata/src"), "output": endpoint("/d ata/src/a b/out put")}
    assert told("at /d ata/src/a b/out put, /d ata/src", **values) == "at out put, src"
    assert told("at /data/src-old/x", source=endpoint("/data/src")) == "at x"


def test_the_home_and_the_working_folder_are_known(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", f"{HOME}/me")
    assert told(f"{HOME}/me/a/b and {Path.cwd()}/c d") == "b and c d"


def test_paths_stand_in_every_field_and_key():
    finding = FindingEntry(id="x", severity="note", message="m", where=f"{HOME}/a b.json",
                           got="/x/y z.json", expected="one of /x/y/a, /x/y/b")  # fmt: skip
    texts = {"text_sha256": {"/t/x/en.txt": "a", "/u/x/en.txt": "b"}}
    edits = ["read from /home/jo/kv.json"]
    two = FindingEntry(id="y", severity="note", message="m", got="/x/y/a and /x/y/b")
    made = folder(findings=[finding, two], config_edits=edits, calibration={"kv_scales": texts})
    value = published(made)
    assert value["findings"][0]["where"] == "a b.json"
    assert value["findings"][0]["got"] == "y z.json"
    assert value["findings"][0]["expected"] == "one of a, b"
    assert value["findings"][1]["got"] == "a and b"
    assert value["config_edits"] == ["read from kv.json"]
    texts = value["calibration"]["kv_scales"]["text_sha256"]
    assert texts == {"en.txt": "a", "en.txt (2)": "b"}


def test_nothing_measured_changes():
    made = facts().folder
    value, before = published(made, VERIFY), made.verify.model_dump()
    for key in ("logits", "levels", "metrics", "files", "verdict"):
        assert value[key] == before[key], key
    assert value["against"]["location"] == "src"


def broken(text: str):
    made = facts().folder
    verify = made.verify.model_copy(
        update={
            "findings": [FindingEntry(id="x", severity="note", message=text)],
            "metrics": {"a": float("nan"), "b": float("inf"), "c": 1.5, text: 1.0},
            "logits": logits().model_copy(update={"kld_curve": [0.0, float("nan")]}),
        }
    )
    return replace(made, verify=verify)


def test_what_json_and_utf8_lack_becomes_what_they_have():
    value = published(broken("bad \ud800 name"), VERIFY)
    assert value["findings"][0]["message"] == "bad \ufffd name"
    assert value["metrics"] == {"a": "nan", "b": "inf", "c": 1.5, "bad \ufffd name": 1.0}
    assert value["logits"]["kld_curve"] == [0.0, "nan"]


def test_such_reports_are_published(publish, output, hub):
    path = output / VERIFY
    report = json.loads(path.read_bytes())
    report["findings"].append({"id": "x", "severity": "note", "message": "bad \ud800 name"})
    report["metrics"]["z"] = float("nan")
    path.write_text(json.dumps(report), encoding="utf-8")
    assert publish().code == 0
    data = hub.files("org/model-NVFP4")[VERIFY]
    assert b"NaN" not in data
    json.loads(data.decode("utf-8"))
    hub.files("org/model-NVFP4")["README.md"].decode("utf-8")


def test_no_path_of_this_machine_is_published(publish, output, hub):
    path = output / CONVERT
    report = json.loads(path.read_bytes())
    report["findings"].append({"id": "x", "severity": "note", "where": "/home/jo/kv.json",
                               "message": "scales from /home/jo/kv.json were used"})  # fmt: skip
    path.write_text(json.dumps(report), encoding="utf-8")
    assert publish().code == 0
    files = hub.files("org/model-NVFP4")
    for name in (CONVERT, VERIFY, "README.md"):
        text = files[name].decode("utf-8")
        assert str(output.parent) not in text
        assert "/home/jo" not in text
        assert str(Path.home()) + "/" not in text

"""What speaks of the old model goes with it; what is somebody's own stays."""

from __future__ import annotations

import hashlib
import json

import pytest
from m3_source import INDEX
from sent_files import REPO, old_model


def manifest_of(files: dict[str, bytes]) -> bytes:
    entries = [
        {"name": n, "bytes": len(d), "sha256": hashlib.sha256(d).hexdigest()}
        for n, d in files.items()
    ]
    return json.dumps({"format": "mmq", "files": entries}).encode()


def test_claims_of_the_old_model_go(publish, output, hub):
    old_model(hub)
    stale = {"mmq-verify.json": b'{"verdict": "pass"}', ".eval_results/mmq.yaml": b"figures"}
    hub.add(REPO, stale)
    (output / "mmq-verify.json").unlink()
    outcome = publish("--allow-unverified")
    assert outcome.code == 0, outcome.events
    assert not {*stale} & {*hub.files(REPO)}
    assert {*stale} <= {*outcome.of("result")[0]["removed"]}


@pytest.mark.parametrize("name", ["vllm-recipe.yaml", "hf_quant_config.json"])
def test_second_files_of_another_layout_go(publish, output, hub, monkeypatch, name):
    # as if this layout had none
    monkeypatch.setattr("mmq.publish.items.has_recipe", lambda *_: False)
    old_model(hub)
    hub.add(REPO, {name: b"{}"})
    if name == "hf_quant_config.json":
        (output / name).unlink()
        manifest = json.loads((output / "mmq-manifest.json").read_bytes())
        manifest["files"] = [f for f in manifest["files"] if f["name"] != name]
        (output / "mmq-manifest.json").write_text(json.dumps(manifest))
    outcome = publish("--allow-unverified")
    assert outcome.code == 0, outcome.events
    assert name not in hub.files(REPO)


def test_files_of_the_old_manifest_go_unless_somebody_changed_them(publish, hub):
    old_model(hub)
    files = {"dspark/old.safetensors": b"w", "old_vocab.json": b"[1]", "guide.md": b"as it came"}
    own = {".gitattributes": hub.files(REPO)[".gitattributes"], ".gitignore": b"*.tmp\n",
           "README.md": b"---\nlicense: other\n---\n# the author's\n"}  # fmt: skip
    hub.add(REPO, own)
    named = files | own
    hub.add(REPO, files | {"guide.md": b"the author's", "mmq-manifest.json": manifest_of(named)})
    assert publish().code == 0
    found = hub.files(REPO)
    assert not {"dspark/old.safetensors", "old_vocab.json"} & {*found}
    assert found["guide.md"] == b"the author's"
    assert {*own} <= {*found}


def test_an_index_decides_about_weights_alone(publish, hub):
    weight_map = {"a": "LICENSE-mine", "b": ".gitattributes", "c": "odd-name.safetensors",
                  "d": "../x.safetensors", "e": "absent.safetensors"}  # fmt: skip
    hub.add(REPO, {
        INDEX: json.dumps({"weight_map": weight_map}).encode(), "config.json": b"{}",
        "LICENSE-mine": b"author", "odd-name.safetensors": b"old weights",
    })  # fmt: skip
    outcome = publish()
    assert outcome.code == 0, outcome.events
    assert outcome.of("result")[0]["removed"] == ["odd-name.safetensors"]
    found = hub.files(REPO)
    assert found["LICENSE-mine"] == b"author"
    assert ".gitattributes" in found


@pytest.mark.parametrize("text", [b"\xff", b"[]", b'{"weight_map": []}', b"[" * 100_000])
def test_an_index_that_cannot_be_read_decides_nothing(publish, hub, text):
    hub.add(REPO, {INDEX: text, "mmq-manifest.json": text, "odd.safetensors": b"w"})
    outcome = publish()
    assert outcome.code == 0, outcome.events
    assert outcome.of("result")[0]["removed"] == []


def test_weights_of_somebody_else_are_told_of(publish, hub):
    old_model(hub)
    hub.add(REPO, {"pytorch_model.bin": b"theirs"})
    outcome = publish("--dry-run")
    (told,) = [e["message"] for e in outcome.of("warning") if "other weights" in e["message"]]
    assert "other.safetensors, pytorch_model.bin" in told
    assert publish().code == 0
    assert hub.files(REPO)["pytorch_model.bin"] == b"theirs"

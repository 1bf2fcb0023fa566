"""`mmq verify` and `mmq calibrate` with locations on the Hub: by headers, by a copy, or shard by
shard (test_hub_verify_rolling.py has more of that); never less than was asked for."""

from __future__ import annotations

import json

import huggingface_hub.constants as constants
import pytest
from hub_runs import REPO, cdn_bytes, refused
from in_process import run_mmq
from m3_source import INDEX, hashes

from mmq.hub import stand_in

OUT = "org/converted"


@pytest.fixture
def converted_repo(hub, good_output):
    """The good output on the Hub; its commit."""
    return hub.add_folder(OUT, good_output.out)


def verified(*arguments):
    code, events, _ = run_mmq("verify", *arguments)
    return code, events[-1], events


def test_structure_by_headers(hub, converted_repo, good_output, monkeypatch):
    monkeypatch.setattr(stand_in, "FIRST_READ", 32 << 10)
    code, answer, events = verified(OUT)
    assert (code, answer["verdict"]) == (0, "pass"), answer["findings"]
    (level,) = answer["levels"]
    assert any("only headers of OUT were read" in text for text in level["skipped"])
    shards = [n for n in hub.files(OUT) if n.endswith(".safetensors") and "/" not in n]
    assert len(hub.log.of("GET /cdn/")) == len(shards)
    assert any("-o FILE" in e["message"] for e in events if e["event"] == "note")


def test_structure_against_the_hub(hub, repo, converted_repo, tmp_path):
    code, answer, _ = verified(
        OUT, "--against", REPO, "--level", "structure", "-o", tmp_path / "report.json"
    )
    assert (code, answer["verdict"]) == (0, "pass"), answer["findings"]
    assert json.loads((tmp_path / "report.json").read_bytes())["against"]["location"] == REPO


@pytest.mark.parametrize("name", ["config.json", "model-00001-of-00001.safetensors", "LICENSE"])
def test_what_is_missing_there_is_found(hub, converted_repo, good_output, name):
    path = good_output.out / name
    if not path.exists():
        (path,) = good_output.out.glob("model-*.safetensors")
    tree = hub.store.repos[OUT].commits[converted_repo]
    hub.store.repos[OUT].commit("main", {n: f for n, f in tree.items() if n != path.name})
    code, answer, _ = verified(OUT)
    assert code == 3 and any(path.name in str(f) for f in answer["findings"])


def test_weights_are_never_skipped_in_silence(hub, repo, good_output, converted_repo, tmp_path):
    for arguments in ((OUT, "--against", REPO), (OUT, "--against", REPO, "--level", "weights")):
        code, id, error = refused("verify", *arguments)
        assert (code, id) == (2, "hub-needs-files")
        assert "--download-dir" in error["hint"] and "hf download" in error["hint"]
    code, answer, _ = verified(good_output.out, "--against", REPO, "-o", tmp_path / "report.json")
    assert (code, answer["levels"][1]["level"]) == (0, "weights")
    assert answer["metrics"]["compared_tensors"] > 100
    assert refused("verify", OUT, "--level", "weights")[:2] == (2, "level-needs-source")


def test_weights_of_a_copy(hub, repo, converted_repo, hub_source, tmp_path, monkeypatch):
    copies = tmp_path / "copies"
    options = ("--against", REPO, "--download-dir", copies, "-o", tmp_path / "report.json")
    code, answer, events = verified(OUT, *options)
    assert (code, answer["verdict"]) == (0, "pass"), answer["findings"]
    assert [level["level"] for level in answer["levels"]] == ["structure", "weights"]
    assert answer["metrics"]["compared_tensors"] > 100
    # OUT's copy stays, SRC's shards do not
    copy = copies / "org--converted" / converted_repo
    assert any(str(copy) in e["message"] for e in events if e["event"] == "note")
    assert hashes(copy, leave_out=()).keys() == hub.files(OUT).keys()
    assert [p.name for p in copies.iterdir()] == ["org--converted"]
    # unless they are told to
    assert verified(OUT, *options, "--keep-downloads")[0] == 0
    assert hashes(copies / "org--name" / repo, leave_out=()) == hashes(hub_source, leave_out=())
    assert not (copy / "mmq-verify.json").exists()
    hub.log.clear()
    monkeypatch.setattr(stand_in, "FIRST_READ", 16 << 10)
    assert verified(OUT, *options)[0] == 0
    assert cdn_bytes(hub) == 3 * (16 << 10)  # headers
    # and it serves the next conversion
    hub.log.clear()
    code, events, _ = run_mmq("convert", REPO, tmp_path / "out", "--download-dir", copies)
    assert code == 0, events
    assert cdn_bytes(hub) == 3 * (16 << 10)
    assert (copies / "org--name" / repo / INDEX).exists()


def test_a_changed_byte_on_the_hub_fails(hub, repo, converted_repo, good_output, tmp_path):
    (path,) = good_output.out.glob("model-*.safetensors")
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    hub.add(OUT, {path.name: bytes(raw)})
    code, answer, _ = verified(OUT, "--against", REPO, "--download-dir", tmp_path / "copies")
    assert (code, answer["verdict"]) == (3, "fail")


def test_logits_write_beside_the_report(hub, repo, converted_repo, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("a")
    code, id, _ = refused(
        "verify", OUT, "--against", REPO, "--level", "logits", "--text", text,
        "--download-dir", tmp_path,
    )  # fmt: skip
    assert (code, id) == (2, "hub-needs-output")


def test_nothing_of_that_name(hub):
    assert refused("verify", "org/nothing")[:2] == (4, "hub-repo-not-found")


def test_calibrate_needs_the_files(hub, repo, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("a")
    arguments = ("calibrate", REPO, "-o", tmp_path / "scales.json", "--text", text)
    assert refused(*arguments)[:2] == (2, "hub-needs-files")


def test_offline_verify(hub, repo, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert refused("verify", REPO)[:2] == (4, "hub-not-cached")

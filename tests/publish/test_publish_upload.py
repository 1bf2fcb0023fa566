"""Sending: what travels, in which order, and what a second run sends."""

from __future__ import annotations

import json

import pytest
from in_process import run_mmq
from m3_source import INDEX, read_folder
from sent_files import COMMIT, PUT, REPO, is_model, sha256, shards_of


def test_everything_the_manifest_names_arrives_and_nothing_else(publish, output, hub):
    outcome = publish()
    assert outcome.code == 0, outcome.events
    files = hub.files(REPO)
    manifest = json.loads((output / "mmq-manifest.json").read_bytes())
    named = {f["name"] for f in manifest["files"]}
    made = {"README.md", "mmq-manifest.json", "mmq-convert.json", "mmq-verify.json",
            "vllm-recipe.yaml", ".gitattributes"}  # fmt: skip
    assert set(files) == named | made
    for name in named - {"README.md"}:
        assert files[name] == (output / name).read_bytes(), name


def test_weights_first_index_then_card_last(publish, output, hub, monkeypatch):
    monkeypatch.setattr("mmq.publish.upload_plan.BATCH_FILES", 2)
    outcome = publish()
    *batches, last = outcome.of("result")[0]["batches"]
    weights = [item["name"] for batch in batches for item in batch]
    assert sorted(weights) == sorted([*shards_of(output), "dspark/model.safetensors"])
    assert all(len(batch) <= 2 for batch in batches)
    assert [item["name"] for item in last][-2:] == [INDEX, "README.md"]
    repo = hub.store.repos[REPO]
    trees = [repo.commits[commit] for _, commit, _ in hub.commits(REPO)]
    assert len(trees) == 1 + len(batches) + 1
    assert [is_model(tree) for tree in trees] == [False] * (len(trees) - 1) + [True]


def test_what_must_not_travel_stays(publish, output, hub):
    for name in ("x.tmp", "mmq.log", ".DS_Store", "model-00001-of-00009.safetensors.partial",
                 "mmq-verify-tokens.npy", ".mmq-verify/states.bin", ".env"):  # fmt: skip
        (output / name).parent.mkdir(exist_ok=True)
        (output / name).write_bytes(b"secret")
    assert publish().code == 0
    assert not [n for n, data in hub.files(REPO).items() if data == b"secret"]


def test_reports_name_no_folder_of_this_machine(publish, output, hub):
    path = output / "mmq-verify.json"
    report = json.loads(path.read_bytes())
    lay = report["against"]["location"]
    assert "/tmp/" in lay, "nothing to hide"
    report["findings"] = [
        {"id": "x", "severity": "note", "message": f"{lay}/config.json is odd", "where": f"{lay}/x"}
    ]
    path.write_text(json.dumps(report), encoding="utf-8")
    assert publish().code == 0
    for name in ("mmq-verify.json", "mmq-convert.json", "README.md", "vllm-recipe.yaml"):
        assert b"/tmp/" not in hub.files(REPO)[name], name


def test_the_next_run_sends_only_what_is_missing(publish, output, hub, monkeypatch):
    monkeypatch.setattr("mmq.publish.upload_plan.BATCH_FILES", 1)
    bad = shards_of(output)[1]
    fault = hub.fault(f"PUT /lfs/.*{sha256(output / bad)}", times=None, status=500)
    assert publish().code == 5
    assert fault.met
    arrived = [name for name in shards_of(output) if name in hub.files(REPO)]
    assert arrived == shards_of(output)[:1]
    hub.heal()
    hub.log.clear()
    assert publish().code == 0
    sent = "".join(r.path for r in hub.log.of(PUT))
    assert sha256(output / arrived[0]) not in sent
    assert sha256(output / bad) in sent
    assert not hub.log.of("repos/create")
    assert is_model(hub.files(REPO))


def test_contents_that_arrived_without_a_commit_are_not_sent_again(publish, output, hub):
    hub.fault(COMMIT, times=None, status=500)
    assert publish().code == 5
    assert hub.log.of(PUT)
    hub.heal()
    hub.log.clear()
    assert publish().code == 0
    assert not hub.log.of(PUT)


def test_a_second_run_sends_nothing(publish, hub):
    publish()
    before = hub.commits(REPO)
    hub.log.clear()
    outcome = publish()
    assert outcome.code == 0
    assert outcome.of("result")[0]["batches"] == []
    assert hub.commits(REPO) == before
    assert not hub.log.of("^(POST|PUT)")


def test_an_interrupted_run_says_how_to_go_on(publish, hub, monkeypatch):
    from mmq.publish.hub import Hub

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Hub, "upload", interrupt)
        outcome = publish()
    assert outcome.code == 130
    assert outcome.error["hint"].startswith("resume with: mmq publish ")
    assert not is_model(hub.files(REPO))
    assert publish().code == 0


@pytest.mark.parametrize("name", ["", "config.json"], ids=["weights", "last"])
def test_a_file_that_changes_under_way(publish, output, hub, monkeypatch, name):
    from mmq.publish.hub import Hub

    upload = Hub.upload

    def touch_one(self, additions, revision, *, pr):
        path = output / (name or additions[0].path_in_repo)
        path.write_bytes(path.read_bytes())
        upload(self, additions, revision, pr=pr)

    monkeypatch.setattr(Hub, "upload", touch_one)
    outcome = publish()
    assert (outcome.code, outcome.error["id"]) == (4, "publish-file-changed")
    assert outcome.error["where"] == name or not name
    assert not is_model(hub.files(REPO))


def test_a_fresh_download_verifies(publish, hub, good_folder, tmp_path):
    assert publish().code == 0
    folder = tmp_path / "download"
    for name, data in hub.files(REPO).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    (folder / "mmq-verify.json").unlink()
    code, events, _ = run_mmq("verify", folder, "--against", good_folder)
    assert code == 0, events
    assert read_folder(folder)

"""Sending: order, resume, faults of the network and of the Hub, and what is visible meanwhile."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from in_process import run_mmq
from m3_source import INDEX, read_folder

REPO = "org/model-NVFP4"
CARD_OPTIONS = ("--base-model", "org/base", "--license-name", "minimax", "--license-link",
                "LICENSE")  # fmt: skip
COMMIT = r"POST /api/models/org/model-NVFP4/commit/"
PUT = r"^PUT /lfs/"


def shards_of(output: Path) -> list[str]:
    return sorted(p.name for p in output.glob("model-*.safetensors"))


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def is_model(files) -> bool:
    return INDEX in files or "config.json" in files or "README.md" in files


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
    monkeypatch.setattr("mmq.publish.upload.BATCH_FILES", 2)
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


def test_429_is_waited_for_as_told_on_every_call(publish, hub, waits):
    for pattern in ("PUT /lfs/part", COMMIT, "GET /api/models/org/[^/]+/tree", "validate-yaml",
                    "repos/create", "preupload", "objects/batch", "models/org"):  # fmt: skip
        hub.fault(pattern, times=2, status=429, headers={"Retry-After": "1"})
    outcome = publish()
    assert outcome.code == 0, outcome.events
    assert INDEX in hub.files(REPO)
    assert len(waits) == 16
    # huggingface_hub adds a second where it waits itself
    assert set(waits) == {1.0, 2.0}
    told = [e["message"] for e in outcome.of("note") if "429" in e["message"]]
    assert len(told) == 16
    assert all("in 1 s, as it asks" in message for message in told)


@pytest.mark.parametrize(
    ("status", "headers", "wait"),
    [
        (429, {"RateLimit": '"api";r=0;t=7'}, 7.0),
        (503, {"RateLimit": '"api";r=400;t=250'}, 1.0),
        (503, {"Retry-After": "4"}, 4.0),
        (429, {"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}, 1.0),
        (500, {}, 1.0),
    ],
)
def test_how_the_hub_says_when_to_come_back(publish, hub, waits, status, headers, wait):
    hub.fault(COMMIT, status=status, headers=headers)
    assert publish().code == 0
    assert waits == [wait]


def test_the_wait_is_a_real_one(hub, output):
    hub.fault("validate-yaml", status=429, headers={"Retry-After": "1"})
    done = subprocess.run(
        [sys.executable, "-m", "mmq", "publish", output, REPO, *CARD_OPTIONS],
        env={**os.environ, **hub.environment}, capture_output=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, second, *_ = hub.log.of("validate-yaml")
    assert 1.0 <= second.at - first.at < 30


def test_a_wait_of_hours_is_left_to_the_next_run(publish, hub, waits):
    hub.fault(COMMIT, status=429, headers={"Retry-After": "7200"})
    outcome = publish()
    assert (outcome.code, outcome.error["id"]) == (5, "publish-rate-limit")
    assert "7,200 s" in outcome.error["message"]
    assert not waits


@pytest.mark.parametrize("pattern", [r"PUT /lfs/", COMMIT], ids=["upload", "commit"])
def test_tries_are_bounded(publish, hub, pattern, waits):
    hub.fault(pattern, times=None, status=503)
    outcome = publish()
    assert (outcome.code, outcome.error["id"]) == (5, "publish-failed")
    # five waits of one request; three more requests may be under way beside it
    assert 5 <= len(waits) <= 5 * 5
    assert max(waits) <= 32


def test_one_shard_that_fails_for_ever_leaves_no_model(publish, output, hub):
    bad = shards_of(output)[1]
    hub.fault(f"PUT /lfs/.*{sha256(output / bad)}", times=None, status=500)
    outcome = publish()
    assert (outcome.code, outcome.error["id"]) == (5, "publish-failed")
    assert bad in outcome.error["message"]
    assert "same command again" in outcome.error["hint"]
    assert not is_model(hub.files(REPO))
    assert not outcome.of("result")[0]["ok"]


def test_the_next_run_sends_only_what_is_missing(publish, output, hub, monkeypatch):
    monkeypatch.setattr("mmq.publish.upload.BATCH_FILES", 1)
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


@pytest.mark.parametrize("where", [PUT, "preupload", COMMIT], ids=["upload", "question", "commit"])
def test_a_cut_connection_is_taken_up_again(publish, output, hub, where):
    hub.fault(where, times=1, cut_after=100)
    outcome = publish()
    assert outcome.code == 0, outcome.events
    assert set(hub.files(REPO)) >= set(shards_of(output))


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


def test_an_unreachable_hub(publish, hub, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    outcome = publish()
    assert (outcome.code, outcome.error["id"]) == (5, "publish-unreachable")


def test_a_silent_hub_is_given_up_on(publish, hub, monkeypatch):
    monkeypatch.setattr("mmq.publish.hub.READ_TIMEOUT", 0.2)
    fault = hub.fault("GET /api/models/org/model-NVFP4$", times=1, delay=1.0)
    outcome = publish()
    assert outcome.code == 0, outcome.events
    assert fault.met == 2, "asked once more"


def test_a_wrong_digest_is_named_and_no_index_follows(publish, output, hub):
    bad = shards_of(output)[0]
    hub.fault(f"(PUT|POST) /lfs/(upload|complete)/{sha256(output / bad)}", corrupt=True)
    outcome = publish()
    assert (outcome.code, outcome.error["id"]) == (3, "publish-digest")
    assert outcome.error["where"] == bad
    assert not is_model(hub.files(REPO))


def test_a_file_that_a_gitignore_there_swallows_is_named(publish, output, hub):
    bad = shards_of(output)[0]
    hub.add(REPO, {".gitignore": f"{bad}\n".encode()})
    outcome = publish()
    assert (outcome.code, outcome.error["id"]) == (3, "publish-digest")
    assert not is_model(hub.files(REPO))


def test_a_damaged_side_file_takes_the_index_away_again(publish, output, hub):
    hub.add(REPO, {".gitignore": b"tokenizer.json\n"})
    outcome = publish()
    assert (outcome.code, outcome.error["where"]) == (3, "tokenizer.json")
    assert INDEX not in hub.files(REPO)


def test_a_file_that_changes_under_way(publish, output, hub, monkeypatch):
    from mmq.publish.hub import Hub

    upload = Hub.upload

    def touch_first(self, additions, revision, *, pr):
        path = output / additions[0].path_in_repo
        path.write_bytes(path.read_bytes())
        upload(self, additions, revision, pr=pr)

    monkeypatch.setattr(Hub, "upload", touch_first)
    outcome = publish()
    assert (outcome.code, outcome.error["id"]) == (4, "publish-file-changed")
    assert not is_model(hub.files(REPO))


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


def test_a_model_that_is_there_is_replaced_in_one_commit(publish, output, hub):
    old_model(hub)
    before = len(hub.commits(REPO))
    assert publish().code == 0
    assert len(hub.commits(REPO)) == before + 1
    files = hub.files(REPO)
    assert set(shards_of(output)) <= set(files)
    assert "model-00001-of-00002.safetensors" not in files
    assert files["other.safetensors"] == b"the author's"


def test_a_model_that_is_there_stays_whole_when_a_shard_fails(publish, output, hub):
    old_model(hub)
    before = hub.files(REPO)
    hub.fault(f"PUT /lfs/.*{sha256(output / shards_of(output)[1])}", times=None, status=500)
    assert publish().code == 5
    assert hub.files(REPO) == before


def test_shards_of_an_attempt_with_other_numbers_are_removed(publish, hub):
    hub.add(REPO, {"model-00001-of-00099.safetensors": b"left over"})
    assert publish().code == 0
    assert "model-00001-of-00099.safetensors" not in hub.files(REPO)


def test_a_pull_request_leaves_main_alone(publish, output, hub):
    old_model(hub)
    before = hub.files(REPO)
    outcome = publish("--create-pr")
    assert outcome.code == 0, outcome.events
    assert outcome.of("result")[0]["revision"] == "refs/pr/1"
    assert hub.files(REPO) == before
    proposed = hub.files(REPO, "refs/pr/1")
    assert set(shards_of(output)) <= set(proposed)
    assert INDEX in proposed


def test_a_pull_request_that_failed_was_never_opened(publish, output, hub):
    hub.add(REPO, {"x": b"y"})
    hub.fault(f"PUT /lfs/.*{sha256(output / shards_of(output)[1])}", times=None, status=500)
    assert publish("--create-pr").code == 5
    assert set(hub.store.repos[REPO].refs) == {"main"}
    hub.heal()
    assert publish("--create-pr").code == 0
    assert set(hub.store.repos[REPO].refs) == {"main", "refs/pr/1"}


def test_another_branch(publish, output, hub):
    hub.add(REPO, {"notes.txt": b"main"})
    assert publish("--revision", "v1").code == 0
    assert INDEX not in hub.files(REPO)
    assert INDEX in hub.files(REPO, "v1")
    assert publish("--revision", "v1").of("result")[0]["batches"] == []


def test_private(publish, hub):
    assert publish("--private").code == 0
    assert hub.store.repos[REPO].private
    assert publish("--private").code == 0


def test_private_is_not_ignored_for_a_public_repository(publish, hub):
    hub.add(REPO, {"x": b"y"})
    before = hub.files(REPO)
    outcome = publish("--private")
    assert (outcome.code, outcome.error["id"]) == (7, "publish-not-private")
    assert hub.files(REPO) == before


def test_a_long_tree_is_read_page_by_page(publish, hub):
    hub.page = 3
    assert publish().code == 0
    hub.log.clear()
    assert publish().of("result")[0]["batches"] == []
    assert len(hub.log.of("/tree/")) > 3


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

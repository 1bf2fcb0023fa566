"""Repositories that hold something already, branches, and private ones."""

from __future__ import annotations

from m3_source import INDEX
from sent_files import REPO, old_model, sha256, shards_of


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

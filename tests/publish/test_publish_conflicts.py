"""Others commit while a folder is sent, and answers are lost: nothing of anybody's is lost."""

from __future__ import annotations

import pytest
from m3_source import INDEX
from sent_files import COMMIT, PUT, REPO, is_model, old_model, shards_of

CARD = b"---\nlicense: mit\n---\n# The author's new text\n"


def edited(hub) -> None:
    hub.add(REPO, {"README.md": CARD})


@pytest.mark.parametrize("there", [False, True], ids=["new", "replaced"])
def test_a_card_that_is_edited_meanwhile_stays(publish, hub, there):
    if there:
        old_model(hub)
    else:
        hub.add(REPO, {"README.md": b"---\nlicense: mit\n---\n# The author's old text\n"})
    before = hub.files(REPO)
    hub.fault(PUT, after=lambda: edited(hub))
    outcome = publish() if there else publish("--base-model", "org/base", card=False)
    assert (outcome.code, outcome.error["id"]) == (7, "publish-conflict")
    assert "same command again" in outcome.error["hint"]
    assert hub.files(REPO) == before | {"README.md": CARD}
    hub.log.clear()
    assert publish("--base-model", "org/base", card=False).code == 0
    assert b"# The author's new text" in hub.files(REPO)["README.md"]
    assert is_model(hub.files(REPO))


def test_a_card_that_is_edited_between_our_own_commits_stays(publish, hub):
    hub.fault(COMMIT, after=lambda: edited(hub))
    outcome = publish()
    assert (outcome.code, outcome.error["id"]) == (7, "publish-conflict")
    assert hub.files(REPO)["README.md"] == CARD
    assert INDEX not in hub.files(REPO)


def test_a_branch_that_moves_meanwhile(publish, hub):
    hub.add(REPO, {"x": b"y"})
    hub.fault(PUT, after=lambda: hub.add(REPO, {"README.md": CARD}, revision="v1"))
    assert publish("--revision", "v1").error["id"] == "publish-conflict"
    assert hub.files(REPO, "v1")["README.md"] == CARD


def test_a_repository_that_somebody_fills_as_it_is_made(publish, hub):
    hub.fault("repos/create", after=lambda: edited(hub))
    outcome = publish()
    assert (outcome.code, outcome.error["id"]) == (7, "publish-conflict")
    assert not hub.log.of(PUT)


def test_another_commit_on_top_of_ours_is_no_damage(publish, hub):
    hub.fault(COMMIT, skip=1, after=lambda: hub.add(REPO, {"tokenizer.json": b"theirs"}))
    assert publish().code == 0
    assert hub.files(REPO)["tokenizer.json"] == b"theirs"
    assert INDEX in hub.files(REPO)


@pytest.mark.parametrize("skip", [0, 1], ids=["weights", "last"])
def test_a_commit_whose_answer_is_lost_is_made_once(publish, hub, skip):
    hub.add(REPO, {"model-00001-of-00099.safetensors": b"left over"})
    fault = hub.fault(COMMIT, skip=skip, lose=True)
    outcome = publish()
    assert outcome.code == 0, outcome.events
    assert fault.met == 2
    assert len(hub.commits(REPO)) == 4, "made, pushed, weights, the rest"
    assert "model-00001-of-00099.safetensors" not in hub.files(REPO)


def test_a_commit_that_lands_while_it_is_tried_again(publish, output, hub):
    # the Hub says 500, and carries it out a moment after it was looked for
    def late() -> None:
        repo = hub.store.repos[REPO]
        tree = dict(repo.commits[repo.refs["main"]])
        from loopback_hub.hub_store import File, content_of

        for name in [*shards_of(output), "dspark/model.safetensors"]:
            tree[name] = File(content_of((output / name).read_bytes()), True)
        repo.commit("main", tree, "ours, late")

    hub.fault(COMMIT, status=500)
    hub.fault(COMMIT, before=late)
    outcome = publish()
    assert outcome.code == 0, outcome.events
    assert [title for _, _, title in hub.commits(REPO)].count("ours, late") == 1
    assert INDEX in hub.files(REPO)


def test_a_pull_request_whose_answer_is_lost_is_opened_once(publish, hub):
    hub.add(REPO, {"x": b"y"})
    hub.fault(COMMIT, lose=True)
    outcome = publish("--create-pr")
    assert outcome.code == 0, outcome.events
    assert outcome.of("result")[0]["revision"] == "refs/pr/1"
    assert set(hub.store.repos[REPO].refs) == {"main", "refs/pr/1"}


@pytest.mark.parametrize("status", [409, 412])
def test_who_is_too_late_is_told(publish, hub, waits, status):
    hub.fault(COMMIT, times=None, status=status, message="A commit has happened since.")
    outcome = publish()
    assert (outcome.code, outcome.error["id"]) == (7, "publish-conflict")
    assert "somebody else" in outcome.error["message"]
    assert not waits


def test_a_try_that_failed_is_not_taken_for_done(publish, output, hub):
    # only weights differ, so that nothing else in the tree tells whether the commit is there
    assert publish().code == 0
    hub.add(REPO, {shards_of(output)[0]: b"damaged"})
    hub.fault(COMMIT, status=500)
    outcome = publish()
    assert outcome.code == 0, outcome.events
    assert hub.files(REPO)[shards_of(output)[0]] == (output / shards_of(output)[0]).read_bytes()


def test_card_and_index_are_read_at_one_commit(publish, hub):
    old_model(hub)
    edited(hub)
    head = hub.store.repos[REPO].refs["main"]
    assert publish("--dry-run", "--base-model", "org/base", card=False).code == 0
    assert {r.path.split("/")[4] for r in hub.log.of("(GET|HEAD) .*/resolve/")} == {head}

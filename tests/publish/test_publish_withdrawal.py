"""What is found damaged once it is visible does not stay a model."""

from __future__ import annotations

import pytest
from m3_source import INDEX
from sent_files import COMMIT, PUT, REPO, is_model, shards_of


def lost(hub, name: str) -> None:
    """The Hub loses a file of its latest commit."""
    repo = hub.store.repos[REPO]
    repo.commits[repo.refs["main"]].pop(name)


def swallowing(hub, **files: bytes) -> None:
    hub.add(REPO, {".gitignore": b"tokenizer.json\n", **files})


def test_a_damaged_side_file_takes_the_model_away_again(publish, output, hub):
    swallowing(hub)
    outcome = publish()
    assert (outcome.code, outcome.error["id"]) == (3, "publish-digest")
    assert outcome.error["where"] == "tokenizer.json"
    files = hub.files(REPO)
    assert not is_model(files)
    assert set(shards_of(output)) <= set(files), "what is right need not be sent again"
    hub.add(REPO, {".gitignore": b""})
    hub.log.clear()
    assert publish().code == 0
    assert not hub.log.of(PUT)


def test_an_authors_card_stays(publish, hub):
    card = b"---\nlicense: mit\n---\n# The author's\n"
    swallowing(hub, **{"README.md": card})
    outcome = publish("--base-model", "org/base", card=False)
    assert outcome.code == 3, outcome.events
    files = hub.files(REPO)
    assert b"# The author's" in files["README.md"]
    assert not {INDEX, "config.json"} & {*files}


def test_a_withdrawal_that_fails_hides_nothing(publish, hub):
    swallowing(hub)
    hub.fault(COMMIT, skip=2, times=None, status=500)
    outcome = publish()
    assert (outcome.code, outcome.error["id"]) == (3, "publish-digest")
    (told,) = [e["message"] for e in outcome.of("warning") if "withdrawn" in e["message"]]
    assert "delete model.safetensors.index.json and config.json there" in told
    assert INDEX in hub.files(REPO), "or the warning would be wrong"


@pytest.mark.parametrize("again", [False, True], ids=["opened", "open already"])
def test_a_damaged_pull_request_is_told_of(publish, hub, again):
    hub.add(REPO, {"x": b"y"})
    if again:
        assert publish("--create-pr").code == 0
        hub.add(REPO, {"x": b"z"}, revision="refs/pr/1")
    repo = hub.store.repos[REPO]
    hub.fault(COMMIT, after=lambda: repo.commits[repo.refs["refs/pr/1"]].pop("config.json"))
    hub.add(REPO, {"mmq-verify.json": b"{}"}, revision="refs/pr/1" if again else "main")
    outcome = publish("--create-pr")
    assert (outcome.code, outcome.error["where"]) == (3, "config.json")
    (told,) = [e["message"] for e in outcome.of("warning") if "merge" in e["message"]]
    assert "refs/pr/1" in told
    assert INDEX in hub.files(REPO, "refs/pr/1"), "merging a withdrawal would delete main's model"


def test_a_file_that_was_there_already_is_compared_too(publish, output, hub):
    hub.add(REPO, {"LICENSE": (output / "LICENSE").read_bytes()})
    hub.fault(COMMIT, skip=1, after=lambda: lost(hub, "LICENSE"))
    outcome = publish()
    assert (outcome.code, outcome.error["where"]) == (3, "LICENSE")
    assert not is_model(hub.files(REPO))


def test_all_that_differ_are_counted(publish, hub):
    hub.add(REPO, {".gitignore": b"tokenizer.json\nLICENSE\n"})
    assert "(and 1 more)" in publish().error["message"]

"""Pull requests, branches and new repositories: where it goes, and what is read back of that."""

from __future__ import annotations

import contextlib
import io

import pytest
from in_process import run_mmq
from loopback_hub.hub_store import PullRequest
from m3_source import INDEX
from sent_files import CARD_OPTIONS, COMMIT, PUT, REPO, is_model, old_model

from mmq.cli import main


def refs(hub) -> set[str]:
    return set(hub.store.repos[REPO].refs)


def printed(output, *options: str) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        assert main(["publish", str(output), REPO, *CARD_OPTIONS, *options]) == 0
    return out.getvalue()


def test_the_same_pull_request_is_gone_on_with(publish, output, hub):
    hub.add(REPO, {"x": b"y"})
    assert publish("--create-pr").code == 0
    (output / "README.md").write_text("---\nlicense: mit\n---\n# another\n")
    again = publish("--create-pr")
    assert again.of("result")[0]["batches"] == [], "the pull request's own card counts"
    hub.add(REPO, {"mmq-verify.json": b"{}"}, revision="refs/pr/1")
    before = hub.files(REPO)
    outcome = publish("--create-pr")
    assert outcome.code == 0, outcome.events
    assert outcome.of("result")[0]["revision"] == "refs/pr/1"
    assert any("refs/pr/1 is open already" in e["message"] for e in outcome.of("note"))
    assert hub.files(REPO, "refs/pr/1")["mmq-verify.json"] != b"{}"
    assert refs(hub) == {"main", "refs/pr/1"}
    assert hub.files(REPO) == before


@pytest.mark.parametrize(
    "fields",
    [
        {"title": "Something else"},
        {"author": "somebody"},
        {"status": "closed"},
        {"status": "merged"},
    ],
)
def test_a_pull_request_that_is_not_ours_or_not_open_is_left_alone(publish, hub, fields):
    hub.add(REPO, {"x": b"y"})
    assert publish("--create-pr").code == 0
    (pull,) = hub.store.repos[REPO].pulls
    for name, value in fields.items():
        setattr(pull, name, value)
    assert publish("--create-pr").of("result")[0]["revision"] == "refs/pr/2"


def test_a_pull_request_from_before_mains_last_commit_is_left_alone(publish, hub):
    hub.add(REPO, {"x": b"y"})
    assert publish("--create-pr").code == 0
    hub.add(REPO, {"notes.txt": b"new on main"})
    assert publish("--create-pr").of("result")[0]["revision"] == "refs/pr/2"
    assert hub.files(REPO, "refs/pr/2")["notes.txt"] == b"new on main"


def test_many_pull_requests_are_read_page_by_page(publish, hub):
    hub.add(REPO, {"x": b"y"})
    assert publish("--create-pr").code == 0
    hub.page = 2
    title = hub.store.repos[REPO].pulls[0].title
    hub.store.repos[REPO].pulls += [PullRequest(n, f"{title} not") for n in range(2, 8)]
    assert publish("--create-pr").of("result")[0]["revision"] == "refs/pr/1"


def test_a_pull_request_by_its_reference(publish, hub):
    old_model(hub)
    assert publish("--create-pr").code == 0
    hub.add(REPO, {"config.json": b"{}"}, revision="refs/pr/1")
    before = hub.files(REPO)
    assert publish("--revision", "refs/pr/1").code == 0
    assert hub.files(REPO, "refs/pr/1")["config.json"] != b"{}"
    assert hub.files(REPO) == before
    outcome = publish("--revision", "refs/pr/7")
    assert (outcome.code, outcome.error["id"]) == (2, "option-value")
    assert "refs/pr/7" in outcome.error["message"]


def test_people_read_that_it_will_be_a_pull_request(hub, output):
    hub.add(REPO, {"x": b"y"})
    assert f"{REPO} (public), a pull request" in printed(output, "--create-pr", "--dry-run")
    printed(output, "--create-pr")
    assert f"{REPO} (public), refs/pr/1" in printed(output, "--create-pr", "--dry-run")


def test_a_branch_is_made_where_main_has_it_all(publish, output, hub):
    assert publish().code == 0
    assert publish("--revision", "v1", "--dry-run").of("result")[0]["new_branch"]
    assert refs(hub) == {"main"}
    hub.log.clear()
    outcome = publish("--revision", "v1")
    assert outcome.code == 0, outcome.events
    assert outcome.of("result")[0]["new_branch"]
    assert refs(hub) == {"main", "v1"}
    assert hub.files(REPO, "v1") == hub.files(REPO)
    assert not hub.log.of(f"{PUT}|{COMMIT}")
    assert not publish("--revision", "v1").of("result")[0]["new_branch"]
    assert f"{REPO} (public), v2 (made)\nnothing to send" in printed(output, "--revision", "v2")


def test_a_branch_starts_from_what_was_read(publish, hub):
    first = hub.add(REPO, {"x": b"1"})
    hub.fault("validate-yaml", after=lambda: hub.add(REPO, {"x": b"2"}))
    assert publish("--revision", "v1").code == 0
    assert hub.files(REPO, "v1")["x"] == b"1"
    assert first in hub.store.repos[REPO].history(hub.store.repos[REPO].refs["v1"])


@pytest.mark.parametrize(
    "name",
    ["a b", "../x", "x..y", "", "-x", "/x", "x/", "x.", ".x", "a/.b", "x.lock", "x.lock/y", "a//b",
     "@", "a@{1", "a~1", "a^", "a:b", "a?", "a*", "a[", "a\\b", "a\tb", "refs/heads/x", "refs/pr/0",
     "refs/pr/x", "0123456789abcdef0123456789abcdef01234567"],
)  # fmt: skip
def test_what_is_no_branch_is_refused_before_anything_is_asked(publish, hub, name):
    outcome = publish("--revision", name)
    assert (outcome.code, outcome.error["id"]) == (2, "option-value")
    assert not hub.log.requests


@pytest.mark.parametrize("name", ["v1", "release/2026.1", "deadbeef", "a-b_c", "größe"])
def test_what_is_a_branch_goes(publish, hub, name):
    hub.add(REPO, {"x": b"y"})
    assert publish("--revision", name).code == 0
    assert name in refs(hub)


@pytest.mark.parametrize(
    ("asked", "owner", "shown"), [(False, False, "public"), (False, True, "private"),
                                  (True, False, "private"), (True, True, "private")],
)  # fmt: skip
def test_a_new_repository_is_said_to_be_what_it_is(hub, output, asked, owner, shown):
    hub.private_by_default = owner
    options = ("--private",) if asked else ()
    text = printed(output, *options)
    assert f"{REPO} (made, {shown}), main" in text
    assert hub.store.repos[REPO].private == (shown == "private")


def test_a_private_repository_that_is_made_public_gets_nothing(publish, hub):
    hub.fault("repos/create", after=lambda: setattr(hub.store.repos[REPO], "private", False))
    outcome = publish("--private")
    assert (outcome.code, outcome.error["id"]) == (7, "publish-not-private")
    assert not hub.log.of(f"{PUT}|{COMMIT}")


def test_a_repository_that_is_made_and_not_yet_there(publish, hub):
    # read back: absent, as on a Hub that is slow to know what it made
    hub.fault(f"GET /api/models/{REPO}$", skip=1, status=404,
              headers={"X-Error-Code": "RepoNotFound"})  # fmt: skip
    outcome = publish()
    assert (outcome.code, outcome.error["id"]) == (5, "publish-failed")
    assert publish().code == 0


def test_a_repository_that_somebody_makes_at_the_same_time(hub, output):
    # 409 from create: it is there, and empty
    hub.fault("repos/create", before=lambda: hub.store.create(REPO))
    code, events, _ = run_mmq("publish", output, REPO, *CARD_OPTIONS)
    assert code == 0, events
    assert is_model(hub.files(REPO))
    assert INDEX in hub.files(REPO)

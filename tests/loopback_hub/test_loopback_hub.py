"""The loopback Hub, asked by huggingface_hub itself and by bare HTTP."""

from __future__ import annotations

import http.client
import os

import pytest
from loopback_hub.hub_server import LoopbackHub

REPO = "org/name"


@pytest.fixture
def hub(monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    with LoopbackHub(part_bytes=1000, page=3) as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
        yield server


@pytest.fixture
def api(hub):
    from huggingface_hub import HfApi

    return HfApi(endpoint=hub.endpoint, token=hub.token)


def ask(hub, path, headers=None, method="GET"):
    """(status, headers, body) of one request; the path may be of storage."""
    address = (hub.storage if path.startswith("/cdn") else hub.endpoint).removeprefix("http://")
    connection = http.client.HTTPConnection(address, timeout=10)
    try:
        connection.request(method, path, headers=headers or {})
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()
    finally:
        connection.close()


def test_what_is_committed_is_what_is_downloaded(hub, api, tmp_path):
    from huggingface_hub import CommitOperationAdd

    data = {
        "big.safetensors": os.urandom(2500),
        "small.safetensors": b"x" * 10,
        "README.md": b"---\nlicense: mit\n---\n",
        "a/b.json": b"{}",
        "empty.txt": b"",
    }
    api.create_repo(REPO)
    operations = [CommitOperationAdd(name, value) for name, value in data.items()]
    api.create_commit(REPO, operations, commit_message="all")
    folder = api.snapshot_download(REPO, local_dir=tmp_path)
    for name, value in data.items():
        with open(f"{folder}/{name}", "rb") as file:  # noqa: PTH123
            assert file.read() == value
    assert len(hub.log.of("PUT /lfs/part")) == 3
    assert len(hub.log.of("PUT /lfs/upload")) == 1
    assert {r.authorized for r in hub.log.of("PUT /lfs|GET /cdn")} == {False}


def test_tree_pages_and_digests(hub, api):
    hub.add(REPO, {f"{n}.txt": b"x" for n in range(7)} | {"w.safetensors": b"weights"})
    found = {e.path: e for e in api.list_repo_tree(REPO, recursive=True)}
    assert len(found) == 9
    assert found["w.safetensors"].lfs.sha256 == hub.store.repos[REPO].commits[
        hub.store.repos[REPO].refs["main"]]["w.safetensors"].content.sha256  # fmt: skip
    assert len(hub.log.of("/tree/")) == 3


@pytest.mark.parametrize(
    ("asked", "status", "body"),
    [(None, 200, b"0123456789"), ("bytes=2-4", 206, b"234"), ("bytes=7-", 206, b"789"),
     ("bytes=-2", 206, b"89"), ("bytes=5-99", 206, b"56789"), ("bytes=10-", 416, b"")],
)  # fmt: skip
def test_ranges(hub, asked, status, body):
    hub.add(REPO, {"a.txt": b"0123456789", "a.safetensors": b"0123456789"})
    headers = {"Range": asked} if asked else {}
    assert ask(hub, f"/{REPO}/resolve/main/a.txt", headers)[::2] == (status, body)
    code, answer, _ = ask(hub, f"/{REPO}/resolve/main/a.safetensors", headers)
    assert code == 302
    path = answer["Location"].removeprefix(hub.storage)
    assert ask(hub, path, headers)[::2] == (status, body)


def test_storage_wants_its_signature_and_no_token(hub):
    hub.add(REPO, {"a.safetensors": b"0"})
    path = ask(hub, f"/{REPO}/resolve/main/a.safetensors")[1]["Location"].removeprefix(hub.storage)
    assert ask(hub, path)[0] == 200
    assert ask(hub, path.partition("?")[0])[0] == 403
    assert ask(hub, path, {"Authorization": f"Bearer {hub.token}"})[0] == 400


def test_who_may_what(hub):
    hub.add(REPO, {"x": b"y"}, private=True)
    info = f"/api/models/{REPO}"
    assert ask(hub, info)[0] == 401
    assert ask(hub, info, {"Authorization": f"Bearer {hub.read_token}"})[0] == 200
    assert ask(hub, info, {"Authorization": "Bearer hf_unknown"})[0] == 401
    assert ask(hub, "/api/models/no/such", {"Authorization": f"Bearer {hub.token}"})[0] == 404
    read = {"Authorization": f"Bearer {hub.read_token}", "Content-Length": "0"}
    assert ask(hub, f"{info}/branch/v1", read, "POST")[0] == 403


def test_a_branch_and_a_commit_stay_what_they_were(hub, api):
    first = hub.add(REPO, {"x": b"1"})
    api.create_branch(REPO, branch="v1")
    hub.add(REPO, {"x": b"2"})
    assert hub.files(REPO)["x"] == b"2"
    assert hub.files(REPO, "v1")["x"] == hub.files(REPO, first)["x"] == b"1"
    assert ask(hub, f"/{REPO}/resolve/{first}/x")[2] == b"1"


def test_faults_happen_as_often_as_told_and_in_their_turn(hub):
    hub.add(REPO, {"x": b"0123456789"})
    path = f"/{REPO}/resolve/main/x"
    hub.fault("resolve", skip=1, times=1, status=503, headers={"Retry-After": "3"})
    assert ask(hub, path)[0] == 200
    status, headers, _ = ask(hub, path)
    assert (status, headers["Retry-After"]) == (503, "3")
    assert ask(hub, path)[0] == 200
    hub.fault("resolve", cut_after=4)
    with pytest.raises((http.client.IncompleteRead, ConnectionError)):
        ask(hub, path)
    hub.fault("resolve", corrupt=True)
    assert ask(hub, path)[2] == b"1123456789"
    hub.fault("resolve", times=None, status=500)
    hub.heal()
    assert ask(hub, path)[0] == 200
    assert [r.status for r in hub.log.of("resolve")] == [200, 503, 200, 200, 200, 200]


def test_files_on_disk_are_served_without_being_read_whole(hub, tmp_path):
    path = tmp_path / "sparse.safetensors"
    with path.open("wb") as file:
        file.truncate(3 << 30)
        file.write(b"")
    from loopback_hub.hub_store import File, content_of

    content = content_of(path, "ab" * 32)
    hub.add(REPO, {"x": b"y"})
    repo = hub.store.repos[REPO]
    repo.commit("main", {"sparse.safetensors": File(content, True)})
    location = ask(hub, f"/{REPO}/resolve/main/sparse.safetensors")[1]["Location"]
    status, headers, body = ask(hub, location.removeprefix(hub.storage), {"Range": "bytes=0-9"})
    assert (status, body) == (206, b"\0" * 10)
    assert headers["Content-Range"] == f"bytes 0-9/{3 << 30}"


def add(name: str, data: bytes):
    from huggingface_hub import CommitOperationAdd

    return CommitOperationAdd(name, data)


def test_a_commit_follows_the_one_it_names(hub, api):
    from huggingface_hub.errors import HfHubHTTPError

    first = hub.add(REPO, {"x": b"1"})
    done = api.create_commit(REPO, [add("y", b"1")], commit_message="m", parent_commit=first[:7])
    assert hub.store.repos[REPO].history(done.oid)[:2] == [done.oid, first]
    assert [c.commit_id for c in api.list_repo_commits(REPO)][:2] == [done.oid, first]
    before = hub.files(REPO)
    with pytest.raises(HfHubHTTPError) as caught:
        api.create_commit(REPO, [add("z", b"1")], commit_message="m", parent_commit=first)
    assert caught.value.response.status_code == 412
    assert hub.files(REPO) == before


def test_a_pull_request_starts_from_the_commit_it_names(hub, api):
    first = hub.add(REPO, {"x": b"1"})
    hub.add(REPO, {"later": b"1"})
    done = api.create_commit(
        REPO, [add("y", b"1")], commit_message="title", parent_commit=first, create_pr=True
    )
    assert done.pr_revision == "refs/pr/1"
    assert "later" not in hub.files(REPO, "refs/pr/1")
    api.create_commit(REPO, [add("z", b"1")], commit_message="more", revision="refs/pr/1")
    assert {"x", "y", "z"} <= {*hub.files(REPO, "refs/pr/1")}
    assert "y" not in hub.files(REPO)
    (found,) = api.get_repo_discussions(REPO, discussion_type="pull_request",
                                        discussion_status="open")  # fmt: skip
    assert (found.title, found.git_reference, found.author) == ("title", "refs/pr/1", "loopback")
    assert not list(api.get_repo_discussions(REPO, author="somebody"))
    assert not list(api.get_repo_discussions(REPO, discussion_type="discussion"))
    hub.store.repos[REPO].pulls[0].status = "merged"
    assert not list(api.get_repo_discussions(REPO, discussion_status="open"))


def test_what_cannot_be_committed_to_or_deleted(hub, api):
    from huggingface_hub import CommitOperationDelete
    from huggingface_hub.errors import HfHubHTTPError, RevisionNotFoundError

    commit = hub.add(REPO, {"x": b"1"})
    with pytest.raises(RevisionNotFoundError):
        api.create_commit(REPO, [add("y", b"1")], commit_message="m", revision=commit)
    for name in ("a b", "../x", "refs/pr/1", commit):
        with pytest.raises(HfHubHTTPError) as caught:
            api.create_branch(REPO, branch=name)
        assert caught.value.response.status_code == 400, name
    with pytest.raises(HfHubHTTPError) as caught:
        api.create_commit(REPO, [CommitOperationDelete("absent")], commit_message="m")
    assert caught.value.response.status_code == 404
    assert set(hub.store.repos[REPO].refs) == {"main"}


def test_an_owner_decides_where_nothing_is_asked_for(hub, api):
    hub.private_by_default = True
    for name, asked in (("org/a", None), ("org/b", False), ("org/c", True)):
        api.create_repo(name, private=asked)
    assert [hub.store.repos[f"org/{n}"].private for n in "abc"] == [True, False, True]


def test_an_answer_that_is_lost_was_carried_out(hub):
    hub.add(REPO, {"x": b"y"})
    seen = []
    hub.fault("branch/v1", lose=True, before=lambda: seen.append(0), after=lambda: seen.append(1))
    write = {"Authorization": f"Bearer {hub.token}", "Content-Length": "0"}
    with pytest.raises((http.client.HTTPException, ConnectionError)):
        ask(hub, f"/api/models/{REPO}/branch/v1", write, "POST")
    assert set(hub.store.repos[REPO].refs) == {"main", "v1"}
    assert seen == [0, 1]

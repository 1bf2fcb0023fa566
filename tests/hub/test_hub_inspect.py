"""`mmq inspect org/name`: what it says of the folder, from headers, in few requests and bytes."""

from __future__ import annotations

import json

import pytest
from hostile import (
    drop_scale,
    expert,
    first,
    good,
    header_length,
    keep_in_index,
    last,
    lfs_pointer,
    lose_shards,
    on_disk,
)
from hub_runs import REPO, refused
from in_process import run_mmq
from m3_source import INDEX, Size

from mmq.hub import stand_in


def said(source, *options):
    """What inspect answers, without where the source lies."""
    code, events, _ = run_mmq("inspect", source, *options)
    assert code == 0, events
    answer = {k: v for k, v in events[-1].items() if k not in ("source", "hub")}
    answer["convert"]["source"].pop("location")
    for key in ("download", "needed_bytes", "peak_memory_bytes"):
        answer["convert"]["resources"].pop(key)
    return answer, events[-1]["hub"]


def test_inspect_says_what_it_says_of_the_folder(hub, repo, hub_source):
    remote, about = said(REPO)
    local, nothing = said(hub_source)
    assert remote == local and nothing is None
    assert about["repo"] == REPO and about["revision"] == "main" and about["commit"] == repo


def test_inspect_reads_headers_only(hub, repo, hub_source, monkeypatch):
    monkeypatch.setattr(stand_in, "FIRST_READ", 16 << 10)
    _, about = said(REPO)
    # the listing, the index, config.json, and one read per shard
    assert about["requests"] == 1 + 2 + 3
    assert len(hub.log.of("GET /cdn/")) == 3
    small = sum((hub_source / n).stat().st_size for n in (INDEX, "config.json"))
    listing = hub.log.of("GET /api/")[0].sent
    assert about["bytes"] == small + listing + 3 * (16 << 10)
    assert sum(r.sent for r in hub.log.requests) == about["bytes"]


@pytest.mark.parametrize("first", [8, 64, 1000])
def test_long_headers_take_a_second_read(hub, repo, hub_source, monkeypatch, first):
    monkeypatch.setattr(stand_in, "FIRST_READ", first)
    assert said(REPO)[0] == said(hub_source)[0]
    assert len(hub.log.of("GET /cdn/")) == 6


def test_every_byte_comes_from_one_commit_and_storage_sees_no_token(hub, repo):
    said(REPO)
    for request in hub.log.requests:
        if request.path.startswith("/cdn/"):
            assert not request.authorized
        elif "/resolve/" in request.path:
            assert f"/resolve/{repo}/" in request.path and request.authorized
    assert len(hub.log.of("GET /api/")) == 1


def test_many_shards(hub, tmp_path):
    source = good(Size(layers=4, experts=8), shards=31)
    folder = source.write(tmp_path / "src")
    hub.add_folder("org/many", folder)
    remote, about = said("org/many")
    assert remote["tensors"] == len(source.all()) and remote["shards"] == 31
    assert about["requests"] == 1 + 2 + 31


@pytest.mark.parametrize("revision", ["main", "v2", "commit"])
def test_revisions(hub, repo, hub_source, tmp_path, revision):
    other = good(Size(layers=4)).write(tmp_path / "src")
    newer = hub.add_folder(REPO, other, revision="v2")
    wanted = {"main": repo, "v2": newer, "commit": newer}[revision]
    name = newer if revision == "commit" else revision
    answer, about = said(f"{REPO}@{name}")
    assert about["commit"] == wanted and about["revision"] == name
    assert answer["tensors"] == said(hub_source if revision == "main" else other)[0]["tensors"]


def _broken(change):
    source = good()
    change(source)
    return source


@pytest.mark.parametrize(
    "change",
    [
        lambda s: lose_shards(s, last(s)),
        lambda s: keep_in_index(s, expert(1, 0, "w2") + ".weight"),
        lambda s: on_disk(s, first(s), lambda raw: lfs_pointer()),
        lambda s: on_disk(s, first(s), header_length(1 << 40)),
        lambda s: on_disk(s, last(s), lambda raw: raw[:-100]),
        lambda s: drop_scale(s, expert(1, 0, "w1")),
    ],
    ids=["shard-missing", "index", "lfs-pointer", "header-length", "truncated", "scale-missing"],
)
def test_damage_is_told_as_of_a_folder(hub, tmp_path, change):
    folder = _broken(change).write(tmp_path / "src")
    hub.add_folder(REPO, folder)
    local = refused("inspect", folder, "--to", "nvfp4")
    remote = refused("inspect", REPO, "--to", "nvfp4")
    assert remote[:2] == local[:2]
    assert remote[2]["message"] == local[2]["message"]


def test_text_says_commit_and_cost(hub, repo, capsys):
    from mmq.cli import main

    assert main(["inspect", REPO]) == 0
    assert f"commit   {repo} of main (6 requests, " in capsys.readouterr().out


def test_index_that_leads_outside(hub, hub_source, tmp_path):
    index = json.loads((hub_source / INDEX).read_bytes())
    name = next(iter(index["weight_map"]))
    index["weight_map"][name] = "../../evil.safetensors"
    hub.add(REPO, {INDEX: json.dumps(index).encode(), "config.json": b"{}"})
    assert refused("inspect", REPO)[1] == "index-path"

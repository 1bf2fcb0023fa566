"""Conversion from the Hub: the bytes of a local one, whatever arrives when and is deleted when."""

from __future__ import annotations

import json
import shutil

import huggingface_hub.constants as constants
import pytest
from hostile import add_mtp, as_bf16, good, scatter_scales
from hub_runs import MANIFEST, REPO, SMALL, cdn_bytes, converted, refused, shard_gets
from in_process import run_mmq
from m3_source import INDEX, hashes, sha256

from mmq.convert import source_files
from mmq.hub import stand_in


@pytest.fixture(scope="session")
def local_output(hub_source, tmp_path_factory):
    return converted(hub_source, tmp_path_factory.mktemp("local") / "out")


@pytest.fixture(autouse=True)
def short_first_read(monkeypatch):
    """So that headers and data can be told apart in the log."""
    monkeypatch.setattr(stand_in, "FIRST_READ", 16 << 10)


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_bytes_are_those_of_a_local_conversion(hub, repo, local_output, tmp_path, jobs):
    found = converted(REPO, tmp_path / "out", "--jobs", jobs)
    assert found == local_output
    assert not (tmp_path / "out" / ".mmq").exists()


@pytest.mark.parametrize(
    "options",
    [("--layout", "minimax"), ("--to", "bf16"), ("--kv-scales", "unit"), ("--mtp", "keep"),
     ("--download-dir", "DIR"), ("--download-dir", "DIR", "--keep-downloads"), ("--hash-source",)],
    ids=" ".join,
)  # fmt: skip
def test_with_any_option(hub, tmp_path, options):
    source = good()
    add_mtp(source)
    scatter_scales(source)
    folder = source.write(tmp_path / "src")
    (folder / ".gitattributes").write_text("*.safetensors filter=lfs\n")
    hub.add_folder(REPO, folder)
    options = [str(tmp_path / "dir") if o == "DIR" else o for o in options]
    here = [o for o in options if not o.startswith(("--download", "--keep")) and "dir" not in o]
    assert converted(REPO, tmp_path / "a", *options) == converted(folder, tmp_path / "b", *here)


def test_experts_from_another_repository(hub, repo, hub_source, tmp_path):
    folder = as_bf16(good()).write(tmp_path / "bf16")
    commit = hub.add_folder("org/experts", folder)
    remote = converted(REPO, tmp_path / "a", "--experts-from", "org/experts@main")
    assert remote == converted(hub_source, tmp_path / "b", "--experts-from", folder)
    manifest = json.loads((tmp_path / "a" / MANIFEST).read_bytes())
    assert manifest["hub"] == {
        "source": {"repo": REPO, "revision": "main", "commit": repo},
        "experts": {"repo": "org/experts", "revision": "main", "commit": commit},
    }


def test_manifest_says_where_it_came_from(hub, repo, hub_source, tmp_path):
    converted(f"{REPO}@{repo}", tmp_path / "out")
    manifest = json.loads((tmp_path / "out" / MANIFEST).read_bytes())
    assert manifest["hub"]["source"] == {"repo": REPO, "revision": repo, "commit": repo}
    shards = {s["name"]: s["sha256"] for s in manifest["source"]["shards"]}
    assert shards == {p.name: sha256(p) for p in hub_source.glob("*.safetensors")}
    assert manifest["source"]["commit"] == repo and manifest["source"]["repo"] == REPO


def test_what_to_do_next_names_the_commit(hub, repo, tmp_path, capsys):
    from mmq.cli import main

    assert main(["convert", REPO, str(tmp_path / "out"), "--jobs", "1"]) == 0
    said = capsys.readouterr().out
    (line,) = [text for text in said.splitlines() if text.startswith("next ")]
    assert line.split()[1:] == ["mmq", "verify", str(tmp_path / "out"), "--against",
                                f"{REPO}@{repo}"]  # fmt: skip
    assert main([*line.split()[2:], "--quiet"]) == 0


def test_each_shard_is_fetched_once(hub, repo, hub_source, tmp_path):
    converted(REPO, tmp_path / "out")
    data = [p.stat().st_size for p in hub_source.rglob("*.safetensors")]
    headers = 3 * (16 << 10)
    assert cdn_bytes(hub) == sum(data) + headers


def test_finished_stays_finished_until_the_branch_moves(hub, repo, hub_source, tmp_path):
    converted(REPO, tmp_path / "out")
    hub.log.clear()
    code, events, _ = run_mmq("convert", REPO, tmp_path / "out", *SMALL)
    assert code == 0 and events[-1]["finished"]
    assert cdn_bytes(hub) == 3 * (16 << 10)
    # other weights with equal headers: only the digest tells
    shard = next(iter(sorted(hub_source.glob("model-*.safetensors"))))
    raw = bytearray(shard.read_bytes())
    raw[-1] ^= 1
    hub.add(REPO, {shard.name: bytes(raw)})
    code, id, error = refused("convert", REPO, tmp_path / "out", *SMALL)
    assert (code, id) == (7, "output-not-empty") and "sha256" in error["got"]


def test_the_branch_moves_during_the_run(
    hub, repo, hub_source, local_output, tmp_path, monkeypatch
):
    moved = []
    real = source_files.download

    def download(*arguments):
        if not moved:
            moved.append(hub.add(REPO, {p.name: b"" for p in hub_source.glob("*.safetensors")}))
        real(*arguments)

    monkeypatch.setattr(source_files, "download", download)
    assert converted(REPO, tmp_path / "out") == local_output
    assert moved and all(f"/resolve/{repo}/" in r.path for r in hub.log.of("/resolve/"))


def test_kept_downloads_are_a_checkpoint(hub, repo, hub_source, local_output, tmp_path):
    kept = tmp_path / "kept"
    converted(REPO, tmp_path / "out", "--download-dir", str(kept), "--keep-downloads")
    (folder,) = kept.glob("*/*")
    assert folder == kept / "org--name" / repo
    assert hashes(folder, leave_out=()) == hashes(hub_source, leave_out=())
    assert not (kept / ".mmq-lock").exists()
    assert converted(folder, tmp_path / "again") == local_output
    hub.log.clear()
    assert converted(REPO, tmp_path / "third", "--download-dir", str(kept)) == local_output
    assert len(shard_gets(hub)) == 3  # headers
    # another run does not take away what was kept
    assert hashes(folder, leave_out=()) == hashes(hub_source, leave_out=())
    damaged = folder / "model-00002-of-00003.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert converted(REPO, tmp_path / "fourth", "--download-dir", str(kept)) == local_output


def test_keeping_needs_a_place(hub, repo, tmp_path):
    assert refused("convert", REPO, tmp_path / "out", "--keep-downloads")[:2] == (
        2, "option-conflict",
    )  # fmt: skip


def test_a_download_folder_is_one_runs_at_a_time(hub, repo, tmp_path):
    lock = source_files.FolderLock(tmp_path / "dir")
    try:
        arguments = ("convert", REPO, tmp_path / "out", "--download-dir", tmp_path / "dir")
        assert refused(*arguments)[:2] == (7, "locked")
    finally:
        lock.close()


def cache_snapshot(repo, commit, folder, leave_out=()):
    """The folder as huggingface_hub's cache keeps it."""
    from pathlib import Path

    root = Path(constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}"
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if not path.is_file() or name in leave_out:
            continue
        lfs = name.endswith(".safetensors")
        blob = root / "blobs" / (sha256(path) if lfs else git_id(path))
        blob.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, blob)
        link = root / "snapshots" / commit / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(blob)
    (root / "refs").mkdir(exist_ok=True)
    (root / "refs" / "main").write_text(commit)
    return root / "snapshots" / commit


def git_id(path):
    import hashlib

    data = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def test_what_the_cache_has_is_not_downloaded(hub, repo, hub_source, local_output, tmp_path):
    cache_snapshot(REPO, repo, hub_source)
    assert converted(REPO, tmp_path / "out") == local_output
    assert [r.path.partition("?")[0] for r in hub.log.requests] == [
        f"/api/models/{REPO}/revision/main"
    ]


def test_what_the_cache_lacks_is_downloaded(hub, repo, hub_source, local_output, tmp_path):
    lacking = "model-00002-of-00003.safetensors"
    cache_snapshot(REPO, repo, hub_source, leave_out=(lacking,))
    assert converted(REPO, tmp_path / "out") == local_output
    assert {r.path.rpartition("/")[2] for r in hub.log.of("/resolve/")} == {lacking}


def test_a_cached_file_under_another_digest_is_not_trusted(
    hub, repo, hub_source, local_output, tmp_path
):
    snapshot = cache_snapshot(REPO, repo, hub_source)
    shard = snapshot / "model-00001-of-00003.safetensors"
    wrong = shard.resolve().with_name("0" * 64)
    shutil.copyfile(shard, wrong)
    shard.unlink()
    shard.symlink_to(wrong)
    assert converted(REPO, tmp_path / "out") == local_output
    assert shard_gets(hub, "model-00001")


def test_offline_uses_the_cache(hub, repo, hub_source, local_output, tmp_path, monkeypatch):
    cache_snapshot(REPO, repo, hub_source)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert converted(REPO, tmp_path / "out") == local_output
    assert hub.log.requests == []
    manifest = json.loads((tmp_path / "out" / MANIFEST).read_bytes())
    assert manifest["hub"]["source"]["commit"] == repo


def test_offline_without_the_cache(hub, repo, hub_source, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert refused("convert", REPO, tmp_path / "out")[:2] == (4, "hub-not-cached")
    cache_snapshot(REPO, repo, hub_source, leave_out=("model-00002-of-00003.safetensors",))
    code, id, error = refused("convert", REPO, tmp_path / "out")
    assert (code, id) == (4, "shard-missing") and "00002" in error["message"]
    assert refused("inspect", f"{REPO}@other")[:2] == (4, "hub-not-cached")
    assert hub.log.requests == []


def test_no_zeros_of_a_stand_in_are_ever_read(hub, repo):
    from mmq.convert.checkpoint import open_checkpoint

    opened = open_checkpoint(REPO)
    assert not any(shard.path.exists() for shard in opened.shards.values())
    assert not list(opened.root.rglob("*.safetensors"))
    folder = opened.root
    del opened
    assert not folder.exists()


def test_calibration_of_another_model_is_refused(hub, repo, hub_source, tmp_path):
    """Norms are read by ranges, so that the check is the one a folder gets."""
    from mmq.convert.checkpoint import open_checkpoint
    from mmq.convert.model_identity import norms_digest
    from mmq.convert.modules import group_modules

    found = []
    for source in (REPO, hub_source):
        opened = open_checkpoint(source)
        found.append(norms_digest(opened, group_modules(opened.tensors)))
    assert found[0] == found[1] is not None


def test_out_in_the_index(hub, repo, tmp_path):
    """The index of OUT is there, and names no file of the downloads."""
    converted(REPO, tmp_path / "out")
    index = json.loads((tmp_path / "out" / INDEX).read_bytes())
    names = set(index["weight_map"].values())
    assert names == {p.name for p in (tmp_path / "out").glob("*.safetensors")}

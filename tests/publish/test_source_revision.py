"""P7: which commit a source is, as download tools leave it behind; and that it is told."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from in_process import run_mmq

from mmq.convert.checkpoint import open_checkpoint
from mmq.convert.source_revision import SourceRevision, source_revision

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OTHER = "f" * 40
NOTHING = SourceRevision("", "")


@pytest.fixture
def source(good_folder, tmp_path) -> Path:
    return Path(shutil.copytree(good_folder, tmp_path / "src"))


def revision(folder: Path) -> SourceRevision:
    return source_revision(open_checkpoint(folder))


def metadata(folder: Path, name: str, commit: str) -> None:
    path = folder / ".cache" / "huggingface" / "download" / f"{name}.metadata"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{commit}\n{'ab' * 32}\n1700000000.0\n", encoding="utf-8")


def shards(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.glob("*.safetensors"))


def test_a_plain_folder_has_none(source):
    assert revision(source) == NOTHING


def test_a_snapshot_of_the_hubs_cache(source, tmp_path):
    snapshot = tmp_path / "models--MiniMaxAI--MiniMax-M3-MXFP8" / "snapshots" / COMMIT
    snapshot.parent.mkdir(parents=True)
    source.rename(snapshot)
    assert revision(snapshot) == SourceRevision("MiniMaxAI/MiniMax-M3-MXFP8", COMMIT)


def test_a_local_download(source):
    for name in shards(source):
        metadata(source, name, COMMIT)
    assert revision(source) == SourceRevision("", COMMIT)


@pytest.mark.parametrize("last", [OTHER, "main", ""], ids=["mixed", "no commit", "empty"])
def test_shards_of_different_commits_are_no_revision(source, last):
    for name in shards(source):
        metadata(source, name, COMMIT)
    metadata(source, shards(source)[-1], last)
    assert revision(source) == NOTHING


@pytest.mark.parametrize("packed", [False, True], ids=["loose", "packed"])
def test_a_git_clone(source, packed):
    git = source / ".git"
    (git / "refs" / "heads").mkdir(parents=True)
    (git / "HEAD").write_text("ref: refs/heads/main\n", encoding="utf-8")
    if packed:
        (git / "packed-refs").write_text(f"# pack\n{COMMIT} refs/heads/main\n", encoding="utf-8")
    else:
        (git / "refs" / "heads" / "main").write_text(f"{COMMIT}\n", encoding="utf-8")
    url = "https://huggingface.co/MiniMaxAI/MiniMax-M3-MXFP8"
    (git / "config").write_text(f'[remote "origin"]\n\turl = {url}\n', encoding="utf-8")
    assert revision(source) == SourceRevision("MiniMaxAI/MiniMax-M3-MXFP8", COMMIT)


def test_a_clone_of_another_host_has_a_commit_and_no_name(source):
    (source / ".git").mkdir()
    (source / ".git" / "HEAD").write_text(COMMIT, encoding="utf-8")
    (source / ".git" / "config").write_text("url = https://github.com/a/b\n", encoding="utf-8")
    assert revision(source) == SourceRevision("", COMMIT)


def test_report_manifest_and_card_carry_the_commit(source, tmp_path, hub):
    for name in shards(source):
        metadata(source, name, COMMIT)
    out = tmp_path / "out"
    assert run_mmq("convert", source, out, "--jobs", "1")[0] == 0
    assert json.loads((out / "mmq-convert.json").read_bytes())["source"]["commit"] == COMMIT
    assert json.loads((out / "mmq-manifest.json").read_bytes())["source"]["commit"] == COMMIT
    assert run_mmq("verify", out, "--against", source)[0] == 0
    code, events, _ = run_mmq(
        "publish", out, "org/m", "--base-model", "a/b", "--license-name", "x", "--license-link",
        "LICENSE",
    )  # fmt: skip
    assert code == 0, events
    card = hub.files("org/m")["README.md"].decode()
    assert f"`a/b` at commit `{COMMIT}`" in card
    assert f"a/b@{COMMIT}" in card


def test_without_a_commit_the_card_carries_the_hashes(publish, output, hub):
    assert publish().code == 0
    card = hub.files("org/model-NVFP4")["README.md"].decode()
    manifest = json.loads((output / "mmq-manifest.json").read_bytes())
    assert "commit unknown" in card
    for shard in manifest["source"]["shards"]:
        assert shard["header_sha256"] in card

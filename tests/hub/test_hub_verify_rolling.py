"""Level weights against a source on the Hub: its shards come when a job reads them, and go; the
report is the one that a folder gives."""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import replace

import pytest
from hostile import add_mtp, as_bf16, good
from hub_runs import FIRST_READ, REPO, SMALL, Watch, cdn_bytes, converted, data_gets, judge, refused
from in_process import run_mmq
from m3_source import INDEX, Size, hashes, read_shard, snapshot

from mmq.convert import download_plan, downloads, source_files
from mmq.convert.stream import SourceReader
from mmq.hub import stand_in
from mmq.verify import weights

SHARDS = 6


@pytest.fixture
def report(tmp_path):
    """In a folder of its own, beside which downloads lie by default."""
    return tmp_path / "reports" / "report.json"


def without_place(report):
    """A report without what tells where the source was, and how long it took."""
    for key in ("location", "repo", "commit"):
        report["against"].pop(key)
    for shard in report["against_files"]:
        shard.pop("sha256")
    for level in report["levels"]:
        level.pop("seconds")
    return report


def sound(out, folder):
    shutil.copytree(out, folder)


def flipped(out, folder):
    """One byte in every third shard."""
    shutil.copytree(out, folder)
    for path in sorted(folder.glob("model-*"))[::3]:
        raw = bytearray(path.read_bytes())
        raw[-1] ^= 1
        path.write_bytes(raw)


def foreign(out, folder):
    """Nothing tells that mmq wrote it; some blocks are wrong, and a side file."""
    flipped(out, folder)
    (folder / "mmq-manifest.json").unlink()
    text = (folder / "chat_template.jinja").read_bytes()
    (folder / "chat_template.jinja").write_bytes(bytes([text[0] ^ 1]) + text[1:])


def other_experts(out, folder):
    """Experts of another checkpoint, which lies here."""
    source = as_bf16(good(Size(layers=6, experts=8), shards=SHARDS))
    experts = source.write(folder.parent / "experts")
    converted(folder.parent / "source", folder, "--experts-from", str(experts))


@pytest.mark.parametrize("backwards", [False, True], ids=["planned", "backwards"])
@pytest.mark.parametrize(
    ("make", "code"), [(sound, 0), (flipped, 3), (foreign, 3), (other_experts, 0)]
)
def test_the_report_is_the_one_a_folder_gives(
    hub, big_repo, big_source, big_folder, report, tmp_path, monkeypatch, make, code, backwards
):
    out = tmp_path / "out"
    (tmp_path / "source").symlink_to(big_source)
    make(big_folder, out)
    local = judge(out, big_source, tmp_path / "local.json")[:2]
    if backwards:
        monkeypatch.setattr(download_plan, "order_units", lambda units, *_: tuple(reversed(units)))
    watch = Watch(report.parent, monkeypatch)
    before = snapshot(out)
    found = judge(out, REPO, report)[:2]
    assert found[0] == local[0] == code
    assert found[1]["against"]["location"] == REPO
    assert (found[1]["against"]["repo"], found[1]["against"]["commit"]) == (REPO, big_repo)
    assert without_place(found[1]) == without_place(local[1])
    assert sorted(watch.fetched) == sorted(p.name for p in big_source.glob("model-*"))
    # nothing is left of it
    assert [p.name for p in report.parent.iterdir()] == [report.name]
    assert snapshot(out) == before


@pytest.mark.parametrize("make", [sound, foreign])
def test_jobs_say_what_they_read(big_source, big_folder, report, tmp_path, monkeypatch, make):
    """Each part of a job by itself reads what its tasks say: no more, and no less."""
    make(big_folder, tmp_path / "out")
    real, read, seen, parts = weights.run_job, SourceReader.read, set(), set()

    def noted(self, tensor, start, nbytes, origin="source"):
        seen.add((origin, tensor.name))
        return read(self, tensor, start, nbytes, origin)

    def run_job(job, *rest):
        every = {"by_bytes": (), "by_value": (), "scalars": (), "modules": ()}
        for part in ("by_bytes", "by_value", "scalars"):
            for task in getattr(job, part):
                alone = replace(job, **{**every, part: (task,)})
                seen.clear()
                real(alone, *rest)
                told = {(o, t.name) for task in alone.tasks for o, t in download_plan.reads(task)}
                assert {pair for pair in seen if pair[0] != "out"} == told, task
                parts.add(part)
        return real(job, *rest)

    monkeypatch.setattr(SourceReader, "read", noted)
    monkeypatch.setattr(weights, "run_job", run_job)
    assert judge(tmp_path / "out", big_source, report)[0] == (0 if make is sound else 3)
    assert parts == ({"by_bytes"} if make is sound else {"by_bytes", "by_value", "scalars"})


def test_the_first_of_many_is_the_first_of_out(
    hub, big_repo, big_source, big_folder, report, monkeypatch
):
    """What is told of all shards together does not depend on the order of the jobs either."""
    real = weights.run_job

    def run_job(job, *rest):
        result = real(job, *rest)
        result.adaptive.append(job.filename)
        return result

    monkeypatch.setattr(weights, "run_job", run_job)
    monkeypatch.setattr(download_plan, "order_units", lambda units, *_: tuple(reversed(units)))
    _, answer, _ = judge(big_folder, REPO, report)
    (finding,) = [f for f in answer["findings"] if f["id"] == "rounding-not-nearest"]
    assert finding["where"] == min(p.name for p in big_folder.glob("model-*"))


def test_a_planted_byte_is_named(hub, big_repo, big_folder, report, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(big_folder, out)
    path = sorted(out.glob("model-*"))[4]
    name = max(read_shard(path), key=lambda n: (n.endswith(".weight"), n))
    raw = bytearray(path.read_bytes())
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    raw[8 + int.from_bytes(raw[:8], "little") + header[name]["data_offsets"][0]] ^= 1
    path.write_bytes(raw)
    code, answer, _ = judge(out, f"{REPO}@{big_repo}", report)
    assert code == 3
    errors = {(f["id"], f["where"]) for f in answer["findings"] if f["severity"] == "error"}
    assert ("file-hash", path.name) in errors
    assert any(where == name for id, where in errors if id != "file-hash"), errors


def test_without_words_they_lie_in_out(hub, big_repo, big_folder, tmp_path, monkeypatch):
    out = tmp_path / "out"
    shutil.copytree(big_folder, out)
    watch = Watch(out / ".mmq-verify" / "source" / "org--name" / big_repo, monkeypatch)
    code, events, _ = run_mmq("verify", out, "--against", REPO)
    assert code == 0, events
    assert len(watch.fetched) == SHARDS and watch.peak > 0
    assert not (out / ".mmq-verify").exists() and (out / "mmq-verify.json").exists()


def told_bytes(events):
    """(all of it, here at a time), as the run says, to four digits."""
    (note,) = [e["message"] for e in events if "at a time" in e.get("message", "")]
    return [float(text) * 1e6 for text in re.findall(r"([\d.]+) MB", note)]


@pytest.mark.parametrize("scattered", [True, False])
def test_no_more_is_held_than_there_is_room_for(
    hub, big_repo, big_source, big_folder, report, tmp_path, monkeypatch, scattered
):
    if not scattered:  # the same tensors, a weight and its scale in one shard
        big_source = good(Size(layers=6, experts=8), shards=SHARDS).write(tmp_path / "src")
        hub.add_folder(REPO, big_source)
    sizes = [p.stat().st_size for p in big_source.glob("model-*")]
    watch = Watch(report.parent, monkeypatch)
    code, _, events = judge(big_folder, REPO, report)
    total, wide = told_bytes(events)
    assert code == 0 and watch.peak <= wide + 5e3
    assert wide < total == pytest.approx(sum(sizes), abs=2e4)

    monkeypatch.setattr(downloads, "free_bytes", lambda folder: 0)
    code, id, error = refused("verify", big_folder, "--against", REPO, "-o", report)
    assert (code, id) == (6, "disk-space") and "--download-dir" in error["hint"]
    needed = int(error["expected"].split()[0].replace(",", ""))
    monkeypatch.setattr(downloads, "free_bytes", lambda folder: needed)
    watch.peak = 0
    code, _, events = judge(big_folder, REPO, report)
    assert code == 0
    assert told_bytes(events)[1] == pytest.approx(needed - downloads.SPARE_BYTES, abs=5e3)
    sides = needed - downloads.SPARE_BYTES - watch.peak
    assert 0 <= sides < min(sizes), "what one job needs at a time, and the side files"
    assert needed - downloads.SPARE_BYTES < wide
    if not scattered:
        assert watch.peak <= 3 * max(sizes) < sum(sizes)
    monkeypatch.setattr(downloads, "free_bytes", lambda folder: needed - 1)
    assert refused("verify", big_folder, "--against", REPO, "-o", report)[:2] == (6, "disk-space")


def test_a_folder_needs_no_room(big_source, big_folder, report, monkeypatch):
    monkeypatch.setattr(downloads, "free_bytes", lambda folder: 0)
    monkeypatch.setattr(source_files.FolderLock, "__init__", None)
    assert judge(big_folder, big_source, report)[0] == 0


def test_what_the_cache_has_is_not_downloaded(hub, big_repo, big_source, big_folder, report):
    from test_hub_convert import cache_snapshot

    cached = cache_snapshot(REPO, big_repo, big_source)
    before = hashes(cached, leave_out=())
    assert judge(big_folder, REPO, report)[0] == 0
    assert len(hub.log.requests) == 1, "the listing"
    assert hashes(cached, leave_out=()) == before


def test_what_the_cache_lacks_is_downloaded(hub, big_repo, big_source, big_folder, report):
    from test_hub_convert import cache_snapshot

    lacking = "model-00002-of-00006.safetensors"
    cached = cache_snapshot(REPO, big_repo, big_source, leave_out=(lacking, "LICENSE"))
    before = hashes(cached, leave_out=())
    assert judge(big_folder, REPO, report)[0] == 0
    assert {r.path.rpartition("/")[2] for r in hub.log.of("/resolve/")} == {lacking, "LICENSE"}
    assert hashes(cached, leave_out=()) == before


def test_a_kept_copy_is_used_and_stays(hub, big_repo, big_source, big_folder, report, tmp_path):
    kept = tmp_path / "kept"
    folder = kept / "org--name" / big_repo
    converted(REPO, tmp_path / "out", "--download-dir", str(kept), "--keep-downloads")
    hub.log.clear()
    assert judge(big_folder, REPO, report, "--download-dir", kept)[0] == 0
    assert cdn_bytes(hub) == SHARDS * FIRST_READ, "headers"
    assert not data_gets(hub)
    assert hashes(folder, leave_out=()) == hashes(big_source, leave_out=())


def test_kept_downloads_are_a_checkpoint(hub, big_repo, big_source, big_folder, report, tmp_path):
    kept = tmp_path / "kept"
    folder = kept / "org--name" / big_repo
    options = ("--download-dir", kept, "--keep-downloads")
    assert judge(big_folder, REPO, report, *options)[0] == 0
    assert hashes(folder, leave_out=()) == hashes(big_source, leave_out=())
    assert not (kept / ".mmq-lock").exists()
    assert judge(big_folder, folder, report)[0] == 0


def test_side_files_of_another_size_are_not_fetched(
    hub, big_repo, big_source, big_folder, report, tmp_path
):
    out = tmp_path / "out"
    shutil.copytree(big_folder, out)
    (out / "LICENSE").write_text("another")
    assert judge(out, REPO, report)[0] == 3
    assert hub.log.of("/resolve/.*/tokenizer.json") and not hub.log.of("/resolve/.*/LICENSE")
    # but kept, the checkpoint is whole
    kept = tmp_path / "kept"
    assert judge(out, REPO, report, "--download-dir", kept, "--keep-downloads")[0] == 3
    copy = kept / "org--name" / big_repo
    assert hashes(copy, leave_out=()) == hashes(big_source, leave_out=())


def test_a_download_folder_is_left_as_it_was(hub, big_repo, big_folder, report, tmp_path):
    folder = tmp_path / "dir"
    folder.mkdir()
    (folder / "mine").write_text("mine")
    assert judge(big_folder, REPO, report, "--download-dir", folder)[0] == 0
    assert [p.name for p in folder.rglob("*")] == ["mine"]


def test_keeping_needs_a_place(hub, big_repo, big_folder):
    found = refused("verify", big_folder, "--against", REPO, "--keep-downloads")
    assert found[:2] == (2, "option-conflict")


def test_an_out_that_cannot_be_written(hub, big_repo, big_folder, report, monkeypatch):
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: path != big_folder and real(path, mode))
    code, id, error = refused("verify", big_folder, "--against", REPO)
    assert (code, id) == (2, "hub-needs-files")
    assert "-o FILE" in error["hint"] and "--download-dir" in error["hint"]
    assert "MB to download" in error["got"] and not data_gets(hub)
    assert judge(big_folder, REPO, report)[0] == 0


def test_nothing_is_written_into_the_cache(hub, big_repo, big_folder, report, tmp_path):
    """OUT is on the Hub, and whole in its cache."""
    from test_hub_convert import cache_snapshot

    published = hub.add_folder("org/converted", big_folder)
    cached = cache_snapshot("org/converted", published, big_folder)
    before = {p: p.stat().st_mtime_ns for p in (cached, *cached.rglob("*"))}
    found = refused("verify", "org/converted", "--against", REPO)
    assert found[:2] == (2, "hub-needs-files")
    for options in (("-o", report), ("--download-dir", tmp_path / "dir")):
        code, events, _ = run_mmq("verify", "org/converted", "--against", REPO, *options)
        assert code == 0, events
    assert {p: p.stat().st_mtime_ns for p in (cached, *cached.rglob("*"))} == before
    assert not list((tmp_path / "dir").iterdir())


def test_structure_downloads_nothing(hub, big_repo, big_folder, report):
    assert judge(big_folder, REPO, report, "--level", "structure")[0] == 0
    assert cdn_bytes(hub) == SHARDS * FIRST_READ


def test_level_logits_needs_a_copy_and_says_so(hub, big_repo, big_folder, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("a")
    code, id, error = refused(
        "verify", big_folder, "--against", REPO, "--level", "logits", "--text", text
    )
    assert (code, id) == (2, "hub-needs-files")
    assert "at once" in error["message"] and "--level weights" in error["hint"]
    assert "--download-dir DIR" in error["hint"] and not data_gets(hub)


def test_a_source_with_a_shard_that_nobody_reads(hub, tmp_path, monkeypatch):
    """Kept, it is whole all the same: its index names that shard."""
    source = good()
    names = add_mtp(source)
    extra = "model-mtp.safetensors"
    source.shards[extra] = {name: source.pop(name) for name in names}
    folder = source.write(tmp_path / "src")
    (folder / ".gitattributes").write_text("*.safetensors filter=lfs\n")
    commit = hub.add_folder(REPO, folder)
    monkeypatch.setattr(stand_in, "FIRST_READ", FIRST_READ)
    out, kept = tmp_path / "out", tmp_path / "kept"
    converted(REPO, out, "--download-dir", str(kept / "a"), "--keep-downloads")
    options = ("--download-dir", kept / "b")
    assert judge(out, REPO, tmp_path / "report.json", *options)[0] == 0
    assert not list((kept / "b").iterdir())
    hub.log.clear()
    options = (*options, "--keep-downloads")
    assert judge(out, REPO, tmp_path / "report.json", *options)[0] == 0
    for place in ("a", "b"):
        whole = kept / place / "org--name" / commit
        assert (whole / INDEX).exists()
        assert hashes(whole, leave_out=()) == hashes(folder, leave_out=())
    planned = run_mmq("convert", REPO, "no-such-out", *SMALL, "--dry-run", *options)[1][-1]
    assert planned["resources"]["download"] is None, "all of it is here"

"""What happens to the output folder, row by row of the case list (W1 …, C5, C6)."""

from __future__ import annotations

import json
import os
import resource
import shutil
import struct
import subprocess
import sys
import tempfile
from collections import namedtuple
from pathlib import Path

import pytest
from hostile import as_bf16, good, shard_bytes, tensor
from in_process import Outcome, run_mmq
from m3_source import INDEX, hashes, read_folder, snapshot


@pytest.fixture
def umask():
    """A function that sets the umask for one test."""
    before = os.umask(0o022)
    yield os.umask
    os.umask(before)


def modes(folder):
    return {p.relative_to(folder).as_posix(): p.stat().st_mode & 0o777
            for p in folder.rglob("*") if p.is_file()}  # fmt: skip


def stays(outcome, id, before, *words):
    """Refused with exit 7, and not a byte of the output folder was touched."""
    assert (outcome.code, outcome.error["id"]) == (7, id), outcome.events
    text = " ".join(str(v) for v in outcome.error.values())
    for word in words:
        assert word in text, f"{word} is not in: {text}"
    assert snapshot(outcome.out) == before


@pytest.mark.parametrize("mask, mode", [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_W1_files_get_0666_and_umask(convert, umask, mask, mode):
    umask(mask)
    assert set(modes(convert(good()).out).values()) == {mode}


def test_W1_overwriting_keeps_the_old_modes(convert, tmp_path):
    outcome = convert(good())
    names = ["model-00001-of-00001.safetensors", "LICENSE", "config.json", "figures/图 1.txt"]
    for name in names:
        (outcome.out / name).chmod(0o664)
    again = convert(tmp_path / "src", "--overwrite", "--input-scales", "none")
    assert again.code == 0
    found = modes(again.out)
    assert {found.pop(name) for name in names} == {0o664}
    assert set(found.values()) == {0o644}


@pytest.mark.parametrize("metadata", [{"format": "pt"}, None, {"b": "2", "format": "np", "a": "1"}])
def test_W2_shards_say_format_pt(convert, metadata):
    source = good()
    source.metadata = metadata
    outcome = convert(source, "--max-shard-size", "300KB")
    assert outcome.code == 0
    for path in outcome.out.glob("*.safetensors"):
        raw = path.read_bytes()
        header = json.loads(raw[8 : 8 + struct.unpack("<Q", raw[:8])[0]])
        assert header["__metadata__"] == {"format": "pt"}


def _half_a_shard(out, good_output):
    out.mkdir()
    raw = (good_output.out / "model-00001-of-00001.safetensors").read_bytes()
    (out / "model-00001-of-00001.safetensors").write_bytes(raw[: len(raw) // 2])


def test_W3_half_a_shard_is_never_trusted(convert, good_output, tmp_path):
    _half_a_shard(tmp_path / "out", good_output)
    before = snapshot(tmp_path / "out")
    outcome = convert(good())
    stays(outcome, "output-not-empty", before, "not an mmq run's", "--overwrite")
    assert convert(tmp_path / "src", "--overwrite").hashes == good_output.hashes


def test_W3_nor_a_whole_one_of_unknown_origin(convert, good_output, tmp_path):
    (tmp_path / "out").mkdir()
    name = "model-00001-of-00001.safetensors"
    shutil.copy(good_output.out / name, tmp_path / "out" / name)
    before = snapshot(tmp_path / "out")
    stays(convert(good()), "output-not-empty", before, name)


def _limited(size, *arguments):
    """mmq in a process that may not write files larger than `size` bytes."""
    return subprocess.run(
        [sys.executable, "-m", "mmq", *map(str, arguments), "--json"], capture_output=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size)),
    )  # fmt: skip


def test_W4_a_write_that_fails_leaves_nothing_half(good_folder, good_output, tmp_path):
    out = tmp_path / "out"
    done = _limited(256 << 10, "convert", good_folder, out, "--jobs", "1")
    events = [json.loads(line) for line in done.stdout.splitlines()]
    (error,) = [e for e in events if e["event"] == "error"]
    assert (done.returncode, error["id"]) == (6, "file-size-limit")
    name = "model-00001-of-00001.safetensors"
    needed = (good_output.out / name).stat().st_size
    assert name in error["message"]
    assert f"{needed:,} bytes" in error["expected"] and "free" in error["got"]
    assert not list(out.glob("*safetensors*"))
    code, _, _ = run_mmq("convert", good_folder, out, "--jobs", "1")
    assert code == 0 and hashes(out) == good_output.hashes


def test_W4_finished_shards_survive_it(good_folder, tmp_path):
    out, options = tmp_path / "out", ("--max-shard-size", "150KB", "--jobs", "1")
    whole = tmp_path / "whole"
    assert run_mmq("convert", good_folder, whole, *options)[0] == 0
    sizes = sorted(p.stat().st_size for p in whole.glob("*.safetensors"))
    assert _limited(sizes[-1] - 1, "convert", good_folder, out, *options).returncode == 6
    kept = sorted(out.glob("*.safetensors"))
    assert kept and len(kept) < len(sizes)
    written = {p: p.stat().st_mtime_ns for p in kept}
    assert run_mmq("convert", good_folder, out, *options)[0] == 0
    assert {p: p.stat().st_mtime_ns for p in kept} == written
    assert hashes(out) == hashes(whole)


def test_W4_room_is_checked_before_work(convert, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9, 12_345))
    outcome = convert(good())
    assert (outcome.code, outcome.error["id"]) == (6, "disk-space")
    assert "12,345 bytes" in outcome.error["got"] and "bytes" in outcome.error["expected"]
    assert not list(outcome.out.glob("*safetensors*")) and not outcome.finished


def test_W4_an_output_that_cannot_be_made(convert, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    good().write(tmp_path / "src")
    for out in (tmp_path / "file" / "out", tmp_path / "file" / "a" / "b", tmp_path / "file"):
        outcome = convert(tmp_path / "src", out=out)
        assert (outcome.code, outcome.error["id"]) == (2, "output-not-folder")
        assert outcome.error["message"] == f"{tmp_path / 'file'} is no folder"
        assert outcome.error["hint"] == f"mmq convert SRC {tmp_path / 'file'}-nvfp4"
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    outcome = convert(tmp_path / "src", out=tmp_path / "link")
    assert (outcome.code, outcome.error["got"]) == (2, "a link to what does not exist")


def test_W6_equal_bytes_whatever_the_metadata_order(convert, good_output, tmp_path):
    for number, keys in enumerate(("abc", "cab", "bca")):
        source = good()
        source.metadata = {"format": "pt", **dict.fromkeys(keys, "x")}
        outcome = convert(source, out=tmp_path / f"out{number}")
        shard = "model-00001-of-00001.safetensors"
        assert outcome.hashes[shard] == good_output.hashes[shard]


OVERLAPS = {
    "the source itself": lambda root, src: src,
    "below the source": lambda root, src: src / "sub" / "out",
    "above the source": lambda root, src: root,
    "a link to the source": lambda root, src: _link(root / "link", src),
    "below a link to the source": lambda root, src: _link(root / "link", src) / "out",
    "with dots": lambda root, src: root / "other" / ".." / "src",
}


def _link(path, target):
    path.symlink_to(target)
    return path


@pytest.mark.parametrize("flag", [(), ("--overwrite",), ("--restart",)], ids=str)
@pytest.mark.parametrize("where", OVERLAPS)
def test_W7_output_overlaps_source(tmp_path, where, flag):
    src = good().write(tmp_path / "src")
    out = OVERLAPS[where](tmp_path, src)
    before = snapshot(tmp_path)
    code, events, _ = run_mmq("convert", src, out, *flag)
    assert (code, Outcome(code, events, "", out).error["id"]) == (7, "output-overlaps-source")
    assert snapshot(tmp_path) == before


def test_W7_output_overlaps_the_source_of_the_experts(convert, tmp_path):
    experts = as_bf16(good()).write(tmp_path / "bf16")
    before = snapshot(experts)
    outcome = convert(good(), "--experts-from", experts, "--overwrite", out=experts)
    assert (outcome.code, outcome.error["id"]) == (7, "output-overlaps-source")
    assert snapshot(experts) == before


def _old_checkpoint(out, source):
    """What an earlier run of another tool left: five shards and an index."""
    out.mkdir()
    old = {}
    for number, shard in enumerate(["a", "b", "c", "d", "e"], 1):
        name = f"model-{number:05d}-of-00005.safetensors"
        (out / name).write_bytes(shard_bytes({shard: tensor("U8", [1, 2, 3])}, None))
        old[shard] = name
    (out / "custom-name.safetensors").write_bytes(shard_bytes({"f": tensor("U8", [1])}, None))
    old["f"] = "custom-name.safetensors"
    (out / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": old}))
    for name in ("config.json", "hf_quant_config.json", "tokenizer.json", "mmq-verify.json"):
        (out / name).write_text("{}")


def test_W8_stale_shards_are_refused(convert, tmp_path):
    source = good()
    _old_checkpoint(tmp_path / "out", source)
    before = snapshot(tmp_path / "out")
    stays(convert(source), "output-not-empty", before, "a finished checkpoint", "--overwrite")


def test_W8_and_none_remains_after_overwrite(convert, good_output, tmp_path):
    source = good()
    _old_checkpoint(tmp_path / "out", source)
    assert convert(source, "--overwrite").hashes == good_output.hashes


@pytest.mark.parametrize("name", ["notes.txt", "sub/x.safetensors", "adapter.bin", ".env"])
def test_W8_foreign_files_are_listed_and_left_alone(convert, tmp_path, name):
    source = good()
    _old_checkpoint(tmp_path / "out", source)
    (tmp_path / "out" / name).parent.mkdir(exist_ok=True)
    (tmp_path / "out" / name).write_bytes(b"mine")
    before = snapshot(tmp_path / "out")
    stays(convert(source, "--overwrite"), "output-foreign-files", before, name)


def test_W8_an_index_cannot_point_overwrite_elsewhere(convert, tmp_path):
    source = good()
    _old_checkpoint(tmp_path / "out", source)
    (tmp_path / "precious.txt").write_bytes(b"mine")
    targets = {"a": "../precious.txt", "b": str(tmp_path / "precious.txt")}
    (tmp_path / "out" / INDEX).write_text(json.dumps({"weight_map": targets}))
    (tmp_path / "out" / "custom-name.safetensors").unlink()
    assert convert(source, "--overwrite").code == 0
    assert (tmp_path / "precious.txt").read_bytes() == b"mine"


def test_W9_the_index_is_what_the_headers_say(convert, tmp_path):
    outcome = convert(good(), "--max-shard-size", "100KB")
    weight_map = outcome.json(INDEX)["weight_map"]
    assert len(set(weight_map.values())) > 5
    tensors = read_folder(outcome.out)  # asserts that headers and index agree
    assert outcome.json(INDEX)["metadata"]["total_size"] == sum(
        len(t.data) for t in tensors.values()
    )
    assert list(weight_map) == sorted(weight_map)


def test_W9_a_single_shard_has_an_index_too(good_output):
    assert set(good_output.json(INDEX)["weight_map"].values()) == {
        "model-00001-of-00001.safetensors"
    }


def test_W10_a_read_only_source_is_not_written(convert, tmp_path, umask):
    umask(0o022)
    folder = good().write(tmp_path / "src")
    for path in [*folder.rglob("*"), folder]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    folders = [folder, *(p for p in folder.rglob("*") if p.is_dir())]
    times = {p: p.stat().st_mtime_ns for p in folders}
    outcome = convert(folder)
    assert {p: p.stat().st_mtime_ns for p in folders} == times
    assert set(modes(outcome.out).values()) == {0o644}
    assert (outcome.out / "figures").stat().st_mode & 0o777 == 0o755
    for path in folders:
        path.chmod(0o755)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody else")
def test_W10_as_somebody_who_may_not_write(good_output):
    """Whoever may only read the source converts it; a lock or cache there would fail."""
    script = (
        "import os, sys\nfrom mmq.cli import main\n_, src, out = sys.argv\n"
        "run = lambda name: main(['convert', src, f'{out}/{name}', '--jobs', '1', '--quiet'])\n"
        "run('as-root')  # imports what the other user may not be able to read\n"
        "os.setgid(65534); os.setuid(65534)\nsys.exit(run('as-nobody'))"
    )
    with tempfile.TemporaryDirectory() as root:
        folder, out = good().write(Path(root) / "src"), Path(root) / "out"
        out.mkdir()
        Path(root).chmod(0o755)
        out.chmod(0o777)
        done = subprocess.run(
            [sys.executable, "-c", script, folder, out], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert hashes(out / "as-nobody") == hashes(out / "as-root") == good_output.hashes


@pytest.mark.parametrize("quoted", ["~/x", "~/deep/er/x"])
def test_C5_a_quoted_tilde_is_the_home_folder(good_folder, tmp_path, monkeypatch, quoted):
    home, here = tmp_path / "home", tmp_path / "here"
    home.mkdir()
    here.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(here)
    assert run_mmq("convert", good_folder, quoted, "--jobs", "1")[0] == 0
    assert (home / quoted[2:] / INDEX).is_file()
    assert not list(here.iterdir())


def test_C6_an_empty_folder_is_not_finished(convert, tmp_path, good_output):
    (tmp_path / "out").mkdir()
    assert convert(good()).hashes == good_output.hashes


@pytest.mark.parametrize("name", ["config.json", "model-00001-of-00001.safetensors", "LICENSE"])
def test_C6_nor_one_that_only_has_some_file(convert, tmp_path, good_output, name):
    (tmp_path / "out").mkdir()
    shutil.copy(good_output.out / name, tmp_path / "out" / name)
    before = snapshot(tmp_path / "out")
    stays(convert(good()), "output-not-empty", before, name)
    assert convert(tmp_path / "src", "--overwrite").hashes == good_output.hashes


def test_C6_finished_means_every_file_is_there(convert, tmp_path, good_output):
    first_run = convert(good())
    assert convert(tmp_path / "src").of("result")[0]["finished"]
    (first_run.out / "LICENSE").unlink()
    outcome = convert(tmp_path / "src")
    assert (outcome.code, outcome.error["id"]) == (7, "output-not-empty")
    assert "LICENSE" in outcome.error["got"]
    assert convert(tmp_path / "src", "--overwrite").hashes == good_output.hashes

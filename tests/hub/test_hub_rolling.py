"""Source shards come and go: never more bytes here than planned, each needed one in time; killed
runs go on where they were."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from hostile import as_bf16, good
from hub_runs import REPO, SMALL, Watch, converted, refused, shard_gets, without_origin
from in_process import run_mmq

from mmq.convert import download_plan, downloads
from mmq.convert.download_plan import order_units, peak_bytes
from mmq.hub import stand_in

SHARDS = 6


def units_of(*needs):
    """Units numbered from 1 and what they need, from words such as "ab"."""
    units = [SimpleNamespace(index=i) for i in range(1, len(needs) + 1)]
    return units, {i: frozenset(word) for i, word in enumerate(needs, 1)}


@pytest.mark.parametrize(
    ("needs", "ahead", "peak"),
    [
        (("a", "a", "b"), 1, 1),
        (("a", "ab", "b", "c"), 1, 2),
        (("a", "b", "c"), 2, 2),
        (("a", "b", "c"), 3, 3),
        (("ab", "c", "a"), 1, 2),
        (("ab", "c", "ac"), 1, 2),
        (("abc", "", "c"), 1, 3),
        (("", ""), 1, 0),
    ],
)
def test_peak(needs, ahead, peak):
    units, needed = units_of(*needs)
    assert peak_bytes(units, needed, dict.fromkeys("abc", 1), ahead) == peak


def test_peak_counts_what_an_earlier_run_left():
    units, needed = units_of("a", "b", "c")
    assert peak_bytes(units, needed, dict.fromkeys("abc", 1), 1, frozenset("c")) == 2


def simulated_peak(units, needed, sizes):
    """Held bytes, unit by unit, from the definition."""
    held, peak = set(), 0
    for step, unit in enumerate(units):
        held |= needed[unit.index]
        peak = max(peak, sum(sizes[s] for s in held))
        later = set().union(*(needed[u.index] for u in units[step + 1 :]))
        held &= later
    return peak


@pytest.mark.parametrize("seed", range(30))
def test_orders_are_whole_and_no_worse_than_the_natural_one(seed):
    rng = random.Random(seed)
    sizes = {s: rng.randint(1, 9) for s in "abcdefgh"}
    words = ["".join(rng.sample("abcdefgh", rng.randint(0, 4))) for _ in range(12)]
    units, needed = units_of(*words)
    ordered = order_units(units, needed, sizes)
    assert sorted(u.index for u in ordered) == [u.index for u in units]
    natural = peak_bytes(units, needed, sizes, 1)
    assert peak_bytes(ordered, needed, sizes, 1) <= natural
    assert natural == simulated_peak(units, needed, sizes)


def test_a_better_order_is_found():
    # the two halves of the source interleave
    units, needed = units_of("ab", "cd", "ab", "cd", "ab", "cd")
    sizes = dict.fromkeys("abcd", 1)
    assert peak_bytes(units, needed, sizes, 1) == 4
    assert peak_bytes(order_units(units, needed, sizes), needed, sizes, 1) == 2


@pytest.fixture(scope="module")
def big_output(big_source, tmp_path_factory):
    return converted(big_source, tmp_path_factory.mktemp("rolling") / "out")


def planned(*options):
    code, events, _ = run_mmq("convert", REPO, "no-such-out", *SMALL, "--dry-run", *options)
    assert code == 0
    return events[-1]["resources"]


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_no_more_is_held_than_planned(hub, big_source, big_output, tmp_path, monkeypatch, jobs):
    hub.add_folder(REPO, big_source)
    plan = planned("--jobs", jobs)["download"]
    sides = plan["bytes"] - sum(p.stat().st_size for p in big_source.glob("model-*"))
    watch = Watch(tmp_path / "out" / ".mmq", monkeypatch)
    assert converted(REPO, tmp_path / "out", "--jobs", jobs) == big_output
    assert watch.peak <= plan["held_bytes"] - sides < plan["bytes"] - sides
    assert sorted(watch.fetched) == sorted(p.name for p in big_source.glob("model-*"))
    assert watch.peak >= max(p.stat().st_size for p in big_source.glob("model-*"))


def test_a_full_disk_holds_one_unit_at_a_time(hub, big_source, big_output, tmp_path, monkeypatch):
    hub.add_folder(REPO, big_source)
    resources = planned("--jobs", "1")
    plan = resources["download"]
    sides = plan["bytes"] - sum(p.stat().st_size for p in big_source.glob("model-*"))
    free = resources["needed_bytes"] + downloads.SPARE_BYTES
    monkeypatch.setattr(downloads, "free_bytes", lambda folder: free)
    watch = Watch(tmp_path / "out" / ".mmq", monkeypatch)
    assert converted(REPO, tmp_path / "out") == big_output
    assert watch.peak == plan["least_bytes"] - sides < plan["held_bytes"] - sides
    monkeypatch.setattr(downloads, "free_bytes", lambda folder: free - 1)
    assert refused("convert", REPO, tmp_path / "b", *SMALL)[:2] == (6, "disk-space")


def test_the_text_of_a_plan(hub, big_source, capsys):
    from mmq.cli import main

    hub.add_folder(REPO, big_source)
    assert main(["convert", REPO, "no-such-out", *SMALL, "--jobs", "1", "--dry-run"]) == 0
    (line,) = [t for t in capsys.readouterr().out.splitlines() if t.startswith("download ")]
    assert " here at a time (" in line and "where the disk is full)" in line


def test_a_missing_need_is_an_error_not_zeros(hub, big_source, tmp_path, monkeypatch):
    """Break the plan: units that read more than they say they need."""
    hub.add_folder(REPO, big_source)
    real = download_plan.reads
    monkeypatch.setattr(
        download_plan, "reads", lambda task: (r for r in real(task) if "scale_inv" not in r[1].name)
    )
    code, id, _ = refused("convert", REPO, tmp_path / "out", *SMALL, "--jobs", "1")
    assert (code, id) == (4, "file-unreadable")


def start(hub, out, *options):
    environment = {**os.environ, **hub.environment, "HF_HUB_CACHE": str(out.parent / "cache")}
    return subprocess.Popen(
        [sys.executable, "-m", "mmq", "convert", REPO, str(out), *SMALL, "--jobs", "1", *options],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip


def records(out):
    return sorted(p.name for p in (out / ".mmq" / "done").glob("*.json"))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_stopped_run_fetches_only_what_is_left(
    hub, big_source, big_output, tmp_path, monkeypatch, number
):
    commit = hub.add_folder(REPO, big_source)
    out = tmp_path / "out"
    # the fifth download stays behind, so that the run is stopped in the middle of one
    slow = hub.fault("GET /cdn/", skip=SHARDS + 5, times=None, pause=0.4)
    run = start(hub, out)
    deadline = time.monotonic() + 60
    while not (records(out) and slow.met > SHARDS + 5 and list(out.rglob("*.safetensors.partial"))):
        assert run.poll() is None and time.monotonic() < deadline, run.communicate()
        time.sleep(0.01)
    time.sleep(0.6)
    run.send_signal(number)
    _, stderr = run.communicate(timeout=30)
    assert run.returncode == (130 if number == signal.SIGINT else -number)
    assert hub.token not in stderr
    done = len(records(out))
    here = {p.name for p in (out / ".mmq" / "source").rglob("model-*.safetensors")}
    hub.heal()
    hub.log.clear()
    monkeypatch.setattr(stand_in, "FIRST_READ", 16 << 10)
    # the branch moves in the meantime; the run stays with its commit
    hub.add(REPO, {"README.md": b"new"})
    code, events, _ = run_mmq("convert", REPO, out, *SMALL, "--jobs", "1")
    assert code == 0, events
    assert without_origin(out) == big_output
    timing = json.loads((out / "mmq-convert.json").read_bytes())["timing"]
    assert timing["resumed_shards"] == done > 0
    manifest = json.loads((out / "mmq-manifest.json").read_bytes())
    assert manifest["hub"]["source"] == {"repo": REPO, "revision": "main", "commit": commit}
    fetched = {r.path.rpartition("/")[2] for r in shard_gets(hub) if r.range != "bytes=0-16383"}
    assert not fetched & here


def test_a_partial_download_goes_on_at_its_end(hub, repo, hub_source, tmp_path):
    from mmq.hub.download import download
    from mmq.hub.location import HubLocation
    from mmq.hub.snapshot import open_snapshot

    snapshot = open_snapshot(HubLocation(REPO, "main"))
    name = "model-00001-of-00003.safetensors"
    whole = (hub_source / name).read_bytes()
    path = tmp_path / snapshot.slug / name
    path.parent.mkdir(parents=True)
    path.with_name(name + ".partial").write_bytes(whole[:100_000])
    told = []
    download(snapshot, name, path, threading.Event(), told.append)
    assert path.read_bytes() == whole
    assert sum(told) == len(whole)
    starts = sorted(int(r.range[6:].split("-")[0]) for r in hub.log.of("GET /cdn/"))
    assert starts[0] == 100_000
    assert not path.with_name(name + ".partial").exists()
    hub.log.clear()
    download(snapshot, name, path, threading.Event())
    assert hub.log.requests == []


@pytest.mark.parametrize("length", [400_000, 1_000_000])
def test_a_partial_file_of_other_bytes_is_fetched_anew(hub, repo, hub_source, tmp_path, length):
    from mmq.hub.download import download
    from mmq.hub.location import HubLocation
    from mmq.hub.snapshot import open_snapshot

    snapshot = open_snapshot(HubLocation(REPO, "main"))
    name = "model-00003-of-00003.safetensors"
    path = tmp_path / name
    path.with_name(name + ".partial").write_bytes(bytes(length))
    download(snapshot, name, path, threading.Event())
    assert path.read_bytes() == (hub_source / name).read_bytes()


def test_restart_takes_the_branch_as_it_is_now(hub, big_source, big_output, tmp_path):
    hub.add_folder(REPO, big_source)
    out = tmp_path / "out"
    hub.fault("GET /.*resolve/.*00004", skip=1, times=None, status=403)
    code, id, _ = refused("convert", REPO, out, *SMALL, "--jobs", "1")
    assert code == 4, id
    hub.heal()
    newer = hub.add(REPO, {"README.md": b"new"})
    assert run_mmq("convert", REPO, out, *SMALL, "--jobs", "1", "--restart")[0] == 0
    manifest = json.loads((out / "mmq-manifest.json").read_bytes())
    assert manifest["hub"]["source"]["commit"] == newer
    assert (out / "README.md").read_bytes() == b"new"


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_units_wait_for_what_they_read(hub, big_source, big_output, tmp_path, jobs):
    hub.add_folder(REPO, big_source)
    hub.fault("GET /cdn/", skip=SHARDS + 3, times=8, delay=0.7)
    assert converted(REPO, tmp_path / "out", "--jobs", jobs) == big_output


def plain_source(folder):
    return good().write(folder)


def bf16_source(folder):
    return as_bf16(good()).write(folder)


def nvfp4_source(folder):
    source = good().write(folder / "mxfp8")
    assert run_mmq("convert", source, folder / "nvfp4", "--jobs", "1")[0] == 0
    return folder / "nvfp4"


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (plain_source, {}),
        (plain_source, {"layout": "minimax"}),
        (plain_source, {"kv_scales": "none", "scale_search": "max"}),
        (plain_source, {"to": "bf16"}),
        (bf16_source, {"to": "mxfp8"}),
        (bf16_source, {}),
        (nvfp4_source, {"layout": "minimax"}),
        (nvfp4_source, {"to": "bf16"}),
        (plain_source, {"experts_from": bf16_source}),
    ],
)
def test_needs_are_what_tasks_read(tmp_path, monkeypatch, make, options):
    """Each task by itself reads what the plan says it reads: no more, and no less."""
    from mmq.convert.checkpoint import open_checkpoint
    from mmq.convert.options import ConvertOptions
    from mmq.convert.plan import build_plan
    from mmq.convert.stream import SourceReader
    from mmq.convert.tasks import TaskContext, run_task

    if "experts_from" in options:
        options = {"experts_from": str(options["experts_from"](tmp_path / "experts"))}
    plan = build_plan(open_checkpoint(make(tmp_path / "src")), ConvertOptions(**options))
    checkpoints = {"source": plan.source, **plan.others}
    paths = {o: {n: s.path for n, s in c.shards.items()} for o, c in checkpoints.items()}
    seen = set()
    real = SourceReader.read

    def read(self, tensor, start, nbytes, origin="source"):
        seen.add((origin, tensor.name))
        return real(self, tensor, start, nbytes, origin)

    monkeypatch.setattr(SourceReader, "read", read)
    reader = SourceReader(paths)
    kinds = set()
    for unit in plan.units:
        for task in unit.tasks:
            seen.clear()
            run_task(task, TaskContext(reader, False, True, lambda data: None))
            assert seen == {(o, t.name) for o, t in download_plan.reads(task)}, task
            kinds.add(type(task).__name__)
    reader.close()
    assert len(kinds) > 1

"""Unfinished, finished and locked output folders: what is resumed, redone, refused or discarded.

Runs are stopped after a chosen shard, in this process; `test_kill.py` does it with signals.
"""

from __future__ import annotations

import fcntl
import json
import os

import pytest
from hostile import NORM, W1, add_mtp, bf16, good, poke
from in_process import Outcome, run_mmq
from m3_source import hashes, snapshot

from mmq.convert import executor
from mmq.report.tables import plan_lines

OPTIONS = ("--max-shard-size", "100KB", "--jobs", "1")


@pytest.fixture(scope="module")
def whole(good_folder, tmp_path_factory):
    """Hashes of an undisturbed run with `OPTIONS`."""
    out = tmp_path_factory.mktemp("whole") / "out"
    assert run_mmq("convert", good_folder, out, *OPTIONS)[0] == 0
    return hashes(out)


@pytest.fixture
def run(good_folder, tmp_path):
    """mmq convert from the good source into tmp_path/out, with `OPTIONS` and more."""

    def convert(*more, source=good_folder):
        out = tmp_path / "out"
        return Outcome(*run_mmq("convert", source, out, *OPTIONS, *more), out)

    return convert


@pytest.fixture
def stop_after(monkeypatch):
    """Calls back and stops (or not) after so many shards of the next run."""

    def plant(shards, action=lambda unit, context: None, *, stop=True):
        real, count = executor.run_unit, 0

        def run_unit(unit, context, progress):
            nonlocal count
            if stop and count == shards:
                raise KeyboardInterrupt
            result = real(unit, context, progress)
            count += 1
            if count == shards:
                action(unit, context)
            return result

        monkeypatch.setattr(executor, "run_unit", run_unit)
        return lambda: monkeypatch.setattr(executor, "run_unit", real)

    return plant


@pytest.fixture
def unfinished(run, stop_after, tmp_path):
    """An output folder that a run left after three shards."""
    go_on = stop_after(3)
    outcome = run()
    assert outcome.code == 130 and not outcome.finished
    assert len(list((outcome.out / ".mmq" / "done").iterdir())) == 3
    go_on()
    return outcome.out


def shards(out):
    return sorted(out.glob("model-*.safetensors"))


def resumed(outcome):
    return outcome.json("mmq-convert.json")["timing"]["resumed_shards"]


def refused(outcome, id, *words, code=7):
    assert (outcome.code, outcome.error["id"]) == (code, id), outcome.events
    text = " ".join(str(v) for v in outcome.error.values())
    for word in words:
        assert word in text, f"{word} is not in: {text}"
    assert not outcome.finished


def test_same_command_finishes_with_the_same_bytes(run, unfinished, whole):
    kept = {p: p.stat().st_mtime_ns for p in shards(unfinished)}
    outcome = run()
    assert outcome.hashes == whole
    assert resumed(outcome) == len(kept) == 3
    assert {p: p.stat().st_mtime_ns for p in kept} == kept
    assert not (unfinished / ".mmq").exists()


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_other_jobs_resume_too(run, unfinished, whole, jobs):
    assert run("--jobs", jobs).hashes == whole


def _truncate(path):
    os.truncate(path, path.stat().st_size - 1)


def _flip_a_byte(path):
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)


@pytest.mark.parametrize(
    "damage", [os.unlink, _truncate, _flip_a_byte, lambda p: p.write_bytes(b"")]
)
def test_damaged_shard_is_made_again(run, unfinished, whole, damage):
    damage(shards(unfinished)[1])
    outcome = run()
    assert outcome.hashes == whole
    assert resumed(outcome) == 2


@pytest.mark.parametrize("text", [b"", b"{", b"{}", b"[]", b'{"bytes": "many"}'])
def test_damaged_record_is_no_record(run, unfinished, whole, text):
    (unfinished / ".mmq" / "done" / "00002.json").write_bytes(text)
    outcome = run()
    assert outcome.hashes == whole
    assert resumed(outcome) == 2


def test_shard_without_a_record_is_made_again(run, unfinished, whole):
    (unfinished / ".mmq" / "done" / "00002.json").unlink()
    shards(unfinished)[1].write_bytes(b"not what it says")
    assert run().hashes == whole


def test_partial_files_of_a_killed_run_go(run, unfinished, whole):
    shard = shards(unfinished)[0].name.replace("00001", "00004")
    for name in (shard, "LICENSE", "config.json", "dspark/config.json"):
        (unfinished / name).parent.mkdir(exist_ok=True)
        (unfinished / f"{name}.partial").write_bytes(b"half")
    assert run().hashes == whole


@pytest.mark.parametrize(
    "options, line",
    [
        (("--layout", "minimax"), "options.layout: modelopt → minimax"),
        (("--max-shard-size", "200KB"), "options.max_shard_bytes: 100000 → 200000"),
        (("--kv-scales", "unit"), "options.kv_scales: analytic → unit"),
        (("--ignore", "*.layers.2.block_sparse_moe.experts.*"), "options.ignore: [] → ["),
        (("--input-scales", "none"), "options.input_scales: unit → none"),
        (("--overwrite", "--mtp", "keep"), "options.mtp: drop → keep"),
    ],
)
def test_other_options_are_refused_with_a_diff(run, unfinished, options, line):
    before = snapshot(unfinished)
    refused(run(*options), "run-differs", line, "--restart")
    assert snapshot(unfinished) == before


def test_changed_source_is_refused_with_a_diff(run, stop_after, tmp_path):
    source = good()
    folder = source.write(tmp_path / "src")
    go_on = stop_after(2)
    assert run(source=folder).code == 130
    go_on()
    shard = folder / source.shard_of(NORM)
    source[NORM] = bf16(source[NORM].f64() * 2)
    source.write(folder)
    refused(run(source=folder), "run-differs", f"source.{shard.name}.mtime_ns")


def test_changed_config_is_refused(run, stop_after, tmp_path):
    source = good()
    folder = source.write(tmp_path / "src")
    go_on = stop_after(2)
    assert run(source=folder).code == 130
    go_on()
    source.config["text_config"]["rope_theta"] = 1
    (folder / "config.json").write_text(json.dumps(source.config))
    refused(run(source=folder), "run-differs", "config_sha256")


def test_restart_discards_the_unfinished_run(run, unfinished, whole, tmp_path):
    other = good()
    add_mtp(other)
    other.files = {"other.txt": b"a side file of the other source"}
    folder = other.write(tmp_path / "other")
    (unfinished / "LICENSE").write_bytes(b"of the first source")
    (unfinished / "chat_template.jinja.partial").write_bytes(b"of the first source")
    outcome = run("--restart", source=folder)
    assert resumed(outcome) == 0
    assert not (unfinished / "LICENSE").exists()
    assert not list(unfinished.rglob("*.partial"))
    fresh = tmp_path / "fresh"
    assert run_mmq("convert", folder, fresh, *OPTIONS)[0] == 0
    assert outcome.hashes == hashes(fresh)


@pytest.mark.parametrize("text", [b"", b"{", b"[]"])
def test_damaged_journal_needs_restart(run, unfinished, whole, text):
    (unfinished / ".mmq" / "journal.json").write_bytes(text)
    refused(run(), "journal-damaged", "--restart")
    assert run("--restart").hashes == whole


def test_restart_of_nothing_is_a_start(run, whole):
    assert run("--restart").hashes == whole


def test_killed_before_the_journal(run, tmp_path, whole):
    (tmp_path / "out" / ".mmq" / "done").mkdir(parents=True)
    (tmp_path / "out" / ".mmq" / "lock").touch()
    assert run().hashes == whole


def test_killed_between_index_and_journal_removal(run, unfinished, whole):
    assert run().code == 0
    (unfinished / ".mmq" / "done").mkdir(parents=True)
    (unfinished / ".mmq" / "journal.json").write_text("{}")
    outcome = run()
    assert outcome.of("result")[0]["finished"]
    assert hashes(unfinished) == whole


def test_finished_folder_is_finished_already(run, whole):
    assert run().hashes == whole
    before = snapshot(run().out)
    outcome = run()
    assert outcome.code == 0 and outcome.of("result")[0]["finished"]
    assert "finished already" in outcome.of("note")[0]["message"]
    assert snapshot(outcome.out) == before


def test_finished_folder_and_other_options(run, whole):
    assert run().hashes == whole
    outcome = run("--kv-scales", "unit")
    assert (outcome.code, outcome.error["id"]) == (7, "output-not-empty")
    assert "options.kv_scales: analytic → unit" in outcome.error["got"]
    assert hashes(outcome.out) == whole


def test_finished_folder_and_a_source_changed_since(run, tmp_path):
    source = good()
    folder = source.write(tmp_path / "src")
    assert run(source=folder).code == 0
    poke(source, f"{W1}.weight", ((0, 0), 0x11))
    source.write(folder)
    outcome = run(source=folder)
    assert (outcome.code, outcome.error["id"]) == (7, "output-not-empty")
    assert "newer than the output" in outcome.error["got"]
    assert run("--overwrite", source=folder).code == 0


def test_two_runs_at_once(run, unfinished):
    lock = os.open(unfinished / ".mmq" / "lock", os.O_RDWR)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        before = snapshot(unfinished)
        for flag in ((), ("--restart",)):
            refused(run(*flag), "locked", "another run")
        assert snapshot(unfinished) == before
    finally:
        os.close(lock)
    assert run().code == 0


def _touch(unit, context):
    path = next(iter(context.paths["source"].values()))
    stat = path.stat()
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))


def _shrink(unit, context):
    for path in context.paths["source"].values():
        os.truncate(path, 1000)


def _remove(unit, context):
    for path in context.paths["source"].values():
        path.unlink()


@pytest.mark.parametrize(
    "change, id",
    [(_touch, "source-changed"), (_shrink, "source-changed"), (_remove, "file-unreadable")],
)
def test_source_that_changes_during_the_run(run, stop_after, tmp_path, change, id):
    folder = good().write(tmp_path / "src")
    stop_after(2, change, stop=False)
    refused(run(source=folder), id, code=4)


def test_source_removed_at_the_end_of_the_run(run, stop_after, whole, tmp_path):
    folder = good().write(tmp_path / "src")
    count = len([n for n in whole if n.startswith("model-") and n.endswith(".safetensors")])
    stop_after(count, _remove, stop=False)
    refused(run(source=folder), "source-changed", code=4)


def test_an_earlier_verdict_does_not_outlive_the_resume(good_folder, tmp_path, monkeypatch):
    """A report about other files is not left beside these; verify makes none of unfinished ones."""
    out = tmp_path / "out"
    monkeypatch.setattr("mmq.convert.run.write_everything_but_index", _interrupted)
    assert run_mmq("convert", good_folder, out, "--jobs", "1")[0] == 130
    monkeypatch.undo()
    code, events, _ = run_mmq("verify", out, "--against", good_folder)
    assert code == 5 and [e["id"] for e in events if e["event"] == "error"] == ["output-unfinished"]
    (out / "mmq-verify.json").write_text("{}")
    assert run_mmq("convert", good_folder, out, "--jobs", "1")[0] == 0
    assert not (out / "mmq-verify.json").exists()


def _interrupted(*_):
    raise KeyboardInterrupt


def test_a_run_without_room_leaves_nothing(good_folder, tmp_path, monkeypatch):
    """Another command may follow; there is nothing to discard."""
    out = tmp_path / "out"
    monkeypatch.setattr("mmq.convert.downloads.free_bytes", lambda _: 1000)
    code, events, _ = run_mmq("convert", good_folder, out, "--jobs", "1")
    assert code == 6 and any(e.get("id") == "disk-space" for e in events)
    assert list(out.iterdir()) == []
    monkeypatch.undo()
    assert run_mmq("convert", good_folder, out, "--jobs", "1", "--layout", "minimax")[0] == 0


def test_the_plan_says_what_the_run_will(good_folder, tmp_path, monkeypatch):
    """A byte less than what the run takes is not enough in the plan either."""
    out = tmp_path / "out"
    plan = run_mmq("convert", good_folder, out, "--jobs", "1", "--dry-run")[1][-1]
    resources = plan["resources"]
    wanted = resources["needed_bytes"] + resources["spare_bytes"]
    for free, code in ((wanted - 1, 6), (wanted, 0)):
        told = {**plan, "resources": {**resources, "free_bytes": free}}
        assert ("NOT ENOUGH" in "\n".join(plan_lines(told))) == (code == 6)
        monkeypatch.setattr("mmq.convert.downloads.free_bytes", lambda _, free=free: free)
        assert run_mmq("convert", good_folder, out, "--jobs", "1")[0] == code


def test_what_an_interrupted_verification_left_is_not_foreign(good_folder, tmp_path):
    out = tmp_path / "out"
    assert run_mmq("convert", good_folder, out, "--jobs", "1")[0] == 0
    (out / ".mmq-verify" / "source").mkdir(parents=True)
    (out / ".mmq-verify" / "source" / "x.safetensors").write_bytes(b"half")
    assert run_mmq("convert", good_folder, out, "--jobs", "1", "--overwrite")[0] == 0
    (out / ".mmq-else").mkdir()
    (out / ".mmq-else" / "x").write_bytes(b"")
    assert run_mmq("convert", good_folder, out, "--jobs", "1", "--overwrite")[0] == 7

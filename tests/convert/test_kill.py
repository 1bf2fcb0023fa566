"""Killed at random points, the same command finishes with the bytes of an undisturbed run; stopped
politely, it says how to resume. C1 is a row of the case list."""

from __future__ import annotations

import json
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hostile import good
from in_process import run_mmq
from m3_source import INDEX, Size, hashes

from mmq.cli import main

SIZE = Size(layers=4, experts=16, hidden=512, inter=256, dense_inter=256, vocab=512)
OPTIONS = ("--max-shard-size", "300KB")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """20 MB, so that a run lasts long enough to be killed in the middle."""
    return good(SIZE, shards=5).write(tmp_path_factory.mktemp("kill") / "src")


@pytest.fixture(scope="module")
def undisturbed(source, tmp_path_factory):
    """(hashes, seconds, bytes) of a run that nobody stopped."""
    out = tmp_path_factory.mktemp("kill") / "out"
    start = time.monotonic()
    assert run_mmq("convert", source, out, *OPTIONS, "--jobs", "1")[0] == 0
    seconds = time.monotonic() - start
    return hashes(out), seconds, size_of(out)


def size_of(out):
    """Bytes below a folder that may be changing."""
    total = 0
    for folder, _, names in os.walk(out):
        for name in names:
            try:
                total += os.lstat(os.path.join(folder, name)).st_size  # noqa: PTH118
            except FileNotFoundError:
                continue
    return total


def fork_and_kill(arguments, now):
    """Run mmq in a forked child and kill it with -9 as soon as `now()`; returns its status."""
    child = os.fork()
    if child == 0:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        os._exit(main([*map(str, arguments), "--quiet"]))
    while not now():
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status
    os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1]


def at_a_random_point(rng, out, seconds, nbytes):
    """When to kill: after a random time, or once the output folder has a random size."""
    if rng.random() < 0.5:
        deadline = time.monotonic() + rng.uniform(0, 1.1) * seconds
        return lambda: time.monotonic() >= deadline
    wanted = rng.uniform(0, 1) * nbytes
    return lambda: size_of(out) >= wanted


def at_the_end(rng, out, names):
    """When a file of the last steps appears: side files, manifest, report, index."""
    name = rng.choice(names)
    return lambda: (out / name).exists() or (out / f"{name}.partial").exists()


def check_killed(out, command):
    """The state a kill left, and what the same command makes of it."""
    records = len(list((out / ".mmq" / "done").glob("*.json"))) if out.exists() else 0
    finished = (out / INDEX).is_file()
    code, events, _ = run_mmq(*command)
    assert code == 0, events
    if finished:
        assert events[-1].get("finished")
    else:
        timing = json.loads((out / "mmq-convert.json").read_bytes())["timing"]
        assert timing["resumed_shards"] == records


def kill_at(seed, source, undisturbed, out, late=None):
    whole, seconds, nbytes = undisturbed
    rng = random.Random(seed)
    now = at_the_end(rng, out, late) if late else at_a_random_point(rng, out, seconds, nbytes)
    command = ("convert", source, out, *OPTIONS, "--jobs", "1")
    status = fork_and_kill(command, now)
    check_killed(out, command)
    assert hashes(out) == whole
    return os.WIFSIGNALED(status)


POINTS = 10


@pytest.mark.parametrize("seed", range(POINTS))
def test_killed_anywhere_resumes(source, undisturbed, tmp_path, seed):
    kill_at(seed, source, undisturbed, tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(POINTS, POINTS + 40))
def test_killed_anywhere_resumes_more(source, undisturbed, tmp_path, seed):
    kill_at(seed, source, undisturbed, tmp_path / "out")


@pytest.mark.parametrize("name", ["LICENSE", "tensors.csv", "mmq-manifest.json", "mmq-convert.json",
                                  INDEX])  # fmt: skip
def test_killed_while_finishing(source, undisturbed, tmp_path, name):
    kill_at(0, source, undisturbed, tmp_path / "out", [name])


def test_killed_again_and_again(source, undisturbed, tmp_path):
    """Each run gets a little further; what is finished is never lost."""
    whole, seconds, _ = undisturbed
    rng, out, done = random.Random(1), tmp_path / "out", 0
    command = ("convert", source, out, *OPTIONS, "--jobs", "1")
    for _ in range(6):
        deadline = time.monotonic() + rng.uniform(0.1, 0.4) * seconds
        fork_and_kill(command, lambda end=deadline: time.monotonic() >= end)
        records = len(list((out / ".mmq" / "done").glob("*.json")))
        assert records >= done or (out / INDEX).exists()
        done = records
    assert run_mmq(*command)[0] == 0
    assert hashes(out) == whole


def start(*arguments):
    """mmq as a process group of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "mmq", *map(str, arguments)], stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


def wait_for(condition, seconds=30.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.002)


def has_shards(out, count=1):
    return lambda: len(list(out.glob("model-*.safetensors"))) >= count


def children(pid):
    """Process ids below a process: workers, and multiprocessing's resource tracker."""
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def running(pids):
    found = []
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            continue
        if state != "Z":
            found.append(pid)
    return found


@pytest.mark.parametrize("jobs", ["1", "2"])
@pytest.mark.parametrize("to", ["process", "group"])
@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_C1_stopped_runs_say_how_to_resume(source, undisturbed, tmp_path, number, code, to, jobs):
    out = tmp_path / "out x"
    run = start("convert", source, out, *OPTIONS, "--jobs", jobs)
    wait_for(has_shards(out))
    workers = children(run.pid)
    assert len(workers) >= int(jobs) or jobs == "1"
    (os.kill if to == "process" else os.killpg)(run.pid, number)
    stdout, stderr = run.communicate(timeout=20)
    assert run.returncode == code, stderr
    assert stdout == "" and "Traceback" not in stderr
    assert not (out / INDEX).exists()
    assert not list(out.rglob("*.partial"))
    wait_for(lambda: not running(workers), 5)
    (line,) = [line for line in stderr.splitlines() if "resume with: " in line]
    command = shlex.split(line.partition("resume with: ")[2])
    assert command[0] == "mmq"
    assert run_mmq(*command[1:])[0] == 0
    assert hashes(out) == undisturbed[0]


def test_C1_before_the_first_shard(source, tmp_path):
    out = tmp_path / "out"
    run = start("convert", source, out, *OPTIONS, "--jobs", "2")
    wait_for((out / ".mmq").exists)
    os.killpg(run.pid, signal.SIGINT)
    _, stderr = run.communicate(timeout=20)
    assert run.returncode == 130
    assert "Traceback" not in stderr


def test_killed_parent_leaves_no_workers(source, undisturbed, tmp_path):
    out = tmp_path / "out"
    command = ("convert", source, out, *OPTIONS, "--jobs", "2")
    run = start(*command)
    wait_for(has_shards(out, 3))
    workers = children(run.pid)
    run.kill()
    run.communicate()
    wait_for(lambda: not running(workers), 5)
    check_killed(out, command)
    assert hashes(out) == undisturbed[0]


def test_killed_worker_is_named_and_resumed(source, undisturbed, tmp_path):
    out = tmp_path / "out"
    command = ("convert", source, out, *OPTIONS, "--jobs", "2")
    run = start(*command)
    wait_for(has_shards(out, 2))
    for pid in children(run.pid):
        if b"resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, signal.SIGKILL)
            break
    _, stderr = run.communicate(timeout=20)
    assert run.returncode == 5
    assert "error[worker-died]" in stderr and "--jobs 1" in stderr
    assert not (out / INDEX).exists()
    assert run_mmq(*command)[0] == 0
    assert hashes(out) == undisturbed[0]


def test_second_run_is_locked_out(source, undisturbed, tmp_path):
    out = tmp_path / "out"
    command = ("convert", source, out, *OPTIONS, "--jobs", "1")
    run = start(*command)
    wait_for(has_shards(out))
    os.kill(run.pid, signal.SIGSTOP)
    try:
        code, events, _ = run_mmq(*command)
        assert (code, [e["id"] for e in events if e["event"] == "error"]) == (7, ["locked"])
    finally:
        os.kill(run.pid, signal.SIGCONT)
    run.communicate(timeout=30)
    assert run.returncode == 0
    assert hashes(out) == undisturbed[0]

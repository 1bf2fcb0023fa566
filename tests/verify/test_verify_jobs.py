"""Level weights in worker processes: the same report as in one, and faults that reach the user."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
from in_process import run_mmq

from mmq.verify import jobs as shard_jobs
from mmq.verify import weights


@pytest.fixture(scope="module")
def shards(good_folder, tmp_path_factory):
    """The good source in several shards."""
    out = tmp_path_factory.mktemp("shards") / "out"
    small = ("--max-shard-size", "300KB")
    assert run_mmq("convert", good_folder, out, "--jobs", "1", *small)[0] == 0
    assert len(list(out.glob("model-*.safetensors"))) > 2
    return out


def verified(out, source, report, *options):
    """(exit code, report without seconds)."""
    code, _, _ = run_mmq("verify", out, "--against", source, "-o", report, *options)
    told = json.loads(report.read_bytes())
    for level in told["levels"]:
        level.pop("seconds")
    return code, told


@pytest.mark.parametrize("fault", [False, True], ids=["sound", "damaged"])
def test_workers_give_the_same_report(shards, good_folder, tmp_path, fault):
    out = Path(shutil.copytree(shards, tmp_path / "out"))
    if fault:
        for shard in sorted(out.glob("model-*.safetensors")):
            data = bytearray(shard.read_bytes())
            data[-1] ^= 1
            shard.write_bytes(data)
    one = verified(out, good_folder, tmp_path / "1.json", "--jobs", "1")
    three = verified(out, good_folder, tmp_path / "3.json", "--jobs", "3")
    assert one == three
    assert one[0] == (3 if fault else 0) and one[1]["metrics"]["compared_tensors"] > 100


def test_a_worker_that_dies_is_told(shards, good_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "run_job", dying)
    code, events, _ = run_mmq(
        "verify", shards, "--against", good_folder, "-o", tmp_path / "r.json", "--jobs", "2"
    )
    (error,) = [e for e in events if e["event"] == "error"]
    assert (code, error["id"]) == (5, "worker-died") and "while verifying model-" in error[
        "message"
    ]
    assert not (tmp_path / "r.json").exists()


def dying(job, context, progress):
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_source_that_changed_is_bad_input_from_a_worker_too(shards, good_folder, tmp_path):
    source = Path(shutil.copytree(good_folder, tmp_path / "src"))
    shard = sorted(source.glob("model-*.safetensors"))[0]
    data = bytearray(shard.read_bytes())
    # a NaN scale exponent in the middle of the experts' scales
    shard.write_bytes(data[: len(data) // 2] + b"\xff" * 64 + data[len(data) // 2 + 64 :])
    codes = {
        run_mmq("verify", shards, "--against", source, "-o", tmp_path / "r.json", "--jobs", n)[0]
        for n in ("1", "2")
    }
    assert len(codes) == 1 and codes < {3, 4}


def test_a_small_model_gets_no_processes(shards, good_folder, tmp_path, monkeypatch):
    seen = []
    real = weights.run_all

    def run_all(units, job, workers, *rest):
        seen.append(workers)
        return real(units, job, workers, *rest)

    monkeypatch.setattr(weights, "run_all", run_all)
    words = ("verify", shards, "--against", good_folder, "-o", tmp_path / "r.json")
    assert run_mmq(*words)[0] == 0
    monkeypatch.setattr(weights, "_WORTH_A_PROCESS", 1000)
    monkeypatch.setattr(weights, "default_jobs", lambda: 2)
    assert run_mmq(*words)[0] == 0
    assert seen == [1, 2]
    assert shard_jobs.run_job is weights.run_job

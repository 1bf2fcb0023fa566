"""--device: refused before a byte is written where it is not there, and the same bytes where it is.

Kernels for a GPU run in Triton's interpreter here, in a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from hostile import as_bf16, good
from in_process import Outcome, run_mmq
from m3_source import Size, hashes

from mmq.convert import device, executor, run
from mmq.convert.memory import MemorySampler
from mmq.convert.page_cache import too_large_for_cache
from mmq.errors import MachineError
from mmq.kernels import ops

#: Everything there is, once: Triton's interpreter takes its time.
TINY = Size(layers=2, dense=1, experts=1)


@pytest.fixture
def no_triton(monkeypatch):
    for name in [n for n in sys.modules if n.startswith("mmq.kernels.triton.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "triton", None)
    ops._resolve.cache_clear()
    yield
    ops._resolve.cache_clear()


@pytest.fixture
def no_gpu(monkeypatch):
    launch = pytest.importorskip("mmq.kernels.triton.launch")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    launch.device.cache_clear()
    yield
    launch.device.cache_clear()


def refused(folder, out):
    made = Outcome(*run_mmq("convert", folder, out, "--device", "cuda", "--jobs", "1"), out)
    assert made.code == 6
    assert not out.exists(), "something was written"
    return made.error


def test_without_a_gpu(good_folder, tmp_path, no_gpu):
    error = refused(good_folder, tmp_path / "out")
    assert error["id"] == "device-missing"
    assert "--device cpu" in error["hint"]


def test_without_triton(good_folder, tmp_path, no_triton):
    error = refused(good_folder, tmp_path / "out")
    assert error["id"] == "backend-missing"
    assert "triton" in error["message"]
    assert "mmq-toolkit[gpu]" in error["hint"]


def test_a_started_run_is_left_as_it_is(good_folder, good_output, tmp_path, no_gpu):
    """Nor is a finished output touched, or called finished, when the device is not there."""
    before = hashes(good_output.out)
    code, _, _ = run_mmq("convert", good_folder, good_output.out, "--device", "cuda")
    assert code == 6
    assert hashes(good_output.out) == before


def test_a_gpu_gives_the_same_bytes(tmp_path):
    pytest.importorskip("triton")
    folder = good(TINY, shards=1).write(tmp_path / "src")
    cpu, gpu = tmp_path / "cpu", tmp_path / "gpu"
    for out, jobs, kind in ((cpu, "1", "cpu"), (gpu, "2", "cuda")):
        subprocess.run(
            [sys.executable, "-m", "mmq", "convert", folder, out, "--device", kind,
             "--jobs", jobs, "--max-shard-size", "100KB"],
            env=os.environ | {"TRITON_INTERPRET": "1"}, check=True, capture_output=True,
        )  # fmt: skip
    assert len(list(gpu.glob("*.safetensors"))) > 1, "one unit needs no worker"
    assert hashes(gpu) == hashes(cpu)
    timing = [Outcome(0, [], "", out).json("mmq-convert.json")["timing"] for out in (cpu, gpu)]
    assert [t["backend"] for t in timing] == ["cpu", "triton"]
    assert [t["device"] for t in timing] == ["cpu", "cpu, Triton's interpreter"]


CONVERSIONS = {
    "MXFP8 to NVFP4": (lambda s: s, ()),
    "BF16 to NVFP4": (as_bf16, ("--kv-scales", "unit")),
    "another search": (lambda s: s, ("--scale-search", "four-over-six")),
    "MXFP8 to BF16": (lambda s: s, ("--to", "bf16")),
    "BF16 to MXFP8": (as_bf16, ("--to", "mxfp8")),
}


@pytest.fixture
def asked_for(monkeypatch):
    """The backends that operations are asked for, whatever each of them is."""
    seen = []
    load = ops._load
    monkeypatch.setattr(ops, "_load", lambda name: (seen.append(name), load(name))[1])
    monkeypatch.setattr(run, "find_place", lambda kind: device.Place("a GPU", "torch-table"))
    return seen


@pytest.mark.parametrize("name", CONVERSIONS)
def test_every_operation_runs_there(tmp_path, asked_for, name):
    change, options = CONVERSIONS[name]
    source = good(TINY, shards=1)
    folder = (change(source) or source).write(tmp_path / "src")
    out = tmp_path / "out"
    made = Outcome(*run_mmq("convert", folder, out, "--jobs", "1", *options), out)
    assert made.code == 0, made.events
    assert set(asked_for) == {"torch-table"}
    assert made.json("mmq-convert.json")["timing"]["device"] == "a GPU"


def test_from_nvfp4_too(tmp_path, good_output, asked_for):
    out = tmp_path / "out"
    code, events, _ = run_mmq("convert", good_output.out, out, "--to", "bf16", "--jobs", "1")
    assert code == 0, events
    assert set(asked_for) == {"torch-table"}


def test_another_device_is_the_same_run(good_folder, good_output, asked_for):
    """The device is no part of the fingerprint: what one began, another may finish."""
    code, events, _ = run_mmq("convert", good_folder, good_output.out, "--jobs", "1")
    assert code == 0, events
    assert events[-1]["finished"] is True
    assert asked_for == []


def test_a_worker_gets_the_backend(good_folder, tmp_path):
    """A worker is another process: asked for what is not there, it must say so."""
    from mmq.convert.checkpoint import open_checkpoint
    from mmq.convert.options import ConvertOptions
    from mmq.convert.plan import build_plan

    plan = build_plan(open_checkpoint(str(good_folder)), ConvertOptions(max_shard_bytes=200_000))
    assert len(plan.units) > 1
    paths = {"source": {name: shard.path for name, shard in plan.source.shards.items()}}
    context = run._context(plan, tmp_path, device.Place("a GPU", "no such backend"), paths)
    with pytest.raises(RuntimeError, match="unknown backend 'no such backend'"):
        list(executor.run_units(plan.units, context, 2, lambda n: None, MemorySampler()))


class OutOfMemoryError(RuntimeError):
    """Named as PyTorch's."""


@pytest.mark.parametrize(
    ("error", "id"),
    [
        (OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore"), "device-memory"),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), "device-failed"),
        (RuntimeError("Triton Error [HIP]: Code: 209"), "device-failed"),
    ],
)
def test_what_the_driver_says_is_the_machines_fault(good_folder, tmp_path, monkeypatch, error, id):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(ops, "quantize_nvfp4_from_mxfp8", fail)
    out = tmp_path / "out"
    made = Outcome(*run_mmq("convert", good_folder, out, "--jobs", "1"), out)
    assert (made.code, made.error["id"]) == (6, id)
    assert "\n" not in made.error["got"]
    assert not made.finished


def test_other_runtime_errors_stay_what_they_are():
    assert device.device_error(RuntimeError("CUDA is a word in it")) is None
    assert isinstance(device.device_error(OutOfMemoryError("x")), MachineError)


def test_pages_are_dropped_only_in_large_runs(good_folder, tmp_path, monkeypatch):
    """And dropping them changes no byte."""
    assert not too_large_for_cache(1 << 20)
    assert too_large_for_cache(1 << 50)
    plain, dropped = tmp_path / "plain", tmp_path / "dropped"
    assert run_mmq("convert", good_folder, plain, "--jobs", "1")[0] == 0
    calls = []
    monkeypatch.setattr(run, "too_large_for_cache", lambda nbytes: True)
    monkeypatch.setattr("mmq.convert.writer._DROP_STEP", 1000)
    monkeypatch.setattr("mmq.convert.writer._DROP_WINDOW", 5000)
    advise = os.posix_fadvise
    monkeypatch.setattr(os, "posix_fadvise", lambda *a: (calls.append(a), advise(*a)))
    assert run_mmq("convert", good_folder, dropped, "--jobs", "1")[0] == 0
    assert hashes(dropped) == hashes(plain)
    assert len(calls) > 50
    assert np.min([start for _, start, _, _ in calls]) >= 0

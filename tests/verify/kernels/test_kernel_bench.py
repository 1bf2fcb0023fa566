"""`mmq bench --kernels`: what is timed, against what, and on which devices."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from bench_runs import run_all
from in_process import run_mmq

from mmq.verify.kernels import bench, bench_references
from mmq.verify.kernels.bench_cases import Load, Work
from mmq.verify.kernels.geometry import SMALL
from mmq.verify.kernels.material import made_up
from mmq.verify.kernels.operations import OPERATIONS
from mmq.verify.kernels.peaks import DEVICES, least_seconds, peaks_of

TINY = Load(prefill=5, sequences=2, context=200, experts=6)


def test_references_run_and_are_timed(monkeypatch):
    """On the CPU, at small sizes: every operation beside something bare."""
    monkeypatch.setattr(bench, "M3", SMALL)
    monkeypatch.setattr(bench, "_CPU_SECONDS", 0.0)
    monkeypatch.setattr(bench_references, "CPU_LOAD", TINY)
    code, events, _ = run_mmq("bench", "--kernels", "--device", "cpu")
    assert code == 0
    timings = events[-1]["timings"]
    assert len(timings) == 12
    assert all(t["seconds"] > 0 and t["least_seconds"] > 0 for t in timings)
    assert {t["limit"] for t in timings} == {"product", "copy"}
    assert all((t["flops"] > 0) == (t["limit"] == "product") for t in timings)
    assert len([e for e in events if e["event"] == "timing"]) == len(timings)


def test_flops_are_those_of_the_products():
    """Attention over all keys: q·k and p·v, 2 FLOPs each, of every head, query and key."""
    work = list(bench_references.reference_work(made_up(SMALL, "small"), TINY))
    (dense,) = [w for w in work if w.op == "attention over all keys"]
    assert dense.flops == 2 * 2 * TINY.sequences * SMALL.heads * TINY.context * SMALL.dim


@pytest.mark.parametrize(
    ("work", "shape"),
    [
        (Work("product", "", 2.0 * 7 * 1024**2, 1.0, "f32", lambda: None), (7, 1024)),
        (Work("bytes", "", 0.0, 1000.0, "f32", lambda: None), (500,)),
    ],
)
def test_bare_work_is_as_much(work, shape):
    assert bench._bare(work)().shape == shape


def test_no_gpu():
    if torch.cuda.is_available():
        pytest.skip("there is one")
    code, events, _ = run_mmq("bench", "--kernels", "--device", "cuda")
    assert code == 6
    assert events[0]["id"] in ("device-missing", "backend-missing")


def test_what_to_time_must_be_said():
    code, events, _ = run_mmq("bench")
    assert code == 2
    assert events[0]["id"] == "bench-what"


def test_roofline():
    h200 = DEVICES["H200"]
    assert least_seconds(h200, 989e12, 1, "bf16") == pytest.approx(1)
    assert least_seconds(h200, 1, 4.8e12, "bf16") == pytest.approx(1)
    # NVFP4 on a device without it is decoded for the next wider format that there is.
    assert least_seconds(h200, 1979e12, 1, "nvfp4") == pytest.approx(1)
    assert peaks_of("NVIDIA H200") is h200
    assert peaks_of("AMD Instinct MI355X OAM") is DEVICES["MI355X"]
    assert peaks_of("NVIDIA GeForce RTX 4090") is None
    for peaks in DEVICES.values():
        assert peaks.source
        assert peaks.tflops["f32"] < peaks.tflops["bf16"] <= peaks.tflops["fp8"]


def test_timings_against_a_roofline():
    work = Work("op", "size", 2 * 989e9, 1.0, "bf16", lambda: None)
    timing = bench._against_roofline(work, 0.004, DEVICES["H200"])
    assert timing.share == pytest.approx(0.5)
    assert timing.limit == "bf16 products"
    unknown = replace(timing, least_seconds=None, limit="")
    found = bench.Bench("RTX 4090", "sm_89", "", "2.13", 0, [timing, unknown])
    lines = bench.bench_lines(found)
    assert lines[0] == "RTX 4090, sm_89, torch 2.13"
    assert lines[-2].split()[-4:] == ["50", "%", "bf16", "products"]
    assert lines[-1].split()[-3:] == ["–", "–", "–"]


@pytest.mark.slow
def test_kernels_run_as_they_are_timed(interpreting):
    """Every kernel that a GPU would time, once, in the interpreter at small sizes."""
    ran = interpreting.call(run_all, SMALL, TINY)
    assert all(flops > 0 or nbytes > 0 for _, flops, nbytes, _ in ran)
    assert all(finite for *_, finite in ran)
    timed = {op for op, *_ in ran}
    assert timed <= set(OPERATIONS)
    assert len(timed) == len(OPERATIONS) - 7  # ranks, MXFP8 activations, weights

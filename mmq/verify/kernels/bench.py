"""`mmq bench --kernels`: time each operation, beside the least time that is possible.

On a GPU that is its roofline, max(FLOPs / peak, bytes / bandwidth), by the device's data sheet. On
a CPU it is measured: a bare matrix product of as many FLOPs in the same run, or, where there are
none, a copy of as many bytes.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from mmq.console import Console
from mmq.convert.device import find_place
from mmq.verify.kernels.bench_cases import GPU_LOAD, Load, Work, kernel_work
from mmq.verify.kernels.geometry import M3, Geometry
from mmq.verify.kernels.peaks import Peaks, least_seconds, peaks_of

#: Side of the bare matrix product's weights.
_SIDE = 1024
#: Written between two runs on a GPU, so that none finds the last one's data in its cache.
_FLUSH_BYTES = 512 * 2**20
_RUNS, _WARM_UP = 20, 3
#: On a CPU: as many runs as fit, three at least.
_CPU_SECONDS = 1.0


@dataclass(frozen=True)
class Timing:
    """One operation's median time.

    Attributes:
        least_seconds: what it is held against; None where the device's peaks are not known.
        limit: what that is.
    """

    op: str
    shape: str
    seconds: float
    flops: float
    nbytes: float
    least_seconds: float | None
    limit: str

    @property
    def share(self) -> float | None:
        """`least_seconds` of `seconds`: 1 is as fast as can be."""
        return None if self.least_seconds is None else self.least_seconds / self.seconds


@dataclass(frozen=True)
class Bench:
    """All timings, and where they were taken."""

    device: str
    target: str
    peaks: str
    torch: str
    threads: int
    timings: list[Timing]

    def as_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)


def bench_kernels(device: str, console: Console) -> Bench:
    """Time everything on "cpu" or "cuda".

    Raises:
        MachineError: there is no such device.
    """
    place = find_place(device) if device == "cuda" else None
    if place is not None and torch.cuda.is_available():
        return _bench_gpu(place.device, M3, GPU_LOAD, console)
    return _bench_cpu(M3, console)


def _bench_gpu(name: str, geometry: Geometry, load: Load, console: Console) -> Bench:
    from mmq.kernels.triton.launch import device, target_name

    peaks = peaks_of(name)
    if peaks is None:
        console.note(f"no peaks are known of {name}: times without a roofline")
    scratch = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=device())
    timings = []
    for work in kernel_work(geometry, load, device()):
        timings.append(_against_roofline(work, gpu_seconds(work.run, scratch), peaks))
        console.event("timing", "", **asdict(timings[-1]))
    source = peaks.source if peaks else ""
    return Bench(name, target_name(), source, torch.__version__, 0, timings)


def gpu_seconds(run: Callable[[], object], scratch: torch.Tensor) -> float:
    """Median of `_RUNS` runs between CUDA events, with a cold cache."""
    for _ in range(_WARM_UP):
        run()
    event: Any = torch.cuda.Event
    pairs = []
    for _ in range(_RUNS):
        scratch.zero_()
        start, end = event(enable_timing=True), event(enable_timing=True)
        start.record()
        run()
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize()
    return statistics.median(float(start.elapsed_time(end)) / 1000 for start, end in pairs)


def _against_roofline(work: Work, seconds: float, peaks: Peaks | None) -> Timing:
    if peaks is None:
        return Timing(work.op, work.shape, seconds, work.flops, work.nbytes, None, "")
    least = least_seconds(peaks, work.flops, work.nbytes, work.format)
    by_memory = work.nbytes / (peaks.terabytes * 1e12) >= least
    limit = "memory" if by_memory else f"{work.format} products"
    return Timing(work.op, work.shape, seconds, work.flops, work.nbytes, least, limit)


def _bench_cpu(geometry: Geometry, console: Console) -> Bench:
    from dataclasses import replace

    from mmq.verify.kernels.bench_references import CPU_LOAD, reference_work
    from mmq.verify.kernels.material import made_up

    material = made_up(replace(geometry, reached=1), "M3")
    timings = []
    for work in reference_work(material, CPU_LOAD):
        # The two take turns, so that another program's work slows down both.
        seconds, least = cpu_seconds(work.run, _bare(work))
        limit = "product" if work.flops else "copy"
        timings.append(Timing(work.op, work.shape, seconds, work.flops, work.nbytes, least, limit))
        console.event("timing", "", **asdict(timings[-1]))
    name = f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"
    return Bench(name, "", "", torch.__version__, torch.get_num_threads(), timings)


def _bare(work: Work) -> Callable[[], object]:
    """A matrix product of as many FLOPs in F32, or a copy of as many bytes, half read."""
    if not work.flops:
        source = torch.ones(max(1, int(work.nbytes / 2)), dtype=torch.uint8)
        return source.clone
    rows = max(1, round(work.flops / (2 * _SIDE**2)))
    x, w = torch.ones(rows, _SIDE), torch.ones(_SIDE, _SIDE)
    return lambda: x @ w


def cpu_seconds(run: Callable[[], object], other: Callable[[], object]) -> tuple[float, float]:
    """Median times of both, run by turns."""
    taken: tuple[list[float], list[float]] = [], []
    run(), other()
    began = time.perf_counter()
    while len(taken[0]) < 3 or (time.perf_counter() - began < _CPU_SECONDS and len(taken[0]) < 50):
        for times, function in zip(taken, (run, other), strict=True):
            start = time.perf_counter()
            function()
            times.append(time.perf_counter() - start)
    return statistics.median(taken[0]), statistics.median(taken[1])


def bench_lines(bench: Bench) -> list[str]:
    """A table for a terminal."""
    from mmq.report.tables import columns

    on_cpu = bench.threads > 0
    versions = f"torch {bench.torch}" + (f", {bench.threads} threads" if on_cpu else "")
    lines = [f"{bench.device}{', ' + bench.target if bench.target else ''}, {versions}"]
    if bench.peaks:
        lines.append(f"peaks: {bench.peaks}")
    head = ("operation", "size", "ms", "GFLOP/s" if on_cpu else "TFLOP/s", "GB/s")
    against = ("ms bare", "of bare", "which is a") if on_cpu else ("ms least", "of it", "limit")
    unit = 1e9 if on_cpu else 1e12
    body = [
        (
            t.op, t.shape, f"{1000 * t.seconds:.3f}",
            f"{t.flops / t.seconds / unit:,.1f}" if t.flops else "–",
            f"{t.nbytes / t.seconds / 1e9:,.1f}",
            "–" if t.least_seconds is None else f"{1000 * t.least_seconds:.3f}",
            "–" if t.share is None else f"{100 * t.share:.0f} %", t.limit or "–",
        )
        for t in bench.timings
    ]  # fmt: skip
    return [*lines, "", *columns([(*head, *against), *body], left=2)]

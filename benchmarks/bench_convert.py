"""`make bench`: what a conversion costs, beside what the machine allows, in one run.

    python benchmarks/bench_convert.py [--folder DIR] [--experts 128] [-o docs/performance.md]

Sources: one full-size MoE layer (128 experts of 3072×6144, 7.5 GB), and a small layer with a large
embedding (2.8 GB), to show that memory does not grow with the checkpoint. Needs 20 GB of disk.
Every ratio compares numbers of the same run; nothing here asserts a time.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from big_source import build

from mmq.convert.page_cache import drop_pages
from mmq.convert.writer import AtomicFile
from mmq.kernels import ops
from mmq.quantize.global_scale import nvfp4_global_scale

CHUNK = 32 << 20
STREAM_BYTES = 384 << 20
#: Eight shards of the layer: as many for each of two jobs.
SHARD = "560MB"


def evict(path: Path) -> None:
    """Drop a file from the page cache, so that reading it means the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def evict_all(folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        evict(path)


def timed(work: Callable[[], int]) -> float:
    """GB/s of a piece of work that returns the bytes it handled."""
    start = time.perf_counter()
    nbytes = work()
    return nbytes / (time.perf_counter() - start) / 1e9


def disk_read(folder: Path) -> int:
    """Read the source from a cold cache, as fast as this machine can: nothing kept in the cache."""
    evict_all(folder)
    buffer, total = bytearray(CHUNK), 0
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            start = 0
            while got := file.readinto(buffer):
                drop_pages(file.fileno(), start, got)
                start += got
            total += start
    return total


def disk_write(folder: Path, nbytes: int) -> int:
    """Write and sync as many bytes as the conversion does, without hashing, in the same way."""
    block = np.random.default_rng(0).integers(0, 256, CHUNK, np.uint8)
    path = folder / "write-test"
    with path.open("wb", buffering=0) as file:
        for number in range(nbytes // CHUNK):
            file.write(block)
            drop_pages(file.fileno(), max(0, number - 8) * CHUNK, 9 * CHUNK)
        os.fsync(file.fileno())
    path.unlink()
    return nbytes // CHUNK * CHUNK


def in_memory() -> dict[str, float]:
    """GB/s of each arithmetic stage on one core, streaming well past the caches."""
    rng = np.random.default_rng(0)
    rows = STREAM_BYTES // 6144
    values = rng.standard_normal((3072, 6144), np.float32) * np.float32(0.02)
    codes, scale, _ = ops.quantize_mxfp8(values, "F32")
    codes = np.ascontiguousarray(np.tile(codes, (rows // 3072 + 1, 1))[:rows])
    scale = np.ascontiguousarray(np.tile(scale, (rows // 3072 + 1, 1))[:rows])
    target = np.empty_like(codes)
    s2 = nvfp4_global_scale(ops.mxfp8_amax(codes[:64], scale[:64]))
    search_s2 = nvfp4_global_scale(ops.mxfp8_amax(codes[:64], scale[:64]), "mse")
    pieces = [(codes[i : i + 3072], scale[i : i + 3072]) for i in range(0, rows, 3072)]

    def over(work: Callable[[np.ndarray, np.ndarray], object]) -> Callable[[], int]:
        def run() -> int:
            for c, s in pieces:
                work(c, s)
            return codes.nbytes + scale.nbytes

        return run

    stages: dict[str, Callable[[], int]] = {
        "memcpy": lambda: (np.copyto(target, codes), codes.nbytes)[1],
        "scan for NaN/Inf": over(lambda c, s: (ops.count_nonfinite(c.reshape(-1), "F8_E4M3"),
                                               ops.count_nonfinite(s.reshape(-1), "F8_E8M0"))),
        "amax pass": over(lambda c, s: ops.mxfp8_amax(c, s)),
        "MXFP8 → NVFP4 `max`, error sums included":
            over(lambda c, s: ops.quantize_nvfp4_from_mxfp8(c, s, s2)),
        "MXFP8 → NVFP4 `mse`, error sums included":
            over(lambda c, s: ops.quantize_nvfp4_from_mxfp8(c, s, search_s2, search="mse")),
        "SHA-256": over(lambda c, s: (hashlib.sha256(c).digest(), hashlib.sha256(s).digest())),
    }  # fmt: skip
    result = {}
    for name, work in stages.items():
        work()  # compile, and touch the pages
        result[name] = max(timed(work) for _ in range(3))
    return result


def convert(source: Path, out: Path, jobs: int) -> dict[str, Any]:
    """A whole `mmq convert` from a cold cache, as a user runs it."""
    shutil.rmtree(out, ignore_errors=True)
    evict_all(source)
    command = [sys.executable, "-m", "mmq", "--json", "convert", str(source), str(out),
               "--jobs", str(jobs), "--max-shard-size", SHARD]  # fmt: skip
    before, start = os.times(), time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wall, after = time.perf_counter() - start, os.times()
    timing = json.loads((out / "mmq-convert.json").read_text("utf-8"))["timing"]
    shutil.rmtree(out)
    user = after.children_user - before.children_user
    system = after.children_system - before.children_system
    return {**timing, "wall": wall, "user": user, "system": system}


def disk(source: Path, folder: Path, nbytes: int) -> dict[str, float]:
    """GB/s of the disk alone, for the bytes that a conversion reads and writes."""
    return {"read": timed(lambda: disk_read(source)),
            "write": timed(lambda: disk_write(folder, nbytes))}  # fmt: skip


def table(folder: Path, experts: int) -> str:
    layer, small, out = folder / "layer", folder / "embedding", folder / "out"
    build(layer, experts, vocab=2048)
    build(small, 4)
    lines = [f"Machine: {cpu()}, {len(os.sched_getaffinity(0))} cores, load average"
             f" {os.getloadavg()[0]:.1f}; Python {platform.python_version()},"
             f" NumPy {np.__version__}.", ""]  # fmt: skip
    lines += [*startup(), ""]
    memory = in_memory()
    lines += ["| one core, in memory | GB/s of input | of memcpy |", "|---|---|---|"]
    lines += [f"| {n} | {v:.2f} | {v / memory['memcpy']:.2f} |" for n, v in memory.items()]
    convert(layer, out, 2)  # compile, and let the disk settle
    before = disk(layer, folder, layer_output(experts))
    runs = [(name, jobs, convert(source, out, jobs)) for name, source, jobs in (
        ("the layer", layer, 2), ("the layer", layer, 2), ("the layer", layer, 1),
        ("large embedding", small, 2))]  # fmt: skip
    after = disk(layer, folder, layer_output(experts))
    fastest = {way: max(before[way], after[way]) for way in before}
    lines += ["", "| disk, cold | GB/s before the conversions | after |", "|---|---|---|"]
    for way, text in (("read", "read the layer"), ("write", "write and sync the output's bytes")):
        lines.append(f"| {text} | {before[way]:.2f} | {after[way]:.2f} |")
    return "\n".join([*lines, "", *run_rows(runs, fastest), "", *verdict(runs[:2], fastest)])


def limit(run: dict[str, Any], speed: dict[str, float]) -> float:
    """Seconds that the disk alone needs: it reads while it writes, so the longer of the two."""
    return max(run["read_bytes"] / speed["read"], run["written_bytes"] / speed["write"]) / 1e9


def run_rows(runs: list[tuple[str, int, dict[str, Any]]], speed: dict[str, float]) -> list[str]:
    """A row for each conversion: against the disk, and what the jobs' time went into."""
    lines = [
        "| `mmq convert`, cold | GB in → out | wall s | wall / disk | compute | hash | read |"
        " write, sync | CPU s, user + system | peak PSS GB |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, jobs, run in runs:
        whole = jobs * run["wall"]
        shares = " | ".join(
            f"{100 * run['spent'][what] / whole:.0f} %"
            for what in ("compute", "hash", "read", "write")
        )
        lines.append(
            f"| {name}, `--jobs {jobs}` | {run['read_bytes'] / 1e9:.1f} →"
            f" {run['written_bytes'] / 1e9:.1f} | {run['wall']:.1f} |"
            f" {run['wall'] / limit(run, speed):.2f} | {shares} |"
            f" {run['user']:.1f} + {run['system']:.1f} | {run['peak_pss_bytes'] / 1e9:.2f} |"
        )
    return [
        *lines,
        "",
        "“wall / disk”: over max(read, write) of the same bytes at the disk's own speed, the better"
        " of before and after; 1.00 would mean that the disk is the only limit. Shares are of jobs"
        " × wall time; what is missing to 100 % is start-up, planning and the end of the run.",
    ]


def verdict(runs: list[tuple[str, int, dict[str, Any]]], speed: dict[str, float]) -> list[str]:
    """One sentence: within 1/0.85 of the disk, or what the bound is, with its share."""
    _, jobs, run = min(runs, key=lambda item: item[2]["wall"])
    ratio = run["wall"] / limit(run, speed)
    if ratio <= 1 / 0.85:
        return [f"The disk is the limit: the layer takes {ratio:.2f} times what it alone needs."]
    shares = {what: seconds / (jobs * run["wall"]) for what, seconds in run["spent"].items()}
    names = {"compute": "arithmetic", "hash": "SHA-256", "read": "reading", "write": "writing"}
    first, second, *_ = sorted(shares, key=lambda what: -shares[what])
    system = run["system"] / (run["user"] + run["system"])
    return [
        f"The layer takes {ratio:.2f} times what the disk alone needs: {names[first]} is the bound,"
        f" with {100 * shares[first]:.0f} % of the {jobs} jobs' time, then {names[second]} with"
        f" {100 * shares[second]:.0f} %. Of the CPU time, {100 * system:.0f} % is the system's."
    ]


def layer_output(experts: int) -> int:
    """About what a conversion of the layer writes, in bytes."""
    return int(0.14e9 + experts * 31.9e6)


def startup() -> list[str]:
    """CPU seconds of commands that must answer at once, best of five, interpreter included."""
    commands = ("--help", "inspect minimax-m3-mxfp8",
                "convert minimax-m3-mxfp8 OUT --to nvfp4 --dry-run")  # fmt: skip
    lines = ["| command | CPU ms | wall ms |", "|---|---|---|"]
    for command in commands:
        best = (math.inf, math.inf)
        for _ in range(5):
            before, start = os.times(), time.perf_counter()
            subprocess.run([sys.executable, "-m", "mmq", *command.split()], check=True,
                           stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
            wall, after = time.perf_counter() - start, os.times()
            spent = after.children_user + after.children_system
            best = min(best, (spent - before.children_user - before.children_system, wall))
        lines.append(f"| `mmq {command}` | {best[0] * 1e3:.0f} | {best[1] * 1e3:.0f} |")
    return lines


def cpu() -> str:
    try:
        info = Path("/proc/cpuinfo").read_text("ascii")
        return next(x.split(":")[1].strip() for x in info.splitlines() if "model name" in x)
    except (OSError, StopIteration):
        return platform.processor() or "unknown CPU"


def fill(page: Path, marker: str, text: str) -> None:
    """Put a table between its markers."""
    start, end = f"<!-- {marker} -->", f"<!-- /{marker} -->"
    head, found, rest = page.read_text("utf-8").partition(start)
    if not found or end not in rest:
        raise SystemExit(f"{page} has no {start} … {end}")
    new = f"{head}{start}\n{text}\n{end}{rest.partition(end)[2]}"
    with AtomicFile(page) as file:
        file.write(new.encode("utf-8"))
        file.commit()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, help="where to build the sources")
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("-o", "--output", type=Path, help="file to put the tables into")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        text = table(Path(folder), arguments.experts)
    print(text)
    if arguments.output:
        fill(arguments.output, "bench_convert", text)


if __name__ == "__main__":
    main()

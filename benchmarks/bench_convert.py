"""`make bench`: what a conversion costs, beside what the machine allows, in one run.

    python benchmarks/bench_convert.py [--folder DIR] [--experts 128] [-o docs/performance.md]

Source: one full-size MoE layer (128 experts of 3072×6144, 7.5 GB) and a 2.5 GB embedding; and a
2.8 GB one to show that memory does not grow with the checkpoint. Needs about 25 GB of disk.
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

import numpy as np
from big_source import build

from mmq.convert.writer import AtomicFile
from mmq.kernels import ops
from mmq.quantize.global_scale import nvfp4_global_scale

CHUNK = 32 << 20
STREAM_BYTES = 384 << 20
START, END = "<!-- bench_convert -->", "<!-- /bench_convert -->"


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
    evict_all(folder)
    buffer, total = bytearray(CHUNK), 0
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            while got := file.readinto(buffer):
                total += got
    return total


def disk_write(folder: Path, nbytes: int) -> int:
    """Write and sync as much as the conversion does, without hashing."""
    block = np.random.default_rng(0).integers(0, 256, CHUNK, np.uint8)
    path = folder / "write-test"
    with path.open("wb", buffering=0) as file:
        for _ in range(nbytes // CHUNK):
            file.write(block)
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


def convert(source: Path, out: Path, jobs: int) -> dict[str, float]:
    """A whole `mmq convert` from a cold cache, as a user runs it."""
    shutil.rmtree(out, ignore_errors=True)
    evict_all(source)
    command = [sys.executable, "-m", "mmq", "--json", "convert", str(source), str(out),
               "--jobs", str(jobs), "--max-shard-size", "1GB"]  # fmt: skip
    before, start = os.times(), time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wall, after = time.perf_counter() - start, os.times()
    timing = json.loads((out / "mmq-convert.json").read_text("utf-8"))["timing"]
    shutil.rmtree(out)
    user = after.children_user - before.children_user
    system = after.children_system - before.children_system
    return {**timing, "wall": wall, "user": user, "system": system}


def table(folder: Path, experts: int) -> str:
    big, small, out = folder / "source-10gb", folder / "source-3gb", folder / "out"
    build(big, experts)
    build(small, 4)
    lines = [f"Machine: {cpu()}, {len(os.sched_getaffinity(0))} cores; Python"
             f" {platform.python_version()}, NumPy {np.__version__}.", ""]  # fmt: skip
    lines += [*startup(), ""]
    memory = in_memory()
    lines += ["| one core, in memory | GB/s of input | of memcpy |", "|---|---|---|"]
    lines += [f"| {n} | {v:.2f} | {v / memory['memcpy']:.2f} |" for n, v in memory.items()]
    read = timed(lambda: disk_read(big))
    write = timed(lambda: disk_write(folder, big_output(experts)))
    runs = {(big, 1): convert(big, out, 1), (big, 2): convert(big, out, 2),
            (small, 2): convert(small, out, 2)}  # fmt: skip
    lines += ["", "| disk, cold | GB/s |", "|---|---|", f"| read the source | {read:.2f} |",
              f"| write and sync the output's bytes | {write:.2f} |", ""]  # fmt: skip
    lines.append(
        "| `mmq convert`, cold | source GB | wall s | read GB/s | peak PSS GB |"
        " CPU s, user + system | disk's own time / wall |"
    )
    lines.append("|---|---|---|---|---|---|---|")
    for (source, jobs), run in runs.items():
        limit = max(run["read_bytes"] / read, run["written_bytes"] / write) / 1e9
        lines.append(
            f"| `--jobs {jobs}` | {run['read_bytes'] / 1e9:.1f} | {run['wall']:.1f} |"
            f" {run['read_bytes'] / run['wall'] / 1e9:.2f} | {run['peak_pss_bytes'] / 1e9:.2f} |"
            f" {run['user']:.1f} + {run['system']:.1f} | {limit / run['wall']:.2f} |"
        )
        del source
    lines += ["", "The last column is max(read, write) at the disk's own speed, over the wall time:"
              " 1.00 means the disk is the only limit."]  # fmt: skip
    return "\n".join(lines)


def big_output(experts: int) -> int:
    """About what a conversion of the large source writes, in bytes."""
    return int(2.57e9 + experts * 31.9e6)


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
        old = arguments.output.read_text("utf-8")
        head, _, rest = old.partition(START)
        new = f"{head}{START}\n{text}\n{END}{rest.partition(END)[2]}"
        with AtomicFile(arguments.output) as file:
            file.write(new.encode("utf-8"))
            file.commit()


if __name__ == "__main__":
    main()

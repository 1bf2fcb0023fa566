"""GB/s of every kernel on one core, beside memcpy of the same bytes in the same run.

    python benchmarks/bench_kernels.py [--megabytes 300] [-o docs/performance.md]

Each operation streams over enough different tensors (3072 × 6144, one expert projection of
MiniMax-M3) that none is still in cache when it is read; the best of three passes counts. Time is
CPU time of the one thread: other programs cost only what they take from caches and memory. What
becomes NVFP4 has its amax looked for first, as in a conversion. What a first run spends on
compiling is measured in processes of their own, with an empty folder for compiled code.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from bench_convert import fill

from mmq.kernels import ops
from mmq.quantize.global_scale import nvfp4_global_scale

ROWS, COLUMNS = 3072, 6144
PASSES = 3

Arrays = tuple[Any, ...]


def nbytes(arrays: Arrays) -> int:
    """Bytes of the arrays among a call's arguments or results."""
    return sum(array.nbytes for array in arrays if isinstance(array, np.ndarray))


def best_seconds(op: Callable[..., Any], calls: list[Arrays]) -> float:
    """CPU seconds for one pass over all calls, the best of several."""
    op(*calls[0])  # compile, and touch
    best = float("inf")
    for _ in range(PASSES):
        start = time.thread_time()
        for arguments in calls:
            op(*arguments)
        best = min(best, time.thread_time() - start)
    return best


def copy(*arrays: Any) -> None:
    """memcpy of the arrays among the arguments."""
    for array in arrays:
        if isinstance(array, np.ndarray):
            array.copy()


def tensors(megabytes: int) -> list[dict[str, Any]]:
    """Gaussian weights in every source format, with their own global scales."""
    count = max(2, -(-megabytes * 1_000_000 // (ROWS * COLUMNS)))
    rng = np.random.default_rng(0)
    out = []
    for _ in range(count):
        f32 = rng.standard_normal((ROWS, COLUMNS), np.float32)
        f32 *= np.float32(0.02)
        bf16 = (f32.view(np.uint32) >> 16).astype(np.uint16)
        mxfp8 = ops.quantize_mxfp8(bf16, "BF16")
        s2 = nvfp4_global_scale(ops.mxfp8_amax(mxfp8.codes, mxfp8.scale))
        nvfp4 = ops.quantize_nvfp4_from_mxfp8(mxfp8.codes, mxfp8.scale, s2)
        out.append({"bf16": bf16, "mxfp8": mxfp8[:2], "nvfp4": (*nvfp4[:2], s2), "s2": s2})
    return out


def convert(codes: Any, scale: Any, search: str, errors: bool = True) -> ops.Nvfp4:
    """What conversion does for one tensor: amax, then quantise."""
    s2 = nvfp4_global_scale(ops.mxfp8_amax(codes, scale), search)
    return ops.quantize_nvfp4_from_mxfp8(codes, scale, s2, search=search, errors=errors)


def convert_bf16(bits: Any, search: str, errors: bool = True) -> ops.Nvfp4:
    """The same from BF16."""
    s2 = nvfp4_global_scale(ops.float_amax(bits, "BF16"), search)
    return ops.quantize_nvfp4_from_float(bits, "BF16", s2, search=search, errors=errors)


def weighted(codes: Any, scale: Any, importance: Any) -> ops.Nvfp4:
    """MXFP8 to NVFP4 with a weight for every input channel."""
    s2 = nvfp4_global_scale(ops.mxfp8_amax(codes, scale), "mse")
    return ops.quantize_nvfp4_from_mxfp8(codes, scale, s2, search="mse", importance=importance)


#: Calls of a process without compiled code: what a conversion with default options needs, and all.
FIRST_CALLS = """
import sys, time
start = time.process_time()
import numpy as np
from mmq.kernels import ops
from mmq.quantize.global_scale import nvfp4_global_scale
codes, scale = np.full((2, 64), 0x40, np.uint8), np.full((2, 2), 120, np.uint8)
bits = np.full((2, 64), 0x3F80, np.uint16)
s2 = nvfp4_global_scale(ops.mxfp8_amax(codes, scale), "mse")
out = ops.quantize_nvfp4_from_mxfp8(codes, scale, s2, search="mse")
if sys.argv[1] == "all":
    ops.quantize_nvfp4_from_mxfp8(codes, scale, np.float32(1))
    ops.quantize_nvfp4_from_float(bits, "BF16", s2, search="mse")
    ops.quantize_mxfp8(bits, "BF16")
    for op in (ops.dequantize_mxfp8, ops.dequantize_mxfp8_f32):
        op(codes, scale)
    for op in (ops.dequantize_nvfp4, ops.dequantize_nvfp4_f32):
        op(out.packed, out.scale, s2)
print(time.process_time() - start)
"""


def first_call(which: str, cache: str) -> float:
    """CPU seconds from the start of a process to its first results."""
    command = [sys.executable, "-c", FIRST_CALLS, which]
    environment = os.environ | {"NUMBA_CACHE_DIR": cache}
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return float(done.stdout)


def compile_line() -> str:
    """What compiling costs, and what it costs the second time."""
    told = []
    for which, name in (("default", "MXFP8 → NVFP4 `mse`"), ("all", "all operations")):
        with tempfile.TemporaryDirectory() as cache:
            first, again = first_call(which, cache), first_call(which, cache)
        told.append(f"{name} {first:.1f} s the first time, {again:.1f} s from then on")
    return "CPU time to the first result, imports and compiling included: " + "; ".join(told) + "."


Row = tuple[str, Callable[..., Any], list[Arrays]]


def rows(data: list[dict[str, Any]]) -> list[Row]:
    """(name, operation, arguments of each call)."""
    mxfp8 = [item["mxfp8"] for item in data]
    nvfp4 = [item["nvfp4"] for item in data]
    bf16 = [(item["bf16"], "BF16") for item in data]
    importance = np.random.default_rng(1).lognormal(size=COLUMNS).astype(np.float32)
    out: list[Row] = []
    for source, op in (("MXFP8", convert), ("BF16", convert_bf16)):
        tensors = mxfp8 if source == "MXFP8" else [call[:1] for call in bf16]
        for search in ops.SEARCHES:
            for errors in (True, False) if search != "four-over-six" else (True,):
                name = f"{source} → NVFP4 {search}{'' if errors else ', no error sums'}"
                out.append((name, op, [(*call, search, errors) for call in tensors]))
    weights = [(*call, importance) for call in mxfp8[: max(1, len(mxfp8) // 4)]]
    codes = [(codes.reshape(-1), "F8_E4M3") for codes, _ in mxfp8]
    bits = [(bits.reshape(-1).view(np.uint8), "BF16") for bits, _ in bf16]
    return [
        *out,
        ("MXFP8 → NVFP4 mse, importance", weighted, weights),
        ("BF16 → MXFP8", ops.quantize_mxfp8, bf16),
        ("MXFP8 → BF16", ops.dequantize_mxfp8, mxfp8),
        ("MXFP8 → F32", ops.dequantize_mxfp8_f32, mxfp8),
        ("NVFP4 → BF16", ops.dequantize_nvfp4, nvfp4),
        ("NVFP4 → F32", ops.dequantize_nvfp4_f32, nvfp4),
        ("MXFP8 amax", ops.mxfp8_amax, mxfp8),
        ("BF16 amax", ops.float_amax, bf16),
        ("scan E4M3", ops.count_nonfinite, codes),
        ("scan BF16", ops.count_nonfinite, bits),
    ]


def table(megabytes: int) -> Iterator[str]:
    """The page's lines, each as soon as it is measured."""
    data = tensors(megabytes)
    yield f"{platform.machine()}, {os.cpu_count()} CPUs, numpy {np.__version__}, one thread, load"
    yield f"average {os.getloadavg()[0]:.1f}; {len(data)} tensors of {ROWS} × {COLUMNS}, best of"
    yield f"{PASSES} passes. {compile_line()}"
    yield ""
    yield "| operation | input MB | GB/s of input | GB/s of output | memcpy of the input, GB/s |"
    yield "|---|---|---|---|---|"
    for name, op, calls in rows(data):
        read = sum(nbytes(call) for call in calls)
        result = op(*calls[0])
        written = len(calls) * nbytes(result if isinstance(result, tuple) else (result,))
        seconds, copying = best_seconds(op, calls), best_seconds(copy, calls)
        output = f"{written / seconds / 1e9:.2f}" if written else "–"
        yield (
            f"| {name} | {read / 1e6:.0f} | {read / seconds / 1e9:.2f} | {output} "
            f"| {read / copying / 1e9:.1f} |"
        )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=300, help="MXFP8 bytes to stream over")
    parser.add_argument("-o", "--output", type=Path, help="file to put the table into")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    lines = []
    for line in table(arguments.megabytes):
        print(line, flush=True)
        lines.append(line)
    if arguments.output:
        fill(arguments.output, "bench_kernels", "\n".join(lines))


if __name__ == "__main__":
    main()

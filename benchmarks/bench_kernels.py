"""GB/s of every kernel on one core, beside memcpy of the same bytes in the same run.

    python benchmarks/bench_kernels.py [--megabytes 300]

Each operation streams over enough different tensors (3072 × 6144, one expert projection of
MiniMax-M3) that none is still in cache when it is read; the best of three passes counts. Time is
CPU time of the one thread: other programs cost only what they take from caches and memory. What
becomes NVFP4 has its amax looked for first, as in a conversion.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections.abc import Callable
from typing import Any

import numpy as np

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


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=300, help="MXFP8 bytes to stream over")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    data = tensors(arguments.megabytes)
    print(f"{platform.machine()}, {os.cpu_count()} CPUs, numpy {np.__version__}, one thread")
    print(f"{len(data)} tensors of {ROWS} × {COLUMNS}, best of {PASSES} passes\n")
    print("| operation | input MB | GB/s of input | GB/s of output | memcpy of the input, GB/s |")
    print("|---|---|---|---|---|")
    for name, op, calls in rows(data):
        read = sum(nbytes(call) for call in calls)
        result = op(*calls[0])
        written = len(calls) * nbytes(result if isinstance(result, tuple) else (result,))
        seconds, copying = best_seconds(op, calls), best_seconds(copy, calls)
        output = f"{written / seconds / 1e9:.2f}" if written else "–"
        print(
            f"| {name} | {read / 1e6:.0f} | {read / seconds / 1e9:.2f} | {output} "
            f"| {read / copying / 1e9:.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()

"""Memory, bytes and time of `mmq calibrate` on a full-size M3 layer.

    python benchmarks/bench_calibrate.py [--folder DIR] [--experts 128] [--windows 4]
        [--context 4096] [-o docs/performance.md]

The source is `big_source`: one sparse MoE layer of the release's shapes and its embedding, 10 GB at
128 experts. Token ids are random, so that nearly every expert is reached. PSS is sampled ten times
a second over the process; what grows with the tokens and what does not is told by two runs, the
second with twice the windows.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
from bench_convert import cpu, evict_all, fill
from big_source import VOCAB, build

from mmq.convert.memory import pss_bytes


class Run(NamedTuple):
    """One calibration.

    Attributes:
        told: memory that mmq announced.
    """

    tokens: int
    seconds: float
    peak_pss: int
    read_bytes: int
    work_bytes: int
    told: str


def run(source: Path, scratch: Path, windows: int, context: int, vocab: int) -> Run:
    """Calibrate in a process of its own, from a cold cache, and watch it."""
    ids = np.random.default_rng(3).integers(0, vocab, (windows, context)).astype(np.int32)
    np.save(scratch / "ids.npy", ids)
    evict_all(source)
    out = scratch / "scales.json"
    command = [
        sys.executable, "-m", "mmq", "calibrate", str(source), "-o", str(out), "--tokens",
        str(scratch / "ids.npy"), "--importance-out", str(scratch / "importance.safetensors"),
        "--input-scales-out", str(scratch / "input.json"), "--windows", "0", "--json",
    ]  # fmt: skip
    peak = work = 0
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        while process.poll() is None:
            peak = max(peak, pss_bytes(process.pid) or 0)
            work = max(work, _folder_bytes(out.with_name(out.name + ".work")))
            time.sleep(0.1)
        assert process.stdout is not None
        events = [json.loads(line) for line in process.stdout]
    seconds = time.perf_counter() - start
    if process.returncode:
        raise SystemExit(f"mmq calibrate failed: {events[-1]}")
    note = next(e["message"] for e in events if "calibrating on" in e.get("message", ""))
    told = note.rpartition("about ")[2].removesuffix(" of memory")
    nbytes = sum(p.stat().st_size for p in source.glob("*.safetensors"))
    return Run(windows * context, seconds, peak, nbytes, work, told)


def _folder_bytes(folder: Path) -> int:
    total = 0
    for path in folder.glob("*"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:  # replaced or removed meanwhile
            continue
    return total


def table(runs: list[Run], experts: int) -> list[str]:
    """Lines of the page."""
    threads = os.environ.get("OMP_NUM_THREADS", "all")
    return [
        f"{experts} experts, {cpu()}, OMP_NUM_THREADS {threads}.", "",
        "| tokens | source GB | wall s | tokens/s | peak PSS GB | announced | work folder GB |",
        "|---|---|---|---|---|---|---|",
        *(
            f"| {r.tokens:,} | {r.read_bytes / 1e9:.1f} | {r.seconds:.1f}"
            f" | {r.tokens / r.seconds:,.0f} | {r.peak_pss / 1e9:.2f} | {r.told}"
            f" | {r.work_bytes / 1e9:.2f} |"
            for r in runs
        ),
    ]  # fmt: skip


def main() -> None:
    """Measure, print, and fill the page's markers."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, help="for the source, kept there")
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--vocab", type=int, default=VOCAB)
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        scratch = Path(name)
        source = (options.folder or scratch) / f"m3-layer-{options.experts}"
        if not (source / "config.json").exists():
            build(source, options.experts, options.vocab)
        runs = [
            run(source, scratch, windows, options.context, options.vocab)
            for windows in (options.windows, 2 * options.windows)
        ]
    text = "\n".join(table(runs, options.experts))
    print(text)
    if options.output:
        fill(options.output, "bench_calibrate", text)


if __name__ == "__main__":
    main()

"""Memory, bytes and time of `mmq verify --level logits` on a full-size M3 layer, and what 60 take.

    python benchmarks/bench_verify.py [--folder DIR] [--experts 128] [--context 4096]
        [-o docs/performance.md]

Source and candidate are `big_source`, one sparse MoE layer of the release's shapes (7.6 GB), and
its NVFP4 conversion (4.2 GB), with a small vocabulary. Both models read one window of random ids,
so that nearly every expert is reached: source and weights, without a KV cache. PSS is sampled ten
times a second. Sixty layers are sixty times the layer's own time and bytes; their memory is the
same, since a layer is dropped before the next is read.
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

import numpy as np
from bench_convert import cpu, evict_all, fill
from big_source import build

from mmq.convert.memory import pss_bytes

VOCAB, LAYERS = 8192, 60


def mmq(*words: str | Path) -> None:
    """Run a command that must succeed."""
    subprocess.run([sys.executable, "-m", "mmq", *map(str, words), "--quiet"], check=True)


def measure(source: Path, out: Path, ids: Path, report: Path) -> dict[str, float]:
    """One verification in a process of its own, from a cold cache."""
    evict_all(source)
    evict_all(out)
    command = [
        sys.executable, "-m", "mmq", "verify", str(out), "--against", str(source), "--level",
        "logits", "--tokens", str(ids), "--kv", "exact", "--no-replay", "-o", str(report),
        "--allow-inconclusive", "--quiet",
    ]  # fmt: skip
    peak = 0
    with subprocess.Popen(command) as process:
        while process.poll() is None:
            peak = max(peak, pss_bytes(process.pid) or 0)
            time.sleep(0.1)
    if process.returncode not in (0, 3):  # random weights may miss the gates
        raise SystemExit(f"mmq verify ended with {process.returncode}")
    data = json.loads(report.read_text("utf-8"))
    seconds = {level["level"]: level["seconds"] for level in data["levels"]}
    timing = data["logits"]["timing"]
    return {"peak": peak, "weights": seconds["weights"], "layer": timing["layers_seconds"],
            "head": timing["head_seconds"], "tokens": data["logits"]["tokens"]}  # fmt: skip


def table(source: Path, out: Path, experts: int, found: dict[str, float]) -> list[str]:
    """Lines of the page."""
    sizes = [sum(p.stat().st_size for p in f.glob("*.safetensors")) / 1e9 for f in (source, out)]
    hours = found["layer"] * LAYERS / 3600
    threads = os.environ.get("OMP_NUM_THREADS", "all")
    return [
        f"{experts} experts, {found['tokens']:,.0f} tokens in one window, two forwards, {cpu()},"
        f" {os.cpu_count()} cores, OMP_NUM_THREADS {threads}.", "",
        "| | |", "|---|---|",
        f"| source and candidate | {sizes[0]:.1f} and {sizes[1]:.1f} GB |",
        f"| level weights (all bytes, requantised) | {found['weights']:.1f} s |",
        f"| level logits, the layer | {found['layer']:.1f} s,"
        f" {2 * found['tokens'] / found['layer']:,.0f} tokens/s |",
        f"| level logits, head of {VOCAB:,} rows | {found['head']:.1f} s |",
        f"| peak PSS | {found['peak'] / 1e9:.2f} GB |",
        f"| {LAYERS} such layers, extrapolated | {sizes[0] * LAYERS:,.0f} and"
        f" {sizes[1] * LAYERS:,.0f} GB read, {hours:.1f} h on this machine, the same memory |",
    ]  # fmt: skip


def main() -> None:
    """Measure, print, and fill the page's markers."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        scratch = Path(name)
        source, out = scratch / "layer", scratch / "layer-nvfp4"
        build(source, options.experts, VOCAB)
        mmq("convert", source, out)
        ids = np.random.default_rng(4).integers(0, VOCAB, (1, options.context))
        np.save(scratch / "ids.npy", ids.astype(np.int32))
        found = measure(source, out, scratch / "ids.npy", scratch / "report.json")
        text = "\n".join(table(source, out, options.experts, found))
    sys.stdout.write(text + "\n")
    if options.output:
        fill(options.output, "bench_verify", text)


if __name__ == "__main__":
    main()

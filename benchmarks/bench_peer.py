"""mmq beside llm-compressor on one checkpoint, in one run: BF16 experts to NVFP4.

    python benchmarks/bench_peer.py [--folder DIR] [--experts 10] [-o docs/performance.md]

llm-compressor (its data-free `model_free_ptq`) is installed into a throw-away environment first;
that is not timed. It takes no MXFP8 M3, so both convert the BF16 form of the same weights, 1.4 GB
at the default. Both are held to the same cores, read from a cold cache, and have their output
checked: same tensors quantised, SQNR, the other tensors unchanged. Linux only; needs 7 GB of disk.
Every ratio compares numbers of the same run; nothing here asserts a time.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import big_source
import numpy as np
from bench_convert import cpu, evict_all, fill

from mmq.convert.safetensors_header import TensorInfo, read_header
from mmq.kernels import ops
from mmq.quantize.floats import to_float32

CONSTRAINTS = Path(__file__).resolve().parent.parent / "constraints.txt"
PEER = "llmcompressor==0.14.0.1"
#: Constraints that PEER's own requirements contradict.
UNPINNED = ("transformers", "compressed-tensors")
CORES = 2
#: Both tools are told to quantise the experts only; a smaller vocabulary leaves less to copy.
VOCAB = 2048
MIN_SQNR_DB = 18.0
SAMPLE_SECONDS = 0.2
EXPERT = re.compile(r"(.+\.experts\.\d+\.w[123])\.weight")

PEER_SCRIPT = """\
import json, sys, time
from importlib.metadata import version
from llmcompressor import model_free_ptq

source, out, workers = sys.argv[1:]
start = time.perf_counter()
model_free_ptq(source, out, scheme="NVFP4A16", device="cpu", max_workers=int(workers),
               ignore=["re:.*embed_tokens$", "re:.*self_attn.*", "re:.*gate$"])
seconds = time.perf_counter() - start
names = ("llmcompressor", "compressed-tensors", "transformers", "torch")
print(json.dumps({"seconds": seconds, "versions": {n: version(n) for n in names}}))
"""

Tensors = dict[str, tuple[Path, TensorInfo]]


@dataclass
class Result:
    """What one command cost; `seconds` is the tool's own clock around the conversion."""

    wall: float = 0.0
    seconds: float = 0.0
    cpu: float = 0.0
    rss: int = 0
    pss: int = 0
    sqnr: float = 0.0


@dataclass(frozen=True)
class Tool:
    """A row of the table; `command` as typed in the benchmark's folder."""

    name: str
    source: str
    command: str


TOOLS = (
    Tool("mmq", "bf16", "python -m mmq convert bf16 out --scale-search max --jobs 2"),
    Tool("llm-compressor, `max_workers=1`", "bf16", "venv/bin/python peer.py bf16 out 1"),
    Tool("llm-compressor, `max_workers=2`", "bf16", "venv/bin/python peer.py bf16 out 2"),
    Tool("mmq, from MXFP8", "mxfp8", "python -m mmq convert mxfp8 out --scale-search max --jobs 2"),
)
ON_MXFP8 = "venv/bin/python peer.py mxfp8 out 1"


def arguments_of(command: str) -> list[str]:
    first, *rest = command.split()
    return [sys.executable if first == "python" else first, *rest]


def family(pid: int) -> list[int]:
    """A process and everything it started."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text("ascii").split()
    except OSError:
        return []
    return [pid, *(p for child in children for p in family(int(child)))]


def memory(pid: int) -> tuple[int, int]:
    """RSS and PSS of a process in bytes, file pages that it has mapped included."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text("ascii").splitlines()
    except OSError:
        return 0, 0
    sizes = {line.split(":")[0]: line.split()[1] for line in lines[1:]}
    return int(sizes.get("Rss", 0)) * 1024, int(sizes.get("Pss", 0)) * 1024


def measured(command: str, folder: Path, log: Path) -> tuple[int, Result]:
    """Run a command in `folder`, its output in `log`; returns exit code and cost."""
    result = Result()
    start = time.perf_counter()
    with log.open("wb") as file:
        process = subprocess.Popen(arguments_of(command), cwd=folder, stdout=file, stderr=file)
        while True:
            # wait4, not poll: it also tells the CPU seconds, the workers' among them
            pid, status, usage = os.wait4(process.pid, os.WNOHANG)
            if pid:
                break
            sizes = [memory(p) for p in family(process.pid)]
            result.rss = max(result.rss, sum(rss for rss, _ in sizes))
            result.pss = max(result.pss, sum(pss for _, pss in sizes))
            time.sleep(SAMPLE_SECONDS)
    result.wall = time.perf_counter() - start
    result.cpu = usage.ru_utime + usage.ru_stime
    process.returncode = os.waitstatus_to_exitcode(status)
    return process.returncode, result


def tensors_of(folder: Path) -> Tensors:
    paths = sorted(folder.glob("*.safetensors"))
    return {info.name: (path, info) for path in paths for info in read_header(path, "").tensors}


def raw(tensors: Tensors, name: str) -> np.ndarray:
    path, info = tensors[name]
    return np.fromfile(path, np.uint8, info.nbytes, offset=info.offset)


def decoded(tensors: Tensors, module: str) -> np.ndarray:
    """An NVFP4 weight as F32, from ModelOpt's names or compressed-tensors'."""
    ours = f"{module}.weight_scale_2" in tensors
    stored = raw(tensors, f"{module}.weight_{'scale_2' if ours else 'global_scale'}")
    scale = np.float32(stored.view(np.float32).item())
    packed = f"{module}.{'weight' if ours else 'weight_packed'}"
    shapes = [tensors[name][1].shape for name in (packed, f"{module}.weight_scale")]
    codes, block_scales = raw(tensors, packed), raw(tensors, f"{module}.weight_scale")
    return ops.dequantize_nvfp4_f32(
        codes.reshape(shapes[0]), block_scales.reshape(shapes[1]),
        scale if ours else np.float32(1) / scale,
    )  # fmt: skip


def sqnr_db(source: Tensors, out: Tensors, module: str) -> float:
    want = to_float32(raw(source, f"{module}.weight"), "BF16")
    error = decoded(out, module).reshape(-1) - want.reshape(-1)
    return 10 * math.log10(np.square(want).mean() / np.square(error).mean())


def check(tool: Tool, folder: Path) -> float:
    """Lowest SQNR of the first and last expert; stops unless the whole job was done."""
    source, given, out = (tensors_of(folder / name) for name in ("bf16", tool.source, "out"))
    experts = [match[1] for name in source if (match := EXPERT.fullmatch(name))]
    for module in experts:
        names = {f"{module}.weight", f"{module}.weight_packed"} & set(out)
        if len(names) != 1 or out[names.pop()][1].dtype != "U8":
            raise SystemExit(f"{tool.command}: {module} is not NVFP4")
    for name in (name for name in given if name.rpartition(".")[0] not in experts):
        if name not in out or not np.array_equal(raw(given, name), raw(out, name)):
            raise SystemExit(f"{tool.command}: {name} is not the source's")
    numbers = sorted({int(module.split(".")[-2]) for module in experts})
    ends = [f".experts.{n}.w{i}" for n in (numbers[0], numbers[-1]) for i in (1, 2, 3)]
    worst = min(sqnr_db(source, out, m) for m in experts if m.endswith(tuple(ends)))
    if not worst > MIN_SQNR_DB:
        raise SystemExit(f"{tool.command}: {worst:.1f} dB SQNR is no conversion")
    return worst


def last_line(log: Path) -> str:
    lines = log.read_text("utf-8", "replace").strip().splitlines()
    return lines[-1].strip() if lines else ""


def run(tool: Tool, folder: Path) -> tuple[Result, dict[str, Any]]:
    """One conversion from a cold cache, checked; and what the tool said about it."""
    out, log = folder / "out", folder / "log"
    evict_all(folder / tool.source)
    code, result = measured(tool.command, folder, log)
    if code:
        sys.stderr.write(log.read_text("utf-8", "replace"))
        raise SystemExit(f"{tool.command}: exit code {code}")
    if tool.name.startswith("mmq"):
        said = json.loads((out / "mmq-convert.json").read_text("utf-8"))["timing"]
    else:
        said = json.loads(last_line(log))
    result.seconds = said["seconds"]
    result.sqnr = check(tool, folder)
    shutil.rmtree(out)
    return result, said


def prepare(folder: Path, experts: int) -> None:
    """The peer in an environment of its own, and both forms of the checkpoint."""
    pins = CONSTRAINTS.read_text("utf-8").splitlines()
    kept = [pin for pin in pins if pin.split("==")[0] not in UNPINNED]
    (folder / "constraints.txt").write_text("\n".join(kept) + "\n", "utf-8")
    (folder / "peer.py").write_text(PEER_SCRIPT, "utf-8")
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    pip = [folder / "venv/bin/python", "-m", "pip", "--disable-pip-version-check", "install"]
    subprocess.run([*pip, "-qq", "-c", folder / "constraints.txt", PEER], check=True)
    big_source.build(folder / "mxfp8", experts, VOCAB)
    # several shards, as a real release has: the peer's unit of parallel work
    command = "python -m mmq convert mxfp8 bf16 --to bf16 --jobs 2 --max-shard-size 600MB"
    code, _ = measured(command, folder, folder / "log")
    if code:
        raise SystemExit(last_line(folder / "log"))


def on_mxfp8(folder: Path) -> str:
    """What the peer makes of the MXFP8 form."""
    code, _ = measured(ON_MXFP8, folder, folder / "log")
    said = last_line(folder / "log")
    return f"exit code {code}, `{said}`" if code else "exit code 0, output not compared"


def compare(folder: Path, rounds: int) -> str:
    """Every tool once per round, in turn, so that a busy minute hits all of them."""
    best: dict[Tool, Result] = {}
    versions: dict[str, str] = {}
    loads = [os.getloadavg()[0]]
    for _ in range(rounds):
        for tool in TOOLS:
            result, said = run(tool, folder)
            print(f"{tool.name}: {result}", file=sys.stderr)
            versions |= said.get("versions", {})
            if tool not in best or result.seconds < best[tool].seconds:
                best[tool] = result
            loads.append(os.getloadavg()[0])
    sizes = {
        source: sum(info.nbytes for _, info in tensors_of(folder / source).values())
        for source in ("bf16", "mxfp8")
    }
    text = [*machine(versions, rounds, loads), "", *table(best, sizes), "", *commands()]
    text += ["", f"The peer on the MXFP8 form (`{ON_MXFP8}`): {on_mxfp8(folder)}."]
    return "\n".join(text)


def machine(versions: dict[str, str], rounds: int, loads: list[float]) -> list[str]:
    mine = [f"{name} {version(name)}" for name in ("mmq-toolkit", "numpy", "numba")]
    peers = [f"{name} {number}" for name, number in versions.items()]
    return [
        f"Machine: {cpu()}, both tools on the same {len(os.sched_getaffinity(0))} cores, load"
        f" average {min(loads):.1f} to {max(loads):.1f}; Python {platform.python_version()}.",
        f"mmq: {', '.join(mine)}.",
        f"Peer: {', '.join(peers)}.",
        f"The shortest of {rounds} rounds that take the rows in turn, each from a cold cache.",
    ]


def table(best: dict[Tool, Result], sizes: dict[str, int]) -> list[str]:
    mine = best[TOOLS[0]]
    lines = [
        "| BF16 experts → NVFP4 | source GB | conversion s | GB/s of input | mmq / this |"
        " whole command s | CPU s | mmq / this, CPU | peak RSS GB | peak PSS GB | SQNR dB |",
        "|" + "---|" * 11,
    ]
    for tool, r in best.items():
        size = sizes[tool.source] / 1e9
        same = tool.source == TOOLS[0].source and r is not mine
        ratios = [f"**{r.seconds / mine.seconds:.1f} ×**", f"{r.cpu / mine.cpu:.1f} ×"]
        by_clock, by_cpu = ratios if same else ("", "")
        lines.append(
            f"| {tool.name} | {size:.2f} | {r.seconds:.1f} | {size / r.seconds:.3f} | {by_clock} |"
            f" {r.wall:.1f} | {r.cpu:.1f} | {by_cpu} | {r.rss / 1e9:.2f} | {r.pss / 1e9:.2f} |"
            f" {r.sqnr:.2f} |"
        )
    return lines


def commands() -> list[str]:
    return [
        "“conversion” is each tool's own clock without its imports, which a checkpoint of any size"
        " pays once; “mmq / this” compares those, and CPU seconds of the whole command beside them"
        " (a busy machine stretches the first, and a long run is the likelier to meet one; it"
        " hardly touches the second). RSS counts shared pages once for each process, and mapped"
        " file pages. mmq's time includes what the peer does not do: SHA-256 of the output, fsync,"
        " a NaN scan, error sums. Every output was checked: all expert projections are NVFP4, SQNR"
        " against the BF16 weights as given, every other tensor byte for byte as it was in"
        " its source.",
        "", "```", *(tool.command for tool in TOOLS), "```", "",
        f"with `{PEER}` (installed under `constraints.txt` less {' and '.join(UNPINNED)}, whose"
        " pins it contradicts) and peer.py:", "", "```python", PEER_SCRIPT.rstrip(), "```",
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, help="where to build everything")
    parser.add_argument("--experts", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("-o", "--output", type=Path, help="file to put the table into")
    arguments = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])  # children inherit it
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        prepare(Path(folder), arguments.experts)
        text = compare(Path(folder), arguments.rounds)
    print(text)
    if arguments.output:
        fill(arguments.output, "bench_peer", text)


if __name__ == "__main__":
    main()

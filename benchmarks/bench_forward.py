"""The verifier's forward against its own matrix products run bare: same shapes, dtype and run.

    python benchmarks/bench_forward.py [--windows 8] [--context 512] [-o docs/performance.md]

A model of M3's structure with about 85 million random parameters is streamed through the layers,
source arm only. Its GEMMs are recorded once and then run alone, on operands of the same shapes and
dtype; the ratio of the two times is the share of the forward that is GEMM speed. The rest is told
by part. Every ratio compares times of the same run; nothing here asserts one.
"""

from __future__ import annotations

import argparse
import functools
import os
import platform
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_convert import cpu, fill
from torch.utils._python_dispatch import TorchDispatchMode

from mmq.convert.checkpoint import open_checkpoint
from mmq.convert.modules import group_modules
from mmq.demo.hub_config import ModelSize
from mmq.demo.small_model import build_small_model
from mmq.kernels.reference import block_attention, block_selection, qkv_rope
from mmq.verify.logits.arms import Arm
from mmq.verify.logits.hidden_states import HiddenStates
from mmq.verify.logits.stream import Model, Stream
from mmq.verify.logits.tokens import TokenSet, Window
from mmq.verify.model import layer as layer_module
from mmq.verify.model.config import read_text_config
from mmq.verify.model.operations import ReferenceOperations
from mmq.verify.model.weights import ModelWeights

#: 85 million parameters: GEMMs large enough to run at speed, small enough for minutes.
SIZE = ModelSize(
    hidden=1024, intermediate=512, dense_intermediate=2048, layers=4, dense_layers=1, experts=12,
    heads=16, kv_heads=4, head_dim=64, vocab=4096, index_dim=64, index_block=64, index_topk=4,
)  # fmt: skip
GEMMS = ("mm", "bmm", "addmm")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Recorder(TorchDispatchMode):
    """Keeps the shapes and dtype of every matrix product."""

    def __init__(self) -> None:
        super().__init__()
        self.products: list[tuple[tuple[int, ...], tuple[int, ...], torch.dtype, bool]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket._qualified_op_name.removeprefix("aten::") in ("mm", "bmm"):
            a, b = args[:2]
            self.products.append((tuple(a.shape), tuple(b.shape), a.dtype, b.stride(-1) != 1))
        return func(*args, **(kwargs or {}))


@contextmanager
def timed_parts(seconds: dict[str, float]) -> Iterator[None]:
    """Times inside the parts of a forward, GEMMs of a part included."""
    parts: list[tuple[Any, str, str]] = [
        (ModelWeights, "matrix", "read and decode weights"),
        (layer_module, "gemma_norm", "norms of hidden states"),
        (qkv_rope, "project_heads", "head norms and RoPE"),
        (block_selection, "score_blocks", "block scores"),
        (block_selection, "select_blocks", "block selection"),
        (block_attention, "attend", "attention"),
        (ReferenceOperations, "moe", "experts"),
    ]  # fmt: skip
    kept = [(owner, name, getattr(owner, name)) for owner, name, _ in parts]
    stack: list[str] = []

    def wrap(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            stack.append(part)
            start = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                taken = time.perf_counter() - start
                stack.pop()
                seconds[part] += taken
                if stack:
                    seconds[stack[-1]] -= taken

        return call

    for owner, name, part in parts:
        setattr(owner, name, wrap(part, getattr(owner, name)))
    try:
        yield
    finally:
        for owner, name, function in kept:
            setattr(owner, name, function)


def run(folder: Path, work: Path, dtype: torch.dtype, windows: int, context: int) -> float:
    """Seconds of one forward through all layers."""
    checkpoint = open_checkpoint(folder)
    paths = {name: shard.path for name, shard in checkpoint.shards.items()}
    weights = ModelWeights(str(folder), group_modules(checkpoint.tensors), paths, dtype)
    model = Model(read_text_config(checkpoint.config), weights)
    ids = np.random.default_rng(7).integers(0, SIZE.vocab, windows * context).astype(np.int32)
    spans = tuple(Window(0, i * context, context) for i in range(windows))
    tokens, arms = TokenSet(ids, spans, ("ids",), {}), (Arm("source", "source"),)
    shutil.rmtree(work, ignore_errors=True)
    states = HiddenStates(work, arms, tokens.count, model.config.hidden, {})
    both = {"source": model, "candidate": model}
    stream = Stream(both, arms, tokens, states, ReferenceOperations(), lambda nbytes: None)
    stream.embed()
    start = time.perf_counter()
    for number in range(model.config.layers):
        stream.run_layer(number)
    taken = time.perf_counter() - start
    weights.close()
    return taken


def bare(products: list[tuple[tuple[int, ...], tuple[int, ...], torch.dtype, bool]]) -> float:
    """Seconds of the recorded products alone; operands of a shape are made once."""
    operands: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}
    for key in products:
        if key not in operands:
            a_shape, b_shape, dtype, transposed = key
            a = torch.randn(a_shape).to(dtype)
            shape = (*b_shape[:-2], b_shape[-1], b_shape[-2]) if transposed else b_shape
            b = torch.randn(shape).to(dtype)
            operands[key] = a, b.transpose(-1, -2) if transposed else b
    start = time.perf_counter()
    for key in products:
        torch.matmul(*operands[key])
    return time.perf_counter() - start


def parameters(folder: Path) -> int:
    """Weights of the language model's layers and ends."""
    modules = group_modules(open_checkpoint(folder).tensors).values()
    return sum(
        int(np.prod(m.shape)) for m in modules
        if m.weight is not None and m.name.startswith("language_model")
    )  # fmt: skip


def measure(folder: Path, windows: int, context: int) -> list[str]:
    """Lines of the page."""
    lines = [
        f"{parameters(folder) / 1e6:.0f} M parameters, {windows} windows of {context} tokens,"
        f" {torch.get_num_threads()} thread(s), {cpu()}, torch {torch.__version__},"
        f" Python {platform.python_version()}.", "",
        "| dtype | tokens/s | GEMMs alone, tokens/s | ratio |", "|---|---|---|---|",
    ]  # fmt: skip
    details: list[str] = []
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch) / "work"
        for name, dtype in DTYPES.items():
            recorder = Recorder()
            with recorder:
                run(folder, work, dtype, 1, context)
            run(folder, work, dtype, 1, context)  # compiled and warm
            recorder = Recorder()
            with recorder:
                run(folder, work, dtype, windows, context)
            seconds: dict[str, float] = defaultdict(float)
            with timed_parts(seconds):
                whole = run(folder, work, dtype, windows, context)
            gemm = bare(recorder.products)
            count = windows * context
            lines.append(
                f"| {name} | {count / whole:,.0f} | {count / gemm:,.0f} | {gemm / whole:.2f} |"
            )
            rest = whole - sum(seconds.values())
            parts = sorted(seconds.items(), key=lambda item: -item[1])
            told = ", ".join(f"{part} {100 * taken / whole:.0f} %" for part, taken in parts)
            details.append(f"{name}: {told}, projections and the rest {100 * rest / whole:.0f} %.")
    return [*lines, "", *details]


def main() -> None:
    """Measure, print, and fill the page's markers."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        model = build_small_model(Path(folder) / "model", SIZE)
        text = "\n".join(measure(model, options.windows, options.context))
    print(text)
    if options.output:
        fill(options.output, "bench_forward", text)


if __name__ == "__main__":
    main()

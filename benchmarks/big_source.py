"""A full-size slice of MiniMax-M3 to measure on: one MoE layer, embedding, real shapes.

    python benchmarks/big_source.py FOLDER [--experts 128]      10.0 GB at the default

Weights are Gaussian MXFP8 made once and rotated per tensor: real statistics, every tensor
different, written at disk speed. The expert shard holds 7.5 GB.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mmq.convert.safetensors_header import header_bytes
from mmq.kernels import ops
from mmq.quantize.floats import bf16_bits

HIDDEN, INTER, VOCAB, HEAD_DIM, HEADS, KV_HEADS = 6144, 3072, 200064, 128, 64, 4
LAYER = "language_model.model.layers.0."

Spec = tuple[str, str, tuple[int, ...]]


def config(experts: int) -> dict[str, Any]:
    """Hub-style config of a one-layer M3."""
    return {
        "architectures": ["MiniMaxM3SparseForConditionalGeneration"],
        "model_type": "minimax_m3_vl",
        "text_config": {
            "hidden_size": HIDDEN, "intermediate_size": INTER, "num_hidden_layers": 1,
            "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
            "num_local_experts": experts, "num_experts_per_tok": 4, "moe_layer_freq": [1],
            "vocab_size": VOCAB, "use_gemma_norm": True, "tie_word_embeddings": True,
        },
        "quantization_config": {
            "quant_method": "mxfp8", "activation_scheme": "dynamic",
            "weight_block_size": [1, 32], "ignored_layers": ["model.embed_tokens"],
        },
    }  # fmt: skip


def linear(name: str, rows: int, columns: int) -> Iterator[Spec]:
    yield f"{name}.weight", "F8_E4M3", (rows, columns)
    yield f"{name}.weight_scale_inv", "U8", (rows, columns // 32)


def rest() -> Iterator[Spec]:
    """Everything but the experts."""
    yield "language_model.model.embed_tokens.weight", "BF16", (VOCAB, HIDDEN)
    yield "language_model.model.norm.weight", "BF16", (HIDDEN,)
    for norm in ("input_layernorm", "post_attention_layernorm"):
        yield f"{LAYER}{norm}.weight", "BF16", (HIDDEN,)
    for norm in ("q_norm", "k_norm"):
        yield f"{LAYER}self_attn.{norm}.weight", "BF16", (HEAD_DIM,)
    yield from linear(f"{LAYER}self_attn.q_proj", HEADS * HEAD_DIM, HIDDEN)
    yield from linear(f"{LAYER}self_attn.k_proj", KV_HEADS * HEAD_DIM, HIDDEN)
    yield from linear(f"{LAYER}self_attn.v_proj", KV_HEADS * HEAD_DIM, HIDDEN)
    yield from linear(f"{LAYER}self_attn.o_proj", HIDDEN, HEADS * HEAD_DIM)
    yield f"{LAYER}block_sparse_moe.gate.weight", "F32", (128, HIDDEN)


def experts_of(count: int) -> Iterator[Spec]:
    for expert in range(count):
        name = f"{LAYER}block_sparse_moe.experts.{expert}."
        yield from linear(name + "w1", INTER, HIDDEN)
        yield from linear(name + "w2", HIDDEN, INTER)
        yield from linear(name + "w3", INTER, HIDDEN)


class Weights:
    """Bytes for any tensor, from one Gaussian matrix."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        values = rng.standard_normal((INTER, HIDDEN), np.float32) * np.float32(0.02)
        codes, scale, _ = ops.quantize_mxfp8(values, "F32")
        self._bytes = {"F8_E4M3": codes, "U8": scale, "BF16": bf16_bits(values), "F32": values}

    def chunks(self, spec: Spec, turn: int) -> Iterator[memoryview]:
        _, dtype, shape = spec
        pool = self._bytes[dtype].reshape(-1)
        left = int(np.prod(shape))
        start = turn * 7919 * 32 % pool.size
        while left:
            piece = pool[start : start + left]
            yield memoryview(np.ascontiguousarray(piece)).cast("B")
            left -= piece.size
            start = 0


def build(folder: Path, experts: int) -> None:
    """Write the checkpoint: one shard of experts, one of everything else."""
    folder.mkdir(parents=True, exist_ok=True)
    weights, weight_map, turn = Weights(), {}, 0
    parts = (list(experts_of(experts)), list(rest()))
    for index, specs in enumerate(parts, 1):
        name = f"model-{index:05d}-of-{len(parts):05d}.safetensors"
        width = {"F8_E4M3": 1, "U8": 1, "BF16": 2, "F32": 4}
        sized = [(n, d, s, int(np.prod(s)) * width[d]) for n, d, s in specs]
        with (folder / name).open("wb") as file:
            file.write(header_bytes(sized, {"format": "pt"}))
            for spec in specs:
                weight_map[spec[0]] = name
                turn += 1
                for chunk in weights.chunks(spec, turn):
                    file.write(chunk)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map}), encoding="utf-8"
    )
    (folder / "config.json").write_text(json.dumps(config(experts)), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--experts", type=int, default=128)
    arguments = parser.parse_args()
    build(arguments.folder, arguments.experts)

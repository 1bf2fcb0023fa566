"""A full-size slice of MiniMax-M3 to measure on: one sparse MoE layer, embedding, real shapes.

    python benchmarks/big_source.py FOLDER [--experts 128]      10.0 GB at the default

Weights are Gaussian MXFP8 made once and rotated per tensor: real statistics, every tensor
different, written at disk speed. The expert shard holds 7.5 GB. It is complete: convert, verify at
every level and calibrate run on it, with the release's own config.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mmq.convert.checkpoint import open_checkpoint
from mmq.convert.safetensors_header import header_bytes
from mmq.kernels import ops
from mmq.quantize.floats import bf16_bits

HIDDEN, INTER, VOCAB, HEAD_DIM, HEADS, KV_HEADS = 6144, 3072, 200064, 128, 64, 4
LAYER = "language_model.model.layers.0."

Spec = tuple[str, str, tuple[int, ...]]


def config(experts: int, vocab: int = VOCAB) -> dict[str, Any]:
    """The release's config, of one layer and without vision."""
    text = dict(open_checkpoint("minimax-m3-mxfp8").text_config)
    sparse = dict(text["sparse_attention_config"])
    sparse |= {key: [1] for key, value in sparse.items() if isinstance(value, list)}
    text |= {
        "num_hidden_layers": 1, "num_local_experts": experts, "moe_layer_freq": [1],
        "vocab_size": vocab, "tie_word_embeddings": True, "num_mtp_modules": 0,
        "sparse_attention_config": sparse,
    }  # fmt: skip
    return {
        "architectures": ["MiniMaxM3SparseForConditionalGeneration"],
        "model_type": "minimax_m3_vl",
        "tie_word_embeddings": True,
        "text_config": text,
        "quantization_config": {
            "quant_method": "mxfp8", "activation_scheme": "dynamic",
            "weight_block_size": [1, 32], "ignored_layers": ["model.embed_tokens"],
        },
    }  # fmt: skip


def linear(name: str, rows: int, columns: int) -> Iterator[Spec]:
    yield f"{name}.weight", "F8_E4M3", (rows, columns)
    yield f"{name}.weight_scale_inv", "U8", (rows, columns // 32)


def rest(experts: int, vocab: int = VOCAB) -> Iterator[Spec]:
    """Everything but the routed experts."""
    yield "language_model.model.embed_tokens.weight", "BF16", (vocab, HIDDEN)
    yield "language_model.model.norm.weight", "BF16", (HIDDEN,)
    for norm in ("input_layernorm", "post_attention_layernorm"):
        yield f"{LAYER}{norm}.weight", "BF16", (HIDDEN,)
    for norm in ("q_norm", "k_norm", "index_q_norm", "index_k_norm"):
        yield f"{LAYER}self_attn.{norm}.weight", "BF16", (HEAD_DIM,)
    yield from linear(f"{LAYER}self_attn.q_proj", HEADS * HEAD_DIM, HIDDEN)
    yield from linear(f"{LAYER}self_attn.k_proj", KV_HEADS * HEAD_DIM, HIDDEN)
    yield from linear(f"{LAYER}self_attn.v_proj", KV_HEADS * HEAD_DIM, HIDDEN)
    yield from linear(f"{LAYER}self_attn.o_proj", HIDDEN, HEADS * HEAD_DIM)
    yield from linear(f"{LAYER}self_attn.index_q_proj", KV_HEADS * HEAD_DIM, HIDDEN)
    yield from linear(f"{LAYER}self_attn.index_k_proj", HEAD_DIM, HIDDEN)
    for name, shape in (("gate_proj", (INTER, HIDDEN)), ("up_proj", (INTER, HIDDEN)),
                        ("down_proj", (HIDDEN, INTER))):  # fmt: skip
        yield from linear(f"{LAYER}block_sparse_moe.shared_experts.{name}", *shape)
    yield f"{LAYER}block_sparse_moe.gate.weight", "F32", (experts, HIDDEN)
    yield f"{LAYER}block_sparse_moe.e_score_correction_bias", "F32", (experts,)


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


def build(folder: Path, experts: int, vocab: int = VOCAB) -> None:
    """Write the checkpoint: one shard of experts, one of everything else."""
    folder.mkdir(parents=True, exist_ok=True)
    weights, weight_map, turn = Weights(), {}, 0
    parts = (list(experts_of(experts)), list(rest(experts, vocab)))
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
    (folder / "config.json").write_text(json.dumps(config(experts, vocab)), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--experts", type=int, default=128)
    arguments = parser.parse_args()
    build(arguments.folder, arguments.experts)

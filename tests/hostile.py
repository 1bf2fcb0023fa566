"""The good source checkpoint of the tests, and functions that break it in one place each.

    source = good()                three shards, complete hub-style config, side files
    drop_scale(source, module)     plants a fault
    source.write(folder)           puts it on disk

Names of layers and experts come from `m3_source.layer` and `m3_source.expert`.
"""

from __future__ import annotations

import functools
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
from m3_source import (
    INDEX,
    TEXT,
    Size,
    Source,
    Tensor,
    bf16,
    decoder_layer,
    expert,
    f32,
    layer,
    linear,
    plain,
    shard_bytes,
    tensor,
    vision,
)

SMALL = Size()
W1 = expert(1, 0, "w1")
W2 = expert(1, 0, "w2")
NORM = f"{TEXT}norm.weight"
LM_HEAD = "language_model.lm_head.weight"
MTP = f"{TEXT}mtp.layers.0."


def config(size: Size = SMALL) -> dict[str, Any]:
    """A hub-style config.json with all that the engines read."""
    sparse = [0] * size.dense + [1] * (size.layers - size.dense)
    attention = {
        "use_sparse_attention": True, "sparse_index_dim": size.head_dim,
        "sparse_num_index_heads": size.kv_heads, "sparse_topk_blocks": 2, "sparse_block_size": 16,
        "sparse_score_type": "max", "sparse_init_block": 0, "sparse_local_block": 1,
        "sparse_attention_freq": sparse, "sparse_disable_index_value": sparse,
    }  # fmt: skip
    text = {
        "architectures": ["MiniMaxM3SparseForCausalLM"], "hidden_size": size.hidden,
        "num_hidden_layers": size.layers, "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads, "head_dim": size.head_dim,
        "rotary_dim": size.head_dim // 2, "partial_rotary_factor": 0.5, "rope_theta": 5_000_000,
        "rms_norm_eps": 1e-6, "use_gemma_norm": True, "use_qk_norm": True,
        "qk_norm_type": "per_head", "hidden_act": "swigluoai", "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0, "vocab_size": size.vocab, "intermediate_size": size.inter,
        "dense_intermediate_size": size.dense_inter, "shared_intermediate_size": size.inter,
        "n_shared_experts": 1, "num_local_experts": size.experts, "num_experts_per_tok": 2,
        "scoring_func": "sigmoid", "use_routing_bias": True, "routed_scaling_factor": 2.0,
        "moe_layer_freq": sparse, "num_mtp_modules": 1, "max_position_embeddings": 4096,
        "attention_output_gate": False, "tie_word_embeddings": False,
        "sparse_attention_config": attention,
    }  # fmt: skip
    vision_config = {
        "model_type": "clip_vision_model", "hidden_size": size.vision, "num_attention_heads": 2,
        "num_hidden_layers": 1, "intermediate_size": 48, "patch_size": 7, "image_size": 28,
        "projection_dim": size.hidden, "position_embedding_type": "rope", "rope_mode": "3d",
        "rope_theta": 10000, "hidden_act": "gelu", "layer_norm_eps": 1e-5, "num_channels": 3,
    }  # fmt: skip
    routers = [f"{layer(i)}block_sparse_moe.gate" for i in range(size.dense, size.layers)]
    return {
        "architectures": ["MiniMaxM3SparseForConditionalGeneration"],
        "auto_map": {"AutoConfig": "configuration_minimax_m3_vl.MiniMaxM3VLConfig"},
        "model_type": "minimax_m3_vl", "torch_dtype": "bfloat16", "transformers_version": "4.52.4",
        "image_token_index": 250, "video_token_index": 251, "projector_hidden_act": "gelu",
        "projector_hidden_size": size.hidden, "multimodal_projector_bias": True,
        "vision_feature_layer": -1, "vision_feature_select_strategy": "full",
        "img_token_compression_config": {"method": "patch_merge", "spatial_merge_size": 2},
        "quantization_config": {
            "quant_method": "mxfp8", "activation_scheme": "dynamic", "weight_block_size": [1, 32],
            "ignored_layers": ["lm_head", "model.embed_tokens", "vision_tower",
                               "multi_modal_projector", "patch_merge_mlp", *routers],
        },
        "text_config": text, "vision_config": vision_config,
    }  # fmt: skip


#: Everything beside the weights: non-ASCII text, remote code, a licence, a folder, a draft model.
SIDE_FILES = {
    "tokenizer.json": json.dumps({"model": {"vocab": {"你": 0, "好": 1}}}, ensure_ascii=False),
    "tokenizer_config.json": '{"bos_token": "]~!b["}\n',
    "chat_template.jinja": "{# 模板 #}{{ messages }}\r\n",
    "generation_config.json": '{"do_sample": true}',
    "preprocessor_config.json": '{"image_size": 28}',
    "configuration_minimax_m3_vl.py": "# remote code, copied as it is\n",
    "LICENSE": "licence text\n",
    "README.md": "---\nlicense: other\n---\n",
    "figures/图 1.txt": "a file in a folder\n",
    "dspark/config.json": '{"model_type": "draft"}',
    "dspark/model.safetensors": "weights of a draft, not ours to read",
}


def good(size: Size = SMALL, *, shards: int = 3) -> Source:
    """The checkpoint without a fault; a copy each time."""
    return _good(size, shards).copy()


@functools.cache
def _good(size: Size, shards: int) -> Source:
    tensors = plain(f"{TEXT}embed_tokens.weight", size.vocab, size.hidden)
    for number in range(size.layers):
        tensors |= decoder_layer(layer(number), size, sparse=number >= size.dense)
    tensors |= plain(NORM, size.hidden) | plain(LM_HEAD, size.vocab, size.hidden) | vision(size)
    # a weight and its scale stay together, as in the release
    names = [n for n in tensors if not n.endswith("_scale_inv")]
    placed: dict[str, dict[str, Tensor]] = {}
    for position, name in enumerate(names):
        number = position * shards // len(names) + 1
        shard = placed.setdefault(f"model-{number:05d}-of-{shards:05d}.safetensors", {})
        shard[name] = tensors[name]
        if f"{name}_scale_inv" in tensors:
            shard[f"{name}_scale_inv"] = tensors[f"{name}_scale_inv"]
    side = {name: text.encode() for name, text in SIDE_FILES.items()}
    return Source(size, placed, config(size), side)


def as_bf16(source: Source) -> Source:
    """The same model with every MXFP8 weight decoded to BF16, as a BF16 release would be."""
    out = source.copy()
    for shard, tensors in out.shards.items():
        decoded = {}
        for name, t in tensors.items():
            if t.dtype == "F8_E4M3":
                decoded[name] = bf16(source.values(name.removesuffix(".weight")))
            elif not name.endswith("_scale_inv"):
                decoded[name] = t
        out.shards[shard] = decoded
    del out.config["quantization_config"]
    return out


# --- files and headers ---------------------------------------------------------------------------


def first(source: Source) -> str:
    """Name of the first shard."""
    return next(iter(source.shards))


def last(source: Source) -> str:
    return list(source.shards)[-1]


def on_disk(source: Source, shard: str, change: Any) -> None:
    """Rewrite a shard's bytes after it was written: `change(bytes) -> bytes`."""

    def action(folder: Path) -> None:
        path = folder / shard
        path.write_bytes(change(path.read_bytes()))

    source.after.append(action)


def lose_shards(source: Source, *shards: str) -> None:
    source.after.extend(lambda folder, s=s: (folder / s).unlink() for s in shards)


def dangle(source: Source, name: str, target: str) -> None:
    """A link whose target is gone, as a pruned cache leaves them."""

    def action(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)

    source.after.append(action)


def lfs_pointer(size: int = 5_348_839_424) -> bytes:
    """What git leaves in place of a file when LFS was not run."""
    oid = "ab" * 32
    return f"version https://git-lfs.github.com/spec/v1\noid sha256:{oid}\nsize {size}\n".encode()


def keep_in_index(source: Source, name: str) -> str:
    """Drop a tensor from its shard and leave its index entry; returns the shard."""
    source.weight_map = {n: s for s, tensors in source.shards.items() for n in tensors}
    shard = source.shard_of(name)
    source.pop(name)
    return shard


def single_file(source: Source) -> None:
    source.shards = {"model.safetensors": source.all()}
    source.indexed = False


def header_length(length: int) -> Any:
    """A change for `on_disk`: claim another header length."""
    return lambda raw: struct.pack("<Q", length) + raw[8:]


# --- tensors -------------------------------------------------------------------------------------


def drop_module(source: Source, module: str) -> None:
    for name in [n for n in source.all() if n.rpartition(".")[0] == module]:
        source.pop(name)


def drop_scale(source: Source, module: str) -> None:
    source.pop(f"{module}.weight_scale_inv")


def scatter_scales(source: Source) -> None:
    """Every MXFP8 scale in the shard before its weight's (the last shard, for the first)."""
    names = list(source.shards)
    moved = [
        (n, t, names[i - 1])
        for i, shard in enumerate(names)
        for n, t in source.shards[shard].items()
        if n.endswith("_scale_inv")
    ]
    for name, t, target in moved:
        source.pop(name)
        source.shards[target][name] = t


def tag_scales_e8m0(source: Source) -> None:
    for name, t in source.all().items():
        if name.endswith("_scale_inv"):
            source[name] = t._replace(dtype="F8_E8M0")


def poke(source: Source, name: str, *edits: tuple[tuple[int, ...], int]) -> None:
    """Set single bytes of a one-byte tensor."""
    data = source[name].bytes_as("u1")
    for position, value in edits:
        data[position] = value
    source[name] = tensor(source[name].dtype, data)


def fuse_experts(source: Source, number: int) -> str:
    """w1 and w3 of a layer's experts as one 3-D tensor; returns its name."""
    moe = f"{layer(number)}block_sparse_moe.experts."
    shard = source.shard_of(f"{moe}0.w1.weight")
    for suffix, fused in (("weight", "gate_up_proj"), ("weight_scale_inv", "gate_up_proj_scale")):
        parts = [
            [source.pop(f"{moe}{e}.{w}.{suffix}") for w in ("w1", "w3")]
            for e in range(source.size.experts)
        ]
        stacked = np.stack([np.concatenate([t.bytes_as("u1") for t in pair]) for pair in parts])
        source.shards[shard][moe + fused] = tensor(parts[0][0].dtype, stacked)
    return f"{moe}gate_up_proj"


def add_mtp(source: Source) -> list[str]:
    """A multi-token-prediction layer with experts of its own; returns its tensor names."""
    size = source.size
    tensors = decoder_layer(f"{MTP}transformer_layer.", size, sparse=True)
    tensors |= linear(f"{MTP}eh_proj", size.hidden, 2 * size.hidden)
    for norm in ("enorm", "hnorm", "final_layernorm"):
        tensors |= plain(f"{MTP}{norm}.weight", size.hidden)
    source.shards[last(source)] |= tensors
    source.config["text_config"].update(num_mtp_modules=7, num_nextn_predict_layers=1)
    return list(tensors)


__all__ = [
    "INDEX", "LM_HEAD", "MTP", "NORM", "SIDE_FILES", "TEXT", "W1", "W2", "Size", "Source",
    "Tensor", "add_mtp", "as_bf16", "bf16", "config", "dangle", "drop_module", "drop_scale",
    "expert", "f32", "first", "fuse_experts", "good", "header_length", "keep_in_index", "last",
    "layer", "lfs_pointer", "lose_shards", "on_disk", "poke", "scatter_scales", "shard_bytes",
    "single_file", "tag_scales_e8m0", "tensor",
]  # fmt: skip

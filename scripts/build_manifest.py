#!/usr/bin/env python3
"""Write the built-in header manifests from a full tensor table of the release.

    python scripts/build_manifest.py m3-mxfp8-tensors.json

The table (not shipped) lists every tensor of the 31-shard MXFP8 release with `layers`/`experts`
ranges, its quantization_config, and the inferred tensors of one MTP layer. Config values come from
public copies of the release's config.json; fields nobody has seen are left out, not guessed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

OUT = Path(__file__).resolve().parent.parent / "mmq" / "convert" / "data"
KEPT = ("name", "dtype", "shape", "layers", "experts")
LAYERS, DENSE_LAYERS = 60, 3

#: 0 for the three dense layers, 1 for the rest: MoE, sparse attention and index values alike.
SPARSE = [0] * DENSE_LAYERS + [1] * (LAYERS - DENSE_LAYERS)

TEXT_CONFIG: dict[str, Any] = {
    "architectures": ["MiniMaxM3SparseForCausalLM"],
    "vocab_size": 200064,
    "hidden_size": 6144,
    "intermediate_size": 3072,
    "dense_intermediate_size": 12288,
    "shared_intermediate_size": 3072,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "attention_output_gate": False,
    "rope_theta": 5000000,
    "rotary_dim": 64,
    "partial_rotary_factor": 0.5,
    "max_position_embeddings": 1048576,
    "rms_norm_eps": 1e-6,
    "use_gemma_norm": True,
    "use_qk_norm": True,
    "qk_norm_type": "per_head",
    "hidden_act": "swigluoai",
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "routed_scaling_factor": 2.0,
    "moe_layer_freq": SPARSE,
    "num_mtp_modules": 1,
    "tie_word_embeddings": False,
    "sparse_attention_config": {
        "use_sparse_attention": True,
        "sparse_index_dim": 128,
        "sparse_num_index_heads": 4,
        "sparse_topk_blocks": 16,
        "sparse_block_size": 128,
        "sparse_score_type": "max",
        "sparse_init_block": 0,
        "sparse_local_block": 1,
        "sparse_attention_freq": SPARSE,
        "sparse_disable_index_value": SPARSE,
    },
}

TOKEN_COMPRESSION = {
    "image_token_compression_method": "patch_merge",
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}

VISION_CONFIG: dict[str, Any] = {
    "model_type": "clip_vision_model",
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_channels": 3,
    "patch_size": 14,
    "image_size": 2016,
    "projection_dim": 6144,
    "position_embedding_type": "rope",
    "rope_mode": "3d",
    "rope_theta": 10000.0,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-5,
    "vision_segment_max_frames": 4,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "initializer_factor": 1.0,
    "vocab_size": 32000,
    "img_token_compression_config": TOKEN_COMPRESSION,
}

GRID = range(336, 2017, 336)


def release_config(quantization_config: dict[str, Any]) -> dict[str, Any]:
    """config.json of the MXFP8 release, as far as public copies show it."""
    return {
        "architectures": ["MiniMaxM3SparseForConditionalGeneration"],
        "auto_map": {"AutoConfig": "configuration_minimax_m3_vl.MiniMaxM3VLConfig"},
        "model_type": "minimax_m3_vl",
        "torch_dtype": "bfloat16",
        "transformers_version": "4.52.4",
        "image_token_index": 200025,
        "video_token_index": 200026,
        "image_seq_length": 576,
        "process_image_mode": "dynamic_res",
        "image_grid_pinpoints": [[height, width] for height in GRID for width in GRID],
        "projector_hidden_act": "gelu",
        "projector_hidden_size": 6144,
        "multimodal_projector_bias": True,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
        "img_token_compression_config": TOKEN_COMPRESSION,
        "num_reward_heads": 0,
        "text_config": TEXT_CONFIG,
        "vision_config": VISION_CONFIG,
        "quantization_config": quantization_config,
    }


def compact(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Table rows with only what a manifest needs."""
    return [{k: e[k] for k in KEPT if e.get(k) is not None} for e in entries]


def write(name: str, manifest: dict[str, Any]) -> None:
    """One tensor entry a line, so that diffs of the data stay readable."""
    tensors = ",\n  ".join(json.dumps(t) for t in manifest.pop("tensors"))
    head = "".join(f"{json.dumps(k)}: {json.dumps(v)},\n " for k, v in manifest.items())
    path = OUT / name
    path.write_text(f'{{{head}"tensors": [\n  {tensors}\n ]}}\n', encoding="utf-8")
    print(f"{path}: {path.stat().st_size:,} B")


def main(table_path: str) -> None:
    table = json.loads(Path(table_path).read_text(encoding="utf-8"))
    OUT.mkdir(exist_ok=True)
    totals, mtp = table["totals"], table["mtp_module"]
    write("minimax-m3-mxfp8.json", {
        "shard_count": table["shards"]["count"],
        "totals": {k: totals[k] for k in ("tensors", "payload_bytes")},
        "config": release_config(table["quantization_config"]),
        "tensors": compact(table["tensors"]),
    })  # fmt: skip
    write("minimax-m3-mtp-layer.json", {
        "inferred": f"the {mtp['tensors_count']} MTP tensors (language_model.model.mtp.*) are"
        " inferred from loaders and published sizes; no public file list shows them",
        "totals": {"tensors": mtp["tensors_count"], "payload_bytes": mtp["payload_bytes"]},
        "tensors": compact(mtp["tensors"]),
    })  # fmt: skip


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])

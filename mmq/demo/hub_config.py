"""config.json of the small model, in the form the Hub has it and every engine insists on.

Loaders fall back on defaults in silence where a key is absent (docs/engines.md lists which), so
the small model states everything the release states, with smaller numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ModelSize:
    """Dimensions of a small M3; the defaults give a checkpoint of some 9 MB.

    Attributes:
        dense_layers: leading layers with a dense MLP and full attention, 3 in the release.
        index_block: tokens per block that sparse attention selects, 128 in the release.
        swiglu_limit: where gate and up are clamped, 7.0 in the release.
        projector_hidden: width inside the two projectors; `hidden`, as in the release, if None.
    """

    hidden: int = 256
    intermediate: int = 128
    dense_intermediate: int = 512
    layers: int = 4
    dense_layers: int = 1
    experts: int = 16
    experts_per_token: int = 4
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 64
    vocab: int = 512
    index_dim: int = 64
    index_block: int = 16
    index_topk: int = 2
    vision_hidden: int = 64
    vision_heads: int = 4
    vision_layers: int = 2
    vision_intermediate: int = 128
    patch: int = 14
    swiglu_limit: float = 7.0
    rope_theta: int = 5000000
    projector_hidden: int | None = None

    @property
    def sparse(self) -> list[int]:
        """1 for each layer with experts and sparse attention: one list serves both in M3."""
        return [int(layer >= self.dense_layers) for layer in range(self.layers)]


_COMPRESSION = {
    "image_token_compression_method": "patch_merge",
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}


def hub_config(size: ModelSize) -> dict[str, Any]:
    """The whole config.json."""
    return {
        "architectures": ["MiniMaxM3SparseForConditionalGeneration"],
        "auto_map": {"AutoConfig": "configuration_minimax_m3_vl.MiniMaxM3VLConfig"},
        "model_type": "minimax_m3_vl",
        "torch_dtype": "bfloat16",
        "transformers_version": "4.52.4",
        "image_token_index": size.vocab - 2,
        "video_token_index": size.vocab - 1,
        "image_seq_length": 576,
        "process_image_mode": "dynamic_res",
        "projector_hidden_act": "gelu",
        "projector_hidden_size": size.projector_hidden or size.hidden,
        "multimodal_projector_bias": True,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
        "img_token_compression_config": dict(_COMPRESSION),
        "num_reward_heads": 0,
        "text_config": _text_config(size),
        "vision_config": _vision_config(size),
        "quantization_config": _quantization_config(size),
    }


def _text_config(size: ModelSize) -> dict[str, Any]:
    return {
        "architectures": ["MiniMaxM3SparseForCausalLM"],
        "vocab_size": size.vocab,
        "hidden_size": size.hidden,
        "intermediate_size": size.intermediate,
        "dense_intermediate_size": size.dense_intermediate,
        # vLLM and SGLang take the shared expert's width from intermediate_size
        "shared_intermediate_size": size.intermediate,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": size.head_dim,
        "attention_output_gate": False,
        "rope_theta": size.rope_theta,
        "rotary_dim": size.head_dim // 2,
        # transformers knows only this key; without it the whole head would rotate
        "partial_rotary_factor": 0.5,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-06,
        "use_gemma_norm": True,
        "use_qk_norm": True,
        "qk_norm_type": "per_head",
        "hidden_act": "swigluoai",
        "swiglu_alpha": 1.702,
        "swiglu_limit": size.swiglu_limit,
        "num_local_experts": size.experts,
        "num_experts_per_tok": size.experts_per_token,
        "n_shared_experts": 1,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "routed_scaling_factor": 2.0,
        "moe_layer_freq": size.sparse,
        # the release declares one, and has no tensors for it either
        "num_mtp_modules": 1,
        "tie_word_embeddings": False,
        "sparse_attention_config": _sparse_attention_config(size),
    }


def _sparse_attention_config(size: ModelSize) -> dict[str, Any]:
    return {
        "use_sparse_attention": True,
        "sparse_index_dim": size.index_dim,
        "sparse_num_index_heads": size.kv_heads,
        "sparse_topk_blocks": size.index_topk,
        "sparse_block_size": size.index_block,
        "sparse_score_type": "max",
        "sparse_init_block": 0,
        "sparse_local_block": 1,
        "sparse_attention_freq": size.sparse,
        "sparse_disable_index_value": size.sparse,
    }


def _vision_config(size: ModelSize) -> dict[str, Any]:
    return {
        "model_type": "clip_vision_model",
        "hidden_size": size.vision_hidden,
        "intermediate_size": size.vision_intermediate,
        "num_hidden_layers": size.vision_layers,
        "num_attention_heads": size.vision_heads,
        "num_channels": 3,
        "patch_size": size.patch,
        "image_size": 8 * size.patch,
        "projection_dim": size.hidden,
        "position_embedding_type": "rope",
        "rope_mode": "3d",
        "rope_theta": 10000.0,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-05,
        "vision_segment_max_frames": 4,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "initializer_factor": 1.0,
        "vocab_size": 32000,
        "img_token_compression_config": dict(_COMPRESSION),
    }


def _quantization_config(size: ModelSize) -> dict[str, Any]:
    routers = [
        f"language_model.model.layers.{layer}.block_sparse_moe.gate"
        for layer, sparse in enumerate(size.sparse)
        if sparse
    ]
    # spelled as the release spells them: the first two lack the language_model. prefix
    trees = ["lm_head", "model.embed_tokens", "vision_tower", "multi_modal_projector",
             "patch_merge_mlp"]  # fmt: skip
    return {
        "quant_method": "mxfp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [1, 32],
        "ignored_layers": sorted([*trees, *routers]),
    }

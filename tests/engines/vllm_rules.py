"""vLLM 0.33.0: parameters and name mapping of MiniMax-M3 on one rank.

Every rule names the file it restates, below `vllm/` of the 0.33.0 wheel.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import fnmatch

from loading import (
    SCALAR,
    Dims,
    Files,
    ListedLayers,
    LoaderError,
    Parameters,
    Shape,
    Slot,
    Wanted,
    bf16,
    mxfp8,
    nvfp4,
    vision_shapes,
)

TEXT = "language_model.model."

#: models/minimax_m3/nvidia/model.py, `MiniMaxM3Model.load_weights`: fused name, stored name, part.
#: The leading dots keep `.q_proj` from matching `.index_q_proj`.
STACKED = (
    (".qkv_proj", ".q_proj", "q"),
    (".qkv_proj", ".k_proj", "k"),
    (".qkv_proj", ".v_proj", "v"),
    (".qkv_proj", ".index_q_proj", "index_q"),
    (".qkv_proj", ".index_k_proj", "index_k"),
    (".gate_up_proj", ".gate_proj", "0"),
    (".gate_up_proj", ".up_proj", "1"),
)
#: models/minimax_m3/nvidia/model.py, `packed_modules_mapping`: the indexer's parts are not in it,
#: so q, k and v alone decide the format of the matrix that index_q and index_k are fused into.
PACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}

#: models/minimax_m3/nvidia/model.py, `hf_to_vllm_mapper`.
TOP_PREFIXES = {
    "multi_modal_projector.": "vision_tower.multi_modal_projector.",
    "patch_merge_mlp.": "vision_tower.patch_merge_mlp.",
}
TOP_SUBSTRINGS = {".mlp.fc1.": ".fc1.", ".mlp.fc2.": ".fc2."}

#: layers/fused_moe/routed_experts.py, `build_expert_params_mapping`: w1 and w3 into w13.
_EXPERT = re.compile(r"experts\.(\d+)\.(w[123])\.")

#: model_executor/model_loader/weight_utils.py, `maybe_remap_kv_scale_name`.
_KV_SCALE = re.compile(r"\.self_attn\.(?:([kv])_proj|qkv_proj)\.([kv])_scale$")
_PLAIN_KV_SCALE = re.compile(r"(?<!\.attn)\.([kv])_scale$")

#: transformers_utils/configs/minimax_m3.py: what absent lists mean.
DEFAULT_LIST = [0] * 3 + [1] * 57


def kv_cache_dtype(files: Files) -> str:
    """What `--kv-cache-dtype auto` becomes: utils/torch_utils.py, `get_kv_cache_quant_algo_string`.

    The scheme's dictionary wins over kv_cache_quant_algo.
    """
    block = files.quantization
    if not block.get("quant_method", "").startswith("modelopt"):
        return "auto"
    algo = str(block.get("kv_cache_quant_algo")).lower()
    scheme = block.get("kv_cache_scheme")
    if isinstance(scheme, dict):
        bits, kind = scheme.get("num_bits"), scheme.get("type")
        algo = "nvfp4" if (bits, kind) == (4, "float") else "auto"
        if (bits, kind, scheme.get("dynamic")) == (8, "float", False):
            algo = "fp8"
    return {"fp8": "fp8_e4m3", "nvfp4": "nvfp4"}.get(algo, "auto")


def check_kv_cache(dtype: str, *, sm100: bool, topk_blocks: int) -> None:
    """models/minimax_m3/common/sparse_attention.py, `select_main_backend_and_impl_cls`.

    Raises:
        LoaderError: an NVFP4 KV cache anywhere but on SM100 with a supported number of blocks.
    """
    if dtype == "nvfp4" and not (sm100 and topk_blocks in (4, 8, 16, 32)):
        raise LoaderError("NVFP4 KV cache only with the SM100 MSA backend")


class _Quantisation:
    """Which format a module gets: `ModelOptMixedPrecisionConfig`, or the vendor's MXFP8 block.

    layers/quantization/modelopt.py; configs come from model_loader/weight_utils.py,
    `get_quant_config`: config.json's block, and hf_quant_config.json where quantized_layers is
    missing from it.
    """

    def __init__(self, files: Files) -> None:
        block = files.quantization
        method = block.get("quant_method")
        self.loads_kv_scales = False
        if method == "mxfp8":
            self.mixed = False
            # `ModelOptMxFp8Config.from_config`: ignored_layers are the exclusions
            self.excluded = list(block.get("ignored_layers") or [])
            return
        if method != "modelopt" or str(block.get("quant_algo")).upper() != "MIXED_PRECISION":
            raise LoaderError(f"quant_method {method!r}: not a rule of this file")
        self.mixed = True
        listed = block
        if "quantized_layers" not in block:
            listed = (files.hf_quant or {}).get("quantization", {})
        layers = listed.get("quantized_layers")
        if not layers:
            raise LoaderError("MIXED_PRECISION requires a non-empty 'quantized_layers' mapping")
        self.listed = ListedLayers(layers, PACKED, _candidates)
        self.excluded = list(listed.get("ignore", listed.get("exclude_modules", [])))
        scheme = block.get("kv_cache_scheme") or {}
        # `ModelOptQuantConfigBase.from_config`: only a float scheme of 8 bits counts here
        self.loads_kv_scales = (scheme.get("type"), scheme.get("num_bits")) == ("float", 8)

    def algo(self, prefix: str) -> str | None:
        if self._excluded(prefix):
            return None
        if not self.mixed:
            return None if prefix.startswith("vision_tower") else "MXFP8"
        return self.listed.resolve(prefix)

    def _excluded(self, prefix: str) -> bool:
        """`is_layer_excluded`: whole names, substrings, then wildcards over the whole name."""
        base, _, last = prefix.rpartition(".")
        parts = [f"{base}.{part}" for part in PACKED.get(last, (last,))]
        if all(part in self.excluded for part in parts):
            return True
        return any(entry in prefix or fnmatch(prefix, entry) for entry in self.excluded)


def _candidates(prefix: str) -> Iterable[str]:
    """`_quantized_layer_prefix_candidates`: both orders of the two prefixes, never neither."""
    yield prefix
    if prefix.startswith(TEXT):
        yield "model.language_model." + prefix.removeprefix(TEXT)
    if prefix.endswith(".lm_head"):
        yield "lm_head"


def parameters(files: Files) -> Parameters:
    """Everything vLLM allocates for this config.json.

    Raises:
        LoaderError: configs that vLLM refuses.
    """
    text = files.config["text_config"]
    if text.get("hidden_act") != "swigluoai":
        raise LoaderError("Only swigluoai is supported")
    if files.config.get("vision_config") is None:
        raise LoaderError("vision_config is required")
    dims = Dims.read(files.config, default_moe=DEFAULT_LIST, default_sparse=DEFAULT_LIST)
    if any(dims.sparse) and dims.index_heads != dims.kv_heads:
        raise LoaderError("the fused qkv needs as many index heads as KV heads")
    quant = _Quantisation(files)
    wanted: Parameters = {}
    _vision(files, wanted)
    wanted[Slot(TEXT + "embed_tokens.weight")] = bf16(dims.vocab, dims.hidden)
    _linear(wanted, quant, "language_model.lm_head", {"": dims.vocab}, dims.hidden)
    wanted[Slot(TEXT + "norm.weight")] = bf16(dims.hidden)
    for layer, moe in enumerate(dims.moe):
        prefix = f"{TEXT}layers.{layer}."
        _attention(wanted, quant, dims, prefix, layer)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            wanted[Slot(f"{prefix}{norm}.weight")] = bf16(dims.hidden)
        if moe:
            _moe(wanted, quant, dims, prefix + "block_sparse_moe.")
        else:
            _mlp(wanted, quant, prefix + "mlp.", dims.hidden, dims.dense_inter)
    return wanted


def _attention(
    wanted: Parameters, quant: _Quantisation, dims: Dims, prefix: str, layer: int
) -> None:
    prefix += "self_attn."
    rows = {name.removesuffix("_proj"): o for name, (o, _) in dims.attention(layer).items()}
    _linear(wanted, quant, prefix + "qkv_proj", rows, dims.hidden)
    _linear(wanted, quant, prefix + "o_proj", {"": dims.hidden}, dims.heads * dims.head_dim)
    for norm, width in dims.head_norms(layer).items():
        wanted[Slot(f"{prefix}{norm}.weight")] = bf16(width)
    # layers/attention/attention.py registers k_scale and v_scale; `MiniMaxM3SparseAttention` is
    # another class and keeps its scales as buffers, which load_weights does not see
    if quant.loads_kv_scales and not dims.sparse[layer]:
        for side in "kv":
            wanted[Slot(f"{prefix}attn.{side}_scale")] = Wanted(("F32",), SCALAR, optional=True)


def _moe(wanted: Parameters, quant: _Quantisation, dims: Dims, prefix: str) -> None:
    # nvidia/model.py, `MiniMaxM3MoE`: router and bias are F32 parameters
    wanted[Slot(prefix + "gate.weight")] = Wanted(("F32", "BF16"), ((dims.experts, dims.hidden),))
    wanted[Slot(prefix + "e_score_correction_bias")] = Wanted(("F32", "BF16"), ((dims.experts,),))
    _mlp(wanted, quant, prefix + "shared_experts.", dims.hidden, dims.inter)
    algo = quant.algo(prefix + "experts")
    for part, shape in dims.expert.items():
        stem = f"{prefix}experts.routed_experts.{'w2' if part == 'w2' else 'w13'}_"
        for suffix, fits in _formats(algo, shape).items():
            for expert in range(dims.experts):
                wanted[Slot(stem + suffix, f"{expert}.{part}")] = fits


def _mlp(wanted: Parameters, quant: _Quantisation, prefix: str, hidden: int, inter: int) -> None:
    _linear(wanted, quant, prefix + "gate_up_proj", {"0": inter, "1": inter}, hidden)
    _linear(wanted, quant, prefix + "down_proj", {"": hidden}, inter)


def _linear(
    wanted: Parameters, quant: _Quantisation, module: str, rows: dict[str, int], columns: int
) -> None:
    algo = quant.algo(module)
    for part, count in rows.items():
        for suffix, fits in _formats(algo, (count, columns)).items():
            wanted[Slot(f"{module}.{suffix}", part)] = fits


def _formats(algo: str | None, shape: Shape) -> dict[str, Wanted]:
    """Parameters of one weight: layers/quantization/modelopt.py.

    `KMxfp8Static` and `ModelOptNvFp4FusedMoE.create_weights`.
    """
    if algo == "MXFP8":
        return mxfp8(shape, "weight_scale")
    if algo == "NVFP4":
        return nvfp4(shape, "weight", "weight_scale_2", "input_scale")
    return {"weight": bf16(*shape)}


def _vision(files: Files, wanted: Parameters) -> None:
    """models/minimax_m3/common/vision_tower.py; every parameter has the model's dtype."""
    for name, shape in vision_shapes(files.config):
        slot = _vision_slot(_top_level(name))
        wanted[slot] = Wanted(("BF16", "F32"), (shape,))


def _top_level(name: str) -> str:
    for old, new in TOP_SUBSTRINGS.items():
        name = name.replace(old, new)
    for old, new in TOP_PREFIXES.items():
        if name.startswith(old):
            name = new + name.removeprefix(old)
    return name


def _vision_slot(name: str) -> Slot:
    for part in ("q", "k", "v"):
        if f"{part}_proj." in name:
            return Slot(name.replace(f"{part}_proj.", "qkv_proj."), part)
    return Slot(name)


def place(name: str, names: frozenset[str]) -> Slot | None:
    """Where `load_weights` copies a stored tensor.

    Raises:
        LoaderError: a name outside the model's top-level modules, or unknown in the vision tower.
    """
    name = _top_level(name)
    if name.startswith("vision_tower."):
        slot = _vision_slot(name)
        if slot.parameter not in names:
            raise LoaderError(f"KeyError: {slot.parameter}")
        return slot
    if not name.startswith("language_model."):
        raise LoaderError(f"There is no module or parameter named {name!r}")
    if "mtp." in name:
        return None
    name = name.replace("weight_scale_inv", "weight_scale")
    for fused, stored, part in STACKED:
        if stored not in name or "block_sparse_moe.experts." in name:
            continue
        name = name.replace(stored, fused)  # the loop goes on with the changed name
        if name in names:
            return Slot(name, part)
    expert = _EXPERT.search(name)
    if expert:
        stem = "w2_" if expert[2] == "w2" else "w13_"
        full = name.replace(expert[0], f"experts.routed_experts.{stem}")
        return Slot(full, f"{expert[1]}.{expert[2]}") if full in names else None
    name = _KV_SCALE.sub(r".self_attn.attn.\2_scale", name)
    name = _PLAIN_KV_SCALE.sub(r".attn.\1_scale", name)
    return Slot(name) if name in names else None

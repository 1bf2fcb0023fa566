"""SGLang 0.5.23: parameters and name mapping of MiniMax-M3 on one rank.

Every rule names the file it restates, below `sglang/srt/` of the 0.5.23 wheel.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase

from loading import (
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

#: Prefix under which models/minimax_m3_vl.py builds modules, and so looks their formats up.
PREFIX = "language_model.model."
#: Prefix of the parameters themselves: the VL class holds the text model as `model`.
TEXT = "model."

#: models/minimax_m3_vl.py, `load_weights`: fused name, stored name, part.
STACKED = (
    (".qkv_proj", ".q_proj", "q"),
    (".qkv_proj", ".k_proj", "k"),
    (".qkv_proj", ".v_proj", "v"),
    (".gate_up_proj", ".gate_proj", "0"),
    (".gate_up_proj", ".up_proj", "1"),
    (".index_qkv_proj", ".index_q_proj", "q"),
    (".index_qkv_proj", ".index_k_proj", "k"),
)
#: models/minimax_m3_vl.py, `packed_modules_mapping`.
PACKED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "index_qkv_proj": ("index_q_proj", "index_k_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
#: layers/moe/fused_moe_triton/layer.py, `make_expert_params_mapping`.
_EXPERT = re.compile(r"experts\.(\d+)\.(w[123])\.")
#: model_loader/weight_utils.py, `maybe_remap_kv_scale_name`: only k under k_proj, v under v_proj.
_KV_SCALE = re.compile(r"\.self_attn\.(?:k_proj\.(k)|v_proj\.(v))_scale$")
_PLAIN_KV_SCALE = re.compile(r"\.([kv])_scale$")

MODELOPT, MINIMAX, PLAIN_MXFP8 = "modelopt_mixed", "minimax_m3_nvfp4", "mxfp8"


def method(files: Files) -> str:
    """Which quantisation class serves the checkpoint.

    arg_groups/model_overrides/minimax_m3.py, `_resolve_quant_method`, and configs/model_config.py,
    `_parse_modelopt_quant_config`.

    Raises:
        LoaderError: none of the three.
    """
    block = files.quantization
    if not block and files.hf_quant:
        block = {"quant_method": "modelopt", **files.hf_quant["quantization"]}
    name = str(block.get("quant_method"))
    if name == "mxfp8":
        packed = (
            str(block.get("moe_quant_algo", "")).upper() == "NVFP4"
            and block.get("moe_quant_format") == "nvfp4-pack-quantized"
        )
        return MINIMAX if packed else PLAIN_MXFP8
    if name == "modelopt" and block.get("quant_algo") == "MIXED_PRECISION":
        listed = (block.get("quantized_layers") or {}).values()
        if not any(str(layer["quant_algo"]).upper() == "NVFP4" for layer in listed):
            raise LoaderError("MIXED_PRECISION without an NVFP4 layer is taken for w4afp8")
        return MODELOPT
    raise LoaderError(f"quant_method {name!r}: not a rule of this file")


def check_minimax(files: Files) -> None:
    """layers/quantization/minimax_m3_nvfp4.py, `MiniMaxM3Nvfp4Config`: values it insists on.

    Raises:
        LoaderError: any other value.
    """
    block = files.quantization
    for key, expected in (
        ("activation_scheme", "dynamic"),
        ("group_size", 16),
        ("weight_block_size", [1, 32]),
        ("kv_cache_quant_algo", "FP8"),
        ("attention_quant_algo", "FP8"),
        ("index_k_quant_type", "nvfp4"),
    ):
        value = block.get(key, expected)
        same = str(value).lower() == expected.lower() if isinstance(expected, str) else (
            value == expected
        )  # fmt: skip
        if not same:
            raise LoaderError(f"M3.1 NVFP4 requires {key}={expected}, got {value}")


def check_blackwell_pool(files: Files) -> None:
    """mem_cache/minimax_m3_nvfp4_pool.py, `MiniMaxM3Nvfp4KVPool`, used on Blackwell only.

    Raises:
        LoaderError: a layer with dense attention, or an index with values.
    """
    sparse = files.config["text_config"]["sparse_attention_config"]
    if not all(sparse["sparse_attention_freq"]):
        raise LoaderError("M3.1 NVFP4 requires sparse attention in every layer")
    if not all(sparse.get("sparse_disable_index_value") or [0]):
        raise LoaderError("M3.1 NVFP4 requires a K-only sparse index")


def kv_cache_dtype(files: Files) -> str:
    """What `--kv-cache-dtype auto` becomes: only FP8 counts (mem_cache/kv_cache_dtype.py)."""
    algo = _declared_kv(files.quantization)
    return "fp8_e4m3" if isinstance(algo, str) and algo.upper() == "FP8" else "model dtype"


def _declared_kv(block: dict[str, object]) -> object:
    """layers/quantization/modelopt_quant.py, `ModelOptMixedPrecisionConfig.from_config`."""
    scheme = block.get("kv_cache_scheme")
    if isinstance(scheme, dict):
        if scheme.get("type") == "float" and scheme.get("num_bits") in (4, 8):
            return "FP8" if scheme["num_bits"] == 8 else "NVFP4"
        return "auto"
    return block.get("kv_cache_quant_algo")


class _Quantisation:
    """Format by module prefix: layers/quantization/{modelopt_quant,minimax_m3_nvfp4,fp8}.py."""

    def __init__(self, files: Files) -> None:
        self.method = method(files)
        block = files.quantization
        if self.method == MODELOPT:
            # model_loader/weight_utils.py, `get_quant_config`: config.json's block counts when it
            # says anything at all about the KV cache, otherwise hf_quant_config.json does
            if not block.keys() & {"kv_cache_quant_algo", "kv_cache_scheme"}:
                block = (files.hf_quant or {}).get("quantization", {})
            layers = block.get("quantized_layers")
            if not layers:
                raise LoaderError("MIXED_PRECISION requires a non-empty quantized_layers map")
            renamed = {_mapped(name): info for name, info in layers.items()}
            self.listed = ListedLayers(renamed, PACKED, _candidates)
            excluded = block.get("ignore", block.get("exclude_modules")) or []
        else:
            if self.method == MINIMAX:
                check_minimax(files)
            excluded = block.get("ignored_layers", block.get("modules_to_not_convert")) or []
        self.excluded = [_mapped(name) for name in excluded]
        # both KV-cache methods add the two scales to every RadixAttention, in sparse layers too
        self.loads_kv_scales = self.method != MODELOPT or bool(_declared_kv(block))

    def algo(self, prefix: str, *, experts: bool = False) -> str | None:
        if self._excluded(prefix, experts=experts):
            return None
        if self.method == PLAIN_MXFP8:
            return "MXFP8"
        if self.method == MINIMAX:
            return "PACKED" if experts else "MXFP8"
        return self.listed.resolve(prefix)

    def _excluded(self, prefix: str, *, experts: bool) -> bool:
        """`is_layer_skipped` (path components in a row), and ModelOpt's `is_layer_excluded`."""
        base, _, last = prefix.rpartition(".")
        if not experts or self.method != MODELOPT:
            parts = [f"{base}.{part}" for part in PACKED.get(last, (last,))]
            skipped = {any(_on_path(e, part) for e in self.excluded) for part in parts}
            if len(skipped) > 1:
                raise LoaderError(f"Detected some but not all shards of {prefix} are quantized")
            if skipped == {True}:
                return True
        if self.method != MODELOPT:
            return False
        # a wildcard is tried on the whole name and on each of its components
        short = prefix.removeprefix("language_model.")
        words = {prefix, short, *prefix.split(".")}
        return any(fnmatchcase(word, entry) for entry in self.excluded for word in words)


def _mapped(name: str) -> str:
    """models/minimax_m3_vl.py, `hf_to_sglang_mapper`."""
    return name.replace(".block_sparse_moe.", ".mlp.", 1)


def _candidates(prefix: str) -> Iterable[str]:
    """`_quantized_layer_prefix_candidates`, for prefixes this model class uses."""
    yield prefix
    if prefix.startswith(PREFIX):
        yield "model.language_model." + prefix.removeprefix(PREFIX)
    if prefix.endswith(".lm_head"):
        yield "lm_head"


def _on_path(entry: str, prefix: str) -> bool:
    """layers/quantization/utils.py, `_module_path_match`."""
    return f".{entry.rstrip('.')}." in f".{prefix}."


def parameters(files: Files) -> Parameters:
    """Everything SGLang allocates for this config.json.

    Raises:
        LoaderError: configs that SGLang refuses.
    """
    if files.config.get("vision_config") is None:
        raise LoaderError("vision_config is required")
    # models/minimax_m3.py, `MiniMaxM3DecoderLayer`: every layer MoE, none sparse where keys lack
    layers = files.config["text_config"]["num_hidden_layers"]
    dims = Dims.read(files.config, default_moe=[1] * layers, default_sparse=[0] * layers)
    quant = _Quantisation(files)
    wanted: Parameters = {}
    for name, shape in vision_shapes(files.config):
        wanted[_vision_slot(name)] = Wanted(("BF16", "F32"), (shape,))
    wanted[Slot(TEXT + "embed_tokens.weight")] = bf16(dims.vocab, dims.hidden)
    # ParallelLMHead has a quantised form in ModelOpt's class only
    head = quant.algo("language_model.lm_head") if quant.method == MODELOPT else None
    for suffix, fits in _formats(head, (dims.vocab, dims.hidden)).items():
        wanted[Slot(f"lm_head.{suffix}")] = fits
    wanted[Slot(TEXT + "norm.weight")] = bf16(dims.hidden)
    for layer, moe in enumerate(dims.moe):
        prefix = f"layers.{layer}."
        _attention(wanted, quant, dims, prefix, layer)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            wanted[Slot(f"{TEXT}{prefix}{norm}.weight")] = bf16(dims.hidden)
        if moe:
            _moe(wanted, quant, dims, prefix + "mlp.")
        else:
            _mlp(wanted, quant, prefix + "mlp.", dims.hidden, dims.dense_inter)
    return wanted


def _attention(
    wanted: Parameters, quant: _Quantisation, dims: Dims, prefix: str, layer: int
) -> None:
    prefix += "self_attn."
    rows = {name.removesuffix("_proj"): o for name, (o, _) in dims.attention(layer).items()}
    index = {part: rows.pop(f"index_{part}") for part in "qk" if f"index_{part}" in rows}
    _linear(wanted, quant, prefix + "qkv_proj", rows, dims.hidden)
    if index:
        _linear(wanted, quant, prefix + "index_qkv_proj", index, dims.hidden)
    _linear(wanted, quant, prefix + "o_proj", {"": dims.hidden}, dims.heads * dims.head_dim)
    for norm, width in dims.head_norms(layer).items():
        wanted[Slot(f"{TEXT}{prefix}{norm}.weight")] = bf16(width)
    if quant.loads_kv_scales:
        for side in "kv":
            slot = Slot(f"{TEXT}{prefix}attn.{side}_scale")
            wanted[slot] = Wanted(("F32",), ((),), optional=True)


def _moe(wanted: Parameters, quant: _Quantisation, dims: Dims, prefix: str) -> None:
    # models/minimax_m3.py, `MiniMaxM3MoE`: the router is BF16 unless
    # SGLANG_OPT_USE_BF16_ROUTER_GEMM=0; copying an F32 tensor into it rounds
    for name, shape in (
        ("gate.weight", (dims.experts, dims.hidden)),
        ("e_score_correction_bias", (dims.experts,)),
    ):
        wanted[Slot(f"{TEXT}{prefix}{name}")] = Wanted(("F32", "BF16"), (shape,))
    _mlp(wanted, quant, prefix + "shared_experts.", dims.hidden, dims.inter)
    algo = quant.algo(f"{PREFIX}{prefix}experts", experts=True)
    for part, shape in dims.expert.items():
        stem = f"{TEXT}{prefix}experts.{'w2' if part == 'w2' else 'w13'}_"
        for suffix, fits in _formats(algo, shape).items():
            for expert in range(dims.experts):
                wanted[Slot(stem + suffix, f"{expert}.{part}")] = fits


def _mlp(wanted: Parameters, quant: _Quantisation, prefix: str, hidden: int, inter: int) -> None:
    _linear(wanted, quant, prefix + "gate_up_proj", {"0": inter, "1": inter}, hidden)
    _linear(wanted, quant, prefix + "down_proj", {"": hidden}, inter)


def _linear(
    wanted: Parameters, quant: _Quantisation, module: str, rows: dict[str, int], columns: int
) -> None:
    algo = quant.algo(PREFIX + module)
    for part, count in rows.items():
        for suffix, fits in _formats(algo, (count, columns)).items():
            wanted[Slot(f"{TEXT}{module}.{suffix}", part)] = fits


def _formats(algo: str | None, shape: Shape) -> dict[str, Wanted]:
    """Parameters of one weight, as the three quantisation classes register them.

    fp8.py; modelopt_quant.py, `ModelOptNvFp4FusedMoEMethod`; compressed_tensors/schemes/
    compressed_tensors_w4a4_nvfp4_moe.py, whose tensor scales are divisors.
    """
    if algo == "MXFP8":
        return mxfp8(shape, "weight_scale_inv")
    if algo == "NVFP4":
        wanted = nvfp4(shape, "weight", "weight_scale_2", "input_scale")
        # filled with 1.0 before loading
        wanted["input_scale"] = wanted["input_scale"]._replace(optional=True)
        return wanted
    if algo == "PACKED":
        return nvfp4(shape, "weight_packed", "weight_global_scale", "input_global_scale")
    return {"weight": bf16(*shape)}


def _vision_slot(name: str) -> Slot:
    """models/minimax_vl_common.py: `load_vision_weight` and `merge_vit_qkv_weights`."""
    for part in ("q", "k", "v"):
        if f"self_attn.{part}_proj." in name:
            return Slot(name.replace(f"{part}_proj.", "qkv_proj."), part)
    if "vision_tower.vision_model." in name:
        for old, new in (
            (".mlp.fc1.", ".fc1."),
            (".mlp.fc2.", ".fc2."),
            (".self_attn.out_proj.", ".self_attn.proj."),
        ):
            name = name.replace(old, new)
    if name.startswith(("patch_merge_mlp.", "multi_modal_projector.")):
        name = "vision_tower." + name
    return Slot(name)


def place(name: str, names: frozenset[str]) -> Slot | None:
    """Where `load_weights` and `_load_llm_weight` copy a stored tensor.

    What finds no parameter is dropped: with a log line for text tensors, without for vision ones.
    """
    if not name.startswith("language_model."):
        slot = _vision_slot(name)
        return slot if slot.parameter in names else None
    name = name.removeprefix("language_model.").replace("block_sparse_moe", "mlp")
    # `get_spec_layer_idx_from_weight_name`
    if name.startswith(("model.dspark.", "model.mtp.layers.")):
        return None
    for fused, stored, part in STACKED:
        if stored in name and "mlp.experts." not in name:
            renamed = name.replace(stored, fused)
            if renamed in names:
                return Slot(renamed, part)
    expert = _EXPERT.search(name)
    if expert:
        stem = "w2_" if expert[2] == "w2" else "w13_"
        full = name.replace(expert[0], f"experts.{stem}")
        return Slot(full, f"{expert[1]}.{expert[2]}") if full in names else None
    if _KV_SCALE.search(name):
        name = _KV_SCALE.sub(lambda m: f".self_attn.attn.{m[1] or m[2]}_scale", name)
    else:
        name = _PLAIN_KV_SCALE.sub(r".attn.\1_scale", name)
    return Slot(name) if name in names else None

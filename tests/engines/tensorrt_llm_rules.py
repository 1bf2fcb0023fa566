"""TensorRT-LLM (PyTorch backend): name mapping of MiniMax-M3 on one rank.

Read in the repository rather than in a wheel: `modeling_minimaxm3.py` and the pull requests that
made it, named at each rule. Shapes are those of the stored tensors; fusing happens after loading.
"""

from __future__ import annotations

from loading import (
    SCALAR,
    Dims,
    Files,
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

TEXT = "model."

#: modeling_minimaxm3.py: the text model is loaded without the VL prefix; the bias is the gate's.
DROPPED_PREFIX = "language_model."
RENAMED = {
    ".block_sparse_moe.e_score_correction_bias": ".block_sparse_moe.gate.e_score_correction_bias"
}
#: PR 14962, 15687: both names of an MXFP8 scale are read.
MXFP8_SCALES = ("weight_scale", "weight_scale_inv")


def uses_scales_for_nvfp4(files: Files) -> bool:
    """PR 17985: KV scales mean an NVFP4 cache only where hf_quant_config.json says so."""
    block = (files.hf_quant or {}).get("quantization") or {}
    return block.get("kv_cache_quant_algo") == "NVFP4"


def kv_scales_of(pair: dict[str, float]) -> tuple[float, float]:
    """Scales of one layer: PR 17985. Both must be there; one alone counts as none, which is 1.0."""
    return (pair["k"], pair["v"]) if {"k", "v"} <= pair.keys() else (1.0, 1.0)


def _formats(files: Files) -> dict[str, str]:
    """quantized_layers of hf_quant_config.json, hub names (PR 15857: ModelOpt's mixed precision).

    Raises:
        LoaderError: no ModelOpt file; the names of the other layout have no rule.
    """
    block = (files.hf_quant or {}).get("quantization") or {}
    layers = block.get("quantized_layers")
    if block.get("quant_algo") != "MIXED_PRECISION" or not layers:
        raise LoaderError("no hf_quant_config.json with quantized_layers")
    return {name: info["quant_algo"] for name, info in layers.items()}


def parameters(files: Files) -> Parameters:
    """Everything it looks for, one slot per stored tensor."""
    text = files.config["text_config"]
    layers = text["num_hidden_layers"]
    dims = Dims.read(files.config, default_moe=[1] * layers, default_sparse=[0] * layers)
    formats = _formats(files)
    wanted: Parameters = {}
    for name, shape in vision_shapes(files.config):
        wanted[Slot(name)] = Wanted(("BF16", "F32"), (shape,))
    wanted[Slot("lm_head.weight")] = wanted[Slot(TEXT + "embed_tokens.weight")] = bf16(
        dims.vocab, dims.hidden
    )
    wanted[Slot(TEXT + "norm.weight")] = bf16(dims.hidden)
    for layer, moe in enumerate(dims.moe):
        prefix = f"{TEXT}layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            wanted[Slot(f"{prefix}{norm}.weight")] = bf16(dims.hidden)
        linears = _attention(wanted, dims, prefix + "self_attn.", layer)
        linears |= _moe(wanted, dims, prefix + "block_sparse_moe.") if moe else _mlp(
            prefix + "mlp.", dims.hidden, dims.dense_inter
        )  # fmt: skip
        for module, linear_shape in linears.items():
            algo = formats.get(DROPPED_PREFIX + module)
            for suffix, fits in _tensors(algo, linear_shape).items():
                wanted[Slot(f"{module}.{suffix}")] = fits
    return wanted


def _attention(wanted: Parameters, dims: Dims, prefix: str, layer: int) -> dict[str, Shape]:
    for norm, width in dims.head_norms(layer).items():
        wanted[Slot(f"{prefix}{norm}.weight")] = bf16(width)
    for side in "kv":
        # F32 dequantisation multipliers; 1.0 where absent
        slot = Slot(f"{prefix}{side}_proj.{side}_scale")
        wanted[slot] = Wanted(("F32",), SCALAR, optional=True)
    shapes = {prefix + name: shape for name, shape in dims.attention(layer).items()}
    return {**shapes, prefix + "o_proj": (dims.hidden, dims.heads * dims.head_dim)}


def _moe(wanted: Parameters, dims: Dims, prefix: str) -> dict[str, Shape]:
    wanted[Slot(prefix + "gate.weight")] = Wanted(("F32", "BF16"), ((dims.experts, dims.hidden),))
    bias = Slot(prefix + "gate.e_score_correction_bias")
    wanted[bias] = Wanted(("F32", "BF16"), ((dims.experts,),))
    linears = _mlp(prefix + "shared_experts.", dims.hidden, dims.inter)
    for expert in range(dims.experts):
        for name, shape in dims.expert.items():
            linears[f"{prefix}experts.{expert}.{name}"] = shape
    return linears


def _mlp(prefix: str, hidden: int, inter: int) -> dict[str, Shape]:
    return {
        prefix + "gate_proj": (inter, hidden),
        prefix + "up_proj": (inter, hidden),
        prefix + "down_proj": (hidden, inter),
    }


def _tensors(algo: str | None, shape: Shape) -> dict[str, Wanted]:
    """Stored tensors of one weight: MXFP8 (PR 14962), NVFP4 under ModelOpt's names (PR 15857)."""
    if algo == "MXFP8":
        return mxfp8(shape, "weight_scale")
    if algo == "NVFP4":
        return nvfp4(shape, "weight", "weight_scale_2", "input_scale")
    return {"weight": bf16(*shape)}


def place(name: str, names: frozenset[str]) -> Slot | None:
    """Where a stored tensor goes; None: dropped (MTP, and names without a rule)."""
    name = name.removeprefix(DROPPED_PREFIX)
    if name.startswith("model.mtp."):
        return None
    for old, new in RENAMED.items():
        name = name.replace(old, new)
    module, _, suffix = name.rpartition(".")
    if suffix in MXFP8_SCALES:
        name = f"{module}.weight_scale"
    return Slot(name) if name in names else None

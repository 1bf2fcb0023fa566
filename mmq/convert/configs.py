"""config.json and hf_quant_config.json of the output, as the engines read them.

Every rule here was met in a loader; docs/engines.md says which and what happens without it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from mmq import __version__
from mmq.convert.modules import MXFP8_FORMAT, Module
from mmq.convert.options import ConvertOptions
from mmq.convert.plan import ConversionPlan
from mmq.convert.relayout import vendor_block
from mmq.quantize.formats import MXFP8, NVFP4

_MTP_KEYS = ("num_mtp_modules", "num_nextn_predict_layers")

#: Whole subtrees no engine quantises, as ModelOpt writes them.
_EXCLUDED_TREES = ("vision_tower", "multi_modal_projector", "patch_merge_mlp")

#: The vendor's block, for outputs whose source has none.
_VENDOR_BLOCK: dict[str, Any] = {
    "quant_method": "mxfp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [1, 32],
}

KV_FP8 = "fp8"

#: What turns an NVFP4 KV cache on, per engine; convert and docs print it.
NVFP4_KV_NOTES: dict[str, str] = {
    "vLLM": "vLLM 0.33: --kv-cache-dtype nvfp4 on SM100 only (4, 8, 16 or 32 blocks per query);"
    " elsewhere fp8 and bf16 are all its M3 backend takes, and a declared NVFP4 makes it refuse M3",
    "SGLang": "SGLang 0.5.23: minimax layout on Blackwell only, where the pool packs NVFP4 by"
    " itself under kv_cache_quant_algo FP8. modelopt layout: fp8_e4m3; a declared NVFP4 silently"
    " gives the model's dtype",
    "TensorRT-LLM": "convert with --kv-format nvfp4: hf_quant_config.json then says"
    " kv_cache_quant_algo NVFP4, with these same scales",
    "transformers": "keeps its KV cache in the model's dtype; scales are ignored",
}


def nvfp4_kv_notes(options: ConvertOptions) -> dict[str, str]:
    """The notes that are true of an output made with these options."""
    if options.to != "nvfp4":
        return {}
    if options.layout == "minimax":
        return {"SGLang": NVFP4_KV_NOTES["SGLang"]}
    if options.kv_scales == "none":
        return {k: v for k, v in NVFP4_KV_NOTES.items() if k != "TensorRT-LLM"}
    return dict(NVFP4_KV_NOTES)


def declared_kv_format(options: ConvertOptions) -> str | None:
    """KV-cache format the config declares: "fp8", "nvfp4" or None.

    `auto` is what every engine starts with: FP8, and nothing where no scales are written, since a
    declared format without scales means 1.0 in silence.
    """
    if options.to != "nvfp4" or options.kv_format == "none":
        return None
    if options.kv_format != "auto":
        return options.kv_format
    if options.layout == "minimax":
        return KV_FP8
    return None if options.kv_scales == "none" else KV_FP8


def build_configs(plan: ConversionPlan) -> dict[str, dict[str, Any]]:
    """JSON files of the output that say how it is quantised, by file name."""
    config = copy.deepcopy(dict(plan.source.config))
    config.pop("quantization_config", None)
    if isinstance(config.get("text_config"), dict):
        config["text_config"].pop("quantization_config", None)
    files = {"config.json": config}
    if plan.options.to == "nvfp4":
        if plan.options.mtp == "drop":
            for part, key in _declared_mtp(config):
                part[key] = 0
        if plan.options.layout == "modelopt":
            block = _modelopt_block(plan)
            config["quantization_config"] = {"quant_method": "modelopt", **block}
            files["hf_quant_config.json"] = {
                "producer": {"name": "mmq", "version": __version__},
                "quantization": block,
            }
        else:
            config["quantization_config"] = _minimax_block(plan)
    elif plan.options.to == "mxfp8":
        config["quantization_config"] = {**_VENDOR_BLOCK, "ignored_layers": _ignored(plan)}
    return files


def config_edits(plan: ConversionPlan) -> list[str]:
    """What changes in config.json apart from its quantisation block, one line each."""
    if plan.options.to != "nvfp4" or plan.options.mtp != "drop":
        return []
    return [f"{key}: {part[key]} → 0 (MTP dropped)" for part, key in
            _declared_mtp(dict(plan.source.config))]  # fmt: skip


def _declared_mtp(config: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    for part in (config, config.get("text_config")):
        if isinstance(part, dict):
            for key in _MTP_KEYS:
                if part.get(key):
                    yield part, key


def _written(plan: ConversionPlan) -> Iterator[Module]:
    """Modules that are in the output."""
    dropping = plan.options.mtp == "drop" and plan.options.to == "nvfp4"
    return (m for m in plan.modules.values() if not (dropping and m.role.mtp))


def quantised_layers(plan: ConversionPlan) -> dict[str, dict[str, Any]]:
    """Module → algorithm and group size, for everything stored as NVFP4 or MXFP8."""
    layers: dict[str, dict[str, Any]] = {}
    for module in _written(plan):
        if module.name in plan.quantised:
            layers[module.name] = {"quant_algo": "NVFP4", "group_size": NVFP4.block}
        elif module.format == MXFP8_FORMAT:
            layers[module.name] = {"quant_algo": "MXFP8", "group_size": MXFP8.block}
    return layers


def _exclusions(plan: ConversionPlan) -> list[str]:
    """Modules with a matrix that stays unquantised; whole trees as one pattern.

    Never `*gate*`: SGLang would leave the gate_proj of dense and shared MLPs unquantised too.
    """
    names: list[str] = []
    for module in _written(plan):
        weight = module.weight
        if module.is_quantised or module.name in plan.quantised or weight is None:
            continue
        if len(weight.shape) < 2 or module.name.partition(".")[0] in _EXCLUDED_TREES:
            continue
        names.append(module.name)
    present = {m.name.partition(".")[0] for m in _written(plan)}
    return [*names, *(f"{tree}*" for tree in _EXCLUDED_TREES if tree in present)]


def _modelopt_block(plan: ConversionPlan) -> dict[str, Any]:
    kv = declared_kv_format(plan.options)
    exclusions = _exclusions(plan)
    block: dict[str, Any] = {
        "quant_algo": "MIXED_PRECISION",
        "group_size": NVFP4.block,
        "kv_cache_quant_algo": kv.upper() if kv else None,
    }
    if kv:
        block["kv_cache_scheme"] = {
            "num_bits": 8 if kv == KV_FP8 else 4,
            "type": "float",
            "dynamic": False,
        }
    # vLLM reads `ignore` from config.json, SGLang falls back to `exclude_modules`
    block["ignore"] = exclusions
    block["exclude_modules"] = exclusions
    block["quantized_layers"] = quantised_layers(plan)
    return block


def _ignored(plan: ConversionPlan) -> list[str]:
    """`ignored_layers` in the vendor's spelling: bare tree names, lm_head without its prefix."""
    names = [n.removesuffix("*") for n in _exclusions(plan)]
    bare = [
        n.removeprefix("language_model.") for n in names if n.endswith(("lm_head", "embed_tokens"))
    ]
    return sorted({*names, *bare})


def _with_vendors(vendors: Any, ours: list[str]) -> list[str]:
    """The vendor's own list where it covers everything unquantised, else with what it lacks."""
    if not isinstance(vendors, list):
        return ours
    listed = [str(name) for name in vendors]
    bare = {name.removeprefix("language_model.") for name in listed}
    missing = [n for n in ours if n.removeprefix("language_model.") not in bare]
    return [*listed, *missing] if missing else listed


def _minimax_block(plan: ConversionPlan) -> dict[str, Any]:
    block = {**_VENDOR_BLOCK, **(vendor_block(plan.source) or {})}
    block["ignored_layers"] = _with_vendors(block.get("ignored_layers"), _ignored(plan))
    block["moe_quant_algo"] = "NVFP4"
    block["moe_quant_format"] = "nvfp4-pack-quantized"
    block["group_size"] = NVFP4.block
    if declared_kv_format(plan.options):
        # the only accepted value; SGLang packs its pool to NVFP4 itself
        block["kv_cache_quant_algo"] = "FP8"
        block["index_k_quant_type"] = "nvfp4"
    return block

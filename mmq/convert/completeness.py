"""Does the checkpoint hold the whole model its config describes?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mmq.convert.checkpoint import Checkpoint
from mmq.convert.modules import MXFP8_FORMAT, NVFP4_LAYOUT_OF, Module
from mmq.errors import BadInputError
from mmq.quantize.architecture import DOWN, GATE, MTP, TEXT, UP
from mmq.report.findings import Finding

#: `model_type` values this release of mmq understands.
MODEL_TYPES = ("minimax_m3_vl",)

#: M3 has 7,680 experts in all; what is missing is listed one by one, so a limit is needed.
_MAX_EXPERTS = 1_000_000

#: Modules of every decoder layer, and of dense ones besides.
_LAYER_MODULES = (
    "input_layernorm", "post_attention_layernorm", "self_attn.q_proj", "self_attn.k_proj",
    "self_attn.v_proj", "self_attn.o_proj", "self_attn.q_norm", "self_attn.k_norm",
)  # fmt: skip
_INDEXER_MODULES = ("index_q_proj", "index_k_proj", "index_q_norm", "index_k_norm")
_DENSE_MODULES = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


def check_architecture(source: Checkpoint) -> None:
    """Refuse sources that are not MiniMax-M3.

    Raises:
        BadInputError: no config.json, or another architecture's.
    """
    if not source.config:
        raise BadInputError(
            "config-missing",
            f"{source.location} has no config.json: its architecture is unknown",
            where=source.location,
            hint="copy the model's config.json beside its weights",
        )
    model_type = source.config.get("model_type")
    if model_type not in MODEL_TYPES:
        raise BadInputError(
            "architecture-unknown",
            f"config.json says model_type {model_type!r}; mmq converts MiniMax-M3",
            where="config.json",
            got=model_type,
            expected=", ".join(MODEL_TYPES),
        )


def check_complete(
    source: Checkpoint, modules: Mapping[str, Module], *, mtp: bool
) -> tuple[Finding, ...]:
    """Refuse a source that lacks part of its model; return what is merely notable.

    Args:
        mtp: whether the MTP modules are wanted, so that theirs must be complete too.

    Raises:
        BadInputError: missing modules (with how many), layers or experts beyond config's count,
            lm_head neither stored nor tied, input scales beside some experts only, a config that
            contradicts itself.
    """
    config = source.text_config
    kinds = _layer_kinds(config, modules)
    expected = [*_expected_modules(config, kinds), *(_expected_mtp(config, modules) if mtp else ())]
    missing = [name for name in expected if not _is_stored(name, modules)]
    if missing:
        raise BadInputError(
            "module-missing",
            f"{len(missing)} module(s) that config.json asks for are not stored, such as"
            f" {missing[0]}",
            where=missing[0],
            got=f"{len(missing)} absent: {', '.join(missing[:3])}",
            expected="every expert and layer of config.json",
        )
    _check_counts(config, len(kinds), modules)
    _check_input_scales(modules)
    _check_shapes(config, modules)
    tied = source.config.get("tie_word_embeddings", config.get("tie_word_embeddings", False))
    if not _is_stored(TEXT + "lm_head", modules) and not tied:
        raise BadInputError(
            "lm-head-missing",
            "tie_word_embeddings is false, but no shard holds language_model.lm_head.weight",
            where=TEXT + "lm_head.weight",
        )
    return (*_mtp_notes(config, modules), *_config_findings(source, modules))


def _is_stored(name: str, modules: Mapping[str, Module]) -> bool:
    """Whether a module has its weight; a name may also be a tensor's that is no weight."""
    module = modules.get(name)
    if module is not None:
        return module.weight is not None
    parent, _, suffix = name.rpartition(".")
    return parent in modules and suffix in modules[parent].tensors


def config_count(config: Mapping[str, Any], key: str) -> int:
    """A count that config.json gives; 0 where it does not.

    Raises:
        BadInputError: it is no whole number.
    """
    value = config.get(key) or 0
    if type(value) is not int or value < 0:
        raise BadInputError(
            "config-inconsistent",
            f"config.json says {key} {value!r}, which is no count",
            where="config.json",
            got=value,
            expected="a whole number",
        )
    return value


def _layer_kinds(config: Mapping[str, Any], modules: Mapping[str, Module]) -> list[int]:
    """1 for each MoE layer, 0 for each dense one; as stored where config.json does not say."""
    layers = config_count(config, "num_hidden_layers")
    if not layers:
        raise BadInputError(
            "config-inconsistent",
            "config.json does not say num_hidden_layers",
            where="config.json",
            expected="a text_config with the language model's dimensions",
        )
    experts = layers * config_count(config, "num_local_experts")
    if max(layers, experts) > _MAX_EXPERTS:
        raise BadInputError(
            "config-inconsistent",
            f"config.json asks for {layers:,} layers and {experts:,} experts in all",
            where="config.json",
            expected=f"at most {_MAX_EXPERTS:,}",
        )
    kinds = config.get("moe_layer_freq")
    if not isinstance(kinds, list):
        sparse = {m.role.layer for m in modules.values() if m.role.is_routed_expert}
        return [int(layer in sparse) for layer in range(layers)]
    if len(kinds) != layers:
        raise BadInputError(
            "config-inconsistent",
            f"moe_layer_freq has {len(kinds)} entries for {layers} layers",
            where="config.json",
            got=len(kinds),
            expected=layers,
        )
    return [int(bool(kind)) for kind in kinds]


def _expected_modules(config: Mapping[str, Any], kinds: list[int]) -> Iterator[str]:
    yield TEXT + "model.embed_tokens"
    yield TEXT + "model.norm"
    for layer, moe in enumerate(kinds):
        yield from _expected_layer(config, f"{TEXT}model.layers.{layer}.", moe)
    attention = config.get("sparse_attention_config")
    freq = attention.get("sparse_attention_freq") if isinstance(attention, Mapping) else None
    for layer, sparse in enumerate(freq if isinstance(freq, list) else ()):
        if sparse:
            for name in _INDEXER_MODULES:
                yield f"{TEXT}model.layers.{layer}.self_attn.{name}"


def _expected_mtp(config: Mapping[str, Any], modules: Mapping[str, Module]) -> Iterator[str]:
    """What belongs to each MTP layer that is stored in part."""
    for layer in sorted({m.role.layer for m in modules.values() if m.role.mtp and m.role.linear}):
        yield from _expected_layer(config, f"{MTP}layers.{layer}.transformer_layer.", 1)


def _expected_layer(config: Mapping[str, Any], prefix: str, moe: int) -> Iterator[str]:
    for name in _LAYER_MODULES if moe else (*_LAYER_MODULES, *_DENSE_MODULES):
        yield prefix + name
    if not moe:
        return
    yield f"{prefix}block_sparse_moe.gate"
    if config.get("use_routing_bias"):
        yield f"{prefix}block_sparse_moe.e_score_correction_bias"
    if config.get("n_shared_experts"):
        for projection in ("gate_proj", "up_proj", "down_proj"):
            yield f"{prefix}block_sparse_moe.shared_experts.{projection}"
    for expert in range(config_count(config, "num_local_experts")):
        for projection in (GATE, DOWN, UP):
            yield f"{prefix}block_sparse_moe.experts.{expert}.{projection}"


def _check_counts(config: Mapping[str, Any], layers: int, modules: Mapping[str, Module]) -> None:
    """No layer and no expert beyond what config.json counts."""
    experts = config_count(config, "num_local_experts")
    for module in modules.values():
        role = module.role
        if role.linear and not role.mtp and role.layer >= layers:
            raise BadInputError(
                "layer-unexpected",
                f"{module.name}: config.json has {layers} layers",
                where=module.name,
                got=f"layer {role.layer}",
                expected=f"0 to {layers - 1}",
            )
        if role.is_routed_expert and role.expert >= experts:
            raise BadInputError(
                "expert-unexpected",
                f"{module.name}: config.json has {experts} experts per layer",
                where=module.name,
                got=f"expert {role.expert}",
                expected=f"0 to {experts - 1}",
            )


def _check_input_scales(modules: Mapping[str, Module]) -> None:
    """NVFP4 experts all have an activation scale, or none has: engines read an absent one as 0."""
    present: dict[bool, str] = {}
    for name, module in modules.items():
        layout = NVFP4_LAYOUT_OF.get(module.format)
        if layout:
            present[layout.input_scale in module.tensors] = name
    if len(present) > 1:
        raise BadInputError(
            "input-scale-missing",
            f"{present[False]} has no input scale, though {present[True]} has one",
            where=present[False],
            got="absent",
            expected="one beside every NVFP4 weight, or beside none",
        )


def _check_shapes(config: Mapping[str, Any], modules: Mapping[str, Module]) -> None:
    """Every routed expert has config's dimensions."""
    hidden, inter = config.get("hidden_size"), config.get("intermediate_size")
    for module in modules.values():
        if not module.role.is_routed_expert:
            continue
        if not (hidden and inter):
            continue
        expected = (hidden, inter) if module.role.projection == DOWN else (inter, hidden)
        if module.shape != expected:
            raise BadInputError(
                "expert-shape",
                f"{module.name} has another shape than config.json's hidden_size and"
                " intermediate_size give",
                where=module.name,
                got=list(module.shape),
                expected=list(expected),
            )


def _mtp_notes(config: Mapping[str, Any], modules: Mapping[str, Module]) -> Iterator[Finding]:
    declared = config_count(config, "num_mtp_modules")
    stored = any(m.role.mtp for m in modules.values())
    if declared and not stored:
        yield Finding(
            "mtp-declared-absent", "note",
            f"config.json declares {declared} MTP module(s) whose tensors are not in this release",
            where="config.json",
        )  # fmt: skip


def _config_findings(source: Checkpoint, modules: Mapping[str, Module]) -> Iterator[Finding]:
    """Formats come from the tensors; a config that says otherwise is worth a warning."""
    config = source.config.get("quantization_config")
    if not config and any(m.is_quantised for m in modules.values()):
        yield Finding(
            "quantization-config-missing", "warning",
            "config.json has no quantization_config, though weights are quantised; formats here"
            " come from the tensors", where="config.json",
        )  # fmt: skip
    elif isinstance(config, Mapping) and any(m.format == MXFP8_FORMAT for m in modules.values()):
        method, block = config.get("quant_method"), config.get("weight_block_size", [1, 32])
        if method not in ("mxfp8", "modelopt") or block != [1, 32]:
            yield Finding(
                "quantization-config-differs", "warning",
                "quantization_config describes another format than the weights have; formats here"
                " come from the tensors", where="config.json",
                got=f"{method}, blocks {block}", expected="mxfp8, blocks [1, 32]",
            )  # fmt: skip

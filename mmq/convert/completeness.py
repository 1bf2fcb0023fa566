"""Does the checkpoint hold the whole model its config describes?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mmq.convert.checkpoint import Checkpoint
from mmq.convert.modules import Module
from mmq.errors import BadInputError
from mmq.quantize.architecture import DOWN, GATE, TEXT, UP
from mmq.report.findings import Finding

#: `model_type` values this release of mmq understands.
MODEL_TYPES = ("minimax_m3_vl",)


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


def check_complete(source: Checkpoint, modules: Mapping[str, Module]) -> tuple[Finding, ...]:
    """Refuse a source that lacks part of its model; return what is merely notable.

    Raises:
        BadInputError: missing experts (with how many), missing layers, lm_head neither stored
            nor tied.
    """
    config = source.text_config
    missing = [name for name in _expected_modules(config) if name not in modules]
    if missing:
        raise BadInputError(
            "module-missing",
            f"{len(missing)} module(s) that config.json asks for are not stored, such as"
            f" {missing[0]}",
            where=missing[0],
            got=f"{len(missing)} absent",
            expected="every expert and layer of config.json",
        )
    _check_shapes(config, modules)
    tied = source.config.get("tie_word_embeddings", config.get("tie_word_embeddings", False))
    if TEXT + "lm_head" not in modules and not tied:
        raise BadInputError(
            "lm-head-missing",
            "tie_word_embeddings is false, but no shard holds language_model.lm_head.weight",
            where=TEXT + "lm_head.weight",
        )
    return tuple(_mtp_notes(config, modules))


def _layer_kinds(config: Mapping[str, Any]) -> list[int]:
    """1 for each MoE layer, 0 for each dense one."""
    layers = int(config.get("num_hidden_layers", 0))
    kinds = config.get("moe_layer_freq")
    if not isinstance(kinds, list):
        return []
    if len(kinds) != layers:
        raise BadInputError(
            "config-inconsistent",
            f"moe_layer_freq has {len(kinds)} entries for {layers} layers",
            where="config.json",
            got=len(kinds),
            expected=layers,
        )
    return [int(bool(kind)) for kind in kinds]


def _expected_modules(config: Mapping[str, Any]) -> Iterator[str]:
    experts = int(config.get("num_local_experts", 0))
    for layer, moe in enumerate(_layer_kinds(config)):
        prefix = f"{TEXT}model.layers.{layer}."
        for projection in ("q_proj", "k_proj", "v_proj", "o_proj"):
            yield f"{prefix}self_attn.{projection}"
        yield f"{prefix}input_layernorm"
        if not moe:
            yield f"{prefix}mlp.down_proj"
            continue
        yield f"{prefix}block_sparse_moe.gate"
        for expert in range(experts):
            for projection in (GATE, DOWN, UP):
                yield f"{prefix}block_sparse_moe.experts.{expert}.{projection}"


def _check_shapes(config: Mapping[str, Any], modules: Mapping[str, Module]) -> None:
    """Every routed expert has config's dimensions, and no expert is outside config's count."""
    hidden, inter = config.get("hidden_size"), config.get("intermediate_size")
    experts = int(config.get("num_local_experts", 0))
    for module in modules.values():
        if not module.role.is_routed_expert:
            continue
        if experts and module.role.expert >= experts:
            raise BadInputError(
                "expert-unexpected",
                f"{module.name}: config.json has {experts} experts per layer",
                where=module.name,
                got=f"expert {module.role.expert}",
                expected=f"0 to {experts - 1}",
            )
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
    declared = int(config.get("num_mtp_modules") or 0)
    stored = any(m.role.mtp for m in modules.values())
    if declared and not stored:
        yield Finding(
            "mtp-declared-absent", "note",
            f"config.json declares {declared} MTP module(s) whose tensors are not in this release",
            where="config.json",
        )  # fmt: skip

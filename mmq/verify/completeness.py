"""Does OUT hold the model its config.json describes, with the dimensions it gives?

Dimensions: H hidden_size, I intermediate_size, D dense_intermediate_size, S the shared experts'
width, Q and KV attention widths, X and Y the indexer's query and key widths, E experts, V words.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from typing import Any

from mmq.quantize.architecture import TEXT
from mmq.report.findings import Finding
from mmq.verify.subject import Subject

#: Module (inside its decoder layer) → its weight's dimensions.
_ATTENTION: dict[str, tuple[str, ...]] = {
    "input_layernorm": ("H",),
    "post_attention_layernorm": ("H",),
    "self_attn.q_proj": ("Q", "H"),
    "self_attn.k_proj": ("KV", "H"),
    "self_attn.v_proj": ("KV", "H"),
    "self_attn.o_proj": ("H", "Q"),
}
_QK_NORMS: dict[str, tuple[str, ...]] = {"self_attn.q_norm": ("A",), "self_attn.k_norm": ("A",)}
_INDEXER: dict[str, tuple[str, ...]] = {
    "self_attn.index_q_proj": ("X", "H"),
    "self_attn.index_k_proj": ("Y", "H"),
    "self_attn.index_q_norm": ("Y",),
    "self_attn.index_k_norm": ("Y",),
}
_DENSE: dict[str, tuple[str, ...]] = {
    "mlp.gate_proj": ("D", "H"), "mlp.up_proj": ("D", "H"), "mlp.down_proj": ("H", "D"),
}  # fmt: skip
_MOE: dict[str, tuple[str, ...]] = {"block_sparse_moe.gate": ("E", "H")}
#: A tensor rather than a module's weight.
_BIAS: dict[str, tuple[str, ...]] = {"block_sparse_moe.e_score_correction_bias": ("E",)}
_SHARED: dict[str, tuple[str, ...]] = {
    "block_sparse_moe.shared_experts.gate_proj": ("S", "H"),
    "block_sparse_moe.shared_experts.up_proj": ("S", "H"),
    "block_sparse_moe.shared_experts.down_proj": ("H", "S"),
}
_EXPERT: dict[str, tuple[str, ...]] = {"w1": ("I", "H"), "w2": ("H", "I"), "w3": ("I", "H")}


def count_of(config: Mapping[str, Any], key: str) -> int:
    """A positive whole number of the config; 0 for anything else."""
    value = config.get(key)
    return value if type(value) is int and value > 0 else 0


def dimensions(text: Mapping[str, Any]) -> dict[str, int]:
    """Widths by letter; 0 where the config does not say."""
    head = count_of(text, "head_dim")
    sparse = text.get("sparse_attention_config")
    sparse = sparse if isinstance(sparse, Mapping) else {}
    index = count_of(sparse, "sparse_index_dim")
    inter = count_of(text, "intermediate_size")
    return {
        "H": count_of(text, "hidden_size"),
        "I": inter,
        "D": count_of(text, "dense_intermediate_size"),
        "S": (count_of(text, "shared_intermediate_size") or inter)
        * count_of(text, "n_shared_experts"),
        "A": head,
        "Q": head * count_of(text, "num_attention_heads"),
        "KV": head * count_of(text, "num_key_value_heads"),
        "X": index * count_of(sparse, "sparse_num_index_heads"),
        "Y": index,
        "E": count_of(text, "num_local_experts"),
        "V": count_of(text, "vocab_size"),
    }


def expected_modules(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(module, weight shape) of the language model; 0 in a shape stands for any size."""
    text = config.get("text_config", config)
    if not isinstance(text, Mapping):
        return
    sizes = dimensions(text)
    for name, dims in _expected(config, text):
        yield name, tuple(sizes[d] for d in dims)


def _expected(
    config: Mapping[str, Any], text: Mapping[str, Any]
) -> Iterator[tuple[str, tuple[str, ...]]]:
    yield TEXT + "model.embed_tokens", ("V", "H")
    yield TEXT + "model.norm", ("H",)
    if not config.get("tie_word_embeddings", text.get("tie_word_embeddings", False)):
        yield TEXT + "lm_head", ("V", "H")
    layers = count_of(text, "num_hidden_layers")
    moe = text.get("moe_layer_freq")
    moe = moe if isinstance(moe, list) and len(moe) == layers else None
    sparse = text.get("sparse_attention_config")
    freq = sparse.get("sparse_attention_freq") if isinstance(sparse, Mapping) else None
    for layer in range(layers):
        parts = dict(_ATTENTION)
        if text.get("use_qk_norm", True):
            parts |= _QK_NORMS
        if isinstance(freq, list) and layer < len(freq) and freq[layer]:
            parts |= _INDEXER
        if moe is not None:
            parts |= _moe_layer(text) if moe[layer] else _DENSE
        for part, dims in parts.items():
            yield f"{TEXT}model.layers.{layer}.{part}", dims


def _moe_layer(text: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    parts = dict(_MOE)
    if text.get("use_routing_bias"):
        parts |= _BIAS
    if count_of(text, "n_shared_experts"):
        parts |= _SHARED
    for expert in range(count_of(text, "num_local_experts")):
        for projection, dims in _EXPERT.items():
            parts[f"block_sparse_moe.experts.{expert}.{projection}"] = dims
    return parts


def check_complete(subject: Subject, source: Container[str] | None) -> Iterator[Finding]:
    """Everything config.json asks for is there with its shape, and nothing beyond its counts.

    Args:
        source: module names of the source; what it lacks as well is not OUT's fault.
    """
    explained = {*subject.broken, *subject.lost_modules, *subject.lost_tensors}
    for name, shape in expected_modules(subject.config):
        got = _stored_shape(subject, name)
        if got is None:
            inherited = source is not None and name not in source and "bias" not in name
            if name not in explained and not inherited:
                yield Finding(
                    "module-missing", "error",
                    f"{name} is not stored, though config.json asks for it", where=name,
                    got="absent", expected=str(list(shape)),
                )  # fmt: skip
        elif not _fits(got, shape):
            yield Finding(
                "module-shape", "error", f"{name} has another shape than config.json gives",
                where=name, got=str(list(got)), expected=str(list(shape)),
            )  # fmt: skip
    yield from _beyond(subject)


def _beyond(subject: Subject) -> Iterator[Finding]:
    """Layers and experts that config.json does not count: engines ignore them, or fail."""
    experts = count_of(subject.text_config, "num_local_experts")
    layers = count_of(subject.text_config, "num_hidden_layers")
    for module in subject.modules.values():
        role = module.role
        if layers and role.linear and not role.mtp and role.layer >= layers:
            yield Finding(
                "layer-unexpected", "error", f"{module.name}: config.json has {layers} layers",
                where=module.name, got=str(role.layer), expected=f"0 to {layers - 1}",
            )  # fmt: skip
        elif experts and role.is_routed_expert and role.expert >= experts:
            yield Finding(
                "expert-unexpected", "error",
                f"{module.name}: config.json has {experts} experts per layer", where=module.name,
                got=str(role.expert), expected=f"0 to {experts - 1}",
            )  # fmt: skip


def _stored_shape(subject: Subject, name: str) -> tuple[int, ...] | None:
    """Logical shape of a module's weight, or of a tensor of that name."""
    module = subject.modules.get(name)
    if module is not None and module.weight is not None:
        return module.shape
    tensor = subject.tensors.get(name)
    return None if tensor is None else tensor.shape


def _fits(got: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    return len(got) == len(shape) and all(b in (0, a) for a, b in zip(got, shape, strict=True))

"""MiniMax-M3's tensor names, read as data: which module plays which role.

Names are hub names (`language_model.model.layers.7.block_sparse_moe.experts.42.w1.weight`); the
table holds one row per kind of module, with `#` for a number. Source: docs/model.md.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

TEXT = "language_model."
MTP = TEXT + "model.mtp."

#: Kind of module (numbers as #, prefix of its decoder layer removed) → component.
_LAYER_ROLES: dict[str, str] = {
    "input_layernorm": "norms",
    "post_attention_layernorm": "norms",
    "self_attn.q_norm": "norms",
    "self_attn.k_norm": "norms",
    "self_attn.index_q_norm": "norms",
    "self_attn.index_k_norm": "norms",
    "self_attn.q_proj": "attention",
    "self_attn.k_proj": "attention",
    "self_attn.v_proj": "attention",
    "self_attn.o_proj": "attention",
    "self_attn.index_q_proj": "indexer",
    "self_attn.index_k_proj": "indexer",
    "mlp.gate_proj": "dense_mlp",
    "mlp.up_proj": "dense_mlp",
    "mlp.down_proj": "dense_mlp",
    "block_sparse_moe": "router",
    "block_sparse_moe.gate": "router",
    "block_sparse_moe.shared_experts.gate_proj": "shared_experts",
    "block_sparse_moe.shared_experts.up_proj": "shared_experts",
    "block_sparse_moe.shared_experts.down_proj": "shared_experts",
    "block_sparse_moe.experts.#.w1": "routed_experts",
    "block_sparse_moe.experts.#.w2": "routed_experts",
    "block_sparse_moe.experts.#.w3": "routed_experts",
}

_LAYER_PREFIXES = (
    TEXT + "model.layers.#.",
    MTP + "layers.#.transformer_layer.",
)

_TOP_ROLES: dict[str, str] = {
    TEXT + "lm_head": "lm_head",
    TEXT + "model.embed_tokens": "embedding",
    TEXT + "model.norm": "norms",
}

_PREFIX_ROLES: tuple[tuple[str, str], ...] = (
    (MTP, "mtp"),
    (TEXT + "model.dspark.", "draft"),
    ("vision_tower.", "vision"),
    ("multi_modal_projector.", "multi_modal_projector"),
    ("patch_merge_mlp.", "patch_merge_mlp"),
)

#: Order in which reports list components.
COMPONENTS = (
    "routed_experts", "attention", "shared_experts", "embedding", "lm_head", "vision",
    "dense_mlp", "patch_merge_mlp", "indexer", "router", "multi_modal_projector", "norms",
    "mtp", "draft", "kv_scales", "other",
)  # fmt: skip

GATE, DOWN, UP = "w1", "w2", "w3"
#: Projections that engines fuse into one matrix and give one global scale.
FUSED_GATE_UP = (GATE, UP)
#: Other linears that engines fuse into one matrix, which then has one format.
FUSED_LINEARS = (("gate_proj", "up_proj"), ("q_proj", "k_proj", "v_proj"))

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
_FUSED_EXPERTS = re.compile(r"\.experts\.(gate_up_proj|down_proj|gate_proj|up_proj|w13|w1|w2|w3)$")


class Role(NamedTuple):
    """What a module is to the model.

    Attributes:
        component: one of `COMPONENTS`, as size reports group it (an MTP module says "mtp").
        linear: component of the linear inside a decoder layer ("routed_experts", "attention"…),
            also for MTP layers; "" when the module is not part of a decoder layer.
        layer / expert: indices, -1 when there are none.
        projection: last part of the name (`w1`, `q_proj`).
        mtp: whether it belongs to a multi-token-prediction module.
    """

    component: str
    linear: str
    layer: int
    expert: int
    projection: str
    mtp: bool

    @property
    def is_routed_expert(self) -> bool:
        return self.linear == "routed_experts"


@lru_cache(maxsize=4096)
def _kind(template: str) -> tuple[str, str, bool]:
    """(component, linear, mtp) of a name whose numbers are written #."""
    mtp = template.startswith(MTP)
    for prefix in _LAYER_PREFIXES:
        if template.startswith(prefix):
            role = _LAYER_ROLES.get(template.removeprefix(prefix), "")
            return ("mtp" if mtp else role or "other"), role, mtp
    if template in _TOP_ROLES:
        return _TOP_ROLES[template], "", False
    for prefix, component in _PREFIX_ROLES:
        if template.startswith(prefix):
            return component, "", mtp
    return "other", "", False


def role_of(module: str) -> Role:
    """Role of a module by its full hub name (without `.weight`)."""
    component, linear, mtp = _kind(_NUMBER.sub("#", module))
    numbers = _NUMBER.findall(module) if linear else ()
    layer = int(numbers[0]) if numbers else -1
    expert = int(numbers[1]) if len(numbers) > 1 and linear == "routed_experts" else -1
    return Role(component, linear, layer, expert, module.rpartition(".")[2], mtp)


def is_fused_experts(module: str) -> bool:
    """Whether a name is a 3-D tensor of all experts at once, as in-memory M3 models hold them."""
    return _FUSED_EXPERTS.search(module) is not None


def natural_key(name: str) -> str:
    """Sort key that orders `layers.2` before `layers.10`; numbers are compared as numbers."""
    return _NUMBER.sub(lambda m: m.group().zfill(8), name)

"""transformers 5.24.0: name mapping of MiniMax-M3, restated from conversion_mapping.py.

The parameters themselves come from the library, which is installed: the model class on the meta
device says what exists and in which shape.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from loading import Slot

#: conversion_mapping.py, "minimax_m3_vl": stored pattern → in-memory name, in order.
RENAMED = (
    (r"^language_model\.lm_head", "lm_head"),
    (r"^language_model\.model\.", "model.language_model."),
    (
        r"^vision_tower\.vision_model\.embeddings\.patch_embedding\.",
        "model.vision_tower.embeddings.proj.",
    ),
    (r"^vision_tower\.vision_model\.encoder\.layers\.", "model.vision_tower.layers."),
    (r"^vision_tower\.vision_model\.pre_layrnorm\.", "model.vision_tower.pre_layrnorm."),
    (r"^multi_modal_projector\.linear_", "model.multi_modal_projector.linear_"),
    (r"^patch_merge_mlp\.linear_", "model.multi_modal_projector.merge_linear_"),
    (r"\.block_sparse_moe\.(experts|gate|shared_experts)\.", r".mlp.\1."),
    (r"\.block_sparse_moe\.e_score_correction_bias", ".mlp.gate.e_score_correction_bias"),
    (r"\.self_attn\.index_([qk])_(proj|norm)\.", r".self_attn.indexer.\1_\2."),
)
#: Stacked and concatenated after renaming: pattern → (fused name, part). Only `.weight` matches,
#: so an expert's packed codes and scales stay unclaimed.
MERGED = (
    (r"\.experts\.(\d+)\.w1\.weight$", ".experts.gate_up_proj", r"\1.w1"),
    (r"\.experts\.(\d+)\.w3\.weight$", ".experts.gate_up_proj", r"\1.w3"),
    (r"\.experts\.(\d+)\.w2\.weight$", ".experts.down_proj", r"\1.w2"),
    (r"\.gate_proj\.weight$", ".gate_up_proj.weight", "gate"),
    (r"\.up_proj\.weight$", ".gate_up_proj.weight", "up"),
)
#: modeling_minimax_m3_vl.py, `_keys_to_ignore_on_load_unexpected`.
IGNORED = re.compile(r"(^|\.)mtp\.")


def place(name: str, names: frozenset[str]) -> Slot | None:
    """Where a stored tensor goes; None: reported as unexpected, or ignored (MTP).

    An MXFP8 weight_scale_inv is consumed beside its weight by the dequantising loader of
    quant_method mxfp8 (integrations/finegrained_fp8.py); that is `is_mxfp8_scale`'s business.
    """
    if IGNORED.search(name):
        return None
    for pattern, new in RENAMED:
        name = re.sub(pattern, new, name)
    for pattern, fused, part in MERGED:
        found = re.search(pattern, name)
        if found:
            return _known(Slot(re.sub(pattern, fused, name), found.expand(part)), names)
    return _known(Slot(name), names)


def _known(slot: Slot, names: frozenset[str]) -> Slot | None:
    return slot if slot.parameter in names else None


def is_mxfp8_scale(name: str, stored: Iterable[str]) -> bool:
    """Whether a tensor is the scale of an MXFP8 weight, used up while that weight is decoded."""
    return name.endswith(".weight_scale_inv") and name.removesuffix("_scale_inv") in stored


def part_shape(parameter: str, shape: tuple[int, ...], part: str) -> tuple[int, ...]:
    """Shape of one stored tensor that goes into a fused parameter of this shape."""
    if parameter.endswith(".experts.gate_up_proj"):
        return (shape[1] // 2, shape[2])
    if parameter.endswith(".experts.down_proj"):
        return shape[1:]
    return (shape[0] // 2, shape[1]) if part in ("gate", "up") else shape

"""A recipe for recipes.vllm.ai: one YAML file by the schema of vllm-project/recipes.

Source of the fields: CONTRIBUTING.md of github.com/vllm-project/recipes ("YAML schema"). Only what
mmq knows is filled in; `meta.hardware` stays empty, since it is for what somebody has run.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import yaml

from mmq.errors import MmqError
from mmq.publish.serve import VLLM, VLLM_CUDA, VLLM_ROCM, Serving, vllm_arguments
from mmq.publish.traits import Traits

RECIPE_NAME = "vllm-recipe.yaml"
#: The schema's words for `precision`; mxfp8 is used there too.
PRECISIONS = ("bf16", "fp8", "nvfp4", "fp4", "int4", "int8", "awq", "gptq", "mxfp4", "mxfp8")
_TASKS = ("text", "multimodal", "omni", "embedding")
_FEATURES = {
    "tool_calling": {
        "description": "Tool calls",
        "args": ["--enable-auto-tool-choice", "--tool-call-parser", "minimax_m3"],
    },
    "reasoning": {"description": "Reasoning", "args": ["--reasoning-parser", "minimax_m3"]},
}
_PRECISION = {"modelopt": "nvfp4", "minimax": "nvfp4", "mxfp8": "mxfp8", "bf16": "bf16"}


def has_recipe(traits: Traits, servings: Iterable[Serving]) -> bool:
    """Whether vLLM loads the checkpoint, and in which release first is known.

    M3.1's is not: `min_vllm_version`, which the schema demands, would be made up.
    """
    return not traits.m31 and any(s.engine == VLLM_CUDA and s.command for s in servings)


def recipe(
    repo: str, traits: Traits, parameters: int, active: int, serving: Mapping[str, Serving]
) -> dict[str, Any]:
    """The recipe's values; the one on vLLM's CUDA image is the default.

    Args:
        parameters / active: of the model, and of one token's path through it; 0 for unknown.
        serving: recipes by engine.
    """
    name = repo.partition("/")[2]
    precision = _PRECISION[traits.layout]
    images = {"nvidia": serving[VLLM_CUDA].image, "amd": serving[VLLM_ROCM].image}
    options, rocm = vllm_arguments(traits), vllm_arguments(traits, VLLM_ROCM)
    arguments = _words(options)
    amd = _words([option for option in rocm if option not in options])
    return {
        "meta": {
            "title": name,
            "slug": re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-"),
            "provider": repo.partition("/")[0],
            "description": f"{name}: {precision.upper()} weights, converted by mmq",
            "difficulty": "advanced",
            "tasks": ["text", "multimodal"] if traits.vision else ["text"],
        },
        "model": {
            "model_id": repo,
            "min_vllm_version": VLLM,
            "docker_image": images,
            "architecture": "moe",
            "parameter_count": billions(parameters),
            "active_parameters": billions(active),
            "context_length": traits.context,
            "base_args": arguments,
            "base_env": {},
        },
        "features": _FEATURES,
        "variants": {
            "default": {
                "precision": precision,
                "vram_minimum_gb": traits.vram_gb,
                "description": f"Converted by mmq, {traits.layout} layout",
            }
        },
        "compatible_strategies": ["single_node_tp", "single_node_tep", "multi_node_tp"],
        "hardware_overrides": {"amd": {"extra_args": amd}},
    }  # fmt: skip


def recipe_text(value: Mapping[str, Any]) -> str:
    """The recipe as YAML.

    Raises:
        MmqError: it would break the schema (a defect of mmq's, not of the input).
    """
    if found := recipe_problems(value):
        raise MmqError("recipe-invalid", f"the vLLM recipe is not valid: {found[0]}")
    return str(yaml.safe_dump(dict(value), sort_keys=False, allow_unicode=True, width=100))


def recipe_problems(value: Mapping[str, Any]) -> list[str]:
    """What the schema forbids in a recipe; empty when it obeys."""
    found = []
    needed = {
        "meta": ("title", "slug", "provider", "description", "tasks"),
        "model": ("model_id", "min_vllm_version", "architecture", "parameter_count",
                  "context_length", "base_args"),
    }  # fmt: skip
    for part, keys in needed.items():
        block = value.get(part)
        block = block if isinstance(block, Mapping) else {}
        found += [f"{part}.{key} is missing" for key in keys if block.get(key) in (None, "", [])]
    meta, model = value.get("meta") or {}, value.get("model") or {}
    found += [f"meta.tasks: {t} is unknown" for t in meta.get("tasks") or () if t not in _TASKS]
    if model.get("architecture") not in ("moe", "dense"):
        found.append("model.architecture is neither moe nor dense")
    arguments = model.get("base_args") or []
    if not all(isinstance(word, str) for word in arguments):
        found.append("model.base_args must be words of text")
    variants = value.get("variants")
    variants = variants if isinstance(variants, Mapping) else {}
    if "default" not in variants:
        found.append("variants.default is missing")
    for name, variant in variants.items():
        if variant.get("precision") not in PRECISIONS:
            found.append(f"variants.{name}.precision is unknown")
        if not isinstance(variant.get("vram_minimum_gb"), int) or variant["vram_minimum_gb"] < 1:
            found.append(f"variants.{name}.vram_minimum_gb must be a whole number of GB")
    if not value.get("compatible_strategies"):
        found.append("compatible_strategies is empty")
    return found


def billions(count: int) -> str:
    """A parameter count as recipes write it: 427B, 1.3T, 5M."""
    for size, letter in ((10**12, "T"), (10**9, "B")):
        if count >= size:
            return f"{count / size:.3g}{letter}"
    return f"{max(1, round(count / 1e6))}M"


def _words(options: list[str]) -> list[str]:
    return [word for option in options for word in option.split(" ")]

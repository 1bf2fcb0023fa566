"""transformers 5.24: the mapping against the real model class, and the real loader.

The model class is built on the meta device at small and at true scale, so parameter names and
shapes are the library's own.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import transformers_rules as rules
from loading import Files, Parameters, Slot, Wanted, load, read_files
from transformers import MiniMaxM3SparseForConditionalGeneration, MiniMaxM3VLConfig

from mmq.convert.checkpoint import open_checkpoint
from mmq.convert.options import ConvertOptions
from mmq.convert.plan import build_plan

FilesOf = Callable[[str], Files]
EXPERTS = (".experts.gate_up_proj", ".experts.down_proj")


def _parameters(files: Files) -> Parameters:
    """Slots of the library's own model for this config.json."""
    config = {k: v for k, v in files.config.items() if k != "quantization_config"}
    experts = config["text_config"]["num_local_experts"]
    wanted: Parameters = {}
    for name, shape in _state(json.dumps(config)).items():
        for part in _parts(name, experts):
            # from_pretrained converts to the dtype asked for
            stored = rules.part_shape(name, shape, part)
            wanted[Slot(name, part)] = Wanted(("BF16", "F32", "F8_E4M3"), (stored,))
    return wanted


@lru_cache(maxsize=4)
def _state(config: str) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        model = MiniMaxM3SparseForConditionalGeneration(MiniMaxM3VLConfig(**json.loads(config)))
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def _parts(name: str, experts: int) -> list[str]:
    if name.endswith(".experts.gate_up_proj"):
        return [f"{e}.{w}" for e in range(experts) for w in ("w1", "w3")]
    if name.endswith(".experts.down_proj"):
        return [f"{e}.w2" for e in range(experts)]
    return ["gate", "up"] if name.endswith(".gate_up_proj.weight") else [""]


def _load(files: Files) -> Any:
    return load(files, _parameters, rules.place)


def _is_spare(name: str, files: Files) -> bool:
    """Tensors of an MXFP8 weight's decoding, and KV scales: nothing a parameter waits for."""
    return rules.is_mxfp8_scale(name, files.tensors) or name.endswith((".k_scale", ".v_scale"))


def test_rules_are_those_of_this_version() -> None:
    assert transformers.__version__.startswith("5.24.")


def test_source_fills_every_parameter(small_source: Path) -> None:
    files = read_files(small_source)
    result = _load(files)
    assert result.clean, (result.missing[:3], result.wrong[:3])
    assert [n for n in result.unused if not _is_spare(n, files)] == []


def test_release_in_bf16_fills_every_parameter(release_files: dict[str, Files]) -> None:
    plan = build_plan(open_checkpoint("minimax-m3-mxfp8"), ConvertOptions(to="bf16"))
    tensors = {o.name: o for unit in plan.units for o in unit.outputs}
    files = Files(release_files["modelopt"].config, None, tensors)  # type: ignore[arg-type]
    result = _load(files)
    assert result.clean, (result.missing[:3], result.wrong[:3])
    assert result.unused == []


def test_modelopt_layout_does_not_fit_the_experts(files: FilesOf) -> None:
    """Packed codes are called .weight, so they are merged, and are half as wide as the experts."""
    checkpoint = files("modelopt")
    result = _load(checkpoint)
    assert not result.missing
    assert result.wrong and all(".experts." in w.partition(":")[0] for w in result.wrong)


def test_minimax_layout_leaves_the_experts_out(files: FilesOf) -> None:
    """Packed tensors have names nobody claims: the experts are missing, the rest loads."""
    checkpoint = files("minimax")
    result = _load(checkpoint)
    assert not result.wrong
    assert result.missing and all(slot.parameter.endswith(EXPERTS) for slot in result.missing)
    unclaimed = [n for n in result.unused if not _is_spare(n, checkpoint)]
    assert unclaimed and all(".experts." in name for name in unclaimed)


# The real loader agrees with the rules.


def _from_pretrained(folder: Path) -> dict[str, Any]:
    _, info = MiniMaxM3SparseForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    return dict(info)


def test_real_loader_takes_the_whole_source(small_source: Path) -> None:
    info = _from_pretrained(small_source)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert not info["mismatched_keys"]


def test_real_loader_raises_on_the_modelopt_layout(small_folders: dict[str, Path]) -> None:
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        _from_pretrained(small_folders["modelopt"])


def test_real_loader_leaves_experts_random_in_the_minimax_layout(
    small_folders: dict[str, Path],
) -> None:
    info = _from_pretrained(small_folders["minimax"])
    assert info["missing_keys"]
    assert all(name.endswith(EXPERTS) for name in info["missing_keys"])
    assert all(".experts." in name for name in info["unexpected_keys"])

"""The scripts that made the bundled model: export changes names and spread, not the function."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import MiniMaxM3SparseForConditionalGeneration

from mmq.demo.hub_config import hub_config

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture(scope="module")
def scripts() -> Any:
    """The modules `rebalance`, `release` and `shape` of scripts/small_model."""
    sys.path.insert(0, str(SCRIPTS))
    try:
        import small_model.rebalance
        import small_model.release
        import small_model.shape
    finally:
        sys.path.remove(str(SCRIPTS))
    return small_model


def _load(folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> Any:
    folder.mkdir()
    stored = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    model, info = MiniMaxM3SparseForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


@pytest.fixture(scope="module")
def exact(scripts: Any) -> dict[str, torch.Tensor]:
    """A fresh model's tensors under their hub names, norms as uneven as after training."""
    model = scripts.shape.new_model(1)
    for layer in model.model.language_model.layers:
        torch.nn.init.normal_(layer.input_layernorm.weight, 0, 0.2)
    return scripts.release.hub_tensors(model)


@pytest.fixture(scope="module")
def moved(scripts: Any, exact: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    tensors = {name: tensor.clone() for name, tensor in exact.items()}
    scripts.rebalance.rebalance(tensors, scripts.shape.SIZE, 1)
    return tensors


def _logits(scripts: Any, folder: Path, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """F32 logits of 130 tokens: selection binds from the 65th on."""
    config = hub_config(scripts.shape.SIZE)
    del config["quantization_config"]
    with torch.inference_mode():
        ids = torch.arange(130)[None] * 7 % 1024
        return _load(folder, tensors, config)(input_ids=ids, use_cache=False).logits


@pytest.fixture(scope="module")
def logits(scripts: Any, exact: Any, tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    return _logits(scripts, tmp_path_factory.mktemp("exact") / "model", exact)


LAYER = "language_model.model.layers.2."


def test_rebalancing_keeps_the_logits(
    scripts: Any, exact: Any, moved: Any, logits: torch.Tensor, tmp_path: Path
) -> None:
    name = LAYER + "block_sparse_moe.experts.0.w1.weight"
    assert (exact[name] - moved[name]).abs().max() > 0.1
    assert (logits - _logits(scripts, tmp_path / "moved", moved)).abs().max() < 1e-4


@pytest.mark.parametrize(
    "name",
    [
        "input_layernorm",
        "self_attn.index_q_proj",
        "self_attn.o_proj",
        "block_sparse_moe.gate",
        "block_sparse_moe.experts.3.w2",
        "block_sparse_moe.shared_experts.up_proj",
    ],
)
def test_a_tensor_left_behind_shows(
    scripts: Any, exact: Any, moved: Any, logits: torch.Tensor, tmp_path: Path, name: str
) -> None:
    key = f"{LAYER}{name}.weight"
    wrong = _logits(scripts, tmp_path / "wrong", {**moved, key: exact[key]})
    assert (logits - wrong).abs().max() > 1e-3

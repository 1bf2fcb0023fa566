"""The small trained model that comes with mmq: whole, shaped as the release, and able to read.

Windows of 512 tokens, <bos> in front. V vocabulary, W windows, T tokens.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from in_process import run_mmq
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import MiniMaxM3SparseForConditionalGeneration

from mmq.convert.checkpoint import open_checkpoint
from mmq.convert.options import ConvertOptions
from mmq.convert.plan import build_plan
from mmq.demo.bundled import bundled_model, bundled_texts

WINDOW = 512
#: Mean difference of neighbouring scale exponents in a row; normally distributed weights have .3.
UNEVEN_OCTAVES = 1.0
#: Mean loss over the windows below, F32, transformers 5.24.
LOSS = 2.44073
MODEL = bundled_model()


def _load(folder: Path) -> Any:
    model, info = MiniMaxM3SparseForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa", output_loading_info=True
    )
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


@pytest.fixture(scope="module")
def model() -> Any:
    return _load(MODEL)


@pytest.fixture(scope="module")
def windows_WT() -> torch.Tensor:
    """The first window of every held-out text."""
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    rows = []
    for text in bundled_texts():
        ids = tokenizer.encode(text.read_text("utf-8")[:3000]).ids
        rows.append([tokenizer.token_to_id("<bos>"), *ids[: WINDOW - 1]])
    return torch.tensor(rows)


@torch.inference_mode()
def _losses(model: Any, ids_WT: torch.Tensor) -> torch.Tensor:
    """Mean negative log-likelihood of each window, F32 [W]."""
    losses = []
    for row in ids_WT:
        logits_TV = model(input_ids=row[None], use_cache=False).logits[0, :-1]
        losses.append(torch.nn.functional.cross_entropy(logits_TV, row[1:]))
    return torch.stack(losses)


class Reading(NamedTuple):
    """What one pass over the windows showed: losses [W], and tokens by expert of each layer."""

    losses_W: torch.Tensor
    loads: list[torch.Tensor]


@pytest.fixture(scope="module")
def reading(model: Any, windows_WT: torch.Tensor) -> Reading:
    routers = [x.mlp.gate for x in model.model.language_model.layers if hasattr(x.mlp, "gate")]
    loads = [torch.zeros(r.num_experts, dtype=torch.long) for r in routers]

    def count(load: torch.Tensor) -> Any:
        def add(_router: Any, _inputs: Any, output: Any) -> None:
            load.add_(torch.bincount(output[2].flatten(), minlength=len(load)))

        return add

    pairs = zip(routers, loads, strict=True)
    hooks = [router.register_forward_hook(count(load)) for router, load in pairs]
    losses_W = _losses(model, windows_WT)
    for hook in hooks:
        hook.remove()
    return Reading(losses_W, loads)


def _config() -> dict[str, Any]:
    return json.loads((MODEL / "config.json").read_text("utf-8"))


def _shards() -> Iterator[Any]:
    for path in sorted(MODEL.glob("*.safetensors")):
        with safe_open(path, "pt") as shard:
            yield path.name, shard


# Whole.


def test_index_lists_every_tensor_of_every_shard() -> None:
    index = json.loads((MODEL / "model.safetensors.index.json").read_text("utf-8"))
    found, total = {}, 0
    for name, shard in _shards():
        found.update(dict.fromkeys(shard.keys(), name))
        total += sum(shard.get_tensor(key).nbytes for key in shard.keys())  # noqa: SIM118
    assert found == index["weight_map"]
    assert total == index["metadata"]["total_size"]


def test_config_describes_the_tensors(model: Any) -> None:
    """transformers builds the model from the config and finds all of its tensors, and no others."""
    text = _config()["text_config"]
    names = open_checkpoint(MODEL).tensors
    for layer, sparse in enumerate(text["moe_layer_freq"]):
        prefix = f"language_model.model.layers.{layer}."
        experts = {n.split(".experts.")[1].split(".")[0] for n in names
                   if n.startswith(prefix) and ".experts." in n}  # fmt: skip
        assert len(experts) == sparse * text["num_local_experts"]
    assert model.config.text_config.layer_types.count("minimax_m3_sparse") == 3


def test_config_states_what_the_release_states() -> None:
    config = _config()
    text, sparse = config["text_config"], config["text_config"]["sparse_attention_config"]
    assert (text["hidden_act"], text["swiglu_limit"]) == ("swigluoai", 3.0)
    assert (sparse["sparse_block_size"], sparse["sparse_topk_blocks"]) == (16, 4)
    assert config["quantization_config"]["weight_block_size"] == [1, 32]


def test_sizes() -> None:
    assert sum(p.stat().st_size for p in MODEL.iterdir()) < 6_600_000
    assert len(list(MODEL.glob("*.safetensors"))) == 3
    texts = bundled_texts()
    assert {p.stem for p in texts} >= {"code", "english", "german"}
    assert 100_000 <= sum(p.stat().st_size for p in texts) <= 250_000


def test_tokenizer_fits_and_loses_nothing() -> None:
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    text = _config()["text_config"]
    assert tokenizer.get_vocab_size() == text["vocab_size"]
    for path in bundled_texts():
        sample = path.read_text("utf-8")[:2000]
        assert tokenizer.decode(tokenizer.encode(sample).ids) == sample


# Shaped as the release.


def test_inspect_and_plan_accept_it() -> None:
    code, _events, stderr = run_mmq("inspect", MODEL)
    assert code == 0, stderr
    plan = build_plan(open_checkpoint(MODEL), ConvertOptions())
    written = [output.name for unit in plan.units for output in unit.outputs]
    text = _config()["text_config"]
    experts = 3 * text["num_local_experts"] * sum(text["moe_layer_freq"])
    assert sum(name.endswith("weight_scale_2") for name in written) == experts


def test_router_is_f32_and_the_rest_as_released() -> None:
    dtypes: dict[str, set[str]] = {}
    for _name, shard in _shards():
        for key in shard.keys():  # noqa: SIM118
            kind = ".".join(key.split(".")[-2:])
            dtypes.setdefault(kind, set()).add(shard.get_slice(key).get_dtype())
    assert dtypes["gate.weight"] == {"F32"}
    assert dtypes["block_sparse_moe.e_score_correction_bias"] == {"F32"}
    assert dtypes["patch_embedding.weight"] == {"F32"}
    assert dtypes["w1.weight"] == dtypes["index_q_proj.weight"] == {"F8_E4M3"}
    assert dtypes["w1.weight_scale_inv"] == {"U8"}
    assert dtypes["q_norm.weight"] == dtypes["lm_head.weight"] == {"BF16"}


def test_an_expert_is_split_over_shards() -> None:
    tensors = open_checkpoint(MODEL).tensors
    stem = "language_model.model.layers.1.block_sparse_moe.experts.0."
    assert tensors[stem + "w1.weight"].shard != tensors[stem + "w3.weight"].shard
    assert tensors[stem + "w1.weight"].shard == tensors[stem + "w1.weight_scale_inv"].shard


def _octaves(scale_OG: torch.Tensor) -> float:
    return float(np.abs(np.diff(scale_OG.numpy().astype(int), axis=1)).mean())


@pytest.mark.parametrize("kind", ["w1", "w3", "gate_proj", "q_proj", "v_proj", "index_k_proj"])
def test_block_scales_are_uneven(kind: str) -> None:
    octaves = [
        _octaves(shard.get_tensor(key))
        for _name, shard in _shards()
        for key in shard.keys()  # noqa: SIM118
        if key.endswith(f".{kind}.weight_scale_inv")
    ]
    assert np.mean(octaves) > UNEVEN_OCTAVES


# Able to read.


def test_perplexity_of_held_out_text(reading: Reading) -> None:
    bound = math.log(_config()["text_config"]["vocab_size"] / 20)
    assert len(reading.losses_W) == len(bundled_texts())
    assert reading.losses_W.max() <= bound


def test_losses_are_the_ones_measured(reading: Reading) -> None:
    """Machines round differently by far less; a lost expert moves it by ten times as much."""
    assert float(reading.losses_W.mean()) == pytest.approx(LOSS, abs=1e-3)


def test_every_expert_has_work(reading: Reading) -> None:
    assert len(reading.loads) == sum(_config()["text_config"]["moe_layer_freq"])
    for load in reading.loads:
        assert load.min() / load.sum() >= 0.005


def test_shifted_block_scales_show(
    reading: Reading, windows_WT: torch.Tensor, tmp_path: Path
) -> None:
    """Each expert block with its neighbour's scale costs more than a tenth of perplexity."""
    folder = tmp_path / "shifted"
    shutil.copytree(MODEL, folder)
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        for name in tensors:
            if ".experts." in name and name.endswith("_scale_inv"):
                tensors[name] = tensors[name].roll(1, dims=1)
        path.unlink()
        save_file(tensors, path, metadata={"format": "pt"})
    shifted = _losses(_load(folder), windows_WT)
    assert shifted.mean() - reading.losses_W.mean() > math.log(1.1)


def test_selection_matters(model: Any, windows_WT: torch.Tensor) -> None:
    """Every sparse layer drops blocks beyond 64 tokens, and other blocks give other logits."""
    ids_WT = windows_WT[:1]
    indexers = [x.self_attn.indexer for x in model.model.language_model.layers[1:]]
    with torch.inference_mode():
        chosen = model(input_ids=ids_WT, use_cache=False).logits[0]
        for indexer in indexers:
            indexer.topk_blocks = WINDOW
        every = model(input_ids=ids_WT, use_cache=False).logits[0]
        for indexer in indexers:
            indexer.topk_blocks = 4
    moved_T = (chosen - every).abs().amax(-1)
    assert moved_T[:64].max() < 1e-4
    assert moved_T[64:].median() > 0.05

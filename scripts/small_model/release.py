"""The trained model as an MXFP8 release: hub names, shards and an index, files beside them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import MiniMaxM3SparseForConditionalGeneration

from mmq.demo.hub_config import hub_config
from mmq.kernels.ops import quantize_mxfp8

from .card import card, notices, provenance
from .rebalance import Tensors, rebalance
from .shape import SIZE
from .texts import Texts
from .tokenizer import BOS, EOS, PAD, SPECIAL, VOCABULARY

SHARDS = 3
#: Stored in the last shard although the rest of its expert is in an earlier one.
STRAYED = "language_model.model.layers.1.block_sparse_moe.experts.0.w1."
_SEED = 20261130
_F32 = ("gate.weight", "e_score_correction_bias", "patch_embedding.weight")


def write_release(
    model: MiniMaxM3SparseForConditionalGeneration, tokenizer: Path, texts: Texts, folder: Path,
    steps: tuple[int, int],
) -> None:  # fmt: skip
    """Write the whole folder; files of the same names are replaced.

    Args:
        steps: where training stopped, and how long the run was planned; for the card.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = hub_tensors(model)
    rebalance(tensors, SIZE, _SEED)
    _write_shards(_encoded(tensors), folder)
    shutil.copyfile(tokenizer, folder / "tokenizer.json")
    _write_json(folder / "config.json", hub_config(SIZE))
    for name, value in _side_jsons():
        _write_json(folder / name, value)
    for name, text in _SIDE_TEXTS.items():
        (folder / name).write_text(text, "utf-8")
    root = Path(__file__).parents[2]
    shutil.copyfile(root / "LICENSE", folder / "LICENSE")
    (folder / "README.md").write_text(card(*steps), "utf-8")
    (folder / "PROVENANCE.md").write_text(provenance(texts), "utf-8")


def write_texts(texts: Texts, folder: Path, archives: Path) -> None:
    """One file of held-out text a kind, and the licences they come under."""
    folder.mkdir(parents=True, exist_ok=True)
    for kind in sorted({d.kind for d in texts.held_out}):
        text = "\n".join(d.text for d in texts.held_out if d.kind == kind)
        (folder / f"{kind}.txt").write_text(text, "utf-8")
    (folder / "LICENSES.md").write_text(notices(archives), "utf-8")


def hub_tensors(model: MiniMaxM3SparseForConditionalGeneration) -> Tensors:
    """Every tensor in F32 under its hub name, in the order of the model."""
    generator = torch.Generator().manual_seed(_SEED)
    found: Tensors = {}
    for name, value in model.state_dict().items():
        value = value.detach().float().clone()
        if "language_model" not in name and name.endswith("bias"):
            # untrained biases are zeros, which would not show if they were lost
            value += 0.02 * torch.randn(value.shape, generator=generator)
        for hub_name, part in _hub_parts(name, value):
            found[hub_name] = part
    return found


def _hub_parts(name: str, value: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """transformers' fused tensors, taken apart."""
    hub = _hub_name(name)
    stem = hub.removesuffix("experts.gate_up_proj").removesuffix("experts.down_proj")
    if hub.endswith("experts.gate_up_proj"):
        for expert, both in enumerate(value):
            gate, up = both.chunk(2)
            yield f"{stem}experts.{expert}.w1.weight", gate.clone()
            yield f"{stem}experts.{expert}.w3.weight", up.clone()
    elif hub.endswith("experts.down_proj"):
        for expert, down in enumerate(value):
            yield f"{stem}experts.{expert}.w2.weight", down.clone()
    elif hub.endswith("gate_up_proj.weight"):
        gate, up = value.chunk(2)
        yield hub.replace("gate_up_proj", "gate_proj"), gate.clone()
        yield hub.replace("gate_up_proj", "up_proj"), up.clone()
    else:
        yield hub, value


def _hub_name(name: str) -> str:
    if name == "lm_head.weight":
        return "language_model.lm_head.weight"
    name = name.removeprefix("model.")
    for found, put in (
        ("multi_modal_projector.merge_linear_", "patch_merge_mlp.linear_"),
        ("vision_tower.embeddings.proj.", "vision_tower.vision_model.embeddings.patch_embedding."),
        ("vision_tower.layers.", "vision_tower.vision_model.encoder.layers."),
        ("vision_tower.pre_layrnorm.", "vision_tower.vision_model.pre_layrnorm."),
    ):
        name = name.replace(found, put)
    if not name.startswith("language_model."):
        return name
    name = "language_model.model." + name.removeprefix("language_model.")
    name = name.replace(".indexer.", ".index_")
    name = name.replace("mlp.gate.e_score_correction_bias", "mlp.e_score_correction_bias")
    layer = name.split(".")[3] if ".layers." in name else ""
    if layer and SIZE.sparse[int(layer)]:
        name = name.replace(".mlp.", ".block_sparse_moe.")
    return name


def _encoded(tensors: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor as it is stored; a weight and its scale are neighbours."""
    for name, value in tensors.items():
        in_layer = name.startswith("language_model.model.layers.")
        if name.endswith(_F32):
            yield name, value
        elif in_layer and value.dim() == 2:
            codes, scale, _errors = quantize_mxfp8(value.numpy(), "F32")
            yield name, torch.from_numpy(codes).view(torch.float8_e4m3fn)
            yield f"{name}_scale_inv", torch.from_numpy(scale)
        else:
            yield name, value.bfloat16()


def _write_shards(tensors: Iterator[tuple[str, torch.Tensor]], folder: Path) -> None:
    """Three runs of about equal size, and one module that strayed."""
    stored = dict(tensors)
    total = sum(t.nbytes for t in stored.values())
    shards: list[Tensors] = [{} for _ in range(SHARDS)]
    done = 0
    for name, tensor in stored.items():
        shard = SHARDS - 1 if name.startswith(STRAYED) else min(done * SHARDS // total, SHARDS - 1)
        shards[shard][name] = tensor
        done += tensor.nbytes
    weight_map = {}
    for number, shard_tensors in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{SHARDS:05d}.safetensors"
        save_file(shard_tensors, folder / file, metadata={"format": "pt"})
        (folder / file).chmod(0o644)
        weight_map.update(dict.fromkeys(shard_tensors, file))
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    _write_json(folder / "model.safetensors.index.json", index)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", "utf-8")


def _token_id(token: str) -> int:
    return VOCABULARY - len(SPECIAL) + SPECIAL.index(token)


def _side_jsons() -> Iterator[tuple[str, dict[str, Any]]]:
    yield "generation_config.json", {
        "bos_token_id": _token_id(BOS), "eos_token_id": _token_id(EOS),
        "pad_token_id": _token_id(PAD), "do_sample": True, "temperature": 1.0, "top_p": 0.95,
        "top_k": 40,
    }  # fmt: skip
    yield "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": EOS,
        "pad_token": PAD, "add_bos_token": False, "model_max_length": 4096,
    }  # fmt: skip
    yield "preprocessor_config.json", {
        "image_processor_type": "MiniMaxM3VLImageProcessor", "patch_size": SIZE.patch,
        "merge_size": 2, "temporal_patch_size": 2,
    }  # fmt: skip


_SIDE_TEXTS = {
    "chat_template.jinja": (
        "{# 对话模板 · chat template #}"
        "{% for m in messages %}<role>{{ m.role }}\n{{ m.content }}<eos>\n{% endfor %}"
        "{% if add_generation_prompt %}<role>assistant\n{% endif %}"
    ),
    "configuration_minimax_m3_vl.py": (
        '"""Stands for the release\'s remote code; copied as it is."""\n'
    ),
}

"""What engines do wrong in silence: `mmq verify` says it, under the id docs/engines.md gives."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from mmq.console import Console
from mmq.convert.checkpoint import INDEX_NAME, open_checkpoint
from mmq.convert.safetensors_header import header_bytes
from mmq.verify.run import verify

DOCS = Path(__file__).parents[2] / "docs" / "engines.md"
LAYER = "language_model.model.layers.1."
EXPERT = LAYER + "block_sparse_moe.experts.0."
ATTENTION = LAYER + "self_attn."


class Stored(NamedTuple):
    """A tensor with its bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


Tensors = dict[str, Stored]


class Damage(NamedTuple):
    """One silent failure.

    Attributes:
        ids: findings that verify must report.
        config: edits config.json.
        tensors: edits the stored tensors.
    """

    ids: tuple[str, ...]
    layout: str = "modelopt"
    config: Callable[[dict[str, Any]], object] | None = None
    tensors: Callable[[Tensors], object] | None = None


def _without(*keys: str) -> Callable[[dict[str, Any]], object]:
    """Removes the value at a path of keys."""

    def edit(config: dict[str, Any]) -> object:
        for key in keys[:-1]:
            config = config[key]
        return config.pop(keys[-1])

    return edit


def _with(*path: Any) -> Callable[[dict[str, Any]], object]:
    """Sets the value at a path of keys; the last argument is the value."""

    def edit(config: dict[str, Any]) -> object:
        for key in path[:-2]:
            config = config[key]
        config[path[-2]] = path[-1]
        return None

    return edit


def _relist(change: Callable[[str], str | None]) -> Callable[[dict[str, Any]], object]:
    """Renames or drops (None) entries of quantized_layers."""

    def edit(config: dict[str, Any]) -> object:
        block = config["quantization_config"]
        renamed = {change(name): info for name, info in block["quantized_layers"].items()}
        renamed.pop(None, None)
        block["quantized_layers"] = renamed
        return None

    return edit


def _drop(*names: str) -> Callable[[Tensors], object]:
    return lambda tensors: [tensors.pop(name) for name in names]


def _retag(name: str, dtype: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: tensors[name]._replace(dtype=dtype)})


def _rename(old: str, new: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({new: tensors.pop(old)})


def _scalar(name: str, value: float) -> Callable[[Tensors], object]:
    data = np.float32(value).tobytes()
    return lambda tensors: tensors.update({name: Stored("F32", (), data)})


def _drop_kv(tensors: Tensors) -> None:
    for name in [n for n in tensors if n.endswith((".k_scale", ".v_scale"))]:
        del tensors[name]


def _leave_source_scale(tensors: Tensors) -> None:
    rows, columns = tensors[EXPERT + "w1.weight_scale"].shape
    scale = Stored("U8", (rows, columns // 2), bytes(rows * columns // 2))
    tensors[EXPERT + "w1.weight_scale_inv"] = scale


SPARSE = ("text_config", "sparse_attention_config")
BLOCK = "quantization_config"

DAMAGES: dict[str, Damage] = {
    # config.json
    "rotary": Damage(
        ("config-engine-key",), config=_without("text_config", "partial_rotary_factor")
    ),
    "no-sparse-config": Damage(("config-engine-key",), config=_without(*SPARSE)),
    "short-list": Damage(
        ("config-engine-key",), config=_with(*SPARSE, "sparse_attention_freq", [0])
    ),
    "index-heads": Damage(
        ("config-engine-key",), config=_with(*SPARSE, "sparse_num_index_heads", 1)
    ),
    "no-moe-list": Damage(("config-engine-key",), config=_without("text_config", "moe_layer_freq")),
    "shared-width": Damage(
        ("config-engine-key",), config=_with("text_config", "shared_intermediate_size", 64)
    ),
    "no-vision-config": Damage(("config-engine-key",), config=_without("vision_config")),
    # ModelOpt layout
    "no-prefix": Damage(
        ("quantized-layers-prefix",), config=_relist(lambda n: n.removeprefix("language_model."))
    ),
    "index-unlisted": Damage(
        ("quantized-layers-missing", "configs-disagree"),
        config=_relist(lambda n: None if ".index_" in n else n),
    ),
    "gate-pattern": Damage(
        ("exclusion-hits-quantised",), config=_with(BLOCK, "ignore", ["*gate*"])
    ),
    "no-layers": Damage(("quantized-layers-absent",), config=_without(BLOCK, "quantized_layers")),
    "no-block": Damage(("config-quantization-missing",), config=_without(BLOCK)),
    "quant-method": Damage(("config-quant-method",), config=_with(BLOCK, "quant_method", "nvfp4")),
    "e8m0-tag": Damage(
        ("mxfp8-scale-dtype",), tensors=_retag(ATTENTION + "o_proj.weight_scale_inv", "F8_E8M0")
    ),
    "scale-name": Damage(
        ("mxfp8-scale-name",),
        tensors=_rename(ATTENTION + "o_proj.weight_scale_inv", ATTENTION + "o_proj.weight_scale"),
    ),
    "leftover": Damage(("leftover-tensor",), tensors=_leave_source_scale),
    "expert-hole": Damage(("nvfp4-tensor-missing",), tensors=_drop(EXPERT + "w2.weight_scale_2")),
    "input-scale-hole": Damage(("input-scale-missing",), tensors=_drop(EXPERT + "w2.input_scale")),
    "w1-w3": Damage(("w1-w3-global-scale",), tensors=_scalar(EXPERT + "w3.weight_scale_2", 0.01)),
    "vision-hole": Damage(
        ("tensor-missing",),
        tensors=_drop("vision_tower.vision_model.encoder.layers.0.self_attn.k_proj.weight"),
    ),
    "norm-shape": Damage(
        ("module-shape",),
        tensors=lambda t: t.update(
            {LAYER + "input_layernorm.weight": Stored("BF16", (8,), bytes(16))}
        ),
    ),
    # KV cache
    "kv-absent": Damage(("kv-scales-absent",), tensors=_drop_kv),
    "kv-layer-absent": Damage(
        ("kv-scale-missing",),
        tensors=_drop(ATTENTION + "k_proj.k_scale", ATTENTION + "v_proj.v_scale"),
    ),
    "kv-unpaired": Damage(("kv-scale-unpaired",), tensors=_drop(ATTENTION + "k_proj.k_scale")),
    "kv-name": Damage(
        ("kv-scale-name",),
        tensors=_rename(ATTENTION + "k_proj.k_scale", ATTENTION + "qkv_proj.k_scale"),
    ),
    "kv-negative": Damage(("kv-scale-invalid",), tensors=_scalar(ATTENTION + "k_proj.k_scale", -1)),
    "kv-nvfp4": Damage(
        ("kv-nvfp4-declared",),
        config=lambda c: c[BLOCK].update(
            kv_cache_quant_algo="NVFP4",
            kv_cache_scheme={"num_bits": 4, "type": "float", "dynamic": False},
        ),
    ),
    # minimax layout
    "no-moe-algo": Damage(
        ("config-vendor-key",), "minimax", config=_without(BLOCK, "moe_quant_algo")
    ),
    "moe-format": Damage(
        ("config-vendor-key",), "minimax", config=_with(BLOCK, "moe_quant_format", "nvfp4")
    ),
    "lm-head": Damage(
        ("lm-head-not-ignored",),
        "minimax",
        config=lambda c: c[BLOCK].update(
            ignored_layers=[n for n in c[BLOCK]["ignored_layers"] if not n.endswith("lm_head")]
        ),
    ),
    "block-scale-tag": Damage(
        ("nvfp4-dtype",), "minimax", tensors=_retag(EXPERT + "w2.weight_scale", "U8")
    ),
    "global-input-hole": Damage(
        ("input-scale-missing",), "minimax", tensors=_drop(EXPERT + "w2.input_global_scale")
    ),
    "kv-not-unit": Damage(
        ("kv-scale-not-unit",), "minimax", tensors=_scalar(ATTENTION + "k_proj.k_scale", 0.5)
    ),
}


def _apply(folder: Path, damage: Damage) -> None:
    if damage.config:
        path = folder / "config.json"
        config = json.loads(path.read_bytes())
        damage.config(config)
        path.write_text(json.dumps(config), encoding="utf-8")
    if damage.tensors:
        tensors = dict(_read(folder))
        damage.tensors(tensors)
        _write(folder, tensors)


def _read(folder: Path) -> Iterator[tuple[str, Stored]]:
    for tensor in open_checkpoint(folder).tensors.values():
        with (folder / tensor.shard).open("rb") as file:
            file.seek(tensor.offset)
            yield tensor.name, Stored(tensor.dtype, tensor.shape, file.read(tensor.nbytes))


def _write(folder: Path, tensors: Tensors) -> None:
    for path in folder.glob("*.safetensors"):
        path.unlink()
    name = "model-00001-of-00001.safetensors"
    specs = [(n, t.dtype, t.shape, len(t.data)) for n, t in tensors.items()]
    data = b"".join(t.data for t in tensors.values())
    (folder / name).write_bytes(header_bytes(specs, {"format": "pt"}) + data)
    index = {"metadata": {"total_size": len(data)}, "weight_map": dict.fromkeys(tensors, name)}
    (folder / INDEX_NAME).write_text(json.dumps(index), encoding="utf-8")


def _findings(folder: Path, against: Path | None = None) -> set[str]:
    report = verify(
        str(folder), str(against) if against else None, "structure", strict=False,
        report_path=folder.parent / "report.json", console=Console("quiet"),
    )  # fmt: skip
    return {f.id for f in report.findings if f.severity != "note"}


@pytest.mark.parametrize("name", DAMAGES)
def test_verify_says_it(
    name: str, small_folders: dict[str, Path], small_source: Path, tmp_path: Path
) -> None:
    damage = DAMAGES[name]
    folder = shutil.copytree(small_folders[damage.layout], tmp_path / "out")
    # without a source every finding but one comes from the folder alone
    against = small_source if "tensor-missing" in damage.ids else None
    assert not _findings(folder, against)
    _apply(folder, damage)
    assert set(damage.ids) <= _findings(folder, against)


def test_docs_name_the_finding_of_every_silent_failure() -> None:
    table = DOCS.read_text(encoding="utf-8").partition("## Silent failures")[2]
    documented = set(re.findall(r"`([a-z0-9]+(?:-[a-z0-9]+)+)`", table))
    tested = {id for damage in DAMAGES.values() for id in damage.ids}
    assert tested <= documented, tested - documented

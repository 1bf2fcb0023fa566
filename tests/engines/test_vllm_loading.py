"""vLLM 0.33 and what mmq writes: every tensor reaches a parameter, or the loss is a known one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import vllm_rules as vllm
from loading import Files, LoaderError, Tensor, load

FilesOf = Callable[[str], Files]


def _load(files: Files) -> Any:
    return load(files, vllm.parameters, vllm.place)


def test_modelopt_layout_fills_every_parameter(files: FilesOf) -> None:
    checkpoint = files("modelopt")
    result = _load(checkpoint)
    assert result.clean, (result.missing[:3], result.wrong[:3], result.overwritten[:3])
    assert len(result.filled) + len(result.unused) == len(checkpoint.tensors)


def test_only_kv_scales_of_sparse_layers_are_dropped(files: FilesOf) -> None:
    checkpoint = files("modelopt")
    sparse = checkpoint.config["text_config"]["sparse_attention_config"]["sparse_attention_freq"]
    dropped = {
        f"language_model.model.layers.{layer}.self_attn.{side}_proj.{side}_scale"
        for layer, flag in enumerate(sparse)
        if flag
        for side in "kv"
    }
    assert set(_load(checkpoint).unused) == dropped
    assert dropped


def test_minimax_layout_fails_on_the_experts(files: FilesOf) -> None:
    """The class for quant_method mxfp8 knows nothing of moe_quant_algo: it makes MXFP8 experts,
    drops the packed codes without a word, and stops at scales that are too wide to be copied."""
    checkpoint = files("minimax")
    result = _load(checkpoint)
    assert all(".experts." in name for name in (w.partition(":")[0] for w in result.wrong))
    assert result.wrong[0].partition(":")[0].endswith(".weight_scale")
    packed = {n for n in checkpoint.tensors if n.endswith(".weight_packed")}
    assert packed <= set(result.unused)
    assert any(
        slot.parameter.endswith("experts.routed_experts.w13_weight") for slot in result.missing
    )


def test_everything_but_the_experts_loads_from_the_minimax_layout(files: FilesOf) -> None:
    result = _load(files("minimax"))
    assert all(".experts." in slot.parameter for slot in result.missing)


@pytest.mark.parametrize(
    ("kv_format", "dtype"), [("fp8", "fp8_e4m3"), ("nvfp4", "nvfp4"), (None, "auto")]
)
def test_declared_kv_cache(small: FilesOf, kv_format: str | None, dtype: str) -> None:
    checkpoint = small("modelopt")
    block = checkpoint.quantization
    if kv_format == "nvfp4":
        block["kv_cache_quant_algo"] = "NVFP4"
        block["kv_cache_scheme"]["num_bits"] = 4
    elif kv_format is None:
        del block["kv_cache_scheme"]
        block["kv_cache_quant_algo"] = None
    assert vllm.kv_cache_dtype(checkpoint) == dtype


def test_declared_nvfp4_kv_cache_is_refused_off_sm100() -> None:
    vllm.check_kv_cache("fp8_e4m3", sm100=False, topk_blocks=16)
    vllm.check_kv_cache("nvfp4", sm100=True, topk_blocks=16)
    with pytest.raises(LoaderError, match="SM100"):
        vllm.check_kv_cache("nvfp4", sm100=False, topk_blocks=16)


def test_declared_nvfp4_kv_cache_loses_the_scales_of_dense_layers_too(small: FilesOf) -> None:
    checkpoint = small("modelopt")
    checkpoint.quantization["kv_cache_scheme"]["num_bits"] = 4
    scales = {n for n in checkpoint.tensors if n.endswith((".k_scale", ".v_scale"))}
    assert set(_load(checkpoint).unused) == scales


# What vLLM does in silence; each has a finding of `mmq verify` in test_silent_failures.py.


def test_layers_without_the_prefix_leave_everything_unquantised(small: FilesOf) -> None:
    checkpoint = small("modelopt")
    block = checkpoint.quantization
    block["quantized_layers"] = {
        name.removeprefix("language_model."): info
        for name, info in block["quantized_layers"].items()
    }
    result = _load(checkpoint)
    assert any(
        "qkv_proj.weight'" in w and "wants Wanted(dtypes=('BF16',)" in w for w in result.wrong
    )
    assert any(name.endswith(".weight_scale_2") for name in result.unused)


def test_quantized_layers_may_come_from_the_second_file(small: FilesOf) -> None:
    checkpoint = small("modelopt")
    del checkpoint.quantization["quantized_layers"]
    assert _load(checkpoint).clean


def test_leftover_source_scale_overwrites_block_scales(small: FilesOf) -> None:
    checkpoint = small("modelopt")
    name = next(n for n in checkpoint.tensors if n.endswith("experts.0.w1.weight_scale"))
    rows, columns = checkpoint.tensors[name].shape
    checkpoint.tensors[name + "_inv"] = Tensor("U8", (rows, columns // 2))
    assert _load(checkpoint).overwritten == [f"{name}_inv over {name}"]


@pytest.mark.parametrize("suffix", ["weight", "weight_scale", "weight_scale_2", "input_scale"])
def test_missing_expert_tensor_leaves_a_hole(small: FilesOf, suffix: str) -> None:
    checkpoint = small("modelopt")
    name = next(n for n in checkpoint.tensors if n.endswith(f"experts.1.w3.{suffix}"))
    del checkpoint.tensors[name]
    assert [slot.part for slot in _load(checkpoint).missing] == ["1.w3"]


def test_scale_tagged_e8m0_is_converted_by_value(small: FilesOf) -> None:
    checkpoint = small("modelopt")
    name = next(n for n in checkpoint.tensors if n.endswith("q_proj.weight_scale_inv"))
    checkpoint.tensors[name] = checkpoint.tensors[name]._replace(dtype="F8_E8M0")
    assert [w.partition(":")[0] for w in _load(checkpoint).wrong] == [name]


def test_both_names_of_an_mxfp8_scale_load(small: FilesOf) -> None:
    checkpoint = small("modelopt")
    renamed = {
        n.replace("weight_scale_inv", "weight_scale"): t for n, t in checkpoint.tensors.items()
    }
    assert _load(Files(checkpoint.config, checkpoint.hf_quant, renamed)).clean


def test_gate_pattern_is_harmless(small: FilesOf) -> None:
    """vLLM's fused names contain no gate_proj, and routers are never quantised anyway."""
    checkpoint = small("modelopt")
    checkpoint.quantization["ignore"] = ["language_model.model.layers.*.block_sparse_moe.gate"]
    assert _load(checkpoint).clean


# Loud failures.


@pytest.mark.parametrize("key", ["hidden_act", "vision_config"])
def test_configs_that_are_refused(small: FilesOf, key: str) -> None:
    checkpoint = small("modelopt")
    part = checkpoint.config if key == "vision_config" else checkpoint.config["text_config"]
    del part[key]
    with pytest.raises(LoaderError):
        _load(checkpoint)


def test_lm_head_outside_the_ignored_layers_waits_for_a_scale(small: FilesOf) -> None:
    checkpoint = small("minimax")
    block = checkpoint.quantization
    block["ignored_layers"] = [n for n in block["ignored_layers"] if not n.endswith("lm_head")]
    missing = {slot.parameter for slot in _load(checkpoint).missing}
    assert "language_model.lm_head.weight_scale" in missing

"""SGLang 0.5.23 and what mmq writes: every tensor of both layouts reaches a parameter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sglang_rules as sglang
from loading import Files, LoaderError, Tensor, load

FilesOf = Callable[[str], Files]


def _load(files: Files) -> Any:
    return load(files, sglang.parameters, sglang.place)


@pytest.mark.parametrize("layout", ["modelopt", "minimax"])
def test_both_layouts_fill_every_parameter_and_nothing_is_dropped(
    files: FilesOf, layout: str
) -> None:
    checkpoint = files(layout)
    result = _load(checkpoint)
    assert result.clean, (result.missing[:3], result.wrong[:3], result.overwritten[:3])
    assert not result.unused
    assert len(result.filled) == len(checkpoint.tensors)


def test_kv_scales_reach_dense_and_sparse_layers(files: FilesOf) -> None:
    checkpoint = files("modelopt")
    layers = checkpoint.config["text_config"]["num_hidden_layers"]
    filled = {slot.parameter for slot in _load(checkpoint).filled}
    assert {
        f"model.layers.{layer}.self_attn.attn.{side}_scale"
        for layer in range(layers)
        for side in "kv"
    } <= filled


def test_each_layout_meets_its_own_method(files: FilesOf) -> None:
    assert sglang.method(files("modelopt")) == sglang.MODELOPT
    assert sglang.method(files("minimax")) == sglang.MINIMAX


def test_plain_m3_in_the_minimax_layout_stays_off_the_blackwell_pool(files: FilesOf) -> None:
    with pytest.raises(LoaderError, match="every layer"):
        sglang.check_blackwell_pool(files("minimax"))


def test_sparse_attention_in_every_layer_would_fit_the_pool(small: FilesOf) -> None:
    checkpoint = small("minimax")
    sparse = checkpoint.config["text_config"]["sparse_attention_config"]
    ones = [1] * len(sparse["sparse_attention_freq"])
    sparse["sparse_attention_freq"] = sparse["sparse_disable_index_value"] = ones
    sglang.check_blackwell_pool(checkpoint)


def test_declared_kv_cache(small: FilesOf) -> None:
    checkpoint = small("modelopt")
    assert sglang.kv_cache_dtype(checkpoint) == "fp8_e4m3"
    checkpoint.quantization["kv_cache_scheme"]["num_bits"] = 4
    assert sglang.kv_cache_dtype(checkpoint) == "model dtype"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("kv_cache_quant_algo", "NVFP4"),
        ("group_size", 32),
        ("index_k_quant_type", "fp8"),
        ("activation_scheme", "static"),
        ("weight_block_size", [128, 128]),
    ],
)
def test_values_that_the_minimax_method_refuses(small: FilesOf, key: str, value: Any) -> None:
    checkpoint = small("minimax")
    checkpoint.quantization[key] = value
    with pytest.raises(LoaderError, match=key):
        _load(checkpoint)


# What SGLang does in silence; each has a finding of `mmq verify` in test_silent_failures.py.


@pytest.mark.parametrize("key", ["moe_quant_algo", "moe_quant_format"])
def test_without_the_pair_of_keys_every_packed_tensor_is_dropped(small: FilesOf, key: str) -> None:
    checkpoint = small("minimax")
    del checkpoint.quantization[key]
    result = _load(checkpoint)
    packed = {n for n in checkpoint.tensors if n.endswith(".weight_packed")}
    assert packed and packed <= set(result.unused)
    assert any(slot.parameter.endswith("experts.w13_weight") for slot in result.missing)


def test_index_projections_outside_quantized_layers_become_bf16(small: FilesOf) -> None:
    checkpoint = small("modelopt")
    layers = checkpoint.quantization["quantized_layers"]
    for name in [n for n in layers if ".index_" in n]:
        del layers[name]
    result = _load(checkpoint)
    assert result.wrong and all(".index_" in w.partition(":")[0] for w in result.wrong)
    scales = {n for n in checkpoint.tensors if ".index_" in n and n.endswith("_scale_inv")}
    assert set(result.unused) == scales


def test_gate_pattern_takes_gate_proj_with_it(small: FilesOf) -> None:
    """`*gate*` matches gate_up_proj, the fused matrix of dense and shared MLPs."""
    checkpoint = small("modelopt")
    checkpoint.quantization["ignore"] = ["*gate*"]
    wrong = {w.partition(":")[0] for w in _load(checkpoint).wrong}
    assert any(".shared_experts.gate_proj." in name for name in wrong)
    assert any(".mlp.up_proj." in name for name in wrong)


def test_only_the_name_with_inv_is_read(small: FilesOf) -> None:
    checkpoint = small("modelopt")
    renamed = {
        n.replace("weight_scale_inv", "weight_scale"): t for n, t in checkpoint.tensors.items()
    }
    result = _load(Files(checkpoint.config, checkpoint.hf_quant, renamed))
    assert any(name.endswith("o_proj.weight_scale") for name in result.unused)
    assert any(slot.parameter.endswith("o_proj.weight_scale_inv") for slot in result.missing)


def test_scale_tagged_e8m0_is_converted_by_value(small: FilesOf) -> None:
    checkpoint = small("modelopt")
    name = next(n for n in checkpoint.tensors if n.endswith("o_proj.weight_scale_inv"))
    checkpoint.tensors[name] = checkpoint.tensors[name]._replace(dtype="F8_E8M0")
    assert [w.partition(":")[0] for w in _load(checkpoint).wrong] == [name]


def test_block_scale_tagged_u8_is_converted_by_value(small: FilesOf) -> None:
    checkpoint = small("minimax")
    name = next(n for n in checkpoint.tensors if n.endswith("experts.0.w2.weight_scale"))
    checkpoint.tensors[name] = checkpoint.tensors[name]._replace(dtype="U8")
    assert [w.partition(":")[0] for w in _load(checkpoint).wrong] == [name]


def test_leftover_source_scale_is_ignored(small: FilesOf) -> None:
    checkpoint = small("modelopt")
    name = next(n for n in checkpoint.tensors if n.endswith("experts.0.w1.weight_scale"))
    checkpoint.tensors[name + "_inv"] = Tensor("U8", (128, 8))
    assert _load(checkpoint).unused == [name + "_inv"]


@pytest.mark.parametrize("suffix", ["weight_packed", "weight_scale", "weight_global_scale",
                                    "input_global_scale"])  # fmt: skip
def test_missing_expert_tensor_leaves_a_hole(small: FilesOf, suffix: str) -> None:
    checkpoint = small("minimax")
    name = next(n for n in checkpoint.tensors if n.endswith(f"experts.1.w2.{suffix}"))
    del checkpoint.tensors[name]
    assert [slot.part for slot in _load(checkpoint).missing] == ["1.w2"]


def test_missing_input_scale_of_the_modelopt_layout_becomes_one(small: FilesOf) -> None:
    checkpoint = small("modelopt")
    for name in [n for n in checkpoint.tensors if n.endswith(".input_scale")]:
        del checkpoint.tensors[name]
    assert _load(checkpoint).clean


@pytest.mark.parametrize("name", ["kv_scale", "qkv_proj.k_scale", "v_proj.k_scale"])
def test_kv_scales_under_other_names_are_dropped(small: FilesOf, name: str) -> None:
    checkpoint = small("modelopt")
    stray = f"language_model.model.layers.0.self_attn.{name}"
    checkpoint.tensors[stray] = Tensor("F32", ())
    assert _load(checkpoint).unused == [stray]


# Loud failures, and the second file.


def test_without_quantized_layers_it_is_taken_for_another_format(small: FilesOf) -> None:
    """The second file is not asked: the block alone decides between ModelOpt's mix and W4AFP8."""
    checkpoint = small("modelopt")
    del checkpoint.quantization["quantized_layers"]
    with pytest.raises(LoaderError, match="w4afp8"):
        _load(checkpoint)


def test_without_any_block_the_second_file_serves(small: FilesOf) -> None:
    checkpoint = small("modelopt")
    del checkpoint.config["quantization_config"]
    assert _load(checkpoint).clean


def test_a_block_silent_about_the_kv_cache_is_replaced_by_the_second_file(small: FilesOf) -> None:
    checkpoint = small("modelopt")
    for key in ("kv_cache_quant_algo", "kv_cache_scheme"):
        del checkpoint.quantization[key]
    result = _load(checkpoint)
    assert result.clean and not result.unused  # the KV scales load as the second file says


def test_layers_without_the_prefix_do_not_fit(small: FilesOf) -> None:
    checkpoint = small("modelopt")
    block = checkpoint.quantization
    block["quantized_layers"] = {
        n.removeprefix("language_model."): i for n, i in block["quantized_layers"].items()
    }
    assert any(".experts." in w.partition(":")[0] for w in _load(checkpoint).wrong)

"""TensorRT-LLM and what mmq writes, by the rules of its M3 pull requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorrt_llm_rules as trtllm
from loading import Files, LoaderError, load

FilesOf = Callable[[str], Files]


def _load(files: Files) -> Any:
    return load(files, trtllm.parameters, trtllm.place)


def test_modelopt_layout_fills_every_parameter_and_nothing_is_dropped(files: FilesOf) -> None:
    checkpoint = files("modelopt")
    result = _load(checkpoint)
    assert result.clean, (result.missing[:3], result.wrong[:3], result.overwritten[:3])
    assert not result.unused
    assert len(result.filled) == len(checkpoint.tensors)


def test_minimax_layout_has_no_rule(files: FilesOf) -> None:
    checkpoint = files("minimax")
    assert checkpoint.hf_quant is None
    with pytest.raises(LoaderError, match=r"hf_quant_config\.json"):
        _load(checkpoint)
    packed = next(name for name in checkpoint.tensors if name.endswith(".weight_packed"))
    assert trtllm.place(packed, frozenset({"model.norm.weight"})) is None


def test_the_second_file_alone_decides_the_formats(small: FilesOf) -> None:
    checkpoint = small("modelopt")
    del checkpoint.config["quantization_config"]
    assert _load(checkpoint).clean


@pytest.mark.parametrize(("algo", "expected"), [("NVFP4", True), ("FP8", False), (None, False)])
def test_scales_mean_nvfp4_where_the_second_file_says_so(
    small: FilesOf, algo: str | None, expected: bool
) -> None:
    checkpoint = small("modelopt")
    assert checkpoint.hf_quant is not None
    checkpoint.hf_quant["quantization"]["kv_cache_quant_algo"] = algo
    assert trtllm.uses_scales_for_nvfp4(checkpoint) is expected


def test_one_kv_scale_of_a_pair_counts_as_none() -> None:
    assert trtllm.kv_scales_of({"k": 0.1, "v": 0.2}) == (0.1, 0.2)
    assert trtllm.kv_scales_of({"v": 0.2}) == (1.0, 1.0)


def test_both_names_of_an_mxfp8_scale_load(small: FilesOf) -> None:
    checkpoint = small("modelopt")
    renamed = {
        name.replace("weight_scale_inv", "weight_scale"): tensor
        for name, tensor in checkpoint.tensors.items()
    }
    assert _load(Files(checkpoint.config, checkpoint.hf_quant, renamed)).clean


def test_missing_expert_tensor_leaves_a_hole(small: FilesOf) -> None:
    checkpoint = small("modelopt")
    name = next(n for n in checkpoint.tensors if n.endswith("experts.1.w2.weight_scale_2"))
    del checkpoint.tensors[name]
    assert [slot.parameter for slot in _load(checkpoint).missing] == [
        name.removeprefix("language_model.")
    ]

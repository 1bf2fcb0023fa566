"""Bytes by component and format, KV bytes per token, and sizes as users type them."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import pytest

from mmq.convert.header_manifest import open_builtin
from mmq.convert.sizes import RELEASES, kv_bytes, parse_size, release_of, size_rows
from mmq.errors import UsageError
from mmq.quantize.architecture import COMPONENTS
from mmq.report.tables import SizeRow

LAYER = "language_model.model.layers.7."
EXPERT = LAYER + "block_sparse_moe.experts.42.w1."


class Tensor(NamedTuple):
    name: str
    dtype: str
    nbytes: int = 100


def text_config(**changes: Any) -> dict[str, Any]:
    """The release's text_config, as far as KV sizes need it."""
    config: dict[str, Any] = json.loads(
        json.dumps(open_builtin("minimax-m3-mxfp8").config["text_config"])
    )
    config.update(changes)
    return {key: value for key, value in config.items() if value is not None}


def by_component(rows: list[SizeRow]) -> dict[str, int]:
    totals: dict[str, int] = {}
    for row in rows:
        totals[row.component] = totals.get(row.component, 0) + row.nbytes
    return totals


def test_the_release_by_component() -> None:
    rows = size_rows(open_builtin("minimax-m3-mxfp8").tensors.values())
    assert by_component(rows) == {
        "routed_experts": 426_032_234_496,
        "attention": 6_617_825_280,
        "shared_experts": 3_328_376_832,
        "embedding": 2_458_386_432,
        "lm_head": 2_458_386_432,
        "vision": 1_265_382_400,
        "dense_mlp": 700_710_912,
        "patch_merge_mlp": 377_511_936,
        "multi_modal_projector": 91_250_688,
        "indexer": 231_137_280,
        "router": 179_335_680,
        "norms": 1_546_752,
    }
    assert sum(row.tensors for row in rows) == 45_838
    experts = [row[1:] for row in rows if row.component == "routed_experts"]
    assert experts == [
        ("MXFP8", "F8_E4M3", 21_888, 413_122_166_784),
        ("MXFP8", "U8", 21_888, 12_910_067_712),
    ]


def test_the_mtp_layer_is_a_component_of_its_own() -> None:
    rows = size_rows(open_builtin("minimax-m3-mxfp8-mtp").tensors.values())
    assert by_component(rows)["mtp"] == 7_728_059_904
    assert sum(row.tensors for row in rows if row.component == "mtp") == 799


@pytest.mark.parametrize(
    ("name", "dtype", "component", "format"),
    [
        (EXPERT + "weight", "F8_E4M3", "routed_experts", "MXFP8"),
        (EXPERT + "weight_scale_inv", "U8", "routed_experts", "MXFP8"),
        (EXPERT + "weight_scale", "F8_E8M0", "routed_experts", "MXFP8"),
        (EXPERT + "weight", "U8", "routed_experts", "NVFP4"),
        (EXPERT + "weight_packed", "U8", "routed_experts", "NVFP4"),
        (EXPERT + "weight_scale", "F8_E4M3", "routed_experts", "NVFP4"),
        (EXPERT + "weight_scale_2", "F32", "routed_experts", "NVFP4"),
        (EXPERT + "input_scale", "F32", "routed_experts", "NVFP4"),
        (EXPERT + "weight_global_scale", "F32", "routed_experts", "NVFP4"),
        (EXPERT + "input_global_scale", "F32", "routed_experts", "NVFP4"),
        (EXPERT + "weight", "BF16", "routed_experts", "BF16"),
        (LAYER + "self_attn.k_proj.k_scale", "F32", "kv_scales", "F32"),
        (LAYER + "self_attn.v_proj.v_scale", "F32", "kv_scales", "F32"),
        (LAYER + "block_sparse_moe.e_score_correction_bias", "F32", "router", "F32"),
        ("language_model.lm_head.weight", "BF16", "lm_head", "BF16"),
        ("something.else", "I64", "other", "I64"),
    ],
)
def test_every_tensor_has_a_component_and_a_format(
    name: str, dtype: str, component: str, format: str
) -> None:
    assert size_rows([Tensor(name, dtype)]) == [SizeRow(component, format, dtype, 1, 100)]


def test_kinds_that_look_alike_stay_apart() -> None:
    names = [EXPERT + "weight", EXPERT.replace("w1", "w9") + "weight", "a.1.weight", "a1.weight"]
    rows = size_rows([Tensor(name, "BF16", 10**i) for i, name in enumerate(names)])
    assert [(r.component, r.nbytes) for r in rows] == [("routed_experts", 1), ("other", 1110)]


def test_rows_come_in_the_order_of_reports() -> None:
    tensors = open_builtin("minimax-m3-mxfp8-mtp").tensors.values()
    seen = [row.component for row in size_rows(reversed(list(tensors)))]
    assert seen == sorted(seen, key=COMPONENTS.index)


def test_kv_bytes_of_the_release() -> None:
    kv = kv_bytes(text_config())
    assert kv is not None
    assert (kv.layers, kv.sparse_layers, kv.heads, kv.head_dim) == (60, 57, 4, 128)
    assert (kv.bf16, kv.fp8, kv.nvfp4, kv.hybrid) == (122_880, 61_440, 34_560, 35_904)
    assert (kv.index_bf16, kv.index_fp8, kv.index_nvfp4) == (14_592, 7_296, 4_104)


def test_kv_bytes_when_every_layer_is_sparse() -> None:
    sparse = {**text_config()["sparse_attention_config"], "sparse_attention_freq": [1] * 60}
    kv = kv_bytes(text_config(sparse_attention_config=sparse))
    assert kv is not None
    assert (kv.nvfp4, kv.hybrid, kv.index_nvfp4) == (34_560, 34_560, 4_320)


def test_kv_bytes_of_another_config() -> None:
    kv = kv_bytes({"num_hidden_layers": 2, "num_key_value_heads": 1, "hidden_size": 256,
                   "num_attention_heads": 4})  # fmt: skip
    assert kv is not None
    assert (kv.head_dim, kv.bf16, kv.fp8, kv.nvfp4) == (64, 512, 256, 144)
    assert (kv.sparse_layers, kv.hybrid, kv.index_bf16) == (None, None, None)


def test_kv_bytes_without_whole_blocks_has_no_nvfp4() -> None:
    kv = kv_bytes(text_config(head_dim=24))
    assert kv is not None and kv.fp8 == 60 * 2 * 4 * 24
    assert (kv.nvfp4, kv.hybrid) == (None, None)


def test_kv_bytes_with_sparse_attention_switched_off() -> None:
    sparse = {**text_config()["sparse_attention_config"], "use_sparse_attention": False}
    kv = kv_bytes(text_config(sparse_attention_config=sparse))
    assert kv is not None
    assert (kv.sparse_layers, kv.hybrid, kv.index_bf16) == (0, 61_440, None)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": None},
        {"num_key_value_heads": None},
        {"num_hidden_layers": "60"},
        {"num_hidden_layers": -1},
        {"num_hidden_layers": True},
        {"head_dim": None, "num_attention_heads": None},
        {"head_dim": None, "hidden_size": None},
    ],
)
def test_kv_bytes_are_unknown_without_the_keys(changes: dict[str, Any]) -> None:
    assert kv_bytes(text_config(**changes)) is None


@pytest.mark.parametrize("sparse", [None, "yes", {"sparse_attention_freq": [1, 1]}, {}])
def test_kv_bytes_without_a_usable_sparse_list_have_no_hybrid(sparse: Any) -> None:
    kv = kv_bytes(text_config(sparse_attention_config=sparse))
    assert kv is not None and kv.fp8 == 61_440
    assert (kv.hybrid, kv.index_bf16) == (None, None)


def test_the_release_is_known_by_its_totals() -> None:
    for name, words in (
        ("minimax-m3-mxfp8", "the MXFP8 release"),
        ("minimax-m3-mxfp8-mtp", "the MXFP8 release with its MTP layer"),
    ):
        source = open_builtin(name)
        assert release_of(len(source.tensors), source.nbytes) == words
    assert release_of(45_838, 443_742_085_121) is None
    assert len(RELEASES) == 2


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("5GB", 5_000_000_000), ("4.5GiB", 4_831_838_208), ("500MB", 500_000_000),
        ("500 mb", 500_000_000), ("2KiB", 2048), ("1TB", 10**12), ("1000000", 10**6), ("77B", 77),
        ("1.5k", 1500), (" 3G ", 3 * 10**9),
    ],
)  # fmt: skip
def test_sizes_as_typed(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    "text", ["", "5XB", "-5GB", "0", "0.1B", "GB", "5iB", "1e9", "5GB5", "٥GB", "5", "999999"]
)
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_size(text)
    assert caught.value.exit_code == 2 and caught.value.id == "option-value"

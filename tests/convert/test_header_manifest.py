"""Header manifests: the built-in sources at true scale, and what a user's file may get wrong."""

from __future__ import annotations

import json
import runpy
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from mmq.convert.checkpoint import open_checkpoint
from mmq.convert.header_manifest import BUILTIN, MAX_TENSORS, open_builtin
from mmq.errors import BadInputError

SCRIPT = Path(__file__).parents[2] / "scripts" / "build_manifest.py"
EXPERT = "language_model.model.layers.{}.block_sparse_moe.experts.{}.w1.weight"


def write(tmp_path: Path, manifest: Any) -> Path:
    path = tmp_path / "model.json"
    path.write_text(manifest if isinstance(manifest, str) else json.dumps(manifest), "utf-8")
    return path


def entry(**changes: Any) -> dict[str, Any]:
    return {"name": "norm.weight", "dtype": "BF16", "shape": [6], **changes}


def test_the_release_has_its_exact_totals() -> None:
    release = open_builtin("minimax-m3-mxfp8")
    assert len(release.tensors) == 45_838
    assert release.nbytes == 443_742_085_120
    assert release.inferred == ""
    assert (release.root, release.shards, release.extra["shard_count"]) == (None, {}, 31)


def test_the_mtp_layer_is_added_and_labelled_inferred() -> None:
    release, with_mtp = open_builtin("minimax-m3-mxfp8"), open_builtin("minimax-m3-mxfp8-mtp")
    extra = [t for name, t in with_mtp.tensors.items() if name not in release.tensors]
    assert len(extra) == 799 and all(".mtp." in t.name for t in extra)
    assert with_mtp.nbytes == 451_470_145_024
    assert "799 MTP tensors" in with_mtp.inferred and "inferred" in with_mtp.inferred
    assert with_mtp.config == release.config


def test_the_release_is_the_one_the_file_lists_show() -> None:
    tensors = open_builtin("minimax-m3-mxfp8").tensors
    dtypes = Counter(t.dtype for t in tensors.values())
    assert dtypes == {"F8_E4M3": 22_422, "U8": 22_422, "BF16": 879, "F32": 115}
    assert EXPERT.format(2, 0) not in tensors and EXPERT.format(3, 0) in tensors
    assert EXPERT.format(59, 127) in tensors and EXPERT.format(59, 128) not in tensors
    scale = tensors["language_model.model.layers.0.self_attn.q_proj.weight_scale_inv"]
    assert (scale.dtype, scale.shape, scale.nbytes) == ("U8", (8192, 192), 8192 * 192)
    assert all(name == tensor.name for name, tensor in tensors.items())


def test_the_release_config_says_what_engines_ask() -> None:
    config = open_builtin("minimax-m3-mxfp8").config
    text = config["text_config"]
    assert config["model_type"] == "minimax_m3_vl"
    assert len(config["quantization_config"]["ignored_layers"]) == 62
    assert config["quantization_config"]["weight_block_size"] == [1, 32]
    assert text["partial_rotary_factor"] == 0.5 and text["hidden_act"] == "swigluoai"
    assert text["shared_intermediate_size"] == text["intermediate_size"] == 3072
    sparse = text["sparse_attention_config"]
    assert sparse["sparse_num_index_heads"] == text["num_key_value_heads"] == 4
    for freq in (text["moe_layer_freq"], sparse["sparse_attention_freq"]):
        assert freq == [0] * 3 + [1] * 57
    assert config["vision_config"]["num_hidden_layers"] == 32
    assert text["num_mtp_modules"] == 1


def test_open_checkpoint_knows_the_builtin_names() -> None:
    assert sorted(BUILTIN) == ["minimax-m3-mxfp8", "minimax-m3-mxfp8-mtp"]
    with pytest.raises(BadInputError) as caught:
        open_checkpoint("minimax-m3")
    assert caught.value.id == "source-not-found"
    assert "minimax-m3-mxfp8-mtp" in str(caught.value.expected)


def test_ranges_are_inclusive_and_shards_may_follow_the_layer(tmp_path: Path) -> None:
    path = write(tmp_path, {
        "config": {"model_type": "minimax_m3_vl"},
        "inferred": "all of it",
        "tensors": [
            entry(shard="a.safetensors"),
            entry(name="layers.{L}.experts.{E}.w{E}", dtype="F8_E4M3", shape=[8, 32],
                  layers=[3, 4], experts=[0, 1], shard="layer-{L}.safetensors"),
            entry(name="layers.{L}.norm", layers=[9, 9], shape=[]),
        ],
    })  # fmt: skip
    source = open_checkpoint(path)
    assert [(t.name, t.shard, t.nbytes) for t in source.tensors.values()] == [
        ("norm.weight", "a.safetensors", 12),
        ("layers.3.experts.0.w0", "layer-3.safetensors", 256),
        ("layers.3.experts.1.w1", "layer-3.safetensors", 256),
        ("layers.4.experts.0.w0", "layer-4.safetensors", 256),
        ("layers.4.experts.1.w1", "layer-4.safetensors", 256),
        ("layers.9.norm", "", 2),
    ]
    assert source.extra["shard_count"] == 3
    assert (source.inferred, source.root) == ("all of it", None)
    assert source.config == {"model_type": "minimax_m3_vl"}


BAD_ENTRIES: list[tuple[str, Any, str]] = [
    ("no object", "norm.weight", "manifest-invalid"),
    ("no name", {"dtype": "BF16", "shape": [6]}, "manifest-invalid"),
    ("empty name", entry(name=""), "manifest-invalid"),
    ("unknown dtype", entry(dtype="X7_MADEUP"), "dtype-unknown"),
    ("dtype is a list", entry(dtype=["BF16"]), "dtype-unknown"),
    ("no shape", {"name": "a", "dtype": "BF16"}, "manifest-shape"),
    ("negative dimension", entry(shape=[-1]), "manifest-shape"),
    ("fractional dimension", entry(shape=[1.5]), "manifest-shape"),
    ("boolean dimension", entry(shape=[True]), "manifest-shape"),
    ("65 dimensions", entry(shape=[1] * 65), "manifest-shape"),
    ("half a byte", entry(dtype="F4", shape=[3]), "manifest-shape"),
    ("more than memory can be", entry(shape=[1 << 62, 1 << 62]), "manifest-shape"),
    ("layers without {L}", entry(layers=[0, 1]), "manifest-invalid"),
    ("{L} without layers", entry(name="layers.{L}.a"), "manifest-invalid"),
    ("{E} without experts", entry(name="experts.{E}.a"), "manifest-invalid"),
    ("range backwards", entry(name="{L}", layers=[2, 1]), "manifest-range"),
    ("range of one number", entry(name="{L}", layers=[2]), "manifest-range"),
    ("range of words", entry(name="{L}", layers=["0", "1"]), "manifest-range"),
    ("negative range", entry(name="{L}", layers=[-1, 1]), "manifest-range"),
    ("endless range", entry(name="{L}", layers=[0, (1 << 63) - 1]), "manifest-range"),
    ("too many tensors", entry(name="{L}.{E}", layers=[0, 99_999], experts=[0, 99_999]),
     "manifest-too-large"),
    ("shard is a number", entry(shard=3), "manifest-invalid"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "id"), [(line, id) for _, line, id in BAD_ENTRIES], ids=[n for n, _, _ in BAD_ENTRIES]
)
def test_a_bad_entry_is_named(tmp_path: Path, line: Any, id: str) -> None:
    path = write(tmp_path, {"tensors": [entry(name="fine"), line]})
    with pytest.raises(BadInputError) as caught:
        open_checkpoint(path)
    assert caught.value.id == id
    assert "tensors[1]" in str(caught.value.where) or id == "manifest-too-large"


@pytest.mark.parametrize(
    "lines",
    [
        [entry(), entry()],
        [entry(name="l.{L}", layers=[0, 5]), entry(name="l.3")],
    ],
)
def test_a_tensor_described_twice_is_refused(tmp_path: Path, lines: list[Any]) -> None:
    with pytest.raises(BadInputError, match="described twice") as caught:
        open_checkpoint(write(tmp_path, {"tensors": lines}))
    assert caught.value.id == "tensor-twice"


@pytest.mark.parametrize(
    ("text", "id"),
    [
        ("{not json", "json-invalid"),
        ("[1, 2]", "json-invalid"),
        ("{}", "manifest-invalid"),
        ('{"tensors": {}}', "manifest-invalid"),
        ('{"tensors": []}', "manifest-invalid"),
        ({"tensors": [entry()], "config": []}, "manifest-invalid"),
        ({"tensors": [entry()], "inferred": 3}, "manifest-invalid"),
        ({"tensors": [entry()], "totals": {"tensors": 2}}, "manifest-totals"),
        ({"tensors": [entry()], "totals": {"payload_bytes": 13}}, "manifest-totals"),
    ],
)
def test_a_bad_file_is_refused(tmp_path: Path, text: Any, id: str) -> None:
    with pytest.raises(BadInputError) as caught:
        open_checkpoint(write(tmp_path, text))
    assert caught.value.id == id


def test_an_index_is_not_mistaken_for_a_manifest(tmp_path: Path) -> None:
    with pytest.raises(BadInputError) as caught:
        open_checkpoint(write(tmp_path, {"weight_map": {"a": "b.safetensors"}}))
    assert "folder" in str(caught.value.hint)


def test_right_totals_pass_and_the_limit_itself_is_allowed(tmp_path: Path) -> None:
    totals = {"tensors": 1, "payload_bytes": 12}
    assert open_checkpoint(write(tmp_path, {"tensors": [entry()], "totals": totals})).nbytes == 12
    last = entry(name="{L}", layers=[MAX_TENSORS - 1, MAX_TENSORS - 1])
    assert list(open_checkpoint(write(tmp_path, {"tensors": [last]})).tensors) == ["1999999"]


def test_the_script_writes_files_that_open(tmp_path: Path) -> None:
    row = {**entry(), "layers": None, "experts": None, "count": 1, "status": "seen"}
    mtp = entry(name="mtp.{L}", layers=[0, 0])
    table = {
        "totals": {"tensors": 1, "payload_bytes": 12, "by_component": {}},
        "shards": {"count": 31},
        "quantization_config": {"quant_method": "mxfp8"},
        "tensors": [row],
        "mtp_module": {"tensors": [mtp], "tensors_count": 1, "payload_bytes": 12},
    }
    script = runpy.run_path(str(SCRIPT))
    script["main"].__globals__["OUT"] = tmp_path / "data"
    script["main"](str(write(tmp_path, table)))
    release = open_checkpoint(tmp_path / "data" / "minimax-m3-mxfp8.json")
    layer = open_checkpoint(tmp_path / "data" / "minimax-m3-mtp-layer.json")
    assert list(release.tensors) == ["norm.weight"] and list(layer.tensors) == ["mtp.0"]
    assert release.config["quantization_config"] == {"quant_method": "mxfp8"}
    # the part of config.json that the script itself holds is the part that ships
    shipped = open_builtin("minimax-m3-mxfp8").config
    assert {**release.config, "quantization_config": 0} == {**shipped, "quantization_config": 0}

"""Weights, scales and configs that do not make a MiniMax-M3 MXFP8 model: refused by name, or read
for what they are. Tests carry the row of the case list they stand for (R7 …)."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hostile import (
    INDEX,
    LM_HEAD,
    MTP,
    NORM,
    SIDE_FILES,
    TEXT,
    W1,
    W2,
    add_mtp,
    bf16,
    drop_module,
    drop_scale,
    expert,
    f32,
    first,
    fuse_experts,
    good,
    last,
    layer,
    tensor,
)
from m3_source import nvfp4_values
from test_reading_shards import refused, same_as_good

__all__ = ["same_as_good"]


def test_R7_scale_bytes_are_exponents(convert):
    """value = e4m3 · 2^(b − 127): read as plain numbers, weights are 450,000 times too large."""
    source = good()
    outcome = convert(source, "--to", "bf16")
    for module in (W1, W2, f"{layer(0)}self_attn.q_proj"):
        assert (outcome.tensors[f"{module}.weight"].f64() == source.values(module)).all()


def test_R7_nvfp4_decodes_to_the_source_values(good_output):
    out, source = good_output.tensors, good()
    for number in range(4):
        for projection in ("w1", "w2", "w3"):
            name = expert(2, number, projection)
            s2 = float(out[f"{name}.weight_scale_2"].f64())
            got = nvfp4_values(out[f"{name}.weight"], out[f"{name}.weight_scale"], s2)
            want = source.values(name)
            assert np.square(got - want).sum() < 0.012 * np.square(want).sum()


SCALES_OF_OTHER_FORMATS = {
    "128x128": f32(np.full((1, 1), 0.02)),
    "per-row": f32(np.full((64, 1), 0.02)),
    "per-tensor": f32(0.02),
    "bf16": bf16(np.full((64, 4), 0.02)),
    "e4m3": tensor("F8_E4M3", np.full((64, 4), 0x38)),
}


@pytest.mark.parametrize("kind", SCALES_OF_OTHER_FORMATS)
def test_R9_scales_of_another_format(convert, kind):
    source = good()
    scale = SCALES_OF_OTHER_FORMATS[kind]
    source[f"{W1}.weight_scale_inv"] = scale
    refused(
        convert(source), "scale-dtype", f"{W1}.weight_scale_inv", scale.dtype, list(scale.shape)
    )


@pytest.mark.parametrize("shape", [(64, 8), (4, 64), (64, 3), (256,), (64, 2, 2), (0, 4)])
def test_R10_scale_grid_does_not_fit(convert, shape):
    source = good()
    source[f"{W1}.weight_scale_inv"] = tensor("U8", np.full(shape, 120))
    refused(
        convert(source), "scale-shape", f"{W1}.weight_scale_inv", list(shape), [64, 128], [64, 4]
    )


@pytest.mark.parametrize("module", [W1, f"{layer(0)}self_attn.q_proj", f"{layer(0)}mlp.up_proj"])
def test_R10_scale_absent(convert, module):
    source = good()
    drop_scale(source, module)
    refused(convert(source), "scale-missing", f"{module}.weight")


def test_R10_two_scales(convert):
    source = good()
    shard = source.shard_of(f"{W1}.weight")
    source.shards[shard][f"{W1}.weight_scale"] = source[f"{W1}.weight_scale_inv"]
    refused(convert(source), "scale-twice", W1)


def test_R10_scale_without_its_weight(convert):
    source = good()
    source.pop(f"{layer(0)}mlp.up_proj.weight")
    refused(convert(source), "scale-without-weight", f"{layer(0)}mlp.up_proj.weight_scale_inv")


def test_R10_scale_beside_a_float_weight(convert):
    source = good()
    source[f"{layer(0)}mlp.up_proj.weight"] = bf16(np.zeros((96, 128)))
    refused(convert(source), "scale-without-weight", "BF16")


def test_R10_scale_named_weight_scale(convert, same_as_good):
    """The name without `_inv` is read too, and written with it, as every engine takes it."""
    source = good()
    for shard, tensors in source.shards.items():
        source.shards[shard] = {n.replace("_scale_inv", "_scale"): t for n, t in tensors.items()}
    same_as_good(convert(source), "mmq-manifest.json")


@pytest.mark.parametrize("where", ["top", "text"])
def test_R20_untied_head_absent(convert, where):
    source = good()
    source.pop(LM_HEAD)
    part = source.config if where == "top" else source.config["text_config"]
    part["tie_word_embeddings"] = False
    refused(convert(source), "lm-head-missing", LM_HEAD, "tie_word_embeddings")


def test_R20_tied_head_absent(convert):
    source = good()
    source.pop(LM_HEAD)
    source.config["text_config"]["tie_word_embeddings"] = True
    assert convert(source).code == 0


def test_R24_mtp_dropped_by_default_and_listed(convert, good_output):
    source = good()
    names = add_mtp(source)
    outcome = convert(source)
    manifest = outcome.json("mmq-manifest.json")
    assert {d["name"] for d in manifest["dropped"]} == set(names)
    assert all("MTP" in d["reason"] for d in manifest["dropped"])
    assert sum(outcome.json("mmq-convert.json")["dropped"].values()) == len(names)
    text = outcome.json("config.json")["text_config"]
    assert (text["num_mtp_modules"], text["num_nextn_predict_layers"]) == (0, 0)
    assert outcome.tensors == good_output.tensors


def test_R24_mtp_kept_with_its_experts_converted(convert):
    source = good()
    names = add_mtp(source)
    outcome = convert(source, "--mtp", "keep")
    out = outcome.tensors
    module = f"{MTP}transformer_layer.block_sparse_moe.experts.3.w2"
    assert out[f"{module}.weight"].dtype == "U8"
    assert f"{module}.weight_scale_inv" not in out
    others = [n for n in names if ".experts." not in n]
    assert all(out[n] == source[n] for n in others)
    assert outcome.json("config.json")["text_config"]["num_mtp_modules"] == 7
    layers = outcome.json("hf_quant_config.json")["quantization"]["quantized_layers"]
    assert layers[module]["quant_algo"] == "NVFP4"
    assert layers[f"{MTP}eh_proj"]["quant_algo"] == "MXFP8"


def test_R24_mtp_kept_must_be_whole(convert):
    source = good()
    add_mtp(source)
    missing = f"{MTP}transformer_layer.block_sparse_moe.experts.2.w1"
    drop_module(source, missing)
    refused(convert(source, "--mtp", "keep"), "module-missing", missing)


def test_R24_declared_mtp_without_tensors_is_a_note(good_output):
    assert good_output.findings["mtp-declared-absent"]["severity"] == "note"


def test_R25_everything_else_is_copied_byte_for_byte(good_output):
    for name, text in SIDE_FILES.items():
        assert (good_output.out / name).read_bytes() == text.encode(), name
    sizes = good_output.json("mmq-convert.json")["side_folder_bytes"]
    assert sizes == {"dspark": sum(len(t) for n, t in SIDE_FILES.items() if n.startswith("dspark"))}


def test_R25_nothing_else_is_there(good_output):
    made = {INDEX, "config.json", "hf_quant_config.json", "tensors.csv", "mmq-manifest.json",
            "mmq-convert.json", "model-00001-of-00001.safetensors"}  # fmt: skip
    found = {p.relative_to(good_output.out).as_posix() for p in good_output.out.rglob("*")
             if p.is_file()}  # fmt: skip
    assert found == made | set(SIDE_FILES)


def test_R25_repository_and_cache_folders_stay_out(convert, same_as_good):
    source = good()
    for name in (".git/HEAD", ".cache/huggingface/x.lock", "__pycache__/a.pyc", ".DS_Store"):
        source.files[name] = b"not part of a model"
    same_as_good(convert(source))


def test_R25_a_file_name_that_is_not_utf8(convert, tmp_path):
    folder = good().write(tmp_path / "src")
    (folder / "caf\udce9.txt").write_bytes(b"Latin-1 name")
    refused(convert(folder), "file-name-not-utf8", "caf\\udce9.txt")


def test_R25_a_source_path_that_is_not_utf8(convert, tmp_path, good_output):
    outcome = convert(good().write(tmp_path / "mod\udce8le"))
    assert outcome.hashes == good_output.hashes


def test_R27_old_quantisation_configs_stay_out(convert, same_as_good):
    source = good()
    source.files["hf_quant_config.json"] = b'{"quantization": {"quant_algo": "FP8"}}'
    same_as_good(convert(source))


def test_R27_old_block_in_text_config_goes_too(convert, same_as_good):
    source = good()
    source.config["text_config"]["quantization_config"] = {"quant_method": "fp8"}
    same_as_good(convert(source), "mmq-manifest.json")


def test_R27_no_quantisation_config_works_from_the_tensors(convert, same_as_good):
    source = good()
    del source.config["quantization_config"]
    outcome = convert(source)
    same_as_good(outcome, "mmq-manifest.json")
    assert outcome.findings["quantization-config-missing"]["severity"] == "warning"


def test_R27_config_of_another_format_loses_against_the_tensors(convert, same_as_good):
    source = good()
    source.config["quantization_config"] |= {"quant_method": "fp8", "weight_block_size": [128, 128]}
    outcome = convert(source)
    same_as_good(outcome, "mmq-manifest.json")
    assert outcome.findings["quantization-config-differs"]["severity"] == "warning"


@pytest.mark.parametrize("change, id", [
    (lambda c: c.clear(), "config-missing"),
    (lambda c: c.update(model_type="llama"), "architecture-unknown"),
    (lambda c: c.update(model_type=None), "architecture-unknown"),
    (lambda c: c["text_config"].update(moe_layer_freq=[0, 1]), "config-inconsistent"),
    (lambda c: c["text_config"].update(num_hidden_layers="three"), "config-inconsistent"),
    (lambda c: c["text_config"].update(num_hidden_layers=-1), "config-inconsistent"),
    (lambda c: c["text_config"].update(num_local_experts=[4]), "config-inconsistent"),
    (lambda c: c["text_config"].update(num_hidden_layers=2, moe_layer_freq=[0, 1]),
     "layer-unexpected"),
    (lambda c: c["text_config"].update(num_local_experts=3), "expert-unexpected"),
    (lambda c: c["text_config"].update(num_local_experts=5), "module-missing"),
    (lambda c: c["text_config"].update(intermediate_size=128), "expert-shape"),
    (lambda c: c["text_config"].update(head_dim="wide"), "config-inconsistent"),
    (lambda c: c.update(text_config=[]), "config-inconsistent"),
])  # fmt: skip
def test_R27_configs_that_do_not_fit(convert, change, id):
    source = good()
    change(source.config)
    refused(convert(source), id)


@pytest.mark.parametrize("text", [b"", b"[]", b"{", b'"\xff"', b"NaN", b"[" * 100_000])
@pytest.mark.parametrize("name", ["config.json", INDEX])
def test_R27_json_that_is_none(convert, name, text):
    source = good()
    source.after.append(lambda folder: (folder / name).write_bytes(text))
    refused(convert(source), "json-invalid", name)


def test_R28_fused_experts_are_refused_by_name(convert):
    source = good()
    name = fuse_experts(source, 2)
    refused(convert(source), "experts-fused", name, "3-D")


@pytest.mark.parametrize("suffix", ["", ".weight"])
@pytest.mark.parametrize("fused", ["gate_up_proj", "down_proj", "w13", "w2"])
def test_R28_whatever_they_are_called(convert, fused, suffix):
    source = good()
    name = f"{layer(1)}block_sparse_moe.experts.{fused}{suffix}"
    source.shards[first(source)][name] = bf16(np.zeros((4, 8, 8)))
    refused(convert(source), "experts-fused", name)


ABSENT = [
    expert(2, 2, "w3"), W1, W2, f"{layer(0)}self_attn.k_proj", f"{layer(0)}mlp.gate_proj",
    f"{layer(1)}block_sparse_moe.gate", f"{layer(1)}block_sparse_moe", f"{layer(2)}input_layernorm",
    f"{layer(2)}post_attention_layernorm", f"{layer(1)}self_attn.k_norm",
    f"{layer(1)}self_attn.index_k_proj", f"{layer(1)}block_sparse_moe.shared_experts.down_proj",
    f"{TEXT}embed_tokens", NORM.removesuffix(".weight"),
]  # fmt: skip


@pytest.mark.parametrize("module", ABSENT)
def test_R29_absent_modules_are_named_and_counted(convert, module):
    source = good()
    drop_module(source, module)
    refused(convert(source), "module-missing", module, "1 absent")


def test_R29_absent_layer_is_counted_whole(convert):
    source = good()
    for name in [n for n in source.all() if n.startswith(layer(2))]:
        source.pop(name)
    refused(convert(source), "module-missing", layer(2), f"{17 + 12} absent")


def test_R29_experts_are_counted_without_moe_layer_freq(convert):
    source = good()
    del source.config["text_config"]["moe_layer_freq"]
    drop_module(source, expert(2, 2, "w3"))
    refused(convert(source), "module-missing", expert(2, 2, "w3"))


def test_R29_a_rank_of_another_layer_does_not_fill_the_gap(convert):
    source = good()
    source.shards[last(source)] |= {
        n.replace("experts.2.w3", "experts.4.w3"): source.pop(n)
        for n in [n for n in source.all() if n.startswith(expert(2, 2, "w3"))]
    }
    refused(convert(source), "module-missing", expert(2, 2, "w3"))


def test_config_survives_but_for_quantisation_and_mtp(good_output):
    ours, theirs = good_output.json("config.json"), good().config
    assert ours.pop("quantization_config") != theirs.pop("quantization_config")
    assert ours["text_config"].pop("num_mtp_modules") == 0
    assert theirs["text_config"].pop("num_mtp_modules") == 1
    assert json.dumps(ours) == json.dumps(theirs)

"""KV scales: pairs, values, names, and what is declared; MTP counts."""

from __future__ import annotations

import numpy as np
import pytest
from hostile import add_mtp, good
from m3_source import Tensor, f32, layer
from planted import CONFIG, HF_CONFIG

K = f"{layer(1)}self_attn.k_proj.k_scale"
V = f"{layer(2)}self_attn.v_proj.v_scale"


def drop(out, *names):
    with out.tensors() as tensors:
        for name in names:
            del tensors[name]


def all_scales(tensors):
    return [n for n in tensors if n.endswith((".k_scale", ".v_scale"))]


@pytest.mark.parametrize("value", [-1.0, np.nan, 0.0, np.inf, 1e-40])
@pytest.mark.parametrize("name", [K, V])
def test_impossible_value(name, value, modelopt):
    modelopt.set_scalar(name, value)
    finding = modelopt.alone().one("kv-scale-invalid", name)
    assert finding.got == str(np.float32(value))


@pytest.mark.parametrize("name", [K, V])
def test_one_of_a_pair(name, modelopt):
    drop(modelopt, name)
    modelopt.alone().one("kv-scale-unpaired", name)
    modelopt.foreign().judge().one("kv-scale-unpaired", name)


def test_one_layer_has_none(modelopt):
    drop(modelopt, K, K.replace("k_proj.k_", "v_proj.v_"))
    modelopt.alone().one("kv-scale-missing", K)


def test_declared_but_absent(modelopt):
    with modelopt.tensors() as tensors:
        for name in all_scales(tensors):
            del tensors[name]
    judged = modelopt.foreign().judge()
    judged.one("kv-scales-absent", CONFIG, "warning")
    assert judged.verdict == "warn"


def test_declared_in_the_second_file_only(modelopt):
    with modelopt.json() as config:
        del config["quantization_config"]["kv_cache_quant_algo"]
        del config["quantization_config"]["kv_cache_scheme"]
    with modelopt.tensors() as tensors:
        for name in all_scales(tensors):
            del tensors[name]
    modelopt.foreign().judge().one("kv-scales-absent", HF_CONFIG, "warning")


@pytest.mark.parametrize(
    "name", ["k_proj.output_scale", "v_proj.output_scale", "kv_scale", "qkv_proj.k_scale"]
)
def test_names_that_engines_drop(name, modelopt):
    full = f"{layer(0)}self_attn.{name}"
    with modelopt.tensors() as tensors:
        tensors[full] = f32(0.1)
    modelopt.alone().one("kv-scale-name", full)


def test_shape(modelopt):
    with modelopt.tensors() as tensors:
        tensors[K] = Tensor("F32", (2,), bytes(8))
        tensors[V] = Tensor("BF16", (), bytes(2))
    judged = modelopt.alone()
    judged.one("kv-scale-shape", K)
    judged.one("kv-scale-shape", V)


@pytest.mark.parametrize("suffix", ["k_proj.k_scale", "idx_k_scale"])
def test_minimax_layout_wants_unit_scales(suffix, make, good_folder):
    out = make(good_folder, layout="minimax", kv_scales="unit")
    name = f"{layer(1)}self_attn.{suffix}"
    with out.tensors() as tensors:
        tensors[name] = f32(0.5)
    out.alone().one("kv-scale-not-unit", name)
    with out.tensors() as tensors:
        tensors[name] = f32(1.0)
    assert not out.alone().of("kv-scale-not-unit")


def test_nvfp4_declared(make, good_folder):
    out = make(good_folder, kv_format="nvfp4")
    judged = out.judge()
    assert "SM100" in judged.one("kv-nvfp4-declared", CONFIG, "warning").message
    assert judged.verdict == "warn"


def test_unknown_format(modelopt):
    with modelopt.quantization() as blocks:
        for block in blocks:
            block["kv_cache_quant_algo"] = "INT4"
    modelopt.alone().one("kv-format-unknown", CONFIG)


@pytest.mark.parametrize(
    ("key", "value"), [("num_bits", 4), ("dynamic", True), ("type", "int"), ("type", None)]
)
def test_scheme_contradicts(key, value, modelopt):
    with modelopt.json() as config:
        config["quantization_config"]["kv_cache_scheme"][key] = value
    modelopt.alone().one("kv-scheme", "config.json: kv_cache_scheme")


def test_scales_without_a_declared_format(make, good_folder):
    out = make(good_folder, kv_format="none")
    out.judge().one("kv-format-undeclared", CONFIG, "note")


def test_sparse_layers_are_mentioned(modelopt):
    modelopt.alone().one("kv-scale-sparse-layers", CONFIG, "note")


def test_foreign_scale_above_the_bound(modelopt):
    modelopt.set_scalar(K, 50.0)
    judged = modelopt.foreign().judge()
    judged.one("kv-scale-above-bound", K, "note")
    assert judged.verdict == "pass"
    assert judged.report.metrics["kv_scale_share_of_bound_max"] > 10


# ---- MTP ------------------------------------------------------------------------------------
def mtp_source(tmp_path):
    source = good()
    add_mtp(source)
    return source.write(tmp_path / "mtp")


def test_mtp_dropped_but_still_declared(make, tmp_path):
    out = make(mtp_source(tmp_path))
    assert out.judge().verdict == "pass"
    with out.json() as config:
        config["text_config"]["num_mtp_modules"] = 1
    out.foreign().judge().one("mtp-declared-absent", CONFIG, "warning")


def test_declared_but_absent_in_the_release_too(modelopt):
    with modelopt.json() as config:
        config["text_config"]["num_mtp_modules"] = 1
    modelopt.foreign().judge().one("mtp-declared-absent", CONFIG, "note")


def test_mtp_kept(make, tmp_path):
    out = make(mtp_source(tmp_path), mtp="keep")
    assert out.judge().verdict == "pass"
    assert out.foreign().judge().verdict == "pass"
    with out.json() as config:
        config["text_config"]["num_nextn_predict_layers"] = 2
    finding = out.judge().one("mtp-count", CONFIG, "warning")
    assert (finding.got, finding.expected) == ("2, 7", "1")

"""Analytic KV scales are bounds no input passes and some input reaches; scales from files and
constants arrive as they are; configs declare what is there."""

from __future__ import annotations

import json
import math
from fractions import Fraction

import numpy as np
import pytest
from hostile import as_bf16, bf16, drop_module, good, layer
from hypothesis import given
from hypothesis import strategies as st
from m3_source import tensor
from test_reading_shards import refused

from mmq.quantize.kv_scales import k_bound, scale_from_bound, v_bound

SOURCE = good()
SIZE = SOURCE.size
NAMES = {
    f"{layer(n)}self_attn.{p}_proj.{p}_scale": (n, p) for n in range(SIZE.layers) for p in "kv"
}
EPS = 1e-6


def rms_norm(x, weight):
    """Gemma's: x / sqrt(mean x² + ε) · (1 + w)."""
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * (1 + weight)


def rope(k, position):
    """Half-split rotation of the first half of each head."""
    half = SIZE.head_dim // 4
    angle = position / 5e6 ** (np.arange(half) / half)
    a, b = k[..., :half], k[..., half : 2 * half]
    turned = (a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle))
    return np.concatenate([*turned, k[..., 2 * half :]], -1)


def weights(source, number):
    prefix = layer(number)
    return {
        "gamma": source[f"{prefix}input_layernorm.weight"].f64(),
        "k_norm": source[f"{prefix}self_attn.k_norm.weight"].f64(),
        "k": source.values(f"{prefix}self_attn.k_proj"),
        "v": source.values(f"{prefix}self_attn.v_proj"),
    }


def keys(x, w, position):
    k = (rms_norm(x, w["gamma"]) @ w["k"].T).reshape(len(x), SIZE.kv_heads, SIZE.head_dim)
    return rope(rms_norm(k, w["k_norm"]), position)


def values(x, w):
    return rms_norm(x, w["gamma"]) @ w["v"].T


def hidden_states(w):
    """Random, heavy-tailed and one-hot states, and the worst ones for each output."""
    rng = np.random.default_rng(5)
    plain = rng.standard_normal((200, SIZE.hidden))
    aligned_v = w["v"] * (1 + w["gamma"])
    # states that a pseudo-inverse sends to one-hot keys of the first head
    first_head = w["k"][: SIZE.head_dim] * (1 + w["gamma"])
    one_hot_keys = np.linalg.pinv(first_head).T
    states = [plain, rng.standard_t(1.2, (200, SIZE.hidden)), np.eye(SIZE.hidden),
              np.ones((1, SIZE.hidden)), aligned_v, -aligned_v, one_hot_keys]  # fmt: skip
    return np.concatenate([s * scale for s in states for scale in (1e-3, 1.0, 1e4)])


def sharpened(seed):
    """The good source with larger norms, so that 1 + w is far from 1 and sometimes negative."""
    source, rng = good(), np.random.default_rng(seed)
    for number in range(SIZE.layers):
        source[f"{layer(number)}input_layernorm.weight"] = bf16(rng.normal(0, 1.5, SIZE.hidden))
        source[f"{layer(number)}self_attn.k_norm.weight"] = bf16(rng.normal(0, 1.5, SIZE.head_dim))
    return source


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_no_input_passes_the_scales_and_some_input_reaches_them(convert, seed):
    source = good() if seed is None else sharpened(seed)
    out = convert(source).tensors
    for number in range(SIZE.layers):
        w = weights(source, number)
        x = hidden_states(w)
        largest = {
            "v": np.abs(values(x, w)).max(),
            "k": max(np.abs(keys(x, w, p)).max() for p in (0, 1, 17, 4095, 1e6)),
        }
        for side, value in largest.items():
            name = f"{layer(number)}self_attn.{side}_proj.{side}_scale"
            assert (out[name].dtype, out[name].shape) == ("F32", ())
            limit = float(out[name].f64()) * 448
            assert 0.99 * limit <= value <= limit * (1 + 1e-12), name


def f32_at_or_above(value):
    """The smallest F32 that is no smaller than an exact fraction."""
    scale = np.float32(float(value))
    while Fraction(float(scale)) < value:
        scale = np.nextafter(scale, np.float32(np.inf))
    below = np.nextafter(scale, np.float32(0))
    while Fraction(float(below)) >= value:
        scale, below = below, np.nextafter(below, np.float32(0))
    return scale


def test_scales_are_the_bounds_over_448_rounded_up(convert):
    source = sharpened(2)
    out = convert(source).tensors
    for name, (number, side) in NAMES.items():
        w = weights(source, number)
        if side == "k":
            bound = math.sqrt(SIZE.head_dim) * np.abs(1 + w["k_norm"]).max()
        else:
            rows = (w["v"] * (1 + w["gamma"])) ** 2
            bound = math.sqrt(SIZE.hidden) * math.sqrt(max(math.fsum(row) for row in rows))
        got = out[name].bytes_as("<f4")
        wanted = f32_at_or_above(Fraction(bound) / 448)
        # float64 rounding of the bound itself may move it across one F32, never further
        assert wanted <= got <= np.nextafter(wanted, np.float32(np.inf))
        assert Fraction(float(got)) * 448 >= Fraction(bound) * (1 - Fraction(1, 10**13))


@given(st.floats(1e-30, 1e30))
def test_rounding_up_is_exact(bound):
    assert scale_from_bound(bound) == f32_at_or_above(Fraction(bound) / 448)


@given(st.integers(0, 2**32), st.integers(1, 70), st.integers(1, 40))
def test_row_sums_agree_with_exact_ones(seed, columns, rows):
    rng = np.random.default_rng(seed)
    weight = rng.standard_t(1.5, (rows, columns)).astype(np.float32)
    gamma = rng.standard_normal(columns)
    exact = max(math.fsum(row) for row in (weight.astype(np.float64) * (1 + gamma)) ** 2)
    assert v_bound(weight, gamma) == pytest.approx(math.sqrt(exact * columns), rel=1e-12)


def test_norms_that_scale_by_w_itself(convert):
    source = good()
    source.config["text_config"]["use_gemma_norm"] = False
    out = convert(source).tensors
    norm = weights(source, 0)["k_norm"]
    limit = float(out[f"{layer(0)}self_attn.k_proj.k_scale"].f64()) * 448
    assert limit == pytest.approx(math.sqrt(SIZE.head_dim) * np.abs(norm).max(), rel=1e-6)
    assert k_bound(norm, SIZE.head_dim, gemma=False) <= limit


def test_zero_weights_still_have_a_scale_above_zero(convert):
    source = good()
    shape = source[f"{layer(0)}self_attn.v_proj.weight"].shape
    source[f"{layer(0)}self_attn.v_proj.weight"] = tensor("F8_E4M3", np.zeros(shape))
    source[f"{layer(0)}self_attn.k_norm.weight"] = bf16(np.full(SIZE.head_dim, -1.0))
    out = convert(source).tensors
    for side in "kv":
        scale = out[f"{layer(0)}self_attn.{side}_proj.{side}_scale"].f64()
        assert scale == np.finfo(np.float32).smallest_normal


def test_bounds_from_bf16_weights_agree(convert, good_output):
    out = convert(as_bf16(good())).tensors
    assert {n: out[n] for n in NAMES} == {n: good_output.tensors[n] for n in NAMES}


def _without(name):
    return lambda source: drop_module(source, name)


@pytest.mark.parametrize("change, word", [
    (lambda s: s.config["text_config"].pop("head_dim"), "head_dim"),
    (lambda s: s.config["text_config"].update(use_qk_norm=False), "per head"),
    (lambda s: s.config["text_config"].update(qk_norm_type="per_layer"), "per_layer"),
    (lambda s: s.shards[s.shard_of(f"{layer(0)}self_attn.v_proj.weight")].update(
        {f"{layer(0)}self_attn.v_proj.bias": bf16(np.zeros(64))}), "bias"),
])  # fmt: skip
def test_no_bound_without_what_it_rests_on(convert, change, word, tmp_path):
    source = good()
    change(source)
    refused(convert(source), "kv-scale-no-bound", word, "--kv-scales unit")
    outcome = convert(source, "--kv-scales", "unit", out=tmp_path / "unit")
    assert {float(outcome.tensors[n].f64()) for n in NAMES} == {1.0}


def test_bound_beyond_f32_is_refused(convert):
    source = good()
    source[f"{layer(1)}self_attn.k_norm.weight"] = bf16(np.full(SIZE.head_dim, 3e38))
    outcome = convert(source)
    assert (outcome.code, outcome.error["id"]) == (4, "kv-scale-no-bound")
    assert not outcome.finished


def kv_file(tmp_path, change=lambda data: None):
    data = {"format": "mmq-kv-scales/1", "scales": {n: 0.1 * (i + 1) for i, n in enumerate(NAMES)}}
    change(data)
    path = tmp_path / "kv 刻度.json"
    path.write_text(json.dumps(data), "utf-8")
    return path


def test_scales_from_a_file_are_written_as_f32(convert, tmp_path):
    out = convert(good(), "--kv-scales", kv_file(tmp_path)).tensors
    got = {n: out[n].bytes_as("<f4") for n in NAMES}
    assert got == {n: np.float32(0.1 * (i + 1)) for i, n in enumerate(NAMES)}


ONE = f"{layer(1)}self_attn.k_proj.k_scale"


@pytest.mark.parametrize("change, id", [
    (lambda d: d.update(format="other/1"), "kv-scales-format"),
    (lambda d: d.pop("scales"), "kv-scales-format"),
    (lambda d: d.update(scales=[1]), "kv-scales-format"),
    (lambda d: d["scales"].pop(ONE), "kv-scales-layers"),
    (lambda d: d["scales"].update({f"{layer(9)}self_attn.k_proj.k_scale": 1}), "kv-scales-layers"),
    *[(lambda d, v=v: d["scales"].update({ONE: v}), "kv-scales-value")
      for v in (0, -1, 1e39, 1e-50, math.nan, math.inf, True, None, "1", [1], 10**400)],
])  # fmt: skip
def test_files_that_do_not_fit(convert, tmp_path, change, id):
    named = [] if id == "kv-scales-format" else ["self_attn.k_proj.k_scale"]
    refused(convert(good(), "--kv-scales", kv_file(tmp_path, change)), id, *named)


@pytest.mark.parametrize(
    "text", [b"", b"\xff", b"[]", b"version https://git-lfs.github.com/spec/v1\n"]
)
def test_files_that_are_no_json_object(convert, tmp_path, text):
    path = tmp_path / "kv.json"
    path.write_bytes(text)
    refused(
        convert(good(), "--kv-scales", path), "lfs-pointer" if b"lfs" in text else "json-invalid"
    )


FP8 = {"num_bits": 8, "type": "float", "dynamic": False}
DECLARED = [
    ((), "FP8", FP8),
    (("--kv-format", "nvfp4"), "NVFP4", {**FP8, "num_bits": 4}),
    (("--kv-format", "none"), None, None),
    (("--kv-scales", "none"), None, None),
    (("--kv-scales", "unit", "--kv-format", "fp8"), "FP8", FP8),
]


@pytest.mark.parametrize("options, algo, scheme", DECLARED, ids=lambda v: str(v))
def test_both_configs_declare_the_same(convert, options, algo, scheme):
    outcome = convert(good(), *options)
    for block in (outcome.json("config.json")["quantization_config"],
                  outcome.json("hf_quant_config.json")["quantization"]):  # fmt: skip
        assert block["kv_cache_quant_algo"] == algo
        assert block.get("kv_cache_scheme") == scheme
    assert set(NAMES) <= set(outcome.tensors) or "none" in options[1:2]


def test_declared_without_scales_warns(convert):
    outcome = convert(good(), "--kv-scales", "none", "--kv-format", "fp8")
    assert outcome.findings["kv-format-without-scales"]["severity"] == "warning"


@pytest.mark.parametrize("kv", ["analytic", "file"])
def test_minimax_takes_unit_scales_or_none(convert, tmp_path, kv):
    kv = kv_file(tmp_path) if kv == "file" else kv
    refused(convert(good(), "--layout", "minimax", "--kv-scales", kv), "option-conflict", code=2)
    outcome = convert(tmp_path / "src", "--layout", "minimax", "--kv-scales", "unit")
    assert {float(outcome.tensors[n].f64()) for n in NAMES} == {1.0}
    block = outcome.json("config.json")["quantization_config"]
    assert (block["kv_cache_quant_algo"], block["index_k_quant_type"]) == ("FP8", "nvfp4")

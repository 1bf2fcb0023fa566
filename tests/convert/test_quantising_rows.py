"""What quantising must and must not do to a checkpoint, row by row of the case list (Q1 …)."""

from __future__ import annotations

import numpy as np
import pytest
from hostile import (
    NORM,
    TEXT,
    W1,
    W2,
    as_bf16,
    bf16,
    expert,
    f32,
    good,
    layer,
    poke,
    tensor,
)
from m3_source import E4M3, nvfp4_values
from test_reading_shards import refused

EXPERTS = [expert(n, e, w) for n in (1, 2) for e in range(4) for w in ("w1", "w2", "w3")]


def decoded(out, module):
    s2 = float(out[f"{module}.weight_scale_2"].f64())
    return nvfp4_values(out[f"{module}.weight"], out[f"{module}.weight_scale"], s2)


def stopped(outcome, id, *words):
    """Failed while streaming: exit 4, named, no index, no partial file, nothing to trust."""
    assert (outcome.code, outcome.error["id"]) == (4, id), outcome.events
    text = " ".join(str(v) for v in outcome.error.values())
    for word in words:
        assert str(word) in text, f"{word} is not in: {text}"
    assert not outcome.finished
    assert not list(outcome.out.glob("*.partial"))
    assert not list(outcome.out.glob("*.safetensors"))


@pytest.mark.parametrize("factor", [2.0**-6, 1.25, 16.0])
def test_Q1_w1_and_w3_share_the_scale_of_the_larger(convert, factor):
    source = good()
    for number in range(4):
        w3 = expert(1, number, "w3")
        source.set_values(w3, factor * source.values(w3))
    out = convert(source, "--scale-search", "max").tensors
    for n in (1, 2):
        for number in range(4):
            w1, w2, w3 = (expert(n, number, w) for w in ("w1", "w2", "w3"))
            amax = {m: np.abs(source.values(m)).max() for m in (w1, w2, w3)}
            shared = np.float32(max(amax[w1], amax[w3])) / np.float32(2688)
            assert out[f"{w1}.weight_scale_2"].f64() == out[f"{w3}.weight_scale_2"].f64() == shared
            own = np.float32(amax[w2]) / np.float32(2688)
            assert out[f"{w2}.weight_scale_2"].f64() == own


@pytest.mark.parametrize("search", ["max", "mse", "four-over-six"])
@pytest.mark.parametrize("layout", ["modelopt", "minimax"])
def test_Q1_shared_in_every_layout_and_search(convert, layout, search):
    source = good()
    source.set_values(W1, 16 * source.values(W1))
    out = convert(source, "--layout", layout, "--scale-search", search).tensors
    name = {"modelopt": "weight_scale_2", "minimax": "weight_global_scale"}[layout]
    assert out[f"{W1}.{name}"] == out[f"{W1.replace('w1', 'w3')}.{name}"]


@pytest.mark.parametrize("exponent", [0, 120, 254])
@pytest.mark.parametrize("search", ["max", "mse", "four-over-six"])
def test_Q2_all_zero_expert(convert, search, exponent):
    source = good()
    for w in ("w1", "w2", "w3"):
        name = expert(1, 1, w)
        codes = source[f"{name}.weight"].bytes_as("u1")
        source[f"{name}.weight"] = tensor("F8_E4M3", codes & 128)
        scale = source[f"{name}.weight_scale_inv"].bytes_as("u1")
        source[f"{name}.weight_scale_inv"] = tensor("U8", np.full_like(scale, exponent))
    out = convert(source, "--scale-search", search).tensors
    for w in ("w1", "w2", "w3"):
        s2 = out[f"{expert(1, 1, w)}.weight_scale_2"].f64()
        assert np.isfinite(s2) and s2 > 0
        assert not decoded(out, expert(1, 1, w)).any()
    _no_nan_scales(out)


def _no_nan_scales(out):
    for name, t in out.items():
        if name.endswith(".weight_scale"):
            values = E4M3[t.bytes_as("u1")]
            assert np.isfinite(values).all() and (values > 0).all(), name


@pytest.mark.parametrize("exponent", [0, 1, 30, 246])
@pytest.mark.parametrize("search", ["max", "mse", "four-over-six"])
def test_Q2_extreme_exponents_stay_finite(convert, search, exponent):
    """Denormal globals and the largest weights: finite, positive scales, and no NaN."""
    source = good()
    for w in ("w1", "w2", "w3"):
        name = f"{expert(1, 1, w)}.weight_scale_inv"
        source[name] = tensor("U8", np.full(source[name].shape, exponent))
    out = convert(source, "--scale-search", search).tensors
    for w in ("w1", "w2", "w3"):
        s2 = out[f"{expert(1, 1, w)}.weight_scale_2"].bytes_as("<f4")
        assert np.finfo(np.float32).smallest_normal <= s2 < np.inf
        assert np.isfinite(decoded(out, expert(1, 1, w))).all()
    _no_nan_scales(out)


def test_Q2_values_beyond_f32_are_refused(convert):
    source = good()
    poke(source, f"{W1}.weight", ((3, 4), 0x7E))
    poke(source, f"{W1}.weight_scale_inv", ((3, 0), 254))
    stopped(convert(source), "value-overflow", f"{W1}.weight")


@pytest.mark.parametrize("search", ["max", "mse", "four-over-six"])
def test_Q3_zero_blocks_among_others(convert, search):
    source = good()
    values = source.values(W2)
    values[5, 16:32] = 0
    values[7, :32] = 0
    values[9, 0] = values.max() * 400  # a largest value that only just fits its block scale
    source.set_values(W2, values)
    out = convert(source, "--scale-search", search).tensors
    _no_nan_scales(out)
    got = decoded(out, W2)
    assert not got[5, 16:32].any() and not got[7, :32].any()
    assert got[5, :16].any()


def test_Q6_exponent_255_is_nan(convert):
    source = good()
    poke(source, f"{W1}.weight_scale_inv", ((0, 1), 255), ((9, 3), 255))
    stopped(convert(source), "nonfinite", f"{W1}.weight_scale_inv", "2 scale bytes 255", "[0, 1]")


def test_Q6_in_a_copied_module_too(convert):
    source = good()
    name = f"{layer(0)}self_attn.q_proj.weight_scale_inv"
    poke(source, name, ((1, 2), 255))
    stopped(convert(source), "nonfinite", name, "[1, 2]")


@pytest.mark.parametrize("module", [W1, W2, f"{layer(0)}mlp.up_proj"])
def test_Q8_nan_codes(convert, module):
    source = good()
    poke(source, f"{module}.weight", ((3, 4), 0x7F), ((9, 9), 0xFF))
    stopped(convert(source), "nonfinite", f"{module}.weight", "2 NaN/Inf", "[3, 4]")


NONFINITE = {
    NORM: bf16(np.r_[np.zeros(127), np.inf]),
    f"{layer(1)}block_sparse_moe.gate.weight": f32(np.full((4, 128), np.nan)),
    "vision_tower.vision_model.pre_layrnorm.bias": bf16(np.full(32, -np.inf)),
}


@pytest.mark.parametrize("name", NONFINITE)
def test_Q8_nan_and_inf_in_copied_tensors(convert, name):
    source = good()
    source[name] = NONFINITE[name]
    stopped(convert(source), "nonfinite", name)


def test_Q8_passthrough_is_recorded_and_never_for_experts(convert, tmp_path):
    source = good()
    for name, t in NONFINITE.items():
        source[name] = t
    outcome = convert(source, "--allow-nonfinite-passthrough")
    assert outcome.tensors[NORM] == source[NORM]
    found = {f["where"]: f["got"] for f in outcome.json("mmq-convert.json")["findings"]
             if f["id"] == "nonfinite-passthrough"}  # fmt: skip
    assert found == {NORM: "1", list(NONFINITE)[1]: "512", list(NONFINITE)[2]: "32"}
    assert {f["where"] for f in outcome.of("finding") if f["severity"] == "warning"} == set(found)
    poke(source, f"{W1}.weight", ((3, 4), 0x7F))
    again = convert(source, "--allow-nonfinite-passthrough", out=tmp_path / "again")
    stopped(again, "nonfinite", W1)


def test_Q8_passthrough_does_not_make_a_nan_kv_scale(convert):
    source = good()
    source[f"{layer(0)}self_attn.k_norm.weight"] = bf16(np.full(32, np.nan))
    outcome = convert(source, "--allow-nonfinite-passthrough")
    stopped(outcome, "kv-scale-no-bound", f"{layer(0)}self_attn.k_norm")


def test_Q8_strict_stops_before_the_index(convert):
    source = good()
    source[NORM] = NONFINITE[NORM]
    outcome = convert(source, "--allow-nonfinite-passthrough", "--strict")
    assert (outcome.code, outcome.error["id"]) == (3, "strict-warning")
    assert not outcome.finished


@pytest.mark.parametrize("columns, blocks", [(152, 5), (48, 1), (24, 1)])
def test_Q9_inner_dimension_is_no_multiple(convert, columns, blocks):
    source = good()
    for number in range(4):
        name = expert(1, number, "w2")
        source[f"{name}.weight"] = tensor("F8_E4M3", np.full((128, columns), 0x38))
        source[f"{name}.weight_scale_inv"] = tensor("U8", np.full((128, blocks), 120))
    source.config["text_config"]["intermediate_size"] = columns
    refused(convert(source), "dim-not-multiple", expert(1, 0, "w2"), columns)


def test_Q9_bf16_experts_of_odd_width(convert):
    source = as_bf16(good())
    for module in EXPERTS:
        shape = (128, 56) if module.endswith("w2") else (56, 128)
        source[f"{module}.weight"] = bf16(np.zeros(shape))
    source.config["text_config"]["intermediate_size"] = 56
    refused(convert(source), "dim-not-multiple", W2, "[128, 56]")


def test_Q10_everything_but_experts_is_byte_identical(good_output):
    source, out = good().all(), good_output.tensors
    kept = [n for n in source if n.rpartition(".")[0] not in EXPERTS]
    assert len(kept) == len(source) - 2 * len(EXPERTS)
    for name in kept:
        assert out[name] == source[name], name
    added = set(out) - set(kept)
    suffixes = ("weight", "weight_scale", "weight_scale_2", "input_scale")
    scales = {
        f"{layer(n)}self_attn.{p}.{p[0]}_scale" for n in range(3) for p in ("k_proj", "v_proj")
    }
    assert added == {f"{m}.{s}" for m in EXPERTS for s in suffixes} | scales


def test_Q10_router_and_embeddings_are_listed_as_excluded(good_output):
    config = good_output.json("config.json")["quantization_config"]
    for name in (
        f"{layer(1)}block_sparse_moe.gate",
        f"{TEXT}embed_tokens",
        "language_model.lm_head",
    ):
        assert name in config["ignore"]
    assert config["ignore"] == config["exclude_modules"]


@pytest.mark.parametrize("pattern", ["*.w1", "*.experts.2.*", f"{W1}", "*.experts.?.w[13]", "*.w2"])
def test_Q12_ignores_that_tear_experts_apart(convert, pattern):
    refused(convert(good(), "--ignore", pattern), "ignore-splits-experts", "layer 1")


def test_Q12_a_broad_pattern_says_what_it_hit(convert, good_output):
    """M3 calls its experts' halves w1 and w3, so *gate* meant for the router hits none of them."""
    outcome = convert(good(), "--ignore", "*gate*")
    found = outcome.findings["ignore-matched"]
    # 2 routers, 2 shared and 1 dense gate_proj
    assert "matches 5 module(s), 0 of which" in found["message"]
    assert outcome.tensors == good_output.tensors


def test_Q12_gate_without_up_warns(convert):
    """--to mxfp8 quantises gate_proj and up_proj, which engines fuse."""
    outcome = convert(as_bf16(good()), "--to", "mxfp8", "--ignore", "*gate*")
    assert outcome.code == 0
    split = [f for f in outcome.of("finding") if f["id"] == "ignore-splits-fused"]
    assert {f["severity"] for f in split} == {"warning"}
    assert {f["where"] for f in split} == {
        f"{layer(0)}mlp.gate_proj",
        f"{layer(1)}block_sparse_moe.shared_experts.gate_proj",
        f"{layer(2)}block_sparse_moe.shared_experts.gate_proj",
    }


def test_Q12_a_whole_layer_may_be_left_alone(convert):
    source = good()
    outcome = convert(source, "--ignore", "*.layers.2.block_sparse_moe.experts.*")
    out, w = outcome.tensors, expert(2, 1, "w3")
    assert out[f"{w}.weight"] == source[f"{w}.weight"]
    assert "12 of which would have been" in outcome.findings["ignore-matched"]["message"]
    layers = outcome.json("config.json")["quantization_config"]["quantized_layers"]
    assert layers[w] == {"quant_algo": "MXFP8", "group_size": 32}
    assert layers[W1] == {"quant_algo": "NVFP4", "group_size": 16}


def test_Q12_ignoring_every_expert_is_an_error(convert):
    refused(convert(good(), "--ignore", "*experts*"), "nothing-to-convert", "0 modules")


def test_Q12_the_minimax_layout_knows_one_format(convert):
    options = ("--layout", "minimax", "--ignore", "*.layers.2.*")
    refused(convert(good(), *options), "option-conflict", "--layout minimax", code=2)


PATTERNS_WITHOUT_A_MATCH = [
    "visual", "mlp.gate", "shared_experts.gate.*", "*.weight$", "lm_head", "model.embed_tokens",
    "*.W1", "re:.*gate.*",
]  # fmt: skip


@pytest.mark.parametrize("pattern", PATTERNS_WITHOUT_A_MATCH)
def test_Q13_a_pattern_that_matches_nothing_warns(convert, good_output, pattern):
    outcome = convert(good(), "--ignore", pattern)
    found = outcome.findings["ignore-matches-nothing"]
    assert (found["severity"], found["where"]) == ("warning", pattern)
    assert outcome.tensors == good_output.tensors


def test_Q13_and_fails_under_strict(convert):
    outcome = convert(good(), "--ignore", "visual", "--strict")
    assert (outcome.code, outcome.error["id"]) == (3, "strict-warning")
    assert not outcome.out.exists()


@pytest.mark.parametrize("layout, name", [("modelopt", "input_scale"),
                                          ("minimax", "input_global_scale")])  # fmt: skip
def test_Q15_input_scales_beside_every_expert(convert, layout, name):
    out = convert(good(), "--layout", layout).tensors
    assert {n for n in out if n.endswith(name)} == {f"{m}.{name}" for m in EXPERTS}
    assert {float(t.f64().item()) for n, t in out.items() if n.endswith(name)} == {1.0}


def test_Q15_or_beside_none(convert):
    out = convert(good(), "--input-scales", "none").tensors
    assert not [n for n in out if "input_scale" in n]


def test_Q23_no_source_scale_is_left_beside_an_expert(good_output, good_folder):
    assert not [n for n in good_output.tensors if ".experts." in n and "_inv" in n]
    left = [n for n in good_output.tensors if n.endswith("_inv")]
    assert len(left) == len([n for n in good().all() if n.endswith("_inv")]) - len(EXPERTS)

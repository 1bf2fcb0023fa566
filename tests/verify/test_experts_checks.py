"""NVFP4 modules: tensors complete, scalars usable, one layout, one scale for w1 and w3."""

from __future__ import annotations

import numpy as np
import pytest
from hostile import W1, W2, good
from m3_source import Tensor, expert, layer

W3 = expert(1, 0, "w3")
Q_PROJ = f"{layer(0)}self_attn.q_proj"


@pytest.mark.parametrize("suffix", ["weight", "weight_scale", "weight_scale_2"])
def test_one_of_the_four_tensors_is_missing(suffix, modelopt):
    with modelopt.tensors() as tensors:
        del tensors[f"{W2}.{suffix}"]
    for judged in (modelopt.judge(), modelopt.foreign().judge(), modelopt.alone()):
        assert judged.verdict == "fail"
        assert any(W2 in f.where for f in judged.report.findings if f.severity == "error")


def test_missing_parts_of_a_module_have_an_id(modelopt):
    with modelopt.tensors() as tensors:
        del tensors[f"{W2}.weight_scale"]
    modelopt.alone().one("nvfp4-tensor-missing", W2)


def test_whole_expert_is_missing(modelopt):
    with modelopt.tensors() as tensors:
        for name in [n for n in tensors if n.startswith(f"{W1.removesuffix('.w1')}.")]:
            del tensors[name]
    judged = modelopt.foreign().alone()
    for module in (W1, W2, W3):
        judged.one("module-missing", module)


@pytest.mark.parametrize(
    ("layout", "suffix"), [("modelopt", "input_scale"), ("minimax", "input_global_scale")]
)
def test_one_input_scale_is_missing(layout, suffix, request):
    out = request.getfixturevalue(layout)
    with out.tensors() as tensors:
        del tensors[f"{W2}.{suffix}"]
    for judged in (out.judge(), out.alone()):
        judged.one("input-scale-missing", f"{W2}.{suffix}")


def test_no_input_scales_at_all(modelopt, minimax):
    for out, suffix in ((modelopt, ".input_scale"), (minimax, ".input_global_scale")):
        with out.tensors() as tensors:
            for name in [n for n in tensors if n.endswith(suffix)]:
                del tensors[name]
    assert modelopt.foreign().judge().verdict == "pass"
    # SGLang's minimax method needs them
    minimax.foreign().judge().one("input-scale-missing", f"{W2}.input_global_scale")


@pytest.mark.parametrize("value", [0.0, -1.0, np.nan, np.inf, 1e-40])
@pytest.mark.parametrize("suffix", ["weight_scale_2", "input_scale"])
def test_unusable_scalar(value, suffix, modelopt):
    modelopt.set_scalar(f"{W2}.{suffix}", value)
    modelopt.alone().one("scalar-invalid", f"{W2}.{suffix}")


@pytest.mark.parametrize("suffix", ["weight_global_scale", "input_global_scale"])
def test_unusable_divisor(suffix, minimax):
    minimax.set_scalar(f"{W2}.{suffix}", 3e38)  # its reciprocal is subnormal
    minimax.alone().one("scalar-invalid", f"{W2}.{suffix}")


def test_scalar_of_the_wrong_shape(modelopt):
    with modelopt.tensors() as tensors:
        tensors[f"{W2}.weight_scale_2"] = Tensor("F32", (2,), bytes(8))
        tensors[f"{W1}.input_scale"] = Tensor("BF16", (), b"\x80\x3f")
    judged = modelopt.alone()
    judged.one("scalar-shape", f"{W2}.weight_scale_2")
    judged.one("scalar-shape", f"{W1}.input_scale")


def test_rank_of_scalars_is_free_for_foreign_outputs(modelopt):
    with modelopt.tensors() as tensors:
        for name, t in tensors.items():
            if name.endswith(("weight_scale_2", "input_scale")):
                tensors[name] = t._replace(shape=(1,))
    assert modelopt.judge().verdict == "fail"
    assert modelopt.foreign().judge().verdict == "pass"


def test_w1_and_w3_have_different_globals(modelopt):
    modelopt.poke(f"{W3}.weight_scale_2", lambda a: a * np.float32(1.25))
    finding = modelopt.alone().one("w1-w3-global-scale", f"{W3}.weight_scale_2")
    assert finding.got != finding.expected


def test_a_single_bit_between_w1_and_w3(modelopt):
    modelopt.poke(f"{W3}.weight_scale_2", lambda a: np.nextafter(a, np.float32(1)))
    modelopt.alone().one("w1-w3-global-scale", f"{W3}.weight_scale_2")


@pytest.mark.parametrize(
    ("layout", "suffix"), [("modelopt", "weight_scale_2"), ("minimax", "weight_global_scale")]
)
def test_inverted_global_is_suspicious_without_a_source(layout, suffix, request):
    out = request.getfixturevalue(layout)
    out.poke(f"{W2}.{suffix}", lambda a: 1 / a)
    out.alone().one("global-scale-implausible", f"{W2}.{suffix}", "warning")


def test_source_scale_left_behind(modelopt, minimax):
    source = good()
    name = f"{W1}.weight_scale_inv"
    for out in (modelopt, minimax):
        with out.tensors() as tensors:
            tensors[name] = source[name]
        assert "overwrites" in out.alone().one("leftover-tensor", name).message


def test_source_weight_left_behind(minimax):
    source = good()
    with minimax.tensors() as tensors:
        tensors[f"{W1}.weight"] = source[f"{W1}.weight"]
    minimax.alone().one("leftover-tensor", f"{W1}.weight")


def left_at_mxfp8(out, number):
    """One layer's experts as the source has them."""
    source = good()
    prefix = f"{layer(number)}block_sparse_moe.experts."
    with out.tensors() as tensors:
        for name in [n for n in tensors if n.startswith(prefix)]:
            del tensors[name]
        tensors |= {n: t for n, t in source.all().items() if n.startswith(prefix)}


def test_labelled_nvfp4_but_left_at_mxfp8(modelopt):
    left_at_mxfp8(modelopt, 1)
    judged = modelopt.foreign().judge()
    # said of either config file
    assert len([f for f in judged.of("quantized-layers-format") if f.where == W1]) == 2
    judged.one("expert-bytes", "routed experts")


def test_minimax_layout_has_no_exceptions(minimax):
    left_at_mxfp8(minimax, 1)
    minimax.foreign().alone().one("expert-not-nvfp4", W1)


def test_layer_of_two_formats(modelopt):
    source = good()
    with modelopt.tensors() as tensors:
        for name in [n for n in tensors if n.startswith(f"{W2}.")]:
            del tensors[name]
        tensors |= {n: source[n] for n in (f"{W2}.weight", f"{W2}.weight_scale_inv")}
    modelopt.alone().one("experts-mixed-formats", W2)


def test_two_layouts(modelopt, minimax):
    theirs = {n: minimax[n] for n in (
        f"{W2}.weight_packed", f"{W2}.weight_scale", f"{W2}.weight_global_scale",
        f"{W2}.input_global_scale")}  # fmt: skip
    with modelopt.tensors() as tensors:
        for name in [n for n in tensors if n.startswith(f"{W2}.")]:
            del tensors[name]
        tensors |= theirs
    modelopt.alone().one("layouts-mixed", W2)


@pytest.mark.parametrize("dtype", ["U8", "F8_E5M2"])
def test_block_scales_with_the_wrong_tag(dtype, minimax):
    with minimax.tensors() as tensors:
        name = f"{W2}.weight_scale"
        tensors[name] = tensors[name]._replace(dtype=dtype)
    minimax.alone().one("nvfp4-dtype", W2)


def test_mxfp8_scales_with_the_wrong_tag(modelopt):
    name = f"{Q_PROJ}.weight_scale_inv"
    with modelopt.tensors() as tensors:
        tensors[name] = tensors[name]._replace(dtype="F8_E8M0")
    modelopt.alone().one("mxfp8-scale-dtype", name)


def test_mxfp8_scales_with_the_wrong_name(modelopt):
    with modelopt.tensors() as tensors:
        tensors[f"{Q_PROJ}.weight_scale"] = tensors.pop(f"{Q_PROJ}.weight_scale_inv")
    modelopt.alone().one("mxfp8-scale-name", f"{Q_PROJ}.weight_scale")


def test_fused_linears_of_two_formats(modelopt):
    name = f"{layer(0)}self_attn.k_proj"
    with modelopt.tensors() as tensors:
        t = tensors[f"{name}.weight"]
        del tensors[f"{name}.weight_scale_inv"]
        tensors[f"{name}.weight"] = Tensor("BF16", t.shape, bytes(2 * len(t.data)))
    modelopt.alone().one("fused-mixed-formats", name, "warning")

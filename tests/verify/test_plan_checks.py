"""OUT against its config's model and against the plan of its source."""

from __future__ import annotations

import shutil

import pytest
from hostile import LM_HEAD, NORM, W1, good
from m3_source import Tensor, f32, layer, linear, plain
from planted import CONFIG, HF_CONFIG, MANIFEST, judge

BIAS = f"{layer(1)}block_sparse_moe.e_score_correction_bias"
K_NORM = f"{layer(1)}self_attn.k_norm"
Q_PROJ = f"{layer(0)}self_attn.q_proj"


# ---- against config.json --------------------------------------------------------------------
@pytest.mark.parametrize("module", [
    NORM.removesuffix(".weight"), LM_HEAD.removesuffix(".weight"), K_NORM, BIAS, Q_PROJ,
    f"{layer(2)}self_attn.index_k_proj", f"{layer(2)}block_sparse_moe.shared_experts.down_proj",
    f"{layer(0)}mlp.up_proj", f"{layer(1)}block_sparse_moe.gate",
])  # fmt: skip
def test_module_is_missing(module, modelopt):
    with modelopt.tensors() as tensors:
        for name in [n for n in tensors if n == module or n.rpartition(".")[0] == module]:
            del tensors[name]
    modelopt.alone().one("module-missing", module)
    assert modelopt.foreign().judge().verdict == "fail"


def test_module_has_another_shape(modelopt):
    with modelopt.tensors() as tensors:
        t = tensors[f"{K_NORM}.weight"]
        tensors[f"{K_NORM}.weight"] = t._replace(shape=(16,), data=t.data[:32])
    finding = modelopt.alone().one("module-shape", K_NORM)
    assert (finding.got, finding.expected) == ("[16]", "[32]")


def test_more_layers_than_config_counts(modelopt):
    extra = f"{layer(3)}self_attn.q_proj"
    with modelopt.tensors() as tensors:
        tensors |= linear(extra, 128, 128)
    modelopt.alone().one("layer-unexpected", extra)


def test_more_experts_than_config_counts(modelopt):
    with modelopt.json() as config:
        config["text_config"]["num_local_experts"] = 3
    where = f"{layer(1)}block_sparse_moe.experts.3.w1"
    modelopt.alone().one("expert-unexpected", where)


# ---- against the plan -----------------------------------------------------------------------
def test_tensor_is_missing(modelopt):
    name = f"{layer(0)}self_attn.q_proj.weight"
    with modelopt.tensors() as tensors:
        del tensors[name], tensors[f"{name}_scale_inv"]
    judged = modelopt.judge()
    assert judged.one("module-missing", Q_PROJ)
    bias = "multi_modal_projector.linear_1.bias"
    with modelopt.tensors() as tensors:
        del tensors[bias]
    assert modelopt.judge().one("tensor-missing", bias).got == "absent"


def test_tensor_has_no_origin(modelopt):
    with modelopt.tensors() as tensors:
        tensors["made.up.weight"] = f32([1.0])
    modelopt.judge().one("tensor-unexpected", "made.up.weight")


def test_tensor_has_another_dtype(modelopt):
    with modelopt.tensors() as tensors:
        t = tensors[NORM]
        tensors[NORM] = t._replace(dtype="F16")
    finding = modelopt.judge().one("tensor-dtype", NORM)
    assert finding.got.startswith("F16") and finding.expected.startswith("BF16")


def test_tensor_has_another_shape(modelopt):
    name = "patch_merge_mlp.linear_1.weight"
    with modelopt.tensors() as tensors:
        t = tensors[name]
        tensors[name] = t._replace(shape=t.shape[::-1])
    modelopt.judge().one("tensor-shape", name)


def test_foreign_choice_of_format_is_a_warning_when_declared(modelopt):
    """Another converter may leave a linear in BF16, if its config says so."""
    with modelopt.tensors() as tensors:
        t = tensors[f"{Q_PROJ}.weight"]
        del tensors[f"{Q_PROJ}.weight_scale_inv"]
        tensors[f"{Q_PROJ}.weight"] = Tensor("BF16", t.shape, bytes(2 * len(t.data)))
    with modelopt.quantization() as blocks:
        for block in blocks:
            del block["quantized_layers"][Q_PROJ]
            block["ignore"] = block["exclude_modules"] = [*block["ignore"], Q_PROJ]
    judged = modelopt.foreign().judge()
    judged.one("tensor-dtype", f"{Q_PROJ}.weight", "warning")
    assert judged.ids == {"tensor-dtype", "fused-mixed-formats"}
    assert "does not store as planned" in judged.skipped


def test_size_to_the_byte_for_our_own(modelopt):
    with modelopt.tensors() as tensors:
        tensors |= plain("made.up.weight", 8)
    judged = modelopt.judge()
    judged.one("size-total", "payload")
    # one shard instead of five
    assert judged.of("shards-differ")


def test_shard_size(modelopt):
    path = modelopt.shard_of(NORM)
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    padded = (length + 8).to_bytes(8, "little") + raw[8 : 8 + length] + b" " * 8
    path.write_bytes(padded + raw[8 + length :])
    modelopt.judge().one("shard-size", path.name)


@pytest.mark.parametrize(("extra", "severity"), [(150, ""), (500, "warning"), (1000, "error")])
def test_size_of_a_foreign_output(extra, severity, modelopt):
    with modelopt.tensors() as tensors:
        tensors |= plain("made.up.weight", extra)
    share = 2 * extra / 773_144
    assert (share > 0.0005) == bool(severity) and (share > 0.002) == (severity == "error")
    found = modelopt.foreign().judge().of("size-total")
    assert [f.severity for f in found] == ([severity] if severity else [])


def test_experts_that_did_not_shrink(modelopt):
    source = good()
    module = W1
    with modelopt.tensors() as tensors:
        for name in [n for n in tensors if n.startswith(f"{module}.")]:
            del tensors[name]
        tensors[f"{module}.weight"] = source[f"{module}.weight"]
        tensors[f"{module}.weight_scale_inv"] = source[f"{module}.weight_scale_inv"]
    finding = modelopt.foreign().judge().one("expert-bytes", "routed experts")
    assert "instead of 0.54" in finding.message


@pytest.mark.parametrize("file", [CONFIG, HF_CONFIG])
def test_own_config_drifts(file, modelopt):
    with modelopt.json(file) as config:
        block = config.get("quantization_config") or config["quantization"]
        block["group_size"] = 32
    key = "quantization_config" if file == CONFIG else "quantization"
    modelopt.judge().one("config-differs", f"{file}: {key}.group_size")


def test_own_config_of_another_version_is_a_warning(modelopt):
    with modelopt.json() as config:
        config["extra"] = 1
    with modelopt.json(MANIFEST) as manifest:
        manifest["versions"]["mmq"] = "0.0.0"
    modelopt.judge().one("config-differs", "config.json: extra", "warning")


def test_foreign_config_drifts(modelopt):
    with modelopt.json() as config:
        config["text_config"]["rope_theta"] = 10_000
    finding = (
        modelopt.foreign()
        .judge()
        .one("config-differs", "config.json: text_config.rope_theta", "warning")
    )
    assert (finding.got, finding.expected) == ("10000", "5000000")


def test_not_made_of_this_source(modelopt, tmp_path):
    """An NVFP4 checkpoint given as the source of its like."""
    copy = shutil.copytree(modelopt.folder, tmp_path / "copy")
    judged = judge(modelopt.folder, copy)
    assert "already" in judged.one("plan-impossible", W1).message
    judged.one("nothing-compared", str(modelopt.folder))


def test_source_of_another_size(modelopt, tmp_path):
    source = good()
    source.pop("patch_merge_mlp.linear_1.bias")
    judged = judge(modelopt.folder, source.write(tmp_path / "other"))
    judged.one("tensor-unexpected", "patch_merge_mlp.linear_1.bias")

"""Quantisation configs against headers, per layout; exclusions; and keys that engines need."""

from __future__ import annotations

import json

import pytest
from hostile import LM_HEAD, W1, as_bf16, good
from m3_source import layer
from planted import CONFIG, HF_CONFIG

ROUTER = f"{layer(1)}block_sparse_moe.gate"
Q_PROJ = f"{layer(0)}self_attn.q_proj"
INDEX_Q = f"{layer(1)}self_attn.index_q_proj"
GATE_PROJ = f"{layer(0)}mlp.gate_proj"


# ---- modelopt -------------------------------------------------------------------------------
def test_no_quantization_config(modelopt):
    with modelopt.json() as config:
        del config["quantization_config"]
    modelopt.alone().one("config-quantization-missing", CONFIG)


def test_wrong_quant_method(modelopt):
    with modelopt.json() as config:
        config["quantization_config"]["quant_method"] = "fp8"
    modelopt.alone().one("config-quant-method", "config.json: quant_method")


def test_wrong_quant_algo(modelopt):
    with modelopt.quantization() as blocks:
        for block in blocks:
            block["quant_algo"] = "NVFP4"
    judged = modelopt.alone()
    judged.one("config-quant-algo", "config.json: quant_algo")
    judged.one("config-quant-algo", "hf_quant_config.json: quant_algo")


def test_second_file_is_missing(modelopt):
    (modelopt.folder / HF_CONFIG).unlink()
    modelopt.foreign().judge().one("hf-quant-config-missing", HF_CONFIG, "warning")


def test_second_file_where_there_is_none(minimax):
    (minimax.folder / HF_CONFIG).write_text('{"quantization": {"quant_algo": "FP8"}}')
    minimax.alone().one("hf-quant-config-unexpected", HF_CONFIG, "warning")


def test_no_quantized_layers(modelopt):
    with modelopt.json() as config:
        del config["quantization_config"]["quantized_layers"]
    modelopt.alone().one("quantized-layers-absent", "config.json: quantized_layers")


@pytest.mark.parametrize("module", [W1, Q_PROJ, INDEX_Q])
def test_quantised_module_is_not_listed(module, modelopt):
    with modelopt.json() as config:
        del config["quantization_config"]["quantized_layers"][module]
    judged = modelopt.alone()
    judged.one("quantized-layers-missing", module)
    judged.one("configs-disagree", "quantized_layers")


def test_listed_module_is_not_stored(modelopt):
    with modelopt.json() as config:
        config["quantization_config"]["quantized_layers"]["no.such"] = {"quant_algo": "NVFP4"}
    modelopt.alone().one("quantized-layers-unknown", "no.such")


@pytest.mark.parametrize(("module", "algo"), [(W1, "MXFP8"), (Q_PROJ, "NVFP4"), (ROUTER, "MXFP8")])
def test_listed_with_another_format(module, algo, modelopt):
    with modelopt.json() as config:
        config["quantization_config"]["quantized_layers"][module] = {"quant_algo": algo}
    finding = modelopt.alone().one("quantized-layers-format", module)
    assert finding.expected == algo


@pytest.mark.parametrize(("module", "size"), [(W1, 32), (Q_PROJ, 16)])
def test_listed_with_another_group_size(module, size, modelopt):
    with modelopt.json() as config:
        config["quantization_config"]["quantized_layers"][module]["group_size"] = size
    modelopt.alone().one("quantized-layers-group-size", module)


def test_listed_without_group_size(modelopt):
    with modelopt.json() as config:
        del config["quantization_config"]["quantized_layers"][W1]["group_size"]
    modelopt.alone().one("quantized-layers-group-size", W1, "warning")


def test_prefix_lost(modelopt):
    with modelopt.quantization() as blocks:
        for block in blocks:
            layers = block["quantized_layers"]
            block["quantized_layers"] = {k.removeprefix("language_model."): v
                                         for k, v in layers.items()}  # fmt: skip
    judged = modelopt.alone()
    found = [f for f in judged.of("quantized-layers-prefix") if f.expected == W1]
    assert len(found) == 2 and judged.verdict == "fail"


def test_other_hub_prefix_is_fine(modelopt):
    with modelopt.quantization() as blocks:
        for block in blocks:
            block["quantized_layers"] = {
                k.replace("language_model.model.", "model.language_model."): v
                for k, v in block["quantized_layers"].items()
            }
    assert modelopt.foreign().judge().verdict == "pass"


@pytest.mark.parametrize("key", ["quant_algo", "kv_cache_quant_algo", "exclude_modules"])
def test_the_two_files_disagree(key, modelopt):
    with modelopt.json(HF_CONFIG) as config:
        block = config["quantization"]
        if key == "exclude_modules":
            block["ignore"] = block[key] = [p for p in block[key] if p != LM_HEAD[:-7]]
        else:
            block[key] = "NVFP4"
    where = "exclusions" if key == "exclude_modules" else key
    modelopt.alone().one("configs-disagree", where)


# ---- exclusions -----------------------------------------------------------------------------
def with_exclusions(out, change):
    with out.quantization() as blocks:
        for block in blocks:
            block["ignore"] = block["exclude_modules"] = change(block["exclude_modules"])


def test_router_is_not_excluded(modelopt):
    with_exclusions(modelopt, lambda names: [n for n in names if n != ROUTER])
    found = [f for f in modelopt.alone().of("not-excluded") if f.where == ROUTER]
    assert [f.severity for f in found] == ["error", "error"]


def test_embedding_is_not_excluded(modelopt):
    with_exclusions(modelopt, lambda names: [n for n in names if "embed" not in n])
    judged = modelopt.foreign().judge()
    assert judged.verdict == "warn" and judged.ids == {"not-excluded"}


@pytest.mark.parametrize("tree", ["vision_tower", "vision_tower*", "vision_tower.*"])
def test_spellings_of_a_tree(tree, modelopt):
    with_exclusions(
        modelopt, lambda names: [tree, "lm_head", "model.embed_tokens",
                                 *(n for n in names if "vision" not in n and "head" not in n)]
    )  # fmt: skip
    assert modelopt.foreign().judge().verdict == "pass"


def test_no_exclusions_are_needed_in_mixed_precision(modelopt):
    with_exclusions(modelopt, lambda names: [])
    assert modelopt.foreign().judge().verdict == "pass"


def test_gate_pattern_hits_gate_proj(modelopt):
    with_exclusions(modelopt, lambda names: [*names, "*gate*"])
    found = [f for f in modelopt.alone().of("exclusion-hits-quantised") if f.where == GATE_PROJ]
    assert found[0].severity == "error" and found[0].got == "*gate*"


def test_pattern_that_is_the_beginning_of_another_name(modelopt):
    pattern = f"{layer(0)}mlp.gate"
    with_exclusions(modelopt, lambda names: [*names, pattern])
    found = modelopt.alone().of("exclusion-ambiguous")
    assert {(f.where, f.got, f.severity) for f in found} == {(GATE_PROJ, pattern, "warning")}


def test_exclusions_under_a_key_vllm_does_not_read(make, tmp_path):
    """Where everything quantised is NVFP4, the exclusions decide."""
    source = good()
    for name in [n for n in source.all() if n.endswith(".weight_scale_inv")]:
        module = name.removesuffix(".weight_scale_inv")
        if ".experts." not in module:
            t = source[f"{module}.weight"]
            source[f"{module}.weight"] = t._replace(dtype="BF16", data=bytes(2 * len(t.data)))
            source.pop(name)
    out = make(source.write(tmp_path / "source")).foreign()
    with out.quantization() as blocks:
        for block in blocks:
            block["quant_algo"] = "NVFP4"
            del block["ignore"]
    judged = out.judge()
    judged.one("exclusions-key", "config.json: ignore", "warning")
    assert judged.verdict == "warn"


# ---- minimax and mxfp8 ------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("key", "value"),
    [("moe_quant_algo", "FP8"), ("moe_quant_algo", None), ("moe_quant_format", "nvfp4-pack"),
     ("moe_quant_format", None), ("quant_method", "modelopt_x"), ("group_size", 32),
     ("weight_block_size", [128, 128]), ("activation_scheme", "static"),
     ("kv_cache_quant_algo", "NVFP4"), ("attention_quant_algo", "NVFP4"),
     ("index_k_quant_type", "fp8")],
)  # fmt: skip
def test_minimax_keys(key, value, minimax):
    with minimax.json() as config:
        config["quantization_config"][key] = value
    minimax.alone().one("config-vendor-key", f"config.json: {key}")


def test_config_of_the_other_layout(modelopt, minimax):
    ours, theirs = (
        json.loads((o.folder / CONFIG).read_bytes())["quantization_config"]
        for o in (modelopt, minimax)
    )
    with modelopt.json() as config:
        config["quantization_config"] = theirs
    modelopt.alone().one("config-quant-method", "config.json: quant_method")
    with minimax.json() as config:
        config["quantization_config"] = ours
    judged = minimax.alone()
    judged.one("config-vendor-key", "config.json: quant_method")
    judged.one("config-vendor-key", "config.json: moe_quant_format")


def test_optional_minimax_keys_may_be_absent(minimax):
    with minimax.json() as config:
        block = config["quantization_config"]
        for key in ("group_size", "activation_scheme", "kv_cache_quant_algo", "index_k_quant_type"):
            del block[key]
        block["moe_quant_algo"] = "nvfp4"
    assert minimax.foreign().judge().verdict == "pass"


def test_lm_head_must_be_ignored(minimax):
    with minimax.json() as config:
        block = config["quantization_config"]
        block["ignored_layers"] = [n for n in block["ignored_layers"] if "lm_head" not in n]
    minimax.alone().one("lm-head-not-ignored", "language_model.lm_head")


def test_router_must_be_ignored(minimax):
    with minimax.json() as config:
        block = config["quantization_config"]
        block["ignored_layers"] = [n for n in block["ignored_layers"] if n != ROUTER]
    minimax.alone().one("not-excluded", ROUTER)


def test_mxfp8_output(make, tmp_path):
    out = make(as_bf16(good()).write(tmp_path / "bf16"), "mxfp8", to="mxfp8")
    assert out.alone().verdict == "pass"
    with out.json() as config:
        config["quantization_config"]["weight_block_size"] = [128, 128]
    out.alone().one("config-vendor-key", "config.json: weight_block_size")


def test_bf16_output_declares_nothing(make, good_folder):
    out = make(good_folder, to="bf16")
    with out.json() as config:
        config["quantization_config"] = {"quant_method": "mxfp8"}
    out.alone().one("config-declares-quantization", CONFIG)


# ---- what engines need of the model's config ----------------------------------------------------
@pytest.mark.parametrize(
    ("key", "value"),
    [("partial_rotary_factor", None), ("sparse_attention_config", None), ("moe_layer_freq", None),
     ("moe_layer_freq", [1]), ("hidden_act", "silu"), ("shared_intermediate_size", 7),
     ("sparse_attention_config.sparse_num_index_heads", 7),
     ("sparse_attention_config.sparse_attention_freq", [0, 1]),
     ("sparse_attention_config.sparse_disable_index_value", None)],
)  # fmt: skip
def test_text_config_keys(key, value, modelopt):
    with modelopt.json() as config:
        *parents, last = key.split(".")
        part = config["text_config"]
        for parent in parents:
            part = part[parent]
        part.pop(last)
        if value is not None:
            part[last] = value
    wheres = {f.where: f.severity for f in modelopt.alone().of("config-engine-key")}
    assert [s for w, s in wheres.items() if last in w] == ["warning"], wheres


def test_vision_config(modelopt):
    with modelopt.json() as config:
        del config["vision_config"]
    modelopt.alone().one("config-engine-key", "vision_config", "warning")


def test_what_the_source_lacks_too_is_a_note(make, tmp_path):
    source = good()
    del source.config["vision_config"]
    out = make(source.write(tmp_path / "source"))
    out.judge().one("config-engine-key", "vision_config", "note")
    out.alone().one("config-engine-key", "vision_config", "warning")


def test_no_config_at_all(modelopt):
    (modelopt.folder / CONFIG).unlink()
    modelopt.alone().one("config-missing", CONFIG)


def test_another_architecture(modelopt):
    with modelopt.json() as config:
        config["model_type"] = "llama"
    modelopt.alone().one("config-model-type", CONFIG, "warning")


def test_minimax_layout_says_who_loads_it(minimax):
    assert "Hopper" in minimax.alone().one("layout-minimax-engines", CONFIG, "note").message

"""Serve recipes, the vLLM recipe file and the Hub's evaluation results."""

from __future__ import annotations

import copy

import pytest
import yaml
from card_example import CONFIG, REPO, logits, traits, verify_report
from huggingface_hub import parse_eval_result_entries

from mmq.errors import MmqError, UsageError
from mmq.publish.eval_results import EvalDataset, eval_text, parse_dataset
from mmq.publish.recipe import billions, has_recipe, recipe, recipe_problems, recipe_text
from mmq.publish.serve import parse_images, servings
from mmq.publish.traits import traits_of
from mmq.report.schema import Measure

DIGEST = "sha256:" + "0f" * 32


def commands(images=None, **values):
    found = servings(REPO, traits(**values), images or {})
    return {s.engine: s for s in found}


def words(serving):
    return " ".join(serving.command)


def test_m3_in_modelopts_layout():
    found = commands()
    assert "--block-size 128" in words(found["vllm"])
    assert "--kv-cache-dtype fp8" in words(found["vllm"])
    assert "--tensor-parallel-size 4" in words(found["vllm"])
    assert found["vllm"].image == "vllm/vllm-openai:v0.33.0"
    assert found["vllm"].minimum == "vLLM 0.33.0"
    assert found["vllm-rocm"].image == "vllm/vllm-openai-rocm:v0.33.0"
    assert "--block-size 128" in words(found["vllm-rocm"])
    assert "--attention-backend TRITON_ATTN" in words(found["vllm-rocm"])
    assert "--kv-cache-dtype fp8_e4m3" in words(found["sglang"])
    assert "SGLANG_OPT_USE_BF16_ROUTER_GEMM=0" in words(found["sglang"])
    assert "trtllm-serve" in words(found["tensorrt-llm"])
    assert "15857" in found["tensorrt-llm"].minimum


def test_m31_has_images_of_its_own():
    found = commands(m31=True, layout="minimax")
    assert found["vllm"].image == "vllm/vllm-openai:minimax-m31-flash"
    assert found["vllm-rocm"].image == "vllm/vllm-openai-rocm:minimax-m31-flash"
    assert found["sglang"].image == "lmsysorg/sglang:dev-minimax-m31-flash"
    assert "--page-size 128" in words(found["sglang"])
    assert not found["tensorrt-llm"].command


def test_a_least_release_of_m31_is_not_made_up():
    found = commands(m31=True, layout="minimax")
    for engine in ("vllm", "vllm-rocm"):
        assert found[engine].minimum == (
            "that build: in which release of vLLM M3.1 is first is not known"
            " (0.33.0 stops at this layout's experts)"
        )
    assert found["sglang"].minimum == "SGLang 0.5.23, which has this layout's loader"
    for engine, serving in commands(m31=True, layout="modelopt").items():
        if engine in ("vllm", "vllm-rocm", "sglang"):
            assert "is not known" in serving.minimum
            assert "0." not in serving.minimum


def test_engines_that_cannot_load_a_layout_get_a_reason_and_no_command():
    found = commands(layout="minimax")
    for engine in ("vllm", "vllm-rocm", "tensorrt-llm"):
        assert not found[engine].command
        assert not found[engine].image
        assert "--layout modelopt" in found[engine].notes[0]
    assert any("Blackwell" in note for note in found["sglang"].notes)


@pytest.mark.parametrize(
    ("kv", "vllm", "rocm", "sglang"),
    [("FP8", "fp8", "fp8", "fp8_e4m3"), ("NVFP4", "nvfp4", "fp8", "fp8_e4m3"),
     ("", "auto", "auto", "auto")],
)  # fmt: skip
def test_kv_flags_are_what_each_engine_takes(kv, vllm, rocm, sglang):
    found = commands(kv=kv)
    assert f"--kv-cache-dtype {vllm} " in words(found["vllm"])
    assert f"--kv-cache-dtype {rocm} " in words(found["vllm-rocm"])
    assert words(found["sglang"]).endswith(f"--kv-cache-dtype {sglang}")


def test_images_with_their_digests():
    image = f"vllm/vllm-openai:minimax-m31-flash@{DIGEST}"
    assert commands(parse_images((f"vllm={image}",)))["vllm"].image == image
    for wrong in ("vllm", "vllm=", "vllm=a", "other=a:b", "vllm=a:b@sha256:12", "vllm=a:b c"):
        with pytest.raises(UsageError):
            parse_images((wrong,))


@pytest.mark.parametrize(
    ("gigabytes", "gpus"), [(1, 1), (69, 1), (70, 2), (139, 2), (250.1, 4), (278, 4), (444, 8)]
)
def test_gpus_follow_from_size(gigabytes, gpus):
    assert traits(file_bytes=int(gigabytes * 1e9)).gpus == gpus


@pytest.mark.parametrize(
    ("block", "layout"),
    [({"quant_method": "modelopt"}, "modelopt"), ({"quant_method": "mxfp8"}, "mxfp8"),
     ({"quant_method": "mxfp8", "moe_quant_algo": "NVFP4"}, "minimax"), (None, "bf16")],
)  # fmt: skip
def test_layouts_from_config(block, layout):
    config = {**CONFIG, "quantization_config": block}
    assert traits_of(config, 1).layout == layout


def test_m31_is_told_by_sparse_attention_everywhere():
    config = copy.deepcopy(CONFIG)
    assert not traits_of(config, 1).m31
    config["text_config"]["sparse_attention_config"]["sparse_attention_freq"] = [1, 1, 1]
    assert traits_of(config, 1).m31
    assert not traits_of({}, 1).m31


# the recipe file


def example_recipe():
    found = traits()
    return recipe(REPO, found, 427_040_140_160, 25_900_000_000, commands())


def test_the_recipe_obeys_the_schema_and_reads_back():
    text = recipe_text(example_recipe())
    value = yaml.safe_load(text)
    assert not recipe_problems(value)
    assert value["model"]["model_id"] == REPO
    assert value["model"]["base_args"] == ["--block-size", "128", "--kv-cache-dtype", "fp8"]
    assert value["model"]["min_vllm_version"] == "0.33.0"
    assert value["model"]["docker_image"]["amd"].startswith("vllm/vllm-openai-rocm:")
    assert value["model"]["parameter_count"] == "427B"
    assert value["model"]["active_parameters"] == "25.9B"
    assert value["variants"]["default"] == {
        "precision": "nvfp4", "vram_minimum_gb": 300,
        "description": "Converted by mmq, modelopt layout",
    }  # fmt: skip
    assert value["hardware_overrides"]["amd"]["extra_args"] == [
        "--attention-backend", "TRITON_ATTN",
    ]  # fmt: skip
    assert "hardware" not in value["meta"], "only what somebody has run belongs there"


@pytest.mark.parametrize("kv", ["FP8", "NVFP4", ""])
def test_amds_options_are_whole_and_come_out_as_its_command_has_them(kv):
    """vLLM's recipes put extra_args after base_args, and the last of an option's values counts."""
    value = recipe(REPO, traits(kv=kv), 1, 1, commands(kv=kv))
    extra = value["hardware_overrides"]["amd"]["extra_args"]
    assert len(extra) % 2 == 0
    assert all(word.startswith("--") for word in extra[::2])
    both = [*value["model"]["base_args"], *extra]
    last = dict(zip(both[::2], both[1::2], strict=True))
    serve = words(commands(kv=kv)["vllm-rocm"])
    assert all(f"{option} {given}" in serve for option, given in last.items())
    assert last["--kv-cache-dtype"] == {"FP8": "fp8", "NVFP4": "fp8", "": "auto"}[kv]


def test_only_what_vllm_is_known_to_load_has_a_recipe():
    def found(**values):
        return has_recipe(traits(**values), commands(**values).values())

    assert found()
    assert found(layout="bf16")
    assert not found(layout="minimax")
    assert not found(m31=True, layout="minimax"), "in which release first is not known"


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("meta.title", ""), ("meta.tasks", []), ("meta.tasks", ["chat"]), ("model.model_id", None),
        ("model.architecture", "mixture"), ("model.base_args", [128]),
        ("model.context_length", None),
        ("variants", {}), ("variants.default.precision", "nvfp5"),
        ("variants.default.vram_minimum_gb", 0), ("variants.default.vram_minimum_gb", "300"),
        ("compatible_strategies", []),
    ],
)  # fmt: skip
def test_each_rule_of_the_schema_bites(path, value):
    broken = copy.deepcopy(example_recipe())
    *parents, key = path.split(".")
    block = broken
    for parent in parents:
        block = block[parent]
    block[key] = value
    assert recipe_problems(broken)
    with pytest.raises(MmqError):
        recipe_text(broken)


def test_no_recipe_for_what_vllm_cannot_load(hub, good_folder, tmp_path):
    from in_process import run_mmq

    out = tmp_path / "minimax"
    assert run_mmq("convert", good_folder, out, "--jobs", "1", "--layout", "minimax")[0] == 0
    assert run_mmq("verify", out, "--against", good_folder)[0] == 0
    code, events, _ = run_mmq(
        "publish", out, "org/mm", "--base-model", "a/b", "--license-name", "x", "--license-link",
        "LICENSE",
    )  # fmt: skip
    assert code == 0, events
    files = hub.files("org/mm")
    assert "vllm-recipe.yaml" not in files
    assert b"stops at the experts' scales" in files["README.md"]
    assert b"library_name: sglang" in files["README.md"]


def test_parameters_of_a_small_model_are_counted(publish, hub):
    assert publish().code == 0
    value = yaml.safe_load(hub.files("org/model-NVFP4")["vllm-recipe.yaml"])
    assert value["model"]["parameter_count"] == "1M"
    assert value["model"]["context_length"] > 0


@pytest.mark.parametrize(
    ("count", "text"),
    [(427_040_140_160, "427B"), (25_946_000_000, "25.9B"), (1_300_000_000_000, "1.3T"), (3, "1M")],
)
def test_counts_as_recipes_write_them(count, text):
    assert billions(count) == text


# evaluation results


def test_results_name_the_dataset_and_their_error():
    data = yaml.safe_load(
        eval_text(verify_report(), EvalDataset("org/set", "perplexity", "a" * 40))
    )
    (entry,) = parse_eval_result_entries(data)
    assert (entry.dataset_id, entry.task_id) == ("org/set", "perplexity")
    assert entry.value == 13.4827
    assert entry.dataset_revision == "a" * 40
    assert "13.483 ± 0.071" in entry.notes
    assert "one SE" in entry.notes
    assert logits().tokens_sha256 in entry.notes


def test_no_figures_no_results():
    with pytest.raises(UsageError) as error:
        eval_text(verify_report(with_logits=False), EvalDataset("org/set", "t", ""))
    assert error.value.id == "eval-no-figures"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_perplexity_that_is_no_number_is_no_result(value):
    report = verify_report()
    arms = report.logits.arms
    arms["both"] = arms["both"].model_copy(update={"perplexity": Measure(value=value)})
    with pytest.raises(UsageError) as error:
        eval_text(report, EvalDataset("org/set", "t", ""))
    assert error.value.id == "eval-no-figures"


def test_results_are_utf8_whatever_the_convention_says():
    report = verify_report()
    report.logits.convention["texts"] = "bad \ud800 name"
    text = eval_text(report, EvalDataset("org/set", "t", ""))
    assert "bad \\ud800 name" in yaml.safe_load(text.encode("utf-8"))[0]["notes"]


@pytest.mark.parametrize(
    ("word", "found"),
    [("a/b:c", EvalDataset("a/b", "c", "")),
     (f"a/b:c@{'0' * 40}", EvalDataset("a/b", "c", "0" * 40))],
)  # fmt: skip
def test_dataset_words(word, found):
    assert parse_dataset(word) == found


@pytest.mark.parametrize("word", ["a/b", "a:b", "a/b:c@main", "a/b:", ""])
def test_dataset_words_that_are_none(word):
    with pytest.raises(UsageError):
        parse_dataset(word)


def test_results_are_published_where_the_dataset_is_named(publish, output, hub):
    import json

    path = output / "mmq-verify.json"
    report = json.loads(path.read_bytes())
    report["logits"] = verify_report().model_dump()["logits"]
    path.write_text(json.dumps(report), encoding="utf-8")
    assert publish("--eval-dataset", "org/set:perplexity").code == 0
    assert b"org/set" in hub.files("org/model-NVFP4")[".eval_results/mmq.yaml"]

"""Which files go, under which names: the folder's and those made here, each once."""

from __future__ import annotations

import hashlib
import json
import shutil

import pytest
import yaml
from in_process import Outcome, run_mmq
from sent_files import CARD_OPTIONS, PUT, REPO, shards_of


def add_to_manifest(output, name: str, data: bytes) -> None:
    path = output / "mmq-manifest.json"
    manifest = json.loads(path.read_bytes())
    entry = {"name": name, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    manifest["files"].append(entry)
    path.write_text(json.dumps(manifest), "utf-8")
    (output / name).parent.mkdir(parents=True, exist_ok=True)
    (output / name).write_bytes(data)


@pytest.fixture(scope="session")
def published_before(good_folder, tmp_path_factory):
    """Converted and verified from a source that mmq itself had published."""
    folder = tmp_path_factory.mktemp("again")
    source, out = folder / "src", folder / "out"
    shutil.copytree(good_folder, source)
    (source / ".eval_results").mkdir()
    for name in ("vllm-recipe.yaml", "mmq-verify.json", "mmq-convert.json",
                 ".eval_results/mmq.yaml", ".eval_results/gpqa.yaml"):  # fmt: skip
        (source / name).write_text("{}\n")
    code, events, _ = run_mmq("convert", source, out, "--jobs", "1")
    assert code == 0, events
    code, events, _ = run_mmq("verify", out, "--against", source)
    assert code == 0, events
    return out


def test_a_source_that_mmq_published(hub, published_before):
    words = ("publish", published_before, REPO, *CARD_OPTIONS)
    outcome = Outcome(*run_mmq(*words), published_before)
    assert outcome.code == 0, outcome.events
    files = hub.files(REPO)
    assert yaml.safe_load(files["vllm-recipe.yaml"])["model"]["model_id"] == REPO
    assert json.loads(files["mmq-verify.json"])["verdict"]
    assert not [name for name in files if name.startswith(".eval_results")]
    assert Outcome(*run_mmq(*words), published_before).of("result")[0]["batches"] == []


@pytest.mark.parametrize("name", ["vllm-recipe.yaml", ".eval_results/mmq.yaml", "mmq-verify.json"])
def test_names_made_here_are_not_taken_from_the_folder(publish, output, hub, name):
    report = (output / "mmq-verify.json").read_bytes()
    add_to_manifest(output, name, report if name == "mmq-verify.json" else b"the source's\n")
    outcome = publish("--allow-unverified")
    assert outcome.code == 0, outcome.events
    sent = [item["name"] for batch in outcome.of("result")[0]["batches"] for item in batch]
    assert len(sent) == len(set(sent))
    assert b"the source's\n" not in hub.files(REPO).values()


def test_no_name_goes_twice():
    from mmq.errors import BadInputError
    from mmq.publish.items import check_items
    from mmq.publish.upload_plan import made

    check_items([made("a", b"1"), made("b", b"1")])
    with pytest.raises(BadInputError, match="'a', which no repository can hold twice"):
        check_items([made("a", b"1"), made("b", b"1"), made("a", b"2")])


@pytest.mark.parametrize("name", [".git/config", "sub/.git/x", "a\nb.txt", "x\u202ey.txt"])
def test_names_that_no_repository_can_hold(name):
    from mmq.errors import BadInputError
    from mmq.publish.items import check_items
    from mmq.publish.upload_plan import made

    with pytest.raises(BadInputError) as caught:
        check_items([made(name, b"1")])
    assert caught.value.id == "publish-manifest-invalid"
    assert repr(name) in caught.value.message


def test_a_manifest_that_names_gits_own_folder(publish, output, hub):
    add_to_manifest(output, ".git/config", b"[core]\n")
    outcome = publish("--allow-unverified")
    assert outcome.code == 0, outcome.events
    assert any(".git/config" in e["message"] for e in outcome.of("warning"))
    assert ".git/config" not in hub.files(REPO)


def test_a_file_larger_than_the_hub_takes(publish, output, hub, monkeypatch):
    largest = max((output / name).stat().st_size for name in shards_of(output))
    monkeypatch.setattr("mmq.publish.items.LARGEST_FILE", largest)
    assert publish("--dry-run").code == 0
    monkeypatch.setattr("mmq.publish.items.LARGEST_FILE", largest - 1)
    outcome = publish()
    assert (outcome.code, outcome.error["id"]) == (2, "publish-file-too-large")
    assert "--max-shard-size" in outcome.error["hint"]
    assert not hub.log.of(PUT)


def test_the_hubs_limit_is_500_gb():
    from mmq.publish.items import LARGEST_FILE

    assert LARGEST_FILE == 500 * 10**9


def test_the_recipe_counts_values_of_one_tokens_path(publish, output, hub, monkeypatch):
    # tensor by tensor: two NVFP4 values to a byte, and scales are no values
    from safetensors import safe_open

    total = routed = 0
    for path in [output / name for name in shards_of(output)]:
        with safe_open(path, "np") as file:
            names = set(file.keys())
            for name in names:
                shape = file.get_slice(name).get_shape()
                values = 1
                for size in shape:
                    values *= size
                stem = name.removesuffix("_scale_inv").removesuffix("_scale_2")
                stem = stem.removesuffix("_scale").removesuffix(".input")
                if stem != name or name.endswith(".input_scale"):
                    continue
                packed = f"{name}_scale" in names
                values *= 2 if packed else 1
                total += values
                routed += values if ".experts." in name else 0
    counts = []
    real = __import__("mmq.publish.items", fromlist=["recipe"]).recipe
    monkeypatch.setattr(
        "mmq.publish.items.recipe", lambda *words: counts.append(words[2:4]) or real(*words)
    )
    assert publish("--dry-run").code == 0
    text = json.loads((output / "config.json").read_bytes())["text_config"]
    share = text["num_experts_per_tok"] / text["num_local_experts"]
    assert 0 < share < 1
    assert counts == [(total, total - routed + round(routed * share))]


def test_the_report_that_was_judged_is_the_one_that_goes(publish, output, hub, monkeypatch):
    from mmq.publish import run

    hashed = run.hash_folder

    def rewrite(folder, console):
        path = output / "mmq-verify.json"
        path.write_text(json.dumps({**json.loads(path.read_bytes()), "verdict": "fail"}), "utf-8")
        return hashed(folder, console)

    monkeypatch.setattr(run, "hash_folder", rewrite)
    assert publish().code == 0
    assert json.loads(hub.files(REPO)["mmq-verify.json"])["verdict"] == "pass"
    assert b"**pass**" in hub.files(REPO)["README.md"]

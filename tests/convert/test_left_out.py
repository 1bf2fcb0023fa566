"""What lies beside a model and is no part of it: left out, told, and not missed by verify."""

from __future__ import annotations

import json
import re
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
from in_process import Outcome, run_mmq

from mmq.convert import side_files
from mmq.convert.checkpoint import open_checkpoint
from mmq.convert.left_out import MOST_NAMES, LeftOut, left_out, left_out_notes
from mmq.convert.side_files import list_side_files
from mmq.publish.eval_results import EVAL_NAME
from mmq.publish.recipe import RECIPE_NAME

OUT = {
    "hidden files": [".env", ".env.local", ".netrc", ".gitignore", ".github/", "dspark/.npmrc"],
    "private files": ["_netrc", "id_rsa", "id_ed25519.pub", "server.PEM", "a/b/api.key"],
    "leftovers": [
        "train.log", "x.tmp", "model.lock", "a.incomplete", "model-1.safetensors.partial", "x.part",
        "x.aria2", "config.json.bak", "config.json~", ".x.swp", "nohup.out", "slurm-1.out", "a.pyc",
    ],
    "state of a training": [
        "optimizer.pt", "scheduler.pt", "scaler.pt", "rng_state.pth", "rng_state_0.pth",
        "trainer_state.json", "training_args.bin", "checkpoint-500/", "global_step10/", "latest",
        "optimizer_0/", "pytorch_model_fsdp_0/", "random_states_0.pkl", "zero_to_fp32.py",
        "runs/events.out.tfevents.1.host.2", "wandb/",
    ],
    "true of the source alone": [".eval_results/", "vllm-recipe.yaml"],
    "": [".git/", ".cache/", "__pycache__/", ".DS_Store", "dspark/.ipynb_checkpoints/", ".mmq/"],
}  # fmt: skip
KEPT = [
    ".gitattributes", "tokenizer.json", "tokenizer.model", "merges.txt", "vocab.json", "LICENSE",
    "chat_template.jinja", "modeling_minimax.py", "dspark/config.json", "dspark/model.safetensors",
    "checkpoint.md", "checkpoint-notes.txt", "logs.md", "figures/logo.png", "key.txt", "log.md",
    "latest.json", "scheduler.py", "optimizer.py", "runs/readme.md", "environment.yml", "README.md",
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "reason"), [(n, r) for r, names in OUT.items() for n in names], ids=str
)
def test_each_name_is_left_out_for_its_reason(name, reason):
    path = f"{name}inner/file" if name.endswith("/") else name
    # .x.swp is a leftover first, and hidden as well
    assert left_out(path) == LeftOut(name, reason)


@pytest.mark.parametrize("name", KEPT)
def test_what_belongs_to_a_model_stays(name):
    assert left_out(name) is None


def test_names_are_those_of_the_tools():
    """transformers' Trainer names its state itself; a source of its own is not imported for it."""
    spec = find_spec("transformers")
    assert spec is not None and spec.origin is not None
    text = (Path(spec.origin).parent / "trainer.py").read_text("utf-8")
    names = re.findall(r'^(\w+)_NAME = "([^"]+)"', text, re.M)
    state = {n for what, n in names if what in ("OPTIMIZER", "SCALER", "SCHEDULER", "TRAINER_STATE",
                                                "TRAINING_ARGS")}  # fmt: skip
    assert len(state) >= 4
    for name in state:
        assert left_out(name) == LeftOut(name, "state of a training")
    for name in (RECIPE_NAME, EVAL_NAME):
        assert left_out(name) is not None


def test_one_note_tells_all_names_of_a_reason():
    found = [LeftOut(f"{n:02}.log", "leftovers") for n in range(MOST_NAMES + 3)] * 2
    (note,) = left_out_notes([*found, LeftOut(".git/", "")])
    assert (note.id, note.severity, note.where) == ("side-file-left-out", "note", "00.log")
    assert note.message.startswith("not copied (leftovers): 00.log, 01.log, ")
    assert note.message.endswith(f"{MOST_NAMES - 1:02}.log and 3 more")


@pytest.fixture
def littered(good_folder, tmp_path) -> Path:
    """The good source with everything beside it that should not travel."""
    source = Path(shutil.copytree(good_folder, tmp_path / "src"))
    for names in OUT.values():
        for name in names:
            path = source / (f"{name}config.json" if name.endswith("/") else name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("s3cret", encoding="utf-8")
    (source / ".gitattributes").write_text("* text\n", encoding="utf-8")
    # nobody looks behind these names
    (source / ".venv").symlink_to("nowhere")
    (source / "wandb" / "gone").symlink_to("nowhere")
    return source


def test_nothing_of_it_is_copied_and_all_of_it_is_told(littered, good_folder, tmp_path):
    out = tmp_path / "out"
    outcome = Outcome(*run_mmq("convert", littered, out, "--jobs", "1"), out)
    assert outcome.code == 0, outcome.events
    assert not [p for p in out.rglob("*") if p.is_file() and b"s3cret" in p.read_bytes()]
    assert (out / ".gitattributes").is_file()
    notes = [e["message"] for e in outcome.of("finding") if e["id"] == "side-file-left-out"]
    assert len(notes) == len(OUT) - 1, "one for each reason, none for tools' folders"
    told = " ".join(notes)
    assert all(word in told for word in (".env", "id_rsa", "train.log", ".eval_results/", ".venv"))
    assert ".git/" not in told
    report = outcome.json("mmq-convert.json")
    assert {f["message"] for f in report["findings"]} >= set(notes)


def test_a_dry_run_tells_it_too(littered, tmp_path):
    code, events, _ = run_mmq("convert", littered, tmp_path / "out", "--dry-run")
    assert code == 0, events
    assert "side-file-left-out" in {e.get("id") for e in events} | {
        f["id"] for e in events for f in e.get("findings", [])
    }


def test_verify_does_not_miss_it(littered, tmp_path):
    out = tmp_path / "out"
    assert run_mmq("convert", littered, out, "--jobs", "1")[0] == 0
    code, events, _ = run_mmq("verify", out, "--against", littered)
    assert code == 0
    assert not [e for e in events if e["event"] == "finding" and "side-file" in e["id"]]


def test_a_clean_source_gives_the_same_bytes(littered, good_folder, tmp_path):
    found = []
    for name, source in (("a", littered), ("b", good_folder)):
        assert run_mmq("convert", source, tmp_path / name, "--jobs", "1")[0] == 0
        outcome = Outcome(0, [], "", tmp_path / name)
        found.append({k: v for k, v in outcome.hashes.items() if k != ".gitattributes"})
    differ = {k for k in found[0] if found[0][k] != found[1].get(k)}
    assert differ <= {"mmq-convert.json", "mmq-manifest.json"}
    assert found[0].keys() == found[1].keys()


def test_a_listing_of_the_hub_is_judged_alike(good_folder, monkeypatch):
    source = open_checkpoint(good_folder)
    names = [n.rstrip("/") + "/x" if n.endswith("/") else n for r in OUT.values() for n in r]
    monkeypatch.setattr(
        side_files, "side_listing",
        lambda _: [(good_folder / "config.json", name, 1) for name in sorted([*names, *KEPT])],
    )  # fmt: skip
    files, notes = list_side_files(source)
    assert {f.name for f in files} == set(KEPT)
    assert len(notes) == len(OUT) - 1


def test_a_copy_that_an_early_mmq_made_is_not_missed_after_publishing(good_folder, tmp_path):
    """Its manifest names a file that publishing does not send."""
    out = tmp_path / "out"
    assert run_mmq("convert", good_folder, out, "--jobs", "1")[0] == 0
    path = out / "mmq-manifest.json"
    manifest = json.loads(path.read_bytes())
    manifest["files"].append({"name": ".env", "bytes": 5, "sha256": "ab" * 32})
    path.write_text(json.dumps(manifest), encoding="utf-8")
    code, events, _ = run_mmq("verify", out)
    assert code == 0, events
    assert "file-missing" not in {e.get("id") for e in events}
    manifest["files"].append({"name": "other.txt", "bytes": 5, "sha256": "ab" * 32})
    path.write_text(json.dumps(manifest), encoding="utf-8")
    assert run_mmq("verify", out)[0] == 3

"""No token is sent: not in a file, not in a report, not in the card; and nothing before that."""

from __future__ import annotations

import json
import shutil

import pytest
from in_process import Outcome, run_mmq

from mmq.errors import RefusedError
from mmq.publish.token_check import live_tokens, refuse_tokens
from mmq.publish.upload_plan import Item, made

REPO = "org/model-NVFP4"
BASE = ("--base-model", "org/base", "--license-name", "minimax", "--license-link", "LICENSE")
TOKEN = "hf_abcdefghijklmnop"


@pytest.fixture
def source(good_folder, tmp_path):
    return shutil.copytree(good_folder, tmp_path / "src")


def converted(source, tmp_path):
    out = tmp_path / "out"
    assert run_mmq("convert", source, out, "--jobs", "1")[0] == 0
    assert run_mmq("verify", out, "--against", source)[0] == 0
    return out


def test_secrets_of_the_sources_folder_do_not_arrive(hub, source, tmp_path):
    names = (".env", "train.log", "x.tmp", "model.lock", ".netrc", "a.incomplete", ".gitignore")
    for name in names:
        (source / name).write_text(f"HF_TOKEN={hub.token}\n", encoding="utf-8")
    (source / ".eval_results").mkdir()
    (source / ".eval_results" / "gpqa.yaml").write_text("- value: 99\n", encoding="utf-8")
    out = converted(source, tmp_path)
    outcome = Outcome(*run_mmq("publish", out, REPO, *BASE), out)
    assert outcome.code == 0, outcome.events
    files = hub.files(REPO)
    assert not {*names, ".eval_results/gpqa.yaml"} & {*files}
    assert not [n for n, data in files.items() if hub.token.encode() in data]


@pytest.mark.parametrize("name", ["notes.txt", "dspark/tokens.bin", "tokenizer.json"])
@pytest.mark.parametrize("dry", [(), ("--dry-run",)], ids=["run", "dry run"])
def test_a_file_that_holds_the_token_stops_it(hub, source, tmp_path, name, dry):
    (source / name).write_bytes(b"x" * 5_000_000 + hub.token.encode() + b"\n")
    out = converted(source, tmp_path)
    outcome = Outcome(*run_mmq("publish", out, REPO, *BASE, *dry), out)
    assert (outcome.code, outcome.error["id"]) == (7, "publish-token-in-file")
    assert outcome.error["where"] == name
    assert hub.token not in str(outcome.events) + outcome.stderr
    assert not hub.store.repos
    assert not hub.log.of("^(POST|PUT)")


@pytest.mark.parametrize("where", ["mmq-verify.json", "README.md"])
def test_the_token_in_a_report_or_a_card_stops_it_too(publish, output, hub, where):
    if where == "README.md":
        text = f"---\nlicense: other\n---\n# {hub.token}\n"
        (output / where).write_text(text, encoding="utf-8")
    else:
        report = json.loads((output / where).read_bytes())
        finding = {"id": "x", "severity": "note", "message": "m", "where": hub.token}
        report["findings"].append(finding)
        (output / where).write_text(json.dumps(report), encoding="utf-8")
    outcome = publish()
    assert (outcome.code, outcome.error["id"]) == (7, "publish-token-in-file")
    assert not hub.store.repos


def test_files_that_an_early_mmq_copied_are_not_sent(publish, output, hub):
    """The manifest still names them; `mmq verify` of a download does not miss them."""
    path = output / "mmq-manifest.json"
    manifest = json.loads(path.read_bytes())
    for name in (".env", ".eval_results/gpqa.yaml", "optimizer.pt"):
        (output / name).parent.mkdir(exist_ok=True)
        (output / name).write_bytes(b"12345")
        manifest["files"].append({"name": name, "bytes": 5, "sha256": "ab" * 32})
    path.write_text(json.dumps(manifest), encoding="utf-8")
    (output / "mmq-verify.json").unlink()
    outcome = publish("--allow-unverified")
    assert outcome.code == 0, outcome.events
    (warning,) = [e["message"] for e in outcome.of("warning") if "not sent" in e["message"]]
    assert ".env, .eval_results/gpqa.yaml, optimizer.pt" in warning
    assert not {".env", ".eval_results/gpqa.yaml", "optimizer.pt"} & {*hub.files(REPO)}


def test_the_cut_between_two_chunks_hides_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr("mmq.publish.token_check._CHUNK", 16)
    for start in range(64):
        path = tmp_path / "x"
        path.write_bytes(b"." * start + TOKEN.encode() + b"." * 40)
        for item in (Item("x", 0, "", path), made("x", path.read_bytes())):
            with pytest.raises(RefusedError) as error:
                refuse_tokens([item], ["hf_another_one", TOKEN])
            assert TOKEN not in str(error.value)
    path.write_bytes(TOKEN[:-1].encode() * 3)
    refuse_tokens([Item("x", 0, "", path)], [TOKEN])
    refuse_tokens([Item("x", 0, "", path)], [])


def test_weights_are_not_searched():
    item = made("x.safetensors", TOKEN.encode())
    weights = Item(item.name, item.nbytes, item.sha256, data=item.data, weights=True)
    refuse_tokens([weights], [TOKEN])


def test_stored_tokens_count_beside_the_one_in_use(monkeypatch, tmp_path):
    store = tmp_path / "stored_tokens"
    store.write_text("[a]\nhf_token = hf_stored_one\n[b]\nhf_token = short\n", encoding="utf-8")
    monkeypatch.setattr("huggingface_hub.constants.HF_STORED_TOKENS_PATH", str(store))
    assert live_tokens(TOKEN) == [TOKEN, "hf_stored_one"]
    assert live_tokens(None) == ["hf_stored_one"]
    monkeypatch.setattr("huggingface_hub.constants.HF_STORED_TOKENS_PATH", str(tmp_path / "none"))
    assert live_tokens(None) == []


def test_a_store_that_cannot_be_read_counts_as_empty(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_STORED_TOKENS_PATH", str(tmp_path))
    assert live_tokens(TOKEN) == [TOKEN]
    (tmp_path / "stored").write_bytes(b"hf_token\xff")
    damaged = str(tmp_path / "stored")
    monkeypatch.setattr("huggingface_hub.constants.HF_STORED_TOKENS_PATH", damaged)
    assert live_tokens(TOKEN) == [TOKEN]

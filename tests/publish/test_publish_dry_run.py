"""A dry run says what would be sent, and sends nothing."""

from __future__ import annotations

import contextlib
import io

from in_process import run_mmq
from m3_source import INDEX, snapshot

from mmq.cli import main

REPO = "org/model-NVFP4"
BASE = ("--base-model", "org/base", "--license-name", "minimax", "--license-link", "LICENSE")


def test_nothing_is_sent_and_nothing_changes(publish, output, hub):
    before = snapshot(output)
    assert publish("--dry-run").code == 0
    assert not hub.store.repos
    assert not hub.log.of("^(POST|PUT)")
    assert snapshot(output) == before


def test_it_says_what_the_real_run_then_does(publish, hub):
    said = publish("--dry-run").of("result")[0]
    done = publish().of("result")[0]
    assert said["batches"] == done["batches"]
    assert said["new_repository"] is True
    assert said["dry_run"] is True
    assert done["dry_run"] is False


def test_it_says_whose_card_it_changes(publish, hub):
    (said,) = publish("--dry-run").of("result")
    assert said["card_diff"][0] == "--- README.md (OUT's)"
    hub.add("org/model-NVFP4", {"README.md": b"---\nlicense: other\n---\n# Theirs\n"})
    (said,) = publish("--dry-run").of("result")
    assert said["card_diff"][0] == "--- README.md (there)"


def test_it_knows_what_is_there(publish, hub):
    publish()
    said = publish("--dry-run").of("result")[0]
    assert said["batches"] == []
    assert INDEX in said["kept"]
    assert said["card_diff"] == []


def test_it_needs_no_token(publish, hub, monkeypatch, tmp_path):
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    assert publish("--dry-run").of("result")[0]["new_repository"] is True
    hub.add(REPO, {"x": b"y"})
    assert publish("--dry-run").of("result")[0]["new_repository"] is False


def test_it_refuses_what_the_real_run_refuses(publish, output, hub):
    (output / "mmq-verify.json").unlink()
    assert publish("--dry-run").code == 7


def test_people_read_files_bytes_order_and_the_cards_changes(hub, output):
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        assert main(["publish", str(output), REPO, *BASE, "--dry-run"]) == 0
    text = out.getvalue()
    assert f"{REPO} (would be made, public), main" in text
    assert "from here on it is a model" in text
    assert text.index("model-00001-of-") < text.index("config.json") < text.index("+<!-- mmq -->")
    assert "+base_model: org/base" in text
    assert "the Hub holds" not in text


def test_a_dry_run_lists_every_file_and_a_run_a_dozen_of_a_batch(hub, output):
    def printed(*options: str) -> str:
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
            assert main(["publish", str(output), REPO, *BASE, *options]) == 0
        return out.getvalue()

    code, events, _ = run_mmq("publish", output, REPO, *BASE, "--dry-run")
    assert code == 0
    batches = next(e for e in events if e["event"] == "result")["batches"]
    names = [item["name"] for batch in batches for item in batch]
    assert max(map(len, batches)) > 12
    text = printed("--dry-run").partition("\nREADME.md\n")[0]
    assert all(f"  {name} " in text for name in names)
    assert " more" not in text
    text = printed()
    assert " more" in text
    assert INDEX in text
    assert "README.md" in text
    assert f"the Hub holds every file as sent: {hub.endpoint}/{REPO}/tree/main" in text

"""What may not be published: unverified, failed, undecided, changed since, unfinished."""

from __future__ import annotations

import hashlib
import json

import pytest
from card_example import verify_report
from in_process import run_mmq
from m3_source import INDEX

REPORT, DRAFT = "mmq-verify.json", "dspark/model.safetensors"


def edit_report(output, **values):
    report = json.loads((output / REPORT).read_bytes())
    (output / REPORT).write_text(json.dumps({**report, **values}), encoding="utf-8")


def edit_manifest(output, name, **values):
    """Change a file's entry; the report then judges that manifest as it is."""
    path = output / "mmq-manifest.json"
    manifest = json.loads(path.read_bytes())
    for entry in manifest["files"]:
        entry |= values if entry["name"] == name else {}
    path.write_text(json.dumps(manifest), encoding="utf-8")
    files = json.loads((output / REPORT).read_bytes())["files"]
    for file in files:
        if file["name"] == path.name:
            file["sha256"] = sha256(path)
    edit_report(output, files=files)


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def flip_last_byte(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def shard_of(output):
    return sorted(output.glob("model-*.safetensors"))[1]


def unverified(output):
    (output / REPORT).unlink()


def failed(output):
    edit_report(output, verdict="fail")


def inconclusive(output):
    edit_report(output, verdict="inconclusive")


def level_belies_the_verdict(output):
    report = json.loads((output / REPORT).read_bytes())
    report["levels"][-1]["status"] = "fail"
    edit_report(output, levels=report["levels"])


def finding_belies_the_verdict(output):
    finding = {"severity": "error", "id": "file-hash", "message": "m", "level": "weights"}
    edit_report(output, findings=[finding])


def gate_belies_the_verdict(output):
    """Level logits of another model's report; one of its gates made to fail."""
    logits = verify_report().logits.model_dump(mode="json")
    logits["gates"][0]["status"] = "fail"
    edit_report(output, logits=logits)


def shard_changed(output):
    flip_last_byte(shard_of(output))


def config_changed(output):
    path = output / "config.json"
    path.write_bytes(path.read_bytes().replace(b"  ", b" ", 1) + b" ")


def config_resized(output):
    path = output / "config.json"
    path.write_bytes(path.read_bytes() + b" ")


def manifest_changed(output):
    path = output / "mmq-manifest.json"
    path.write_bytes(path.read_bytes() + b"\n")


def structure_only(output):
    report = json.loads((output / REPORT).read_bytes())
    edit_report(output, files=[f for f in report["files"] if f["name"].endswith(".json")])


def side_file_nobody_judged(output):
    report = json.loads((output / REPORT).read_bytes())
    edit_report(output, files=[f for f in report["files"] if f["name"] != "chat_template.jinja"])
    flip_last_byte(output / "chat_template.jinja")


def draft_nobody_judged(output):
    report = json.loads((output / REPORT).read_bytes())
    assert any(f["name"] == DRAFT for f in report["files"])
    edit_report(output, files=[f for f in report["files"] if f["name"] != DRAFT])


def changed_with_its_manifest(output):
    """The manifest agrees with the new bytes; the report, which judged the old ones, counts."""
    name = "chat_template.jinja"
    flip_last_byte(output / name)
    edit_manifest(output, name, sha256=sha256(output / name))


@pytest.mark.parametrize(
    ("fault", "finding"),
    [
        (unverified, "publish-unverified"),
        (failed, "publish-verdict"),
        (inconclusive, "publish-verdict"),
        (level_belies_the_verdict, "publish-verdict"),
        (finding_belies_the_verdict, "publish-verdict"),
        (gate_belies_the_verdict, "publish-verdict"),
        (shard_changed, "publish-stale"),
        (config_changed, "publish-stale"),
        (config_resized, "publish-file-missing"),
        (manifest_changed, "publish-stale"),
        (structure_only, "publish-weights-unverified"),
        (side_file_nobody_judged, "publish-stale"),
        (draft_nobody_judged, "publish-weights-unverified"),
        (changed_with_its_manifest, "publish-stale"),
    ],
    ids=lambda v: getattr(v, "__name__", v),
)
def test_refused_with_nothing_sent(publish, output, hub, fault, finding):
    fault(output)
    outcome = publish()
    assert finding in {*outcome.findings, outcome.error["id"]}
    assert outcome.code == (4 if finding == "publish-file-missing" else 7)
    assert not hub.store.repos
    assert not hub.log.of("^(POST|PUT)")


def test_refused_before_anything_is_hashed_or_asked(publish, output, hub):
    unverified(output)
    publish()
    assert not hub.log.requests


def test_a_warning_may_be_published(publish, output, hub):
    edit_report(output, verdict="warn")
    assert publish().code == 0


@pytest.mark.parametrize("fault", [unverified, failed, shard_changed], ids=lambda f: f.__name__)
def test_allow_unverified_publishes_and_the_card_says_so(publish, output, hub, fault):
    fault(output)
    outcome = publish("--allow-unverified")
    assert outcome.code == 0
    assert {f["severity"] for f in outcome.of("finding")} == {"warning"}
    card = hub.files("org/model-NVFP4")["README.md"].decode()
    assert "Published without a passing verification" in card
    finding = outcome.of("finding")[0]["message"].split(":")[0]
    assert finding.split("model-0000")[0] in card


def test_a_passing_card_has_no_such_note(publish, hub):
    publish()
    assert "without a passing" not in hub.files("org/model-NVFP4")["README.md"].decode()


def test_the_card_of_out_may_be_edited_after_verifying(publish, output, hub):
    card = output / "README.md"
    card.write_text("---\nlicense: mit\n---\n# Mine\n\nHello.\n", encoding="utf-8")
    assert publish("--base-model", "org/base", card=False).code == 0
    published = hub.files("org/model-NVFP4")["README.md"].decode()
    assert published.startswith("---\nlicense: mit\n")
    assert published.index("Hello.") < published.index("<!-- mmq -->")


def unfinished(output):
    (output / ".mmq").mkdir()


def without_manifest(output):
    (output / "mmq-manifest.json").unlink()


def manifest_leads_out(output):
    path = output / "mmq-manifest.json"
    path.write_bytes(path.read_bytes().replace(b'"LICENSE"', b'"../LICENSE"'))


def manifest_names_a_file_twice(output):
    path = output / "mmq-manifest.json"
    manifest = json.loads(path.read_bytes())
    manifest["files"].append(manifest["files"][0])
    path.write_text(json.dumps(manifest), encoding="utf-8")


def without_shard(output):
    shard_of(output).unlink()


def index_names_another(output):
    path = output / INDEX
    name = shard_of(output).name.encode()
    path.write_bytes(path.read_bytes().replace(name, name[:-18] + b"9" + name[-17:]))


@pytest.mark.parametrize(
    ("fault", "error", "code"),
    [
        (unfinished, "output-unfinished", 5),
        (without_manifest, "publish-no-manifest", 4),
        (manifest_leads_out, "publish-manifest-invalid", 4),
        (manifest_names_a_file_twice, "publish-manifest-invalid", 4),
        (without_shard, "publish-file-missing", 4),
        (index_names_another, "index-manifest-differ", 4),
    ],
    ids=lambda v: getattr(v, "__name__", v),
)
def test_no_finished_output(publish, output, hub, fault, error, code):
    fault(output)
    outcome = publish()
    assert (outcome.error["id"], outcome.code) == (error, code)
    assert not hub.log.requests


def test_no_such_folder(hub, tmp_path):
    code, events, _ = run_mmq("publish", tmp_path / "nothing", "org/model")
    assert (code, events[0]["id"]) == (4, "output-not-found")


@pytest.mark.parametrize(
    "words",
    [
        ("model",),
        ("org/model/x",),
        ("org/model", "--create-pr", "--revision", "v1"),
        ("org/model", "--base-model", "nobody"),
        ("org/model", "--image", "vllm=latest"),
        ("org/model", "--image", "mystery=a/b:c"),
        ("org/model", "--eval-dataset", "squad"),
        ("org/model", "--eval-dataset", "org/set:task"),
    ],
    ids=" ".join,
)
def test_command_lines_that_make_no_sense(hub, output, words):
    repo, *options = words
    code, _, _ = run_mmq("publish", output, repo, "--base-model", "org/base", *options)
    assert code == 2
    assert not hub.log.of("^(POST|PUT)")

"""The composite action: its steps' shell is run, from the Hub and back to it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml
from actions_runner import ActionRun, Runner
from ci_places import REPO, ROOT, SOURCE
from m3_source import INDEX

from mmq.demo.bundled import bundled_gates, bundled_texts

#: Shards of the small model's output are small too, so that there are several.
INPUTS = {
    "source": SOURCE, "install": "false", "cache": "false",
    "convert-args": "--max-shard-size 2MB\n--jobs 1\n",
}  # fmt: skip
PUBLISH = {"repo": REPO, "publish-args": "--license apache-2.0\n"}


@pytest.fixture
def inputs(hub, tmp_path):
    """For a run that publishes; level weights."""
    return {
        **INPUTS, **PUBLISH, "token": hub.token, "out": str(tmp_path / "out"),
        "download-dir": str(tmp_path / "downloads"), "keep-downloads": "true",
    }  # fmt: skip


def outcomes(run: ActionRun) -> dict[str, str]:
    names = ("inspect", "convert", "verify", "report", "publish")
    return {name: run.steps[name].outcome for name in names}


def junit(run: ActionRun) -> ElementTree.Element:
    return ElementTree.parse(Path(run.outputs["reports"]) / "mmq.xml").getroot()


def flip_a_byte(out: Path) -> None:
    shard = out / "model-00001-of-00003.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)


def test_from_the_hub_and_back_to_it(runner, hub, inputs, tmp_path, environment):
    texts = "".join(f"--text {path}\n" for path in bundled_texts())
    # the windows that the gates were frozen with
    verify = f"{texts}--windows 10\n--gates {bundled_gates()}\n"
    inputs |= {"level": "logits", "verify-args": verify, "publish-args": "--debug\n"
               + inputs["publish-args"]}  # fmt: skip
    run = runner.run(inputs)
    assert not run.failed, run.log
    commit = hub.commits(SOURCE)[-1][1]
    assert run.outputs["source"] == f"{SOURCE}@{commit}"
    assert (run.outputs["exit-code"], run.outputs["verdict"]) == ("0", "pass")
    assert run.outputs["url"] == f"{hub.endpoint}/{REPO}/tree/main"
    assert {p.name for p in Path(run.outputs["reports"]).iterdir()} == {
        "mmq-convert.json", "mmq-verify.json", "mmq.html", "mmq.xml"
    }  # fmt: skip
    suites = {suite.get("name") for suite in junit(run)}
    assert {"mmq.structure", "mmq.weights", "mmq.logits"} <= suites
    assert "## mmq convert" in run.summary and "## mmq verify" in run.summary
    assert run.steps["Keep the reports"].given == {
        "name": "mmq-reports", "path": run.outputs["reports"]
    }  # fmt: skip
    _the_token_is_nowhere(hub, run)
    _a_fresh_download_passes(hub, run, tmp_path, environment)


def _the_token_is_nowhere(hub, run: ActionRun) -> None:
    texts = [p.read_text("utf-8") for p in Path(run.outputs["reports"]).iterdir()]
    out = [p.read_text("utf-8") for p in Path(run.outputs["out"]).glob("*.json")]
    for text in (run.log, run.summary, *texts, *out, *run.outputs.values()):
        assert hub.token not in text


def _a_fresh_download_passes(hub, run: ActionRun, tmp_path: Path, environment) -> None:
    out = Path(run.outputs["out"])
    published = hub.files(REPO)
    for name in json.loads(published[INDEX])["weight_map"].values():
        assert published[name] == (out / name).read_bytes()
    done = subprocess.run(
        [sys.executable, "-m", "mmq", "verify", REPO, "--against", run.outputs["source"],
         "--download-dir", tmp_path / "fresh", "-o", tmp_path / "fresh.json", "--strict"],
        env={**environment, "PYTHONPATH": str(ROOT)}, cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "fresh.json").read_bytes())
    assert report["metrics"]["compared_tensors"] == 726


def test_a_planted_fault_stops_it(runner, hub, inputs):
    run = runner.run(inputs, after={"convert": lambda: flip_a_byte(Path(inputs["out"]))})
    assert outcomes(run) == {
        "inspect": "success", "convert": "success", "verify": "failure", "report": "success",
        "publish": "skipped",
    }  # fmt: skip
    assert run.steps["verify"].code == 3
    assert (run.outputs["exit-code"], run.outputs["verdict"]) == ("3", "fail")
    red = [case.get("classname") for case in junit(run).iter("testcase")
           if case.find("failure") is not None]  # fmt: skip
    assert {"conversion-differs", "file-hash"} <= set(red)
    assert "## mmq verify: ❌ fail" in run.summary
    assert any(line.startswith("::error title=conversion-differs::") for line in run.annotations)
    assert len(run.annotations) <= 10
    assert run.steps["Keep the reports"].outcome == "success"
    assert REPO not in hub.store.repos, "nothing is on the Hub, an index least of all"


def test_bad_input_stops_it(runner, hub, inputs, tmp_path):
    """An index that names a shard that is not there."""
    files = hub.files(SOURCE)
    shard = next(name for name in files if name.endswith(".safetensors"))
    hub.add("acme/broken", {n: data for n, data in files.items() if n != shard})
    run = runner.run({**inputs, "source": "acme/broken"})
    assert outcomes(run) == {
        "inspect": "failure", "convert": "skipped", "verify": "skipped", "report": "skipped",
        "publish": "skipped",
    }  # fmt: skip
    assert (run.outputs["exit-code"], run.outputs["verdict"]) == ("4", "")
    assert any(line.startswith("::error title=shard-missing::") for line in run.annotations)
    assert run.steps["Keep the reports"].outcome == "skipped"
    assert not (tmp_path / "out").exists() and REPO not in hub.store.repos


def test_a_wrong_option_is_usage(runner, inputs):
    run = runner.run({**inputs, "verify-args": "--no-such-option"})
    assert run.steps["verify"].code == 2 and run.outputs["exit-code"] == "2"
    assert outcomes(run)["report"] == "success", "the conversion's report is there"
    assert {p.name for p in Path(run.outputs["reports"]).iterdir()} == {
        "mmq-convert.json", "mmq.html", "mmq.xml"
    }  # fmt: skip
    assert outcomes(run)["publish"] == "skipped"


def test_logits_without_a_place_for_the_source_fails_at_once(runner, inputs):
    run = runner.run({**inputs, "level": "logits", "download-dir": ""})
    assert outcomes(run)["inspect"] == "skipped" and run.outputs["exit-code"] == "2"
    assert run.annotations == [
        "::error title=mmq::level logits needs the whole source on disk: give download-dir"
    ]  # fmt: skip


def test_an_old_verdict_is_not_this_runs(runner, hub, inputs):
    """A second run whose verify comes to no verdict shows nothing of the first one's, which was
    not to publish."""
    first = runner.run({**inputs, "repo": "", "artifact": ""})
    assert not first.failed and first.outputs["exit-code"] == "0"
    assert first.steps["publish"].outcome == "skipped" and first.outputs["url"] == ""
    assert first.steps["Keep the reports"].outcome == "skipped"
    assert (Path(inputs["out"]) / "mmq-verify.json").is_file()
    run = runner.run({**inputs, "verify-args": "--gates absent.yaml\n"})
    assert run.steps["verify"].outcome == "failure" and run.outputs["verdict"] == ""
    assert not (Path(run.outputs["reports"]) / "mmq-verify.json").exists()
    assert REPO not in hub.store.repos


def test_the_same_again_sends_no_weights(runner, hub, inputs):
    assert not runner.run(inputs).failed
    sent = len(hub.log.of(r"PUT /lfs/"))
    again = runner.run(inputs)
    assert not again.failed, again.log
    assert "is finished" in again.steps["convert"].log
    # a verification has its times in it
    assert "sent 1 file" in again.steps["publish"].log
    assert len(hub.log.of(r"PUT /lfs/")) == sent > 0
    assert again.outputs["source"].startswith(f"{SOURCE}@")


def test_a_hub_that_does_not_answer_is_asked_again(runner, hub, inputs):
    """Told to wait for longer than mmq waits, it exits with 5; the next attempt goes on."""
    hub.fault(rf"POST /api/models/{REPO}/commit/", status=429, headers={"Retry-After": "4000"})
    run = runner.run(inputs)
    assert not run.failed, run.log
    assert "attempt 2 of 3" in run.steps["publish"].log
    assert INDEX in hub.files(REPO)


def test_attempts_are_bounded(runner, hub, inputs):
    hub.fault(rf"POST /api/models/{REPO}/commit/", status=429, headers={"Retry-After": "4000"},
              times=None)  # fmt: skip
    run = runner.run({**inputs, "attempts": "2"})
    assert run.steps["publish"].code == 5 and run.outputs["exit-code"] == "5"
    assert run.steps["publish"].log.count("attempt 2 of 2") == 1
    assert INDEX not in hub.files(REPO)


def test_text_in_inputs_is_not_run(runner, tmp_path):
    planted = tmp_path / "planted"
    word = f'x"; touch {planted}; $(touch {planted}) `touch {planted}`'
    run = runner.run({**INPUTS, "source": word, "convert-args": word, "repo": word, "out": word})
    assert run.failed and not planted.exists()


def test_no_expression_stands_in_the_shell():
    steps = yaml.safe_load((ROOT / "action.yml").read_text("utf-8"))["runs"]["steps"]
    scripts = [step["run"] for step in steps if "run" in step]
    assert len(scripts) == 7 and not [s for s in scripts if "${{" in s]


def test_words_are_lines(tmp_path):
    """An option and its value share a line; nothing in it is the shell's."""
    (tmp_path / "mmq").write_text('#!/bin/bash\nprintf "<%s>" "$@" > words\nexit ${CODE:-0}\n')
    (tmp_path / "mmq").chmod(0o755)
    words = "--text my file.txt\n\n--strict\n--gates=$HOME *.yaml\n'quoted'\n"

    def run(code: int, **more: str) -> int:
        environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "GITHUB_OUTPUT": str(tmp_path / "out"),
                       "CODE": str(code), "PAUSE": "0", **more}  # fmt: skip
        return subprocess.run(
            [ROOT / ".github" / "action-step.sh", "verify", "a b"], env=environment, cwd=tmp_path,
        ).returncode  # fmt: skip

    assert run(0, WORDS=words) == 0
    assert (tmp_path / "words").read_text() == (
        "<verify><a b><--text><my file.txt><--strict><--gates=$HOME><*.yaml><'quoted'>"
    )
    assert run(5, ATTEMPTS="2") == 5 and run(3, ATTEMPTS="2") == 3
    assert (tmp_path / "out").read_text().split() == [
        "exit-code=0", "exit-code=5", "exit-code=3"
    ]  # fmt: skip


@pytest.mark.slow
def test_it_installs_mmq(tmp_path, hub, inputs, environment):
    """With a PATH that has Python but not mmq."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(Path(sys.executable).resolve())
    environment["PATH"] = f"{tmp_path / 'bin'}:/usr/bin:/bin"
    run = Runner(ROOT, tmp_path / "runner", environment).run(
        {**inputs, "install": "true", "cache": "true"}
    )
    assert not run.failed, run.log
    assert run.steps["Caches of pip and numba"].given["path"].startswith("~/.cache/pip\n")

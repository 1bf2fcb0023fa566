"""The examples are valid, name what exists, and their shell is run on the small model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml
from actions_runner import BASH
from ci_expressions import Expressions
from ci_places import REPO, ROOT, SOURCE
from m3_source import INDEX

from mmq.demo.bundled import bundled_gates

SCHEMAS = {
    "action.yml": "github-actions",
    "examples/publish.yml": "github-workflows",
    "examples/gitlab-ci.yml": "gitlab-ci",
}


def valid(path: Path, schema: str) -> subprocess.CompletedProcess[str]:
    """check-jsonschema with the schema that it ships."""
    return subprocess.run(
        [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}", path],
        capture_output=True, text=True,
    )  # fmt: skip


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_files_obey_their_schemas(name, tmp_path):
    done = valid(ROOT / name, SCHEMAS[name])
    assert done.returncode == 0, done.stdout + done.stderr
    for wrong, right in (("runs:", "run_s:"), ("runs-on:", "run-on:"), ("script:", "scripts:")):
        (tmp_path / "x.yml").write_text((ROOT / name).read_text("utf-8").replace(wrong, right))
        if wrong in (ROOT / name).read_text("utf-8"):
            assert valid(tmp_path / "x.yml", SCHEMAS[name]).returncode == 1


@pytest.fixture
def project(tmp_path):
    """What a repository with checkpoints to release has: its gates, and the licence."""
    folder = tmp_path / "project"
    (folder / "release").mkdir(parents=True)
    (folder / "release" / "gates.yaml").write_bytes(bundled_gates().read_bytes())
    return folder


def test_the_workflow_gives_the_action_what_it_takes(hub, project, runner, tmp_path):
    workflow = yaml.safe_load((ROOT / "examples" / "publish.yml").read_text("utf-8"))
    (step,) = [s for s in workflow["jobs"]["publish"]["steps"] if s.get("id") == "mmq"]
    # YAML reads the key `on` as true
    assert set(workflow[True]["workflow_dispatch"]["inputs"]) == {"source", "repo"}
    given = {"source": SOURCE, "repo": REPO}
    contexts = {"inputs": given, "secrets": {"HF_TOKEN": hub.token}}
    inputs = {k: Expressions(contexts, {}).text(v) for k, v in step["with"].items()}
    assert inputs["out"] == f"/data/mmq/{REPO}"
    gates = project / "release" / "gates.yaml"
    inputs |= {
        "out": str(tmp_path / "out"), "install": "false",
        "verify-args": inputs["verify-args"].replace("release/gates.yaml", str(gates)),
    }  # fmt: skip
    run = runner.run(inputs)
    assert not run.failed, run.log
    assert run.outputs["revision"] == "refs/pr/1"
    assert INDEX in hub.files(REPO, "refs/pr/1") and INDEX not in hub.files(REPO)
    outputs = set(run.outputs)
    (last,) = [s for s in workflow["jobs"]["publish"]["steps"] if "run" in s]
    assert {v.split("outputs.")[1].split(" ")[0] for v in last["env"].values()} <= outputs


class GitlabJob:
    """A job's scripts as GitLab's shell executor runs them: before_script and script in one shell,
    after_script in another, whatever came of the first."""

    def __init__(
        self, environment: dict[str, str], project: Path, out: Path, numba_cache: Path
    ) -> None:
        text = (ROOT / "examples" / "gitlab-ci.yml").read_text("utf-8")
        self.job = yaml.safe_load(text)["publish-checkpoint"]
        self.project = project
        self.environment = {
            **environment, "SOURCE": SOURCE, "REPO": REPO, "OUT": str(out), "LANG": "C.UTF-8",
            "NUMBA_CACHE_DIR": str(numba_cache),
        }  # fmt: skip

    def run(self, *lines: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*BASH, "-c", "\n".join(lines)], cwd=self.project, env=self.environment,
            capture_output=True, text=True,
        )  # fmt: skip

    def cases(self) -> dict[str, int]:
        self.run(*self.job["after_script"])
        report = ElementTree.parse(self.project / self.job["artifacts"]["reports"]["junit"])
        cases = list(report.getroot().iter("testcase"))
        failed = [c for c in cases if c.find("failure") is not None]
        return {"cases": len(cases), "failed": len(failed)}


@pytest.fixture
def job(environment, hub, project, tmp_path, numba_cache):
    variables = {**environment, "HF_TOKEN": hub.token}
    return GitlabJob(variables, project, tmp_path / "out", numba_cache)


def test_gitlab_publishes(job, hub, project):
    done = job.run(*job.job["script"])
    assert done.returncode == 0, done.stderr
    assert INDEX in hub.files(REPO, "refs/pr/1")
    found = job.cases()
    assert found["cases"] > 20 and found["failed"] == 0
    assert {p.name for p in project.iterdir()} >= set(job.job["artifacts"]["paths"])


def test_gitlab_stops_at_a_fault(job, hub, tmp_path):
    script = list(job.job["script"])
    (at,) = [n for n, line in enumerate(script) if line.startswith("mmq verify")]
    script.insert(at, 'printf "\\0" >> "$OUT/model-00001-of-00001.safetensors"')
    done = job.run(*script)
    assert done.returncode == 3, done.stderr
    assert job.cases()["failed"] > 0
    assert REPO not in hub.store.repos


def test_gitlab_retries_what_can_go_on_only(job, hub):
    assert job.job["retry"]["exit_codes"] == [5]
    hub.fault(r"GET /api/models/acme/small-m3/", status=429, headers={"Retry-After": "4000"},
              times=None)  # fmt: skip
    assert job.run(*job.job["script"]).returncode == 5

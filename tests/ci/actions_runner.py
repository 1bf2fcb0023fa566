"""A runner for composite actions: the steps' shell for real, in GitHub's bash and with its files.

    run = Runner(action, temporary, environment).run({"source": …}, after={"convert": damage})
    run.steps["verify"].outcome, run.outputs["verdict"], run.summary, run.log

Steps that use other actions are not run; what they are given is in `Step.given`. How steps decide,
pass outputs on and share a PATH is docs.github.com's "metadata syntax", "contexts" and "workflow
commands".
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from ci_expressions import Expressions

#: What `shell: bash` means.
BASH = ("bash", "--noprofile", "--norc", "-e", "-o", "pipefail")
_OPEN = {"_open": True}


@dataclass
class Step:
    """One step as it went.

    Attributes:
        outcome: success, failure, or skipped.
        given: `with:` of a step that uses another action.
    """

    name: str
    outcome: str = "skipped"
    code: int | None = None
    log: str = ""
    outputs: dict[str, str] = field(default_factory=dict)
    given: dict[str, str] | None = None


@dataclass
class ActionRun:
    """What is left of a run."""

    steps: dict[str, Step]
    outputs: dict[str, str]
    summary: str

    @property
    def failed(self) -> bool:
        return any(s.outcome == "failure" for s in self.steps.values())

    @property
    def log(self) -> str:
        return "\n".join(s.log for s in self.steps.values())

    @property
    def annotations(self) -> list[str]:
        return [line for line in self.log.splitlines() if line.startswith("::")]


class Runner:
    """Runs the action in a folder.

    Args:
        action: folder of action.yml.
        temporary: RUNNER_TEMP.
        environment: variables beside the runner's own.
    """

    def __init__(self, action: Path, temporary: Path, environment: Mapping[str, str]) -> None:
        self.action, self.temporary = action, temporary
        self.metadata = yaml.safe_load((action / "action.yml").read_text("utf-8"))
        self._environment = dict(environment)
        self._path: list[str] = []
        temporary.mkdir(parents=True, exist_ok=True)

    def run(
        self, inputs: Mapping[str, str], after: Mapping[str, Callable[[], None]] | None = None
    ) -> ActionRun:
        """All steps in order.

        Args:
            after: what happens once a step is over, by its id.
        """
        summary = self.temporary / "summary.md"
        summary.write_bytes(b"")
        self._contexts: dict[str, Any] = {
            "inputs": self._inputs(inputs),
            "github": {"action_path": str(self.action)},
            "runner": {"temp": str(self.temporary), "os": "Linux", "arch": "X64"},
            "steps": {step["id"]: {"outputs": _OPEN, "outcome": ""}
                      for step in self.metadata["runs"]["steps"] if "id" in step},
        }  # fmt: skip
        steps: dict[str, Step] = {}
        self._failed = False
        for number, declared in enumerate(self.metadata["runs"]["steps"]):
            name = declared.get("id") or declared["name"]
            step = steps[name] = self._step(declared, number)
            self._failed |= step.outcome == "failure"
            if "id" in declared:
                outputs = {**_OPEN, **step.outputs}
                self._contexts["steps"][name] = {"outputs": outputs, "outcome": step.outcome}
            if after and name in after and step.outcome != "skipped":
                after[name]()
        declared = self.metadata["outputs"]
        outputs = {name: self._expressions.text(o["value"]) for name, o in declared.items()}
        return ActionRun(steps, outputs, summary.read_text("utf-8"))

    def _inputs(self, given: Mapping[str, str]) -> dict[str, str]:
        declared = self.metadata["inputs"]
        if unknown := set(given) - set(declared):
            raise ValueError(f"no such inputs: {unknown}")
        if missing := {n for n, i in declared.items() if i.get("required")} - set(given):
            raise ValueError(f"missing inputs: {missing}")
        return {n: given.get(n, i.get("default", "")) for n, i in declared.items()}

    @property
    def _expressions(self) -> Expressions:
        return Expressions(
            self._contexts,
            {"always": lambda: True, "success": lambda: not self._failed,
             "failure": lambda: self._failed},
        )  # fmt: skip

    def _step(self, declared: dict[str, Any], number: int) -> Step:
        step = Step(declared["name"])
        wanted, asks = self._expressions.condition(declared.get("if", "success()"))
        if not wanted or (self._failed and not asks):
            return step
        if "uses" in declared:
            step.given = {k: self._expressions.text(v) for k, v in declared["with"].items()}
            step.outcome = "success"
            return step
        environment, output, path = self._variables(declared, number)
        assert declared["shell"] == "bash"
        script = self.temporary / f"step-{number}.sh"
        script.write_text(self._expressions.text(declared["run"]), "utf-8")
        done = subprocess.run(
            [*BASH, str(script)], cwd=self.temporary, env=environment,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        step.code, step.log = done.returncode, done.stdout.decode("utf-8")
        step.outcome = "success" if done.returncode == 0 else "failure"
        step.outputs = read_outputs(output.read_text("utf-8"))
        self._path[:0] = path.read_text("utf-8").splitlines()
        return step

    def _variables(
        self, declared: dict[str, Any], number: int
    ) -> tuple[dict[str, str], Path, Path]:
        """Environment of a step, and the files that it leaves outputs and PATH entries in."""
        output, path = (self.temporary / f"{kind}-{number}" for kind in ("output", "path"))
        output.write_bytes(b"")
        path.write_bytes(b"")
        environment = {
            "HOME": os.environ["HOME"], "LANG": "C.UTF-8",
            **self._environment,
            "GITHUB_ACTIONS": "true", "CI": "true",
            "GITHUB_ACTION_PATH": str(self.action), "RUNNER_TEMP": str(self.temporary),
            "GITHUB_OUTPUT": str(output), "GITHUB_PATH": str(path),
            "GITHUB_STEP_SUMMARY": str(self.temporary / "summary.md"),
        }  # fmt: skip
        base = self._environment.get("PATH", os.environ["PATH"])
        environment["PATH"] = os.pathsep.join([*self._path, base])
        own = declared.get("env", {})
        environment |= {name: self._expressions.text(value) for name, value in own.items()}
        return environment, output, path


def read_outputs(text: str) -> dict[str, str]:
    """`name=value` lines of $GITHUB_OUTPUT; anything else would be refused there."""
    outputs = {}
    for line in text.splitlines():
        name, found, value = line.partition("=")
        if not found or not name:
            raise ValueError(f"not name=value: {line!r}")
        outputs[name] = value
    return outputs

"""mmq run in this process, and what a run left behind."""

from __future__ import annotations

import contextlib
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from m3_source import INDEX, hashes, read_folder

from mmq.cli import main


@dataclass(frozen=True)
class Outcome:
    """What a run of mmq left behind: exit code, JSON events, and the output folder."""

    code: int
    events: list[dict[str, Any]]
    stderr: str
    out: Path

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [e for e in self.events if e["event"] == kind]

    @property
    def error(self) -> dict[str, Any]:
        (error,) = self.of("error")
        return error

    @property
    def findings(self) -> dict[str, dict[str, Any]]:
        return {e["id"]: e for e in self.of("finding")}

    @property
    def finished(self) -> bool:
        return (self.out / INDEX).exists()

    @property
    def tensors(self):
        assert self.code == 0, self.events
        return read_folder(self.out)

    @property
    def hashes(self):
        assert self.code == 0, self.events
        return hashes(self.out)

    def json(self, name: str) -> dict[str, Any]:
        return json.loads((self.out / name).read_bytes())


def failed(*arguments: str | Path) -> tuple[int, dict[str, Any]]:
    """(exit code, error) of a run that fails."""
    code, events, _ = run_mmq(*arguments)
    (error,) = [e for e in events if e["event"] == "error"]
    assert error["exit_code"] == code
    return code, error


def run_mmq(*arguments: str | Path) -> tuple[int, list[dict[str, Any]], str]:
    """mmq in this process: exit code, JSON events, stderr."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([*map(str, arguments), "--json"])
    return code, [json.loads(line) for line in out.getvalue().splitlines()], err.getvalue()

"""What the scripts that refresh pages share: output of commands, and the blocks it is put into.

A block is what stands between <!-- name --> and <!-- /name -->.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run(
    folder: Path, command: str, environment: Mapping[str, str] | None = None, status: int = 0
) -> list[str]:
    """A command and what it prints, as a terminal shows it (progress lines left out).

    Raises:
        SystemExit: it ends with another exit code than `status`.
    """
    done = subprocess.run(
        [sys.executable, "-m", *command.split()], cwd=folder, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "100", **(environment or {})},
    )  # fmt: skip
    text = done.stdout.decode("utf-8")
    if done.returncode != status:
        raise SystemExit(f"{command}: exit {done.returncode}\n{text}")
    kept = [line.rstrip() for line in text.splitlines() if " elapsed" not in line]
    return [f"$ {command}", *kept]


def block(*parts: list[str]) -> str:
    """Parts below each other, fenced."""
    return "```\n" + "\n\n".join("\n".join(lines).rstrip() for lines in parts) + "\n```"


def filled(text: str, name: str, content: str) -> str:
    """A page with new content in one of its blocks.

    Raises:
        SystemExit: it has no such block.
    """
    start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    head, found, rest = text.partition(start)
    if not found or end not in rest:
        raise SystemExit(f"the page has no {start} … {end}")
    return f"{head}{start}\n{content}\n{end}{rest.partition(end)[2]}"

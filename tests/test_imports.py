"""Imports go one way through the package, and the light commands stay light."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import mmq

ROOT = Path(mmq.__file__).parent

#: A part may import itself and what stands left of it (or on the same rank, for single modules).
RANKS = {
    "errors": 0, "report": 1, "console": 2, "hub": 2, "kernels": 3, "quantize": 4, "convert": 5,
    "verify": 6, "calibrate": 7, "publish": 8, "demo": 8, "doctor": 8, "mistyped": 8,
    "invocation": 9, "commands": 10, "cli": 11, "__main__": 12,
}  # fmt: skip


def modules() -> list[Path]:
    return sorted(p for p in ROOT.rglob("*.py") if p != ROOT / "__init__.py")


def part_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported_parts(source: str, package: tuple[str, ...]) -> Iterator[str]:
    """Parts of mmq that a module of `package` imports, anywhere in its code (type checks too)."""
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, *([node.module] if node.module else [])))
            names = [module] if module != "mmq" else [f"mmq.{alias.name}" for alias in node.names]
        for name in names:
            top, _, rest = name.partition(".")
            if top == "mmq" and rest and rest.partition(".")[0] != "__version__":
                yield rest.partition(".")[0]


def violations(source: str, part: str, package: tuple[str, ...]) -> list[str]:
    return [
        other
        for other in imported_parts(source, package)
        if other != part and RANKS[other] >= RANKS[part]
    ]


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_one_way(path: Path) -> None:
    package = ("mmq", *path.relative_to(ROOT).parent.parts)
    assert violations(path.read_text("utf-8"), part_of(path), package) == []


def test_every_part_has_a_rank() -> None:
    assert {part_of(p) for p in modules()} <= set(RANKS)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from mmq.convert.plan import build_plan", ["convert"]),
        ("import mmq.cli", ["cli"]),
        ("from mmq import convert", ["convert"]),
        ("def f():\n    from ..verify import run", ["verify"]),
        ("from mmq.errors import MmqError\nfrom mmq import __version__", []),
        ("from .formats import MXFP8", []),
    ],
)
def test_the_check_sees_wrong_imports(source: str, found: list[str]) -> None:
    assert violations(source, "quantize", ("mmq", "quantize")) == found


HEAVY = ("torch", "numba", "numpy", "pydantic", "tqdm", "multiprocessing.pool")


def loaded_by(tmp_path: Path, *arguments: str, **environment: str) -> set[str]:
    """Heavy modules in `sys.modules` after a command, run in a process of its own."""
    code = (
        "import json, sys\nfrom mmq.cli import main\ncode = main(sys.argv[1:])\n"
        f"print(json.dumps([m for m in {HEAVY!r} if m in sys.modules]), file=sys.stderr)\n"
        "sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=tmp_path,
        encoding="utf-8", timeout=60, env={**os.environ, **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stderr.splitlines()[-1]))


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        ["convert", "--help"],
        ["doctor", "--help"],
        ["completion", "bash"],
    ],
    ids=" ".join,
)
def test_help_imports_nothing_heavy(tmp_path: Path, arguments: list[str]) -> None:
    assert loaded_by(tmp_path, *arguments) == set()


@pytest.mark.parametrize(
    "arguments",
    [["inspect", "minimax-m3-mxfp8"], ["convert", "minimax-m3-mxfp8", "out", "--dry-run"]],
    ids=["inspect", "dry-run"],
)
def test_planning_imports_nothing_heavy(tmp_path: Path, arguments: list[str]) -> None:
    assert loaded_by(tmp_path, *arguments) == set()


@pytest.mark.parametrize(
    "words", ["mmq ", "mmq convert --", "mmq convert m", "mmq verify --level "]
)
def test_completion_imports_nothing_heavy(tmp_path: Path, words: str) -> None:
    asked = {"_MMQ_COMPLETE": "bash_complete", "COMP_WORDS": words}
    assert loaded_by(tmp_path, **asked, COMP_CWORD=str(words.count(" "))) == set()

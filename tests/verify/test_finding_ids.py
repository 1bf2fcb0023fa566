"""Every finding that verify can make is planted by a test and explained in docs/verify.md."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import mmq
import mmq.verify

ROOT = Path(mmq.verify.__file__).parent
TESTS = Path(__file__).parent


def ids() -> list[str]:
    """Ids that verify's own code spells out; errors of opening OUT keep their own."""
    found = set()
    for path in ROOT.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            made = isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Finding"
            if made and node.args and isinstance(node.args[0], ast.Constant):
                found.add(node.args[0].value)
    return sorted(found)


def test_there_are_ids():
    assert len(ids()) > 60


@pytest.mark.parametrize("id", ids())
def test_id_is_planted_and_documented(id):
    tests = "".join(p.read_text("utf-8") for p in TESTS.glob("test_*.py") if p != Path(__file__))
    assert f'"{id}"' in tests
    docs = (Path(mmq.__file__).parents[1] / "docs" / "verify.md").read_text("utf-8")
    assert f"`{id}`" in docs

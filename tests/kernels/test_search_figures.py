"""The figures in docs/numerics.md are what the scripts measure."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run_script(name):
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / name], capture_output=True, text=True, check=True
    )
    return done.stdout


@pytest.mark.slow
def test_table_of_the_docs():
    assert run_script("scale_search_table.py") in (ROOT / "docs" / "numerics.md").read_text("utf-8")


@pytest.mark.slow
def test_mantissa_in_use_is_the_one_chosen():
    out = run_script("choose_global_mantissa.py")
    assert "chosen: 1.1875, in use: 1.1875" in out
    docs = (ROOT / "docs" / "numerics.md").read_text("utf-8")
    chosen = next(line for line in out.splitlines() if "chosen" in line).split("|")[2:7]
    assert all(f"**{cell.strip()[1:]}**" in docs for cell in chosen)

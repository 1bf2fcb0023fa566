"""`mmq doctor --kernels`: the table of operations and targets, and the page that shows it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from in_process import run_mmq

from mmq.verify.kernels.operations import OPERATIONS

ROOT = Path(__file__).parents[3]


def test_table_of_kernels():
    pytest.importorskip("triton", reason="needs triton, which has wheels for Linux only")
    code, events, _ = run_mmq("doctor", "--kernels")
    assert code == 0
    cells = events[-1]["kernels"]
    assert list(dict.fromkeys(cell["op"] for cell in cells)) == list(OPERATIONS)
    assert len(cells) == 6 * len(OPERATIONS)
    assert all(cell["reason"] for cell in cells)
    paths = {(cell["op"], cell["target"]): cell["path"] for cell in cells}
    assert paths["NVFP4 to FP8 staging", "sm_100"] == "native"
    assert paths["NVFP4 to FP8 staging", "sm_107"] == "fallback"
    assert paths["MoE W4A4", "gfx950"] == "fallback"


def test_a_path_says_nothing_about_kernels():
    code, events, _ = run_mmq("doctor", ".", "--kernels")
    assert (code, events[-2]["id"]) == (2, "option-conflict")


def test_names_are_the_same_everywhere():
    pytest.importorskip("triton", reason="needs triton, which has wheels for Linux only")
    from mmq.verify.kernels.parity import CHECKS
    from mmq.verify.kernels.support_table import SUPPORTS

    assert tuple(CHECKS) == tuple(SUPPORTS) == OPERATIONS


def test_page_shows_the_table():
    pytest.importorskip("triton", reason="needs triton, which has wheels for Linux only")
    path = ROOT / "scripts" / "build_kernels_doc.py"
    spec = importlib.util.spec_from_file_location("build_kernels_doc", path)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    page = script.TARGET.read_text("utf-8")
    assert script.with_output(page, "support", script.support()) == page
    for name in ("parity", "bench"):
        assert f"$ mmq {' '.join(script.COMMANDS[name])}\n" in script.shown(page, name)
    # Every operation has its line in the output that the page shows.
    assert all(f"\n{op} " in script.shown(page, "parity") for op in OPERATIONS)

"""`mmq doctor`, its table of kernels, and the page that shows it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from in_process import run_mmq

from mmq.kernels import ops as weight_operations
from mmq.verify.kernels import machine
from mmq.verify.kernels.operations import OPERATIONS

ROOT = Path(__file__).parents[3]


def facts(result):
    return {f["name"]: f for section in result["sections"].values() for f in section}


def test_doctor():
    code, events, _ = run_mmq("doctor")
    assert code == 0
    found = facts(events[-1])
    assert found["python"]["text"] == sys.version.split()[0]
    assert found["numpy"]["ok"]
    assert {*weight_operations.BACKENDS, "auto"} <= set(found)
    assert found["auto"]["text"] == "is cpu"
    assert "GB free" in found["disk here"]["text"]
    assert found["convert --device cpu"]["ok"]


def test_doctor_says_nothing_of_tokens(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_marker_of_this_test")
    assert "marker" not in str(run_mmq("doctor"))


def test_doctor_without_triton_and_numba(tmp_path):
    """Broken libraries are told, with what they are needed for, and end nothing."""
    (tmp_path / "triton.py").write_text("raise OSError('libtriton.so: bad image')")
    (tmp_path / "numba.py").write_text("raise ImportError('no numba here')")
    done = subprocess.run(
        [sys.executable, "-m", "mmq", "doctor", "--json"], cwd=tmp_path, capture_output=True,
        text=True, env={**os.environ, "PYTHONPATH": str(tmp_path)}, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    sections = json.loads(done.stdout.splitlines()[-1])["sections"]
    told = {(title, f["name"]): f for title, facts in sections.items() for f in facts}
    for (title, name), text in {
        ("libraries", "triton"): "libtriton.so: bad image; needed for the GPU's kernels",
        ("libraries", "numba"): "no numba here; needed for fast conversion",
        ("backends of weight operations", "cpu"): "no numba here",
        ("backends of weight operations", "triton"): "libtriton.so: bad image",
        ("backends of weight operations", "auto"): "is torch-table: the same bytes, slowly",
        ("what works", "verify --level kernels"): "needs triton: every operation is skipped",
        ("what works", "convert --device cuda"): "no: triton cannot be imported",
    }.items():
        assert told[title, name]["ok"] is False
        assert told[title, name]["text"].startswith(text)


class FakeGpu:
    """What PyTorch says of a GPU."""

    def __init__(self, name, hip=None, **properties):
        self.name, self.total_memory = name, 192 * 2**30
        self.__dict__.update(properties)
        self.version = type("version", (), {"hip": hip, "cuda": None if hip else "13.0"})
        self.cuda = type(
            "cuda", (),
            {
                "is_available": lambda: True, "device_count": lambda: 1,
                "get_device_properties": lambda index: self,
            },
        )  # fmt: skip


@pytest.mark.parametrize(
    ("gpu", "ok", "text"),
    [
        (FakeGpu("B200", major=10, minor=0), True, "sm_100, 192 GiB"),
        (FakeGpu("MI355X", hip="7.0", gcnArchName="gfx950:sramecc+"), True, "gfx950, 192 GiB"),
        (
            FakeGpu("RTX 4090", major=8, minor=9), False,
            "sm_89, 192 GiB; kernels were never compiled for it",
        ),
    ],
)  # fmt: skip
def test_gpus(monkeypatch, gpu, ok, text):
    pytest.importorskip("triton")
    real = machine.importlib.import_module

    def load(name):
        return gpu if name == "torch" else real(name)

    real("mmq.kernels.triton.launch")
    monkeypatch.setattr(machine.importlib, "import_module", load)
    (fact,) = machine._gpus()
    assert (fact.ok, fact.text) == (ok, text)


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

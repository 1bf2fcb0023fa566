"""`mmq doctor` as a whole: what it shows, that it ends well whatever is broken, its remedies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest
from in_process import run_mmq

from mmq.cli import main
from mmq.doctor import libraries
from mmq.kernels import ops as weight_operations


def facts(sections):
    """Facts by (section, name)."""
    return {(title, f["name"]): f for title, found in sections.items() for f in found}


def doctor_process(folder, *options, **environment):
    """`mmq doctor` in a process that finds the modules of `folder` first: its sections."""
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "mmq", "doctor", "--json", *options], cwd=folder, text=True,
        capture_output=True, env={**os.environ, "PYTHONPATH": path, **environment}, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return facts(json.loads(done.stdout.splitlines()[-1])["sections"])


def without_remedy(told):
    return [f for f in told.values() if f["ok"] is False and not f["remedy"]]


def test_a_machine_that_is_well():
    code, events, _ = run_mmq("doctor", "--no-network")
    assert code == 0
    told = facts(events[-1]["sections"])
    assert told["machine", "python"]["text"] == sys.version.split()[0]
    assert "cores for this process" in told["machine", "processor"]["text"]
    assert "GB free" in told["machine", "disk"]["text"]
    assert ("machine", "disk write") not in told, "nothing is written without PATH"
    for name in libraries.LIBRARIES:
        if name != "triton":
            assert told["libraries", name]["ok"] is True
    names = {name for title, name in told if title == "backends of weight operations"}
    assert names == {*weight_operations.BACKENDS, "auto"}
    assert told["backends of weight operations", "auto"]["text"] == "is cpu"
    assert told["what works", "convert --device cpu"]["ok"] is True
    assert not without_remedy(told)


def test_the_lines_that_people_read(capsys):
    assert main(["doctor", "--no-network"]) == 0
    told = capsys.readouterr()
    assert not told.err
    lines = told.out.splitlines()
    assert {"machine", "libraries", "GPUs", "Hugging Face Hub", "what works"} <= set(lines)
    bad = [i for i, line in enumerate(lines) if line[46:50] == "no  "]
    assert bad or "bench --kernels --device cuda               ok" in told.out
    assert all(lines[i + 1].startswith("    remedy: ") for i in bad)


def test_broken_libraries_are_told_and_end_nothing(tmp_path):
    (tmp_path / "triton.py").write_text("raise OSError('libtriton.so: bad image')")
    (tmp_path / "numba.py").write_text("raise ImportError('no numba here')")
    (tmp_path / "huggingface_hub.py").write_text("1 / 0")
    told = doctor_process(tmp_path)
    rows = "backends of weight operations"
    for key, text, remedy in [
        (("libraries", "triton"), "libtriton.so: bad image; needed for the GPU's kernels",
         "mmq-toolkit[gpu]"),
        (("libraries", "numba"), "no numba here; needed for fast", "--force-reinstall numba"),
        (("libraries", "huggingface_hub"), "division by zero; needed for sources on the Hub",
         "--force-reinstall huggingface_hub"),
        ((rows, "cpu"), "no numba here", "--force-reinstall numba"),
        ((rows, "triton"), "libtriton.so: bad image", "mmq-toolkit[gpu]"),
        ((rows, "auto"), "is torch-table: the same bytes, slowly", "--force-reinstall numba"),
        (("Hugging Face Hub", "address"), "huggingface_hub: division by zero", "huggingface_hub"),
        (("what works", "verify --level kernels"), "needs triton: every operation is skipped",
         "mmq-toolkit[gpu]"),
        (("what works", "convert --device cuda"), "no: triton cannot be imported",
         "--device cpu"),
    ]:  # fmt: skip
        assert told[key]["ok"] is False, key
        assert told[key]["text"].startswith(text), key
        if sys.platform == "linux" or "gpu" not in remedy:
            assert remedy in told[key]["remedy"], key
    assert told["libraries", "numba's cache"]["text"] == "not looked for: no numba here"
    assert not without_remedy(told)


@pytest.mark.parametrize("name", ["numpy", "torch"])
def test_without_what_everything_stands_on(tmp_path, name):
    (tmp_path / f"{name}.py").write_text("raise RuntimeError('bad image\\nsecond line')")
    told = doctor_process(tmp_path, "--no-network")
    assert told["libraries", name]["text"].startswith("bad image; needed for")
    assert told["what works", "verify --level structure, weights, logits"]["ok"] is False
    assert told["machine", "python"]["ok"] is True
    assert not without_remedy(told)


def test_numba_that_may_not_compile(tmp_path):
    told = doctor_process(tmp_path, "--no-network", NUMBA_DISABLE_JIT="1")
    assert told["backends of weight operations", "cpu"]["remedy"] == "unset NUMBA_DISABLE_JIT"


# ---- numba's cache


def test_numbas_cache(tmp_path):
    (tmp_path / "code").mkdir()
    told = doctor_process(tmp_path, "--no-network", NUMBA_CACHE_DIR=str(tmp_path / "code"))
    (fact,) = [f for (_, name), f in told.items() if name == "numba's cache"]
    (folder,) = (tmp_path / "code").iterdir()
    assert (fact["ok"], fact["text"]) == (True, f"0.0 MB in {folder}, which can be written")


def test_numbas_cache_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "code"
    told = doctor_process(tmp_path, "--no-network", NUMBA_CACHE_DIR=str(folder))
    fact = told["libraries", "numba's cache"]
    assert fact["ok"] is False
    assert fact["text"].startswith(f"NUMBA_CACHE_DIR={folder} cannot be written: every process")
    assert fact["remedy"].startswith("export NUMBA_CACHE_DIR=")


def test_the_caches_size(tmp_path, monkeypatch):
    from mmq.kernels.cpu import jit

    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "f.nbc").write_bytes(bytes(3_400_000))
    monkeypatch.setattr(jit, "cache_folder", lambda: tmp_path)
    assert libraries.numba_cache().text.startswith("3.4 MB in ")
    monkeypatch.setattr(jit, "cache_folder", lambda: None)
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    fact = libraries.numba_cache()
    assert (fact.ok, fact.text.partition(":")[0]) == (
        False, "mmq's folder and the user's cache cannot be written"
    )  # fmt: skip


def test_a_section_that_bursts_hides_no_other(monkeypatch):
    def burst():
        raise RuntimeError("surprise\nof two lines")

    monkeypatch.setattr("mmq.doctor.sections.gpu_facts", burst)
    code, events, _ = run_mmq("doctor", "--no-network")
    told = facts(events[-1]["sections"])
    assert code == 0
    assert told["GPUs", "not looked at"]["text"] == "RuntimeError: surprise"
    assert told["what works", "convert --device cpu"]["ok"]


def test_it_is_quick_where_nobody_answers(monkeypatch, tmp_path):
    """Addresses that swallow everything: name servers that do not answer look the same."""
    from mmq.doctor import hub

    monkeypatch.setattr(hub, "SECONDS", 0.2)
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: time.sleep(30))
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://hub.invalid")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    start = time.monotonic()
    code, events, _ = run_mmq("doctor")
    assert code == 0
    assert time.monotonic() - start < 10
    fact = facts(events[-1]["sections"])["Hugging Face Hub", "address"]
    assert (fact["ok"], fact["text"]) == (False, "http://hub.invalid: no answer within 0 s")
    assert fact["remedy"]

"""The verifier's forward on Triton's operations, in its interpreter, against the reference's.

BF16 operands flip a route or a block here and there, so that single tokens may differ: most
decisions must be the same, and the hidden states close.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from in_process import run_mmq

from mmq.console import Console
from mmq.convert.options import ConvertOptions
from mmq.convert.run import RunSettings, convert
from mmq.demo.bundled import bundled_model

pytest.importorskip("triton", reason="needs triton, which has wheels for Linux only")

#: Five blocks of 16, of which four are chosen: selection leaves one out.
TOKENS = 70


def forward(folder: Path, layers: int) -> dict[str, object]:
    here = Path(__file__).parent
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(here)}
    command = [sys.executable, here / "interpreted_forward.py", folder, layers, TOKENS]
    done = subprocess.run(
        list(map(str, command)), env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    out = tmp_path_factory.mktemp("triton") / "out"
    quiet = Console("quiet", stdout=io.StringIO(), stderr=io.StringIO())
    convert(str(bundled_model()), out, ConvertOptions(), RunSettings(jobs=1), quiet)
    return out


def check(found):
    assert found["mean"] > 0.998
    assert min(found["selections"]) > 0.9 and min(found["experts"]) > 0.85
    assert found["left_out"]


def test_a_dense_and_a_sparse_layer(converted):
    check(forward(converted, 2))


@pytest.mark.slow
def test_the_whole_model(converted):
    check(forward(converted, 4))


def test_without_a_gpu_the_error_says_so(converted):
    """Before a weight is read, and with the exit code of a machine that cannot."""
    import torch

    if torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    code, events, _ = run_mmq(
        "verify", converted, "--against", bundled_model(), "--level", "logits", "--device",
        "cuda", "--tokens", "absent.npy",
    )  # fmt: skip
    assert code == 6
    assert [e["id"] for e in events if e["event"] == "error"] == ["device-missing"]

"""Conversions of an independent float64 quantiser, sound and broken in known ways."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from planted import judge

GENERATOR = Path(__file__).parents[3] / "shared" / "cases" / "casegen.py"

#: Case → (finding, part of what it names).
EXPECTED = {
    "nv-good": None,
    "nv-scale-nan-byte": ("scale-nan", "layers.1.block_sparse_moe.experts.0.w1.weight_scale"),
    "nv-w1-w3-scale2-differ": ("w1-w3-global-scale", "experts.2.w3.weight_scale_2"),
    "nv-input-scale-missing": ("input-scale-missing", "experts.3.w2.input_scale"),
    "nv-kv-scale-bad": ("kv-scale-invalid", "layers.1.self_attn.k_proj.k_scale"),
    "nv-kv-scale-only-v": ("kv-scale-unpaired", "layers.1.self_attn.k_proj.k_scale"),
    "nv-kv-scheme-without-scales": ("kv-scales-absent", "config.json"),
    "nv-nibbles-swapped": ("sqnr-low", "experts.0.w1.weight"),
    "nv-scale2-reciprocal": ("sqnr-low", "experts.0.w1.weight"),
    "nv-left-at-fp8": ("quantized-layers-format", "layers.1.block_sparse_moe.experts.0.w1"),
    "nv-leftover-source-scale": ("leftover-tensor", "experts.0.w1.weight_scale_inv"),
    "nv-router-not-excluded": ("not-excluded", "layers.1.block_sparse_moe.gate"),
    "nv-no-format-metadata": ("metadata-format", "model-00001-of-00003.safetensors"),
    "nv-index-drift": ("index-tensor-misplaced", "language_model.model.norm.weight"),
}
VERDICTS = {"accept": "pass", "warn": "warn", "reject": "fail"}


def run(*arguments: str | Path) -> str:
    command = [sys.executable, GENERATOR, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.mark.skipif(
    not GENERATOR.exists(), reason="the case generator is not beside the repository"
)
def test_reference_conversions(tmp_path):
    names = [line.split()[0] for line in run("--list").splitlines() if line.startswith("nv-")]
    assert set(names) == set(EXPECTED)
    run(tmp_path, *names)
    for name in names:
        wanted = json.loads((tmp_path / f"{name}.expect.json").read_bytes())
        judged = judge(tmp_path / name, tmp_path / wanted["src"])
        assert judged.verdict == VERDICTS[wanted["verdict"]], name
        expected = EXPECTED[name]
        if expected:
            assert any(expected[1] in f.where for f in judged.of(expected[0])), name

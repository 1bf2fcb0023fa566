"""NVFP4 staged as FP8: the reference against the committed table of all pairs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mmq.kernels.reference import fp8_staging
from mmq.kernels.reference.e4m3 import decode_e2m1, decode_e4m3, encode_e4m3
from mmq.kernels.reference.fp8_staging import stage_e4m3, stage_rows
from mmq.kernels.reference.nvfp4 import pack_nibbles

ROOT = Path(__file__).parents[2]
CODES = torch.arange(16, dtype=torch.uint8)[:, None]
SCALES = torch.arange(256, dtype=torch.int32).to(torch.uint8)[None, :]


@pytest.fixture(scope="module")
def table():
    """U8 [16, 256]: the result of each code under each scale."""
    rows = json.loads((ROOT / "tests" / "data" / "fp8_staging.json").read_text())["staged"]
    return torch.tensor([list(bytes.fromhex(row)) for row in rows], dtype=torch.uint8)


def test_every_pair(table):
    assert torch.equal(stage_e4m3(CODES, SCALES), table)


def test_table_and_figures_are_those_of_the_script():
    """The oracle is exact rational arithmetic and shares nothing with the package."""
    script = ROOT / "scripts" / "build_fp8_staging.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_example():
    codes = torch.tensor([3, 7, 15, 1], dtype=torch.uint8)
    scale = torch.tensor(0x6B, dtype=torch.uint8)
    products = decode_e2m1(codes) * decode_e4m3(scale[None])
    assert products.tolist() == [132, 528, -528, 44]
    staged = stage_e4m3(codes, scale[None])
    assert staged.tolist() == [0x70, 0x7E, 0xFE, 0x63]
    assert decode_e4m3(staged).tolist() == [128, 448, -448, 44]


def test_nan_and_zeros(table):
    """As the docs say: NaN is 0x7F under every code, zeros have the product of the signs."""
    assert (table[:, [0x7F, 0xFF]] == 0x7F).all()
    assert not ((table & 0x7F) == 0x7F)[:, SCALES[0] & 0x7F != 0x7F].any()
    assert table[0, 0x38] == 0 == table[8, 0xB8] and table[8, 0x38] == 0x80 == table[0, 0xB8]
    assert table[1, 0x01] == 0 and table[9, 0x01] == 0x80  # 2^−10 is a tie


def test_rows():
    """Packed codes under the scale of their 16 columns."""
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 16, (5, 64), generator=generator).to(torch.uint8)
    scales = torch.randint(0, 256, (5, 4), generator=generator).to(torch.uint8)
    staged = stage_rows(pack_nibbles(codes), scales)
    assert staged.shape == (5, 64)
    for r, d in ((0, 0), (0, 15), (0, 16), (2, 33), (4, 63)):
        assert staged[r, d] == stage_e4m3(codes[r, d, None], scales[r, d // 16, None])


def truncate(values):
    """E4M3 towards zero."""
    codes = encode_e4m3(values)
    beyond = decode_e4m3(codes).abs() > values.clamp(-448, 448).abs()
    return codes - beyond.to(torch.uint8)


def away(values):
    """Ties away from zero."""
    up = encode_e4m3(values * (1 + 2**-20))
    return up.where(values.abs() < 440, encode_e4m3(values))


MISTAKES = {
    "truncation": ("encode_e4m3", truncate),
    "ties away from zero": ("encode_e4m3", away),
    "no saturation": ("encode_e4m3", lambda v: encode_e4m3(v).where(v.abs() <= 464, 0x7F)),
    "subnormals flushed": (
        "encode_e4m3", lambda v: encode_e4m3(v.where(v.abs() >= 2.0**-6, v * 0)),
    ),
    "scale as E8M0": ("decode_e4m3", lambda s: torch.exp2(s.float() - 127).clamp(max=448)),
    "no sign of zero": ("encode_e4m3", lambda v: encode_e4m3(v + 0.0)),
    "E2M1 without 0.5": ("decode_e2m1", lambda c: decode_e2m1(c).where(c & 7 != 1, 0.0)),
    "NaN as it comes": ("E4M3_NAN", 0xFF),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_planted_mistakes_are_caught(monkeypatch, table, mistake):
    monkeypatch.setattr(fp8_staging, *MISTAKES[mistake])
    assert not torch.equal(stage_e4m3(CODES, SCALES), table)

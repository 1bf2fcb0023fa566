"""inspect and --dry-run at the release's true scale, from the built-in headers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mmq.cli import main

RELEASE = "minimax-m3-mxfp8"


def test_inspect_the_release(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", RELEASE]) == 0
    out, err = capsys.readouterr()
    for words in (
        "45,838 tensors in 31 shards, 443,742,085,120 B = 443.742 GB = 413.267 GiB",
        "routed_experts         MXFP8   F8_E4M3   21,888  413,122,166,784  413.122  384.750",
        "  FP8                               61,440 B",
        "  NVFP4                             34,560 B",
        "  hybrid: 57 NVFP4, 3 FP8 (dense)   35,904 B",
        "BF16 14,592 B, FP8 7,296 B, NVFP4 4,104 B",
        "convert  NVFP4, modelopt layout: 443.742 GB → 250.091 GB of weights (−43.6 %)",
        "weights  250,091,244,544 B = 250.091 GB = 232.916 GiB",
        "KV       120 scales, 480 B apart",
        "with headers, in 51 shards",
        "claimed  451.5 → 250.1 GB announced (−44.6 %); measured 443.7 → 250.1 GB (−43.6 %)",
    ):
        assert words in out
    assert "note[mtp-declared-absent]" in err and "inferred" not in out


def test_inspect_the_release_with_its_mtp_layer(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", RELEASE + "-mtp"]) == 0
    out = capsys.readouterr().out
    assert "46,637 tensors in 31 shards, 451,470,145,024 B" in out
    assert "inferred the 799 MTP tensors" in out
    assert "451.470 GB → 250.091 GB of weights (−44.6 %)" in out
    assert "measured 451.5 → 250.1 GB (−44.6 %)" in out


def test_dry_run_of_the_release_with_its_mtp_layer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out_folder = tmp_path / "deep" / "out"
    assert main(["convert", RELEASE + "-mtp", str(out_folder), "--dry-run", "--jobs", "3"]) == 0
    out = capsys.readouterr().out
    for words in (
        "source   minimax-m3-mxfp8-mtp: 46,637 tensors, 451,470,145,024 B",
        "inferred the 799 MTP tensors",
        "weights  250,091,244,544 B = 250.091 GB = 232.916 GiB",
        "  NVFP4: 21,888 modules",
        "  as in the source: 1,267 modules",
        "  799 tensors, 7.728 GB: MTP",
        "  quantization_config: quant_method modelopt, MIXED_PRECISION, KV cache declared FP8",
        "  num_mtp_modules: 1 → 0",
        "  vLLM: ",
        "  SGLang: ",
        "  TensorRT-LLM: ",
        f"free at {tmp_path}",
        "with 3 jobs",
        "work     443.742 GB to read, 250.104 GB to write",
    ):
        assert words in out
    assert not out_folder.parent.exists()


def test_mtp_keep_converts_its_experts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--json", "inspect", RELEASE + "-mtp", "--mtp", "keep"]) == 0
    plan = json.loads(capsys.readouterr().out.splitlines()[-1])["convert"]
    assert (plan["dropped"], plan["quantised_modules"]) == ([], 58 * 128 * 3)

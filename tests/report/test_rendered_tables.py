"""Sizes as text: units, alignment, and the two sides of a change."""

from __future__ import annotations

from typing import Any

import pytest

from mmq.report.tables import (
    KvBytes,
    SizeRow,
    announced_lines,
    change_table,
    columns,
    convert_lines,
    kv_lines,
    percent_change,
    percent_text,
    size_table,
    size_text,
)

KV = KvBytes(60, 57, 4, 128, 122_880, 61_440, 34_560, 35_904, 14_592, 7_296, 4_104)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (480, "480 B"),
        (999, "999 B"),
        (1000, "1,000 B = 1.000 kB = 0.977 KiB"),
        (1_203_904, "1,203,904 B = 1.204 MB = 1.148 MiB"),
        (250_091_244_544, "250,091,244,544 B = 250.091 GB = 232.916 GiB"),
    ],
)
def test_sizes_in_both_units(nbytes: int, text: str) -> None:
    assert size_text(nbytes) == text


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        (443_742_085_120, 250_091_244_544, "−43.6 %"),
        (451_470_145_024, 250_091_244_544, "−44.6 %"),
        (100, 200, "+100.0 %"),
        (0, 200, ""),
    ],
)
def test_changes_in_percent(before: int, after: int, text: str) -> None:
    assert percent_text(percent_change(before, after)) == text


def test_columns_line_up() -> None:
    assert columns([("a", "1"), ("bcd", "1,000")], left=1) == ["a        1", "bcd  1,000"]


def test_size_table_adds_up_in_the_unit_of_its_total() -> None:
    rows = [
        SizeRow("routed_experts", "MXFP8", "F8_E4M3", 2, 3_000_000),
        SizeRow("norms", "BF16", "BF16", 1, 500),
    ]
    assert [line.split() for line in size_table(rows)] == [
        ["component", "format", "dtype", "tensors", "bytes", "MB", "MiB"],
        ["routed_experts", "MXFP8", "F8_E4M3", "2", "3,000,000", "3.000", "2.861"],
        ["norms", "BF16", "BF16", "1", "500", "0.001", "0.000"],
        ["total", "3", "3,000,500", "3.001", "2.861"],
    ]


def test_change_table_shows_what_comes_and_goes() -> None:
    before = [
        SizeRow("routed_experts", "MXFP8", "F8_E4M3", 2, 4 * 10**9),
        SizeRow("norms", "BF16", "BF16", 1, 10**9),
    ]
    after = [
        SizeRow("kv_scales", "F32", "F32", 2, 8),
        SizeRow("norms", "BF16", "BF16", 1, 10**9),
        SizeRow("routed_experts", "NVFP4", "U8", 2, 2 * 10**9),
    ]
    assert [line.split() for line in change_table(before, after)] == [
        ["component", "format", "dtype", "before", "GB", "GiB", "after", "GB", "GiB"],
        ["routed_experts", "MXFP8", "F8_E4M3", "4.000", "3.725", "–", "–"],
        ["routed_experts", "NVFP4", "U8", "–", "–", "2.000", "1.863"],
        ["norms", "BF16", "BF16", "1.000", "0.931", "1.000", "0.931"],
        ["kv_scales", "F32", "F32", "–", "–", "0.000", "0.000"],
        ["total", "5.000", "4.657", "3.000", "2.794"],
    ]


def test_kv_lines_keep_the_index_keys_apart() -> None:
    assert kv_lines(KV) == [
        "KV cache per token (60 layers, 4 KV heads × 128):",
        "  BF16                             122,880 B",
        "  FP8                               61,440 B",
        "  NVFP4                             34,560 B",
        "  hybrid: 57 NVFP4, 3 FP8 (dense)   35,904 B",
        "  index keys apart (57 layers): BF16 14,592 B, FP8 7,296 B, NVFP4 4,104 B",
    ]


def test_kv_lines_leave_out_what_does_not_apply() -> None:
    every_layer = KV._replace(sparse_layers=60, hybrid=34_560)
    assert not any("hybrid" in line for line in kv_lines(every_layer))
    bare = KvBytes(2, None, 1, 24, 192, 96, None, None, None, None, None)
    assert kv_lines(bare)[1:] == ["  BF16  192 B", "  FP8    96 B"]
    assert kv_lines(None) == ["KV cache: unknown, config.json lacks layers, KV heads or head_dim"]


def test_the_announcement_stands_beside_the_measurement() -> None:
    data: dict[str, Any] = {
        "source": {"bytes": 443_742_085_120},
        "output": {"weights_bytes": 250_091_244_544},
        "change_percent": -43.6,
        "announced": {"before_gb": 451.5, "after_gb": 250.1, "note": "why"},
    }
    assert announced_lines(data) == [
        "claimed  451.5 → 250.1 GB announced (−44.6 %); measured 443.7 → 250.1 GB (−43.6 %)",
        "         why",
    ]
    assert announced_lines({**data, "announced": None}) == []


REPORT: dict[str, Any] = {
    "source": {"payload_bytes": 10**9},
    "output": {"payload_bytes": 6 * 10**8 + 8, "file_bytes": 6 * 10**8 + 108, "shards": 1},
    "kv_scale_bytes": 8,
    "side_folder_bytes": {"dspark": 2000},
    "components": [{"component": "norms", "before_bytes": 10**9, "after_bytes": 6 * 10**8}],
    "quality": {"sqnr_db": 20.5, "tensors": 3, "worst_tensor_sqnr_db": 19.9, "worst_tensor": "w"},
    "dropped": {"MTP": 799},
    "timing": {"seconds": 2.0, "read_gb_per_s": 0.5, "jobs": 2, "peak_pss_bytes": 10**9,
               "resumed_shards": 1, "device": "cpu"},
}  # fmt: skip


def test_the_end_of_a_conversion() -> None:
    assert convert_lines(REPORT, "SRC", "OUT") == [
        "component  before GB  after GB",
        "norms          1.000     0.600",
        "total          1.000     0.600",
        "",
        "weights  1.000 GB → 600.000 MB (−40.0 %), 600,000,000 B = 600.000 MB = 572.205 MiB",
        "files    600,000,108 B = 600.000 MB = 572.205 MiB with headers, shards: 1,"
        " 8 B of them KV scales",
        "beside   dspark/ copied whole, 2,000 B = 2.000 kB = 1.953 KiB",
        "quality  SQNR 20.50 dB over 3 weights, worst 19.90 dB in w",
        "dropped  799 tensors: MTP",
        "time     2.0 s, 0.50 GB/s read, 2 jobs, done before: 1, peak memory 1.00 GB (summed PSS)",
        "next     mmq verify OUT --against SRC",
    ]


def test_the_end_of_a_conversion_that_quantised_nothing() -> None:
    lossless = {**REPORT["quality"], "sqnr_db": None}
    lines = convert_lines({**REPORT, "quality": lossless, "kv_scale_bytes": 0}, "SRC", "OUT")
    assert not any(line.startswith("quality") or "KV" in line for line in lines)

"""Block scales that no decoder survives, found with and without a source."""

from __future__ import annotations

import pytest
from hostile import W1, W2
from m3_source import layer

from mmq.verify import structure

SCALE = f"{W1}.weight_scale"
Q_SCALE = f"{layer(0)}self_attn.q_proj.weight_scale_inv"


def put(name, row, block, byte):
    return lambda out: out.poke(name, lambda a: a.__setitem__((row, block), byte))


FAULTS = [
    ("scale-nan", SCALE, put(SCALE, 2, 3, 0x7F)),
    ("scale-nan", SCALE, put(SCALE, 63, 7, 0xFF)),
    ("scale-negative", SCALE, put(SCALE, 2, 3, 0xB8)),
    ("scale-zero-with-data", SCALE, put(SCALE, 2, 3, 0)),
    ("scale-zero-with-data", SCALE, put(SCALE, 2, 3, 0x80)),
    ("mxfp8-scale-nan", Q_SCALE, put(Q_SCALE, 5, 1, 255)),
]


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize(("id", "where", "fault"), FAULTS)
def test_scan(id, where, fault, alone, modelopt):
    fault(modelopt)
    judged = modelopt.alone() if alone else modelopt.judge()
    assert judged.one(id, where).got == "1"


def test_place_of_the_first_and_count(modelopt):
    def three(a):
        a[40, 6] = a[41, 0] = a[63, 7] = 0x7F

    modelopt.poke(SCALE, three)
    finding = modelopt.alone().one("scale-nan", SCALE)
    assert "3 NaN bytes" in finding.message and "row 40, block 6" in finding.message


def test_zero_scale_over_zeros_is_fine(modelopt):
    modelopt.poke(f"{W2}.weight", lambda a: a.__setitem__((0, slice(0, 8)), 0x80))
    modelopt.poke(f"{W2}.weight_scale", lambda a: a.__setitem__((0, 0), 0))
    assert modelopt.alone().verdict == "pass"


def test_scan_in_pieces(monkeypatch, modelopt):
    from mmq.verify import scan

    monkeypatch.setattr(scan, "CHUNK_BYTES", 24)  # three rows of eight blocks
    put(SCALE, 62, 5, 0)(modelopt)
    finding = modelopt.alone().one("scale-zero-with-data", SCALE)
    assert "row 62, block 5" in finding.message


def test_large_checkpoints_are_not_scanned_without_a_source(monkeypatch, modelopt):
    monkeypatch.setattr(structure, "STRUCTURE_LIMIT", 1000)
    put(SCALE, 2, 3, 0x7F)(modelopt)
    judged = modelopt.alone()
    assert judged.verdict == "pass"
    assert "mmq verify OUT --against SRC" in judged.skipped and "GB of them" in judged.skipped
    assert "block scales scanned" not in judged.report.levels[0].checks
    assert modelopt.judge().of("scale-nan")

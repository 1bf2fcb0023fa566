"""The searches against committed bytes: inputs and outputs both come from the file.

A failure here means that output bytes change: bump NUMERICS_VERSION, say so in the changelog, and
write the file anew with scripts/build_search_golden.py.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from mmq.kernels import ops
from mmq.quantize.global_scale import nvfp4_global_scale

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "nvfp4-search-golden.json").read_text())
BACKENDS = ["cpu", "torch-table", "reference"]
CASES = ["normal", "heavy", "small", "ties"]


def rows(texts, dtype=np.uint8):
    return np.array([np.frombuffer(bytes.fromhex(text), dtype) for text in texts])


def test_no_case_is_left_out():
    assert set(GOLDEN["cases"]) == set(CASES)
    for case in GOLDEN["cases"].values():
        assert list(case["outputs"]) == list(ops.SEARCHES)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("search", ops.SEARCHES)
@pytest.mark.parametrize("name", CASES)
def test_bytes(name, search, backend):
    case = GOLDEN["cases"][name]
    expected = dict(case["outputs"][search])
    bits = rows(case["bf16"], "<u2")
    mxfp8 = rows(case["mxfp8_codes"]), rows(case["mxfp8_exponents"])
    s2 = nvfp4_global_scale(ops.float_amax(bits, "BF16"), search)
    assert float(s2).hex() == expected.pop("s2")
    options = {"search": search, "backend": backend}
    found = {
        "bf16": ops.quantize_nvfp4_from_float(bits, "BF16", s2, **options),
        "mxfp8": ops.quantize_nvfp4_from_mxfp8(*mxfp8, s2, **options),
    }
    if search != "max":
        importance = np.array(GOLDEN["importance"], np.float32)
        found["bf16 weighted"] = ops.quantize_nvfp4_from_float(
            bits, "BF16", s2, importance=importance, **options
        )
    assert list(found) == list(expected)
    for source, out in found.items():
        np.testing.assert_array_equal(out.scale, rows(expected[source]["scale"]))
        np.testing.assert_array_equal(out.packed, rows(expected[source]["packed"]))
        assert [value.hex() for value in out.error] == expected[source]["error"]

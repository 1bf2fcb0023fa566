"""Both backends against what ModelOpt computed: codes, scales and global scales, byte for byte."""

from __future__ import annotations

import numpy as np
import pytest

from mmq.kernels import ops
from mmq.quantize.global_scale import nvfp4_global_scale

FINITE_CASES = ["edge_s2_1", "randn_bf16", "mxfp8_src", "tiny_amax", "huge_amax", "odd_amax"]
BACKENDS = ["cpu", "torch-table", "reference"]


def read_case(golden, name):
    case = golden[name]
    rows = [row.split() for row in case["input_bf16_bits"]]
    bits = np.array([[int(word, 16) for word in row] for row in rows], np.uint16)
    peer = case["outputs"]["modelopt/NVFP4QTensor"]
    packed = np.array([list(bytes.fromhex(row)) for row in peer["packed"]], np.uint8)
    scale = np.array([list(bytes.fromhex(row)) for row in peer["scale_e4m3"]], np.uint8)
    return bits, packed, scale, peer["s2"]


def test_no_case_is_left_out(golden):
    assert set(golden) == {*FINITE_CASES, "nan", "inf", "allzero"}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", FINITE_CASES)
def test_modelopt_bytes(golden, name, backend):
    bits, packed, scale, s2 = read_case(golden, name)
    ours = ops.quantize_nvfp4_from_float(bits, "BF16", np.float32(s2), backend=backend)
    np.testing.assert_array_equal(ours.scale, scale)
    np.testing.assert_array_equal(ours.packed, packed)


@pytest.mark.parametrize("name", FINITE_CASES)
def test_modelopt_global_scale(golden, name):
    bits, _, _, s2 = read_case(golden, name)
    if name == "edge_s2_1":  # its amax is 2688: s2 = 1 by design
        assert ops.float_amax(bits, "BF16") == 2688
    assert nvfp4_global_scale(ops.float_amax(bits, "BF16")) == np.float32(s2)


@pytest.mark.parametrize("name", ["nan", "inf"])
def test_nonfinite_inputs_are_found(golden, name):
    bits = read_case(golden, name)[0]
    count, first = ops.count_nonfinite(bits.reshape(-1).view(np.uint8), "BF16")
    bad = np.flatnonzero((bits.reshape(-1) & 0x7F80) == 0x7F80)
    assert (count, first) == (bad.size, bad[0])
    with pytest.raises(ValueError, match="finite"):
        nvfp4_global_scale(ops.float_amax(bits, "BF16"))


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_zero_tensor_stays_finite(golden, backend):
    """ModelOpt emits s2 = 0 and undefined codes here; mmq emits zeros under scale 1."""
    bits = read_case(golden, "allzero")[0]
    s2 = nvfp4_global_scale(ops.float_amax(bits, "BF16"))
    ours = ops.quantize_nvfp4_from_float(bits, "BF16", s2, backend=backend)
    assert s2 == 1
    assert (ours.scale == 0x38).all()
    assert (ours.packed == 0).all()
    assert ours.error == (0, 0, 0)
    values = ops.dequantize_nvfp4_f32(ours.packed, ours.scale, s2, backend=backend)
    assert (values == 0).all()

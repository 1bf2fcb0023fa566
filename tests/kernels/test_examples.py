"""The four-number examples in the module docstrings and in docs/numerics.md are true."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mmq.kernels import ops
from mmq.kernels.reference import blocks, e4m3, scale_search

BACKENDS = ["cpu", "torch-table", "reference"]


def padded(values, size):
    return np.array([[*values, *[0] * (size - len(values))]], np.float32)


@pytest.mark.parametrize("backend", BACKENDS)
def test_nvfp4(backend):
    s2 = np.float32(2.0**-7)
    out = ops.quantize_nvfp4_from_float(
        padded([0.5, -0.03, 0.125, 0], 16), "F32", s2, backend=backend
    )
    assert out.scale.tolist() == [[0x53]]
    assert out.packed[0, :2].tolist() == [0x97, 0x03]
    back = ops.dequantize_nvfp4_f32(out.packed, out.scale, s2, backend=backend)[0, :4]
    assert np.round(back, 4).tolist() == pytest.approx([0.5156, -0.0430, 0.1289, 0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_nvfp4_from_codes(backend):
    codes = np.zeros((1, 32), np.uint8)
    codes[0, :4] = [0x30, 0x98, 0x20, 0x00]
    out = ops.quantize_nvfp4_from_mxfp8(
        codes, np.array([[120]], np.uint8), np.float32(2.0**-7), backend=backend
    )
    assert out.scale.tolist() == [[0x1B, 0x38]]
    assert out.packed[0, :2].tolist() == [0x97, 0x03]


@pytest.mark.parametrize("backend", BACKENDS)
def test_search(backend):
    """The `max` code stays, against its neighbours and against the code of the same error."""
    values = padded([0.5, -0.34, 0.25, 0], 16)
    s2 = np.float32(2.0**-7)
    out = ops.quantize_nvfp4_from_float(values, "F32", s2, search="mse", backend=backend)
    assert out.scale.tolist() == [[0x53]]
    assert out.packed[0, :2].tolist() == [0xE7, 0x05]
    codes = torch.tensor([[0x53, 0x52, 0x54, 0x58, 0x5B]], dtype=torch.uint8)
    blocks = torch.from_numpy(values).expand(5, 16)[None]
    errors = scale_search.block_errors(blocks, codes, torch.tensor(float(s2)), None)
    expected = [5.23, 32.39, 100.07, 20.07, 5.23]
    assert errors[0].tolist() == pytest.approx(expected, abs=0.005)


@pytest.mark.parametrize("backend", BACKENDS)
def test_mxfp8(backend):
    out = ops.quantize_mxfp8(padded([1, -0.3, 0.01, 0], 32), "F32", backend=backend)
    assert out.scale.tolist() == [[119]]
    assert out.codes[0, :4].tolist() == [0x78, 0xEA, 0x42, 0x00]
    back = ops.dequantize_mxfp8_f32(out.codes, out.scale, backend=backend)[0, :4]
    assert back.tolist() == [1, -0.3125, 0.009765625, 0]


def test_small_floats():
    codes = torch.tensor([0x38, 0x01, 0x7E], dtype=torch.uint8)
    assert e4m3.decode_e4m3(codes).tolist() == [1, 2.0**-9, 448]
    assert e4m3.decode_e8m0(torch.tensor([130, 0], dtype=torch.uint8)).tolist() == [8, 2.0**-127]
    quotients = torch.tensor([0.25, 0.75, 2.5, -5])
    assert e4m3.encode_e2m1(quotients).tolist() == [0, 2, 4, 14]


def test_errors():
    source = torch.tensor([[1, -0.3, 0.01, 0]], dtype=torch.float64)
    stored = torch.tensor([[1, -0.3125, 0.01, 0]], dtype=torch.float64)
    sums = blocks.row_errors(blocks.in_blocks(source, 4), blocks.in_blocks(stored, 4))
    assert sums[0].tolist() == pytest.approx([1.0901, 1.5625e-4, 0.0125])


def test_amax():
    codes = np.zeros((1, 128), np.uint8)
    codes[0, [0, 32, 64, 96]] = [0x78, 0x7E, 0x70, 0x7E]
    assert ops.mxfp8_amax(codes, np.array([[120, 119, 120, 117]], np.uint8)) == 2

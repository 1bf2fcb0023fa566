"""compressed-tensors reads mmq's NVFP4 tensors and finds the values mmq means."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationScheme, preset_name_to_scheme
from compressed_tensors.quantization.lifecycle.forward import dequantize

from mmq.kernels import ops
from mmq.quantize.global_scale import nvfp4_global_scale, reciprocal_scale

SCHEME: QuantizationScheme = preset_name_to_scheme("NVFP4A16", ["Linear"])


@pytest.fixture
def source():
    rng = np.random.default_rng(31)
    weights = (rng.standard_normal((24, 192)) * rng.lognormal(size=(24, 1))).astype(np.float32)
    weights[3] = 0
    weights[4, :16] = -0.0
    return weights


def foreign_state(out: ops.Nvfp4, s2: np.float32):
    divisor = torch.tensor([float(reciprocal_scale(s2))], dtype=torch.float32)
    scale = torch.from_numpy(out.scale).view(torch.float8_e4m3fn)
    return torch.from_numpy(out.packed), scale, divisor


def test_decompressor_agrees_where_nothing_is_rounded(source):
    """With s2 a power of two every value fits BF16: the decoders must agree to the bit."""
    s2 = np.float32(2.0 ** np.ceil(np.log2(np.abs(source).max() / 2688)))
    out = ops.quantize_nvfp4_from_float(source, "F32", s2)
    packed, scale, divisor = foreign_state(out, s2)
    state = {"weight_packed": packed, "weight_scale": scale, "weight_global_scale": divisor}
    weight = NVFP4PackedCompressor.decompress(state, SCHEME)["weight"]
    assert weight.dtype == torch.bfloat16
    foreign = weight.float().numpy()
    np.testing.assert_array_equal(foreign, ops.dequantize_nvfp4_f32(out.packed, out.scale, s2))
    bits = weight.view(torch.int16).numpy().view(np.uint16)
    np.testing.assert_array_equal(bits, ops.dequantize_nvfp4(out.packed, out.scale, s2))


def test_divisor_form_means_the_same_values(source):
    """With any s2 the divisor form may round otherwise, by no more than three F32 roundings."""
    s2 = nvfp4_global_scale(ops.float_amax(source, "F32"))
    out = ops.quantize_nvfp4_from_float(source, "F32", s2)
    packed, scale, divisor = foreign_state(out, s2)
    elements = unpack_fp4_from_uint8(packed, *source.shape, dtype=torch.float32)
    foreign = dequantize(
        elements, scale.float(), args=SCHEME.weights, global_scale=divisor, dtype=torch.float32
    ).numpy()
    ours = ops.dequantize_nvfp4_f32(out.packed, out.scale, s2)
    assert (np.abs(foreign - ours) <= 3 * 2.0**-24 * np.abs(ours)).all()
    assert np.abs(ours).max() == pytest.approx(np.abs(source).max(), rel=1e-6)

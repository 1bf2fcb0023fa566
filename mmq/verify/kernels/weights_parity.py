"""Kernels that convert weights beside their references: the same bytes and the same error sums."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from mmq.kernels.arguments import SEARCHES
from mmq.kernels.reference import backend as reference
from mmq.kernels.reference.e4m3 import bf16_bits
from mmq.kernels.reference.moe import Mxfp8Weight, Nvfp4Weight, Weight, to_f32
from mmq.kernels.reference.mxfp8 import quantize_mxfp8
from mmq.kernels.results import ScaleChoice
from mmq.kernels.triton import backend
from mmq.quantize.global_scale import nvfp4_global_scale
from mmq.verify.kernels.compare import Comparison, exactly
from mmq.verify.kernels.material import Material, normal

#: Rows and columns that are converted: two programs, the last in part.
ROWS, COLUMNS = 37, 96


def to_nvfp4(material: Material) -> Iterator[Comparison]:
    """From MXFP8, BF16 and F32, by every rule, with and without importance weights."""
    mxfp8, bits, values = _sources(material)
    importance = normal(material.generator(18), values.shape[1]).abs().numpy()
    amax = np.float32(np.abs(values).max())
    for search in SEARCHES:
        s2 = nvfp4_global_scale(amax, search)
        choice = ScaleChoice(search)
        name = "quantize_nvfp4_from_mxfp8"
        yield _same(f"MXFP8, {search}", name, (*mxfp8, s2, choice))
        if search != "max":
            weighted = ScaleChoice(search, importance)
            yield _same(f"MXFP8, {search}, weighted", name, (*mxfp8, s2, weighted))
    s2 = nvfp4_global_scale(amax)
    yield _same("BF16, max", "quantize_nvfp4_from_f32", (bits, s2))
    yield _same("F32, max", "quantize_nvfp4_from_f32", (values, s2))


def to_mxfp8(material: Material) -> Iterator[Comparison]:
    """From BF16 and F32."""
    _, bits, values = _sources(material)
    yield _same("BF16", "quantize_mxfp8_from_f32", (bits,))
    yield _same("F32", "quantize_mxfp8_from_f32", (values,))


def from_nvfp4(material: Material) -> Iterator[Comparison]:
    """Every byte under every scale, and rows of an expert."""
    bytes_OP = np.tile(np.arange(256, dtype=np.uint8), (256, 1))
    scale_OB = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 32, axis=1)
    sources = [("every byte × every scale", bytes_OP, scale_OB, np.float32(19 / 16 * 2.0**-9))]
    for expert in material.experts[:1]:
        for name, weight in zip(("gate", "up", "down"), expert, strict=True):
            if isinstance(weight, Nvfp4Weight):
                rows = weight.packed_OP[:ROWS].numpy(), weight.scale_OB[:ROWS].numpy()
                sources.append((f"an expert's {name}", *rows, np.float32(weight.s2)))
    for case, packed, scale, s2 in sources:
        for form in ("bf16", "f32"):
            yield _same(f"{case} to {form}", f"dequantize_nvfp4_{form}", (packed, scale, s2))


def from_mxfp8(material: Material) -> Iterator[Comparison]:
    """Every code under every exponent, and rows of a weight."""
    codes_OK = np.tile(np.arange(256, dtype=np.uint8), (256, 1))
    exponents = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 8, axis=1)
    mxfp8, _, _ = _sources(material)
    for case, source in (("every code × every exponent", (codes_OK, exponents)), ("rows", mxfp8)):
        for form in ("bf16", "f32"):
            yield _same(f"{case} to {form}", f"dequantize_mxfp8_{form}", source)


def amax(material: Material) -> Iterator[Comparison]:
    """Of MXFP8, BF16 and F32."""
    mxfp8, bits, values = _sources(material)
    yield _same("MXFP8", "mxfp8_amax", mxfp8)
    for form, source in (("BF16", bits), ("F32", values)):
        expected = np.float32(np.abs(values).max())
        yield exactly(form, _tensors(backend.float_amax(source)), _tensors(expected))


def _sources(material: Material) -> tuple[tuple[Any, Any], Any, Any]:
    """The same numbers as MXFP8, as BF16 bits and as F32; zeros and −0 among them."""
    weight = _a_weight(material)
    values = to_f32(weight)[:ROWS]
    codes, exponents = (
        (weight.codes_OK[:ROWS], weight.exponent_OG[:ROWS])
        if isinstance(weight, Mxfp8Weight)
        else quantize_mxfp8(values)[:2]
    )
    codes = codes.clone()
    codes[0, :32], codes[1, :32] = 0, 0x80
    restored = to_f32(Mxfp8Weight(codes, exponents))
    bits = bf16_bits(restored)
    f32 = bits.view(torch.bfloat16).float()
    return (codes.numpy(), exponents.numpy()), bits.numpy(), f32.numpy()


def _a_weight(material: Material) -> Weight:
    """Rows of some projection, all columns of a small layer."""
    weight = material.row_ZM
    columns = min(material.geometry.hidden, 8 * COLUMNS)
    if isinstance(weight, Mxfp8Weight):
        codes, exponents = weight
        return Mxfp8Weight(codes[:ROWS, :columns], exponents[:ROWS, : columns // 32])
    return to_f32(weight)[:ROWS, :columns]


def _same(case: str, name: str, arguments: tuple[Any, ...]) -> Comparison:
    got = getattr(backend, name)(*arguments)
    expected = getattr(reference, name)(*arguments)
    return exactly(case, _tensors(got), _tensors(expected))


def _tensors(result: Any) -> tuple[torch.Tensor, ...]:
    """Arrays as tensors; BF16 bits as integers."""
    arrays = [np.atleast_1d(a) for a in (result if isinstance(result, tuple) else (result,))]
    return tuple(
        torch.from_numpy((a.view(np.int16) if a.dtype == np.uint16 else a).copy()) for a in arrays
    )

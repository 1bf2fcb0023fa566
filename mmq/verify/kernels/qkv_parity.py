"""From a layer's input to its heads and pages: the fused kernel, the steps, and the reference.

From the row on, bits are specified. The row is a product whose sums the kernel adds in an order of
its own: within `error_bounds.products_apart`, and equal where all sums are integers that F32 holds.

Dimensions: T tokens, M hidden, Z columns of the row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from mmq.kernels.error_bounds import products_apart, rounded_apart
from mmq.kernels.kv_pages import KvFormat, PagedCache, PageLayout
from mmq.kernels.reference import qkv_rope as reference
from mmq.kernels.reference.e4m3 import encode_e4m3
from mmq.kernels.reference.moe import Mxfp8Weight, Weight, to_f32
from mmq.kernels.reference.mxfp8 import quantize_mxfp8
from mmq.kernels.reference.qkv_rope import Destination
from mmq.kernels.triton import qkv_rope
from mmq.kernels.triton.launch import device
from mmq.verify.kernels.compare import Comparison, exactly, moved, within
from mmq.verify.kernels.material import Material, normal

#: Tokens: fewer than a tile, and more than the narrow one.
TOKENS = 3, 37


def projection(material: Material, x_format: str) -> Iterator[Comparison]:
    """`x_format`: of the activations, "bf16" or "mxfp8"; weights as the material has them."""
    for tokens, format in zip(TOKENS, ("nvfp4", "fp8"), strict=True):
        x = _activations(normal(material.generator(11), tokens, material.geometry.hidden), x_format)
        yield from _any_sums(material, x, tokens, format)  # type: ignore[arg-type]
    yield from _whole_numbers(material, x_format)


def _any_sums(
    material: Material, x: Tensor | Mxfp8Weight, tokens: int, format: KvFormat
) -> Iterator[Comparison]:
    """The row within its bound; pages from one kernel, from two, and from the reference."""
    case = f"{tokens} tokens, {format} pages"
    row_TZ = _rows(x, material.row_ZM, material)
    x_TM, w_ZM = to_f32(x).double(), to_f32(material.row_ZM).double()
    value_TZ = x_TM @ w_ZM.T
    apart_TZ = products_apart(x_TM.abs() @ w_ZM.abs().T, x_TM.shape[1])
    yield within(f"row, {case}", row_TZ, value_TZ, rounded_apart(value_TZ, apart_TZ))
    steps = _inserted(material, row_TZ, format)
    yield exactly(f"pages of a row, {case}", steps, _expected(material, row_TZ, format))
    fused = _fused(material, x, material.row_ZM, format, tokens)
    yield exactly(f"one kernel or two, {case}", fused, steps)


def _whole_numbers(material: Material, x_format: str) -> Iterator[Comparison]:
    """All products and sums whole numbers below 2^24: any order has the same bits."""
    geometry, generator = material.geometry, material.generator(12)
    shape = geometry.row.width, geometry.hidden
    w_ZM = torch.randint(-8, 9, shape, generator=generator, dtype=torch.int8).float()
    exponents = torch.full((shape[0], shape[1] // 32), 127, dtype=torch.uint8)
    w = Mxfp8Weight(encode_e4m3(w_ZM), exponents)
    x_TM = torch.randint(-8, 9, (5, geometry.hidden), generator=generator).float()
    x = _activations(x_TM, x_format)
    row_TZ = reference.project_rows(x_TM, w_ZM)
    expected = _expected(material, row_TZ, "nvfp4")
    yield exactly("whole numbers, fused", _fused(material, x, w, "nvfp4", 5), expected)


def _activations(x_TM: Tensor, format: str) -> Tensor | Mxfp8Weight:
    if format == "bf16":
        return x_TM.bfloat16()
    return Mxfp8Weight(*quantize_mxfp8(x_TM)[:2])


def _operand(weight: Weight) -> Any:
    """As the kernels' wrappers take it, on the device."""
    if isinstance(weight, Mxfp8Weight):
        return qkv_rope.Mxfp8(*moved(tuple(weight), device()))
    return torch.as_tensor(weight).bfloat16().to(device())


def _rows(x: Tensor | Mxfp8Weight, w: Weight, material: Material) -> Tensor:
    row: Tensor = qkv_rope.project_rows(_operand(x), _operand(w), material.geometry.row)
    return row.cpu()


def _tables(material: Material, tokens: int) -> tuple[Tensor, Tensor]:
    """Positions from 0 to a million."""
    positions_T = torch.randint(0, 2**20, (tokens,), generator=material.generator(13))
    positions_T[:2] = torch.tensor([0, 2**20 - 1])[:tokens]
    return reference.rope_tables(positions_T, material.geometry.rotary_dim, material.geometry.theta)


def _destination(material: Material, format: KvFormat, tokens: int) -> Destination:
    """Pages of 0xEE, slots all over them, every fourth token nowhere."""
    geometry = material.geometry
    layout = PageLayout(
        format, geometry.kv_heads, geometry.block, geometry.dim,
        v_scale_order="quads" if format == "nvfp4" else "linear",
    )  # fmt: skip
    index_layout = PageLayout(format, 1, geometry.block, geometry.dim, sides=1)
    pages = -(-tokens // geometry.block) + 2
    slots_T = torch.randperm(pages * geometry.block, generator=material.generator(14))[:tokens]
    slots_T[3::4] = -1
    caches = [
        PagedCache(each, torch.full((pages, each.page_bytes), 0xEE, dtype=torch.uint8), *scales)
        for each, scales in (
            (layout, (material.k_scale, material.v_scale)),
            (index_layout, (material.index_scale,)),
        )
    ]
    queries = "fp8" if format == "fp8" else "bf16"
    return Destination(slots_T, caches[0], caches[1], queries, queries)  # type: ignore[arg-type]


def _results(queries: tuple[Any, ...], where: Destination) -> tuple[Tensor, ...]:
    """Queries, and the bytes of both caches."""
    assert where.index_cache is not None
    found = *queries, where.cache.pages_PZ, where.index_cache.pages_PZ
    return moved(found, torch.device("cpu"))


def _expected(material: Material, row_TZ: Tensor, format: KvFormat) -> tuple[Tensor, ...]:
    where = _destination(material, format, len(row_TZ))
    geometry = material.geometry
    q, k, v, index_q, index_k = reference.split_row(row_TZ, geometry.row)
    cos_sin, norms = _tables(material, len(row_TZ)), material.norms

    def finish(x: Tensor, w: Tensor | None) -> Tensor:
        assert w is not None
        normed = reference.gemma_norm(x, w, norms.eps, norms.gemma)
        return reference.apply_rope(normed, *cos_sin)

    heads = reference.Heads(
        finish(q, norms.q_D), finish(k, norms.k_D), v.float(), finish(index_q, norms.index_q_E),
        finish(index_k, norms.index_k_E)[:, 0],
    )  # fmt: skip
    return _results(reference.write_heads(heads, where), where)


def _inserted(material: Material, row_TZ: Tensor, format: KvFormat) -> tuple[Tensor, ...]:
    where = moved(_destination(material, format, len(row_TZ)), device())
    arguments = moved((material.norms, _tables(material, len(row_TZ))), device())
    queries = qkv_rope.insert_heads(row_TZ.to(device()), material.geometry.row, *arguments, where)
    return _results(queries, where)


def _fused(
    material: Material, x: Tensor | Mxfp8Weight, w: Weight, format: KvFormat, tokens: int
) -> tuple[Tensor, ...]:
    where = moved(_destination(material, format, tokens), device())
    arguments = moved((material.norms, _tables(material, tokens)), device())
    queries = qkv_rope.project_and_insert(
        _operand(x), _operand(w), material.geometry.row, *arguments, where
    )
    return _results(queries, where)

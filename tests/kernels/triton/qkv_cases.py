"""Rows, weights, caches and what the reference makes of them, for the tests of the QKV kernels.

Dimensions: T tokens, M hidden, Z columns of the row, P pages.
"""

from __future__ import annotations

import interpreted_qkv as run
import torch

from mmq.kernels.kv_pages import PagedCache, PageLayout
from mmq.kernels.reference import qkv_rope as reference
from mmq.kernels.reference.mxfp8 import dequantize_mxfp8, quantize_mxfp8
from mmq.kernels.reference.qkv_rope import Destination, HeadNorms, RowLayout
from mmq.kernels.triton import qkv_rope

M3 = RowLayout()
SMALL = RowLayout(heads=4, kv_heads=2, index_heads=2)
TINY = RowLayout(heads=2, kv_heads=1, index_heads=1)
#: Scales of K, V and index keys that are no powers of two.
SCALES = 0.0123, 0.377, 0.021


def norms(seed=3, **more):
    generator = torch.Generator().manual_seed(seed)
    return HeadNorms(*(torch.randn(4, 128, generator=generator) * 0.3).bfloat16(), **more)


def some_positions(tokens, seed=5):
    generator = torch.Generator().manual_seed(seed)
    positions_T = torch.randint(0, 1_048_576, (tokens,), generator=generator)
    positions_T[:2] = torch.tensor([0, 1_048_575])[:tokens]
    return positions_T


def some_rows(tokens, layout, dtype=torch.bfloat16, seed=4):
    """Rows of all sizes: from where ε decides to where squares overflow, zero and subnormal."""
    generator = torch.Generator().manual_seed(seed)
    sizes_T1 = 2.0 ** torch.randint(-20, 10, (tokens, 1), generator=generator)
    row_TZ = torch.randn(tokens, layout.width, generator=generator) * sizes_T1
    return row_TZ.to(dtype)


def destination(
    tokens, layout=M3, format="nvfp4", order="linear", index="fp8", queries="bf16", skip=0
):
    """Pages of 0xEE, more than are needed, and slots all over them."""
    generator = torch.Generator().manual_seed(6)
    pages = -(-tokens // 128) + 2
    slots_T = torch.randperm(pages * 128, generator=generator)[:tokens]
    if skip:
        slots_T[::skip] = -1
    k_scale, v_scale, index_scale = SCALES
    page = PageLayout(format, layout.kv_heads, v_scale_order=order)
    key = PageLayout(index, 1, sides=1)

    def bytes_of(layout):
        return torch.full((pages, layout.page_bytes), 0xEE, dtype=torch.uint8)

    index_cache = PagedCache(key, bytes_of(key), index_scale) if layout.index_heads else None
    cache = PagedCache(page, bytes_of(page), k_scale, v_scale)
    return Destination(slots_T, cache, index_cache, queries, queries)


def expected(row_TZ, layout, weights, positions_T, where):
    """What the reference makes of a row: queries, and the bytes of both caches."""
    where = run.own(where)
    heads = reference.project_heads(row_TZ, layout, weights, positions_T)
    return *reference.write_heads(heads, where), *run.pages(where)


def assert_same(ours, theirs):
    for got, want in zip(ours, theirs, strict=True):
        assert (got is None) == (want is None)
        if got is not None:
            assert got.dtype == want.dtype
            assert got.shape == want.shape
            integers = {2: torch.int16, 4: torch.int32}.get(got.element_size())
            assert torch.equal(*(x.view(integers) if integers else x for x in (got, want)))


def integers(tokens, columns, layout, seed=8):
    """x BF16 and W MXFP8 whose sums of products F32 holds, so that any order has the same bits."""
    generator = torch.Generator().manual_seed(seed)
    x_TM = torch.randint(-8, 9, (tokens, columns), generator=generator).bfloat16()
    w_ZM = torch.randint(-8, 9, (layout.width, columns), generator=generator).float()
    codes_ZM, exponents_ZG, _ = quantize_mxfp8(w_ZM)
    assert torch.equal(dequantize_mxfp8(codes_ZM, exponents_ZG), w_ZM)
    return x_TM, qkv_rope.Mxfp8(codes_ZM, exponents_ZG), w_ZM


def reals(tokens, columns, layout, larger=4096, seed=9):
    """x BF16 and W MXFP8, and W's values.

    A third of the products, `larger` times the rest, cancels another third, so that the order of
    the sum shows.
    """
    generator = torch.Generator().manual_seed(seed)
    third = columns // 96 * 32
    x_TM = torch.randn(tokens, columns, generator=generator).bfloat16()
    w_ZM = torch.randn(layout.width, columns, generator=generator) * 0.02
    x_TM[:, :third] *= larger
    x_TM[:, third : 2 * third] = -x_TM[:, :third]
    w_ZM[:, third : 2 * third] = w_ZM[:, :third]
    codes_ZM, exponents_ZG, _ = quantize_mxfp8(w_ZM)
    w_ZM = dequantize_mxfp8(codes_ZM, exponents_ZG)
    return x_TM, qkv_rope.Mxfp8(codes_ZM, exponents_ZG), w_ZM


def codes_of(layout, pages_PZ):
    """Codes of elements and of scales of all pages, as numbers that count up with values."""
    data, scales = layout.data_bytes, layout.scale_bytes
    side_PSZ = pages_PZ.reshape(len(pages_PZ), 2, data + scales).short()
    codes, sign = side_PSZ[..., :data], 128
    if layout.format == "nvfp4":
        codes, sign = torch.stack([codes & 15, codes >> 4]), 8
    return torch.where(codes >= sign, sign - codes, codes), side_PSZ[..., data:]


def head_pages(layout, pages_PZ, groups):
    """The pages of some heads of pages."""
    side = layout.data_bytes, layout.scale_bytes
    regions = [r.unflatten(1, (layout.heads, -1)) for r in pages_PZ.split(side * 2, 1)]
    return torch.cat([region[:, groups].flatten(1) for region in regions], 1)

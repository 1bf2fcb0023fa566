"""Kernels around the cache beside their references: staging, write and read, all bit for bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

from mmq.kernels.kv_pages import KvFormat, PagedCache, PageLayout, ScaleOrder
from mmq.kernels.reference import fp8_staging as staging_reference
from mmq.kernels.reference import kv_cache as reference
from mmq.kernels.reference.moe import Nvfp4Weight
from mmq.kernels.triton import fp8_staging, kv_cache
from mmq.kernels.triton.launch import device
from mmq.verify.kernels.compare import Comparison, exactly, moved
from mmq.verify.kernels.material import Material

#: Tokens that a write and a read have; 0 and 1 are among them.
TOKENS = (0, 1, 37)


def staging(material: Material) -> Iterator[Comparison]:
    """All 16 × 256 pairs of a code and a scale, and blocks of an expert's weights."""
    # 256 rows, one a scale; 16 blocks, one a code and the code beside it.
    code_J = torch.arange(16).repeat_interleave(8)
    packed_RP = (code_J | (code_J.flip(0) << 4)).to(torch.uint8).expand(256, -1).contiguous()
    scale_RB = torch.arange(256).to(torch.uint8)[:, None].expand(-1, 16).contiguous()
    yield _staged("all codes × all scales", packed_RP, scale_RB)
    for expert in material.experts[:1]:
        for name, weight in zip(("gate", "down"), (expert.gate_IM, expert.down_MI), strict=True):
            if isinstance(weight, Nvfp4Weight):
                rows = weight.packed_OP[:64], weight.scale_OB[:64]
                yield _staged(f"64 rows of an expert's {name}", *rows)


def _staged(case: str, packed_RP: torch.Tensor, scale_RB: torch.Tensor) -> Comparison:
    got = fp8_staging.stage_fp8(packed_RP.to(device()), scale_RB.to(device()))
    return exactly(case, got.cpu(), staging_reference.stage_rows(packed_RP, scale_RB))


def write_and_read(material: Material, format: KvFormat) -> Iterator[Comparison]:
    """Bytes of whole pages, those that must stay as they are too, and what is read back."""
    orders: tuple[ScaleOrder, ...] = ("linear", "quads") if format == "nvfp4" else ("linear",)
    for order in orders:
        for tokens in TOKENS:
            yield from _written(material, format, order, tokens)
    yield from _index_keys(material, format)


def _written(
    material: Material, format: KvFormat, order: ScaleOrder, tokens: int
) -> Iterator[Comparison]:
    geometry = material.geometry
    layout = PageLayout(format, geometry.kv_heads, geometry.block, geometry.dim, 2, order)
    expected = _empty(layout, material, pages=-(-tokens // geometry.block) + 2)
    ours = _copy(expected)
    slots = len(expected.pages_PZ) * geometry.block
    slots_T = torch.randperm(slots, generator=material.generator(7))[:tokens]
    slots_T[::4] = -1
    heads = material.heads(max(1, tokens), salt=8)
    k_TGD, v_TGD = heads.k_TGD[:tokens], heads.v_TGD[:tokens]
    reference.write_pages(expected, slots_T, k_TGD, v_TGD)
    kv_cache.write_pages(ours, *moved((slots_T, k_TGD, v_TGD), device()))
    case = f"{tokens} tokens" + (f", V scales {order}" if format == "nvfp4" else "")
    yield exactly(f"write {case}", ours.pages_PZ.cpu(), expected.pages_PZ)
    if not tokens:
        return
    # What was not written is 0xEE, a number in every format.
    page_table_N = torch.arange(len(expected.pages_PZ)).int()
    for staged in (False, True) if format == "nvfp4" else (False,):
        wanted = reference.read_pages(expected, page_table_N, tokens, staged=staged)
        arguments = moved((expected, page_table_N), device())
        got = kv_cache.read_pages(*arguments, tokens, staged=staged)
        name = f"read {case}" + (", staged" if staged else "")
        yield exactly(name, moved(tuple(got), torch.device("cpu")), tuple(wanted))


def _index_keys(material: Material, format: KvFormat) -> Iterator[Comparison]:
    geometry = material.geometry
    layout = PageLayout(format, 1, geometry.block, geometry.dim, sides=1)
    expected = _empty(layout, material, pages=2)
    ours = _copy(expected)
    k_TE = material.heads(9, salt=9).index_k_TE
    assert k_TE is not None
    slots_T = torch.arange(9) + geometry.block - 5
    reference.write_pages(expected, slots_T, k_TE[:, None], None)
    kv_cache.write_pages(ours, slots_T.to(device()), k_TE[:, None].to(device()), None)
    yield exactly("write 9 index keys over a page's end", ours.pages_PZ.cpu(), expected.pages_PZ)


def _empty(layout: PageLayout, material: Material, pages: int) -> PagedCache:
    bytes_PZ = torch.full((pages, layout.page_bytes), 0xEE, dtype=torch.uint8)
    return PagedCache(layout, bytes_PZ, material.k_scale, material.v_scale)


def _copy(cache: PagedCache) -> PagedCache:
    return dataclasses.replace(cache, pages_PZ=cache.pages_PZ.clone().to(device()))

"""The KV cache: rows of K and V encoded into pages in place, and read back.

    BF16     data = bf16(x)                                   to nearest, ties to even
    FP8      data = e4m3(clamp(x / scale, −448, 448))
    NVFP4    blocks of 16 by `mmq.kernels.reference.nvfp4`, rule `max`, with s2 = scale:
             block scale = e4m3(clamp(amax16 / (6 · scale), 2^−9, 448)), 1 where the quotient is 0
             code = e2m1(x / (e4m3(block scale) · scale))
    back     element · scale, the element being bf16, e4m3, e2m1 · e4m3(block scale), or, staged as
             kernels do that multiply in FP8, e4m3(e2m1 · e4m3(block scale)); BF16 has no scale

Elements are exact in BF16 (E2M1 · E4M3 has 6 significant bits), so that kernels take them as
operands and multiply with `scale` afterwards: one rounding, here too. `scale` is the F32 `k_scale`
or `v_scale` of the layer, the same for FP8 and NVFP4. Where bytes lie is `mmq.kernels.kv_pages`.
Slots are page · B + offset; tokens with a negative slot are skipped.

Four numbers, [0.5, −0.03, 0.125, 0] with scale 2^−7: as NVFP4 block scale 0x53 (11) and bytes 0x97,
0x03, back [0.5156, −0.0430, 0.1289, 0]; as FP8 quotients 64, −3.84, 16, 0, bytes 0x68, 0xC7
(−3.75), 0x58, 0x00; staged codes 7, 9, 3, 0 give 66 → 64, −5.5, 16.5 → 16, 0, back
[0.5, −0.0430, 0.125, 0].

Sources: vLLM nvfp4_kv_cache_kernels.cu (FlashInfer PR 4982 has the same pages), with IEEE divisions
where it has approximate reciprocals; the rule of ModelOpt's NVFP4QTensor.

Dimensions: R rows, D head dimension, T tokens, G KV heads, S positions of a sequence, N its blocks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..kv_pages import QUAD, KvFormat, PagedCache
from .e4m3 import bf16_bits, decode_e4m3, encode_e4m3
from .fp8_staging import stage_rows
from .nvfp4 import dequantize_nvfp4, max_scale, pack_nibbles, quantize_elements


def encode_rows(x_RD: Tensor, format: KvFormat, scale: float) -> tuple[Tensor, Tensor]:
    """Finite F32 rows, R ≥ 1, as data U8 [R, bytes] and block scales U8 [R, D/16] (else [R, 0])."""
    s2 = torch.tensor(scale, dtype=torch.float32)
    no_scales_R0 = torch.empty(len(x_RD), 0, dtype=torch.uint8)
    if format == "bf16":
        return bf16_bits(x_RD).view(torch.uint8), no_scales_R0
    if format == "fp8":
        return encode_e4m3(x_RD / s2), no_scales_R0
    scale_RB = max_scale(x_RD, s2)
    return pack_nibbles(quantize_elements(x_RD, scale_RB, s2)), scale_RB


def decode_rows(
    data_RZ: Tensor, scale_RB: Tensor, format: KvFormat, scale: float, *, staged: bool = False
) -> Tensor:
    """The inverse of `encode_rows`: F32 [R, D]. Under scale 1 they are the elements.

    Args:
        staged: NVFP4 as rounded to E4M3 on the way; other formats are what they are.
    """
    if format == "bf16":
        return data_RZ.contiguous().view(torch.bfloat16).float()
    if format == "fp8":
        elements_RD = decode_e4m3(data_RZ)
    elif staged:
        elements_RD = decode_e4m3(stage_rows(data_RZ, scale_RB))
    else:
        elements_RD = dequantize_nvfp4(data_RZ, scale_RB, torch.ones(()))
    return elements_RD * torch.tensor(scale, dtype=torch.float32)


def write_pages(cache: PagedCache, slots_T: Tensor, k_TGD: Tensor, v_TGD: Tensor | None) -> None:
    """Encode K and V of a batch into their pages, in place; other bytes stay as they are.

    Args:
        slots_T: integers, each slot at most once; negative for tokens that go nowhere.
        k_TGD, v_TGD: finite F32; no V where the pages have one side.

    Raises:
        ValueError: V is given to pages of one side, or missing for two.
    """
    layout = cache.layout
    sides = [k_TGD] if v_TGD is None else [k_TGD, v_TGD]
    if len(sides) != layout.sides:
        raise ValueError(f"{len(sides)} sides for pages of {layout.sides}")
    kept_T = slots_T >= 0
    slots_T = slots_T[kept_T].long()
    if not len(slots_T):
        return
    page_T, token_T = slots_T // layout.tokens, slots_T % layout.tokens
    for x_TGD, side in zip(sides, _sides(cache), strict=True):
        data_RZ, scale_RB = encode_rows(x_TGD[kept_T].flatten(0, 1), layout.format, side.scale)
        side.data_PGBZ[page_T, :, token_T] = data_RZ.reshape(-1, layout.heads, data_RZ.shape[1])
        scale_TGS = scale_RB.reshape(len(slots_T), layout.heads, -1)
        quad_T, rest_T = token_T // side.quad, token_T % side.quad
        side.scales_PGBSI[page_T, :, quad_T, :, rest_T] = scale_TGS


def read_pages(
    cache: PagedCache, page_table_N: Tensor, tokens: int, *, staged: bool = False
) -> tuple[Tensor, Tensor | None]:
    """K and V of the first `tokens` positions of a sequence, F32 [S, G, D]; no V of one side.

    Args:
        page_table_N: the page of each block.
        staged: as for `decode_rows`.

    Raises:
        ValueError: a position has no page.
    """
    layout = cache.layout
    blocks = -(-tokens // layout.tokens)
    pages_N = page_table_N[:blocks].long()
    if len(pages_N) < blocks or (pages_N < 0).any():
        raise ValueError(f"{tokens} tokens need {blocks} pages, got {pages_N.tolist()}")
    if not tokens:
        k_SGD, v_SGD = torch.empty(2, 0, layout.heads, layout.dim)
        return k_SGD, v_SGD if layout.sides == 2 else None
    sides_SGD = []
    for side in _sides(cache):
        data_RZ = side.data_PGBZ[pages_N].transpose(1, 2).flatten(0, 2)
        scale_RB = side.scales_PGBSI[pages_N].permute(0, 2, 4, 1, 3).flatten(0, 3)
        rows_RD = decode_rows(data_RZ, scale_RB, layout.format, side.scale, staged=staged)
        sides_SGD.append(rows_RD.reshape(-1, layout.heads, layout.dim)[:tokens])
    return sides_SGD[0], sides_SGD[1] if layout.sides == 2 else None


class _Side(NamedTuple):
    """K or V of all pages of a cache, as views of their bytes.

    Attributes:
        data_PGBZ: U8, the data of each page, head and token.
        scales_PGBSI: U8, block scales: page, head, group of tokens, scale, token of the group.
        scale: F32 of the tensor.
    """

    data_PGBZ: Tensor
    scales_PGBSI: Tensor
    scale: float

    @property
    def quad(self) -> int:
        """Tokens whose scales lie together: 1, or 4 in quads."""
        return self.scales_PGBSI.shape[-1]


def _sides(cache: PagedCache) -> list[_Side]:
    layout = cache.layout
    sides = [_side(cache, 0, layout.k_scales, 1, cache.k_scale)]
    if layout.sides == 2:
        quad = QUAD if layout.v_scale_order == "quads" else 1
        sides.append(_side(cache, layout.v_data, layout.v_scales, quad, cache.v_scale))
    return sides


def _side(cache: PagedCache, data: int, scales: int, quad: int, scale: float) -> _Side:
    layout, pages_PZ = cache.layout, cache.pages_PZ
    pages, heads, tokens = len(pages_PZ), layout.heads, layout.tokens
    data_PZ = pages_PZ[:, data : data + layout.data_bytes]
    scales_PZ = pages_PZ[:, scales : scales + layout.scale_bytes]
    return _Side(
        data_PZ.view(pages, heads, tokens, layout.head_token_bytes),
        scales_PZ.view(pages, heads, tokens // quad, layout.head_token_scales, quad),
        scale,
    )

"""What the interpreting process runs of the KV cache kernels, and broken variants. NumPy in, NumPy
out; BF16 as bits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from staging_runs import replaced

from mmq.kernels.kv_pages import PagedCache
from mmq.kernels.triton import kv_cache
from mmq.kernels.triton.launch import pretended


def _tensor(array):
    """F32 as it is; I16 bits as BF16."""
    if array is None:
        return None
    x = torch.from_numpy(array)
    return x.view(torch.bfloat16) if x.dtype == torch.int16 else x


def written(layout, pages, slots, k, v, scales):
    """Pages after a write."""
    cache = PagedCache(layout, torch.from_numpy(pages), *scales)
    kv_cache.write_pages(cache, torch.from_numpy(slots), _tensor(k), _tensor(v))
    return pages


def written_from_rows(layout, pages, slots, rows, scales):
    """The same from rows [T, heads · D · 2 and more], of which K and V are columns."""
    cache = PagedCache(layout, torch.from_numpy(pages), *scales)
    packed = torch.from_numpy(rows)
    width = layout.heads * layout.dim
    k, v = packed[:, 3 : 3 + width], packed[:, -width:]
    assert not k.is_contiguous()
    kv_cache.write_pages(cache, torch.from_numpy(slots), k, v)
    return pages


def read(layout, pages, page_table, tokens, scales, target=None, staged=False):
    """K and V; staged by the path of a target."""
    cache = PagedCache(layout, torch.from_numpy(pages), *scales)
    with pretended(target or "sm_90"):
        sides = kv_cache.read_pages(cache, torch.from_numpy(page_table), tokens, staged=staged)
    return tuple(None if side is None else side.numpy() for side in sides)


@triton.jit
def _load_kernel(
    pages, out, page, head, first, last, K: tl.constexpr, D: tl.constexpr,
    FORMAT: tl.constexpr, HEADS: tl.constexpr, B: tl.constexpr, V: tl.constexpr,
    QUADS: tl.constexpr, STAGED: tl.constexpr,
):  # fmt: skip
    token_K = tl.arange(0, K)
    inside_K = (token_K >= first) & (token_K < last)
    rows_KD = kv_cache.load_rows(
        pages, tl.cast(page, tl.int64), head, token_K, inside_K,
        FORMAT, HEADS, B, D, 2, V, QUADS, STAGED,
    )  # fmt: skip
    tl.static_assert(rows_KD.dtype == tl.bfloat16)
    tl.store(out + token_K[:, None] * D + tl.arange(0, D)[None, :], rows_KD)


def loaded(layout, pages, page, head, part, v, staged):
    """The elements of some tokens of a page by `load_rows`, as F32."""
    out = torch.full((layout.tokens, layout.dim), torch.nan, dtype=torch.bfloat16)
    _load_kernel[(1,)](
        torch.from_numpy(pages), out, page, head, *part, layout.tokens, layout.dim, layout.format,
        layout.heads, layout.tokens, v, layout.v_scale_order == "quads", staged,
    )  # fmt: skip
    return out.float().numpy()


encode_nvfp4, scale_offsets = kv_cache.encode_nvfp4, kv_cache._scale_offsets


@triton.jit
def _nibbles_swapped(x_TD, scale):
    packed_TP, scale_TS = encode_nvfp4(x_TD, scale)
    return (packed_TP >> 4) | (packed_TP << 4), scale_TS


@triton.jit
def _scales_of_other_numbers(x_TD, scale):
    packed_TP, _ = encode_nvfp4(x_TD, scale)
    return packed_TP, encode_nvfp4(1 - x_TD, scale)[1]


@triton.jit
def _always_linear(head, token_K, B: tl.constexpr, S: tl.constexpr, QUADS: tl.constexpr):
    return scale_offsets(head, token_K, B, S, False)


@triton.jit
def _transposed_quads(head, token_K, B: tl.constexpr, S: tl.constexpr, QUADS: tl.constexpr):
    first = token_K // 4 * (4 * S) + token_K % 4 * S
    return head * (B * S) + first[:, None] + tl.arange(0, S)[None, :]


@triton.jit
def _heads_apart(head, token_K, B: tl.constexpr, S: tl.constexpr, QUADS: tl.constexpr):
    return scale_offsets(0, token_K, B, S, QUADS) + head * S


@triton.jit
def _truncated_bf16(values):
    return (values.to(tl.uint32, bitcast=True) >> 16).to(tl.uint16)


@triton.jit
def _unsigned_e4m3(values):
    return kv_cache_encode_e4m3(values) & 0x7F


kv_cache_encode_e4m3 = kv_cache.encode_e4m3

#: mistake → format, what it replaces, by what
MISTAKES = {
    "nibbles swapped": ("nvfp4", "encode_nvfp4", _nibbles_swapped),
    "scales of other numbers": ("nvfp4", "encode_nvfp4", _scales_of_other_numbers),
    "quads as rows": ("nvfp4", "_scale_offsets", _always_linear),
    "quads with tokens outside": ("nvfp4", "_scale_offsets", _transposed_quads),
    "heads side by side": ("nvfp4", "_scale_offsets", _heads_apart),
    "BF16 truncated": ("bf16", "bf16_bits", _truncated_bf16),
    "sign lost": ("fp8", "encode_e4m3", _unsigned_e4m3),
}


def written_wrongly(mistake, *arguments):
    """`written` by kernels with a planted mistake."""
    _, name, function = MISTAKES[mistake]
    with replaced(kv_cache, name, function):
        return written(*arguments)

"""Attention kernels over a paged KV cache: the blocks each token chose, or all keys (causal).

Reference: `mmq.kernels.reference.block_attention`.

    score = (q · k) · scale · log2 e              q, k BF16, products and sums F32
    p     = 2^(score − max)                       F32, over the visible keys, block after block
    out   = Σ bf16(p)·v / Σ p · v_scale           v BF16, sums F32
    lse   = (max + log2 Σ p) · ln 2

Four numbers, D 1, scale 1, q = 2 at position 3, block 2: k = [0, 9, 0.5, 1], v = [7, 7, 1, 5],
chosen block 1: scores [1.4427, 2.8854], p = [0.3679, 1], in BF16 [0.3672, 1], out = 5.3672 / 1.3679
= 3.9237, lse = 2.3133.

Operands of the dots are BF16 on every target. What the cache holds is exact in it: BF16 itself,
E4M3 (4 significant bits), E2M1 · E4M3 block scale (2 + 4 bits, 2^−10 to 2,688) and the same rounded
to E4M3. The tensor's own scales are no part of the operands: `scale` holds K's, the output gets
V's. A program takes TOKENS query tokens of a KV head, whose R query heads read the same keys: M =
TOKENS · R rows of a dot. With SPLITS > 1 a program takes a part of the blocks, and
`merge_partials_kernel` merges what the parts gave by their lse.

Source: M. Milakov, N. Gimelshein, Online normalizer calculation for softmax (2018); T. Dao et al.,
Flash-Decoding (2023); vLLM 0.33 ``minimax_m3/common/ops/sparse_attn.py``.

Dimensions: T query tokens, H query heads, G KV heads, R = H/G, M rows of a program, D head
dimension, B tokens of a block and page, C chosen blocks, N blocks of a sequence, P pages, X parts.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kv_pages import PagedCache, PageLayout, TokenBatch
from ..support import Support
from .blocks import wide
from .fp8_staging import staging_path
from .kv_cache import load_rows
from .launch import TARGETS, launch_options, target_name

LOG2_E = tl.constexpr(math.log2(math.e))
LN_2 = tl.constexpr(math.log(2.0))
FAR = tl.constexpr(2**30)

#: Keys taken at a time: with 128 the tiles of K, V, scores and output spill registers.
KEYS = 64
#: Rows of a dot. 16 is the least that tensor cores take, and M3's query heads of a KV head; 128
#: fills those of sm_90 (wgmma) and sm_100 (tcgen05).
MIN_ROWS, TILE_ROWS = 16, 128
#: Threads of a program of fewer than 64 rows, of more, of a merge. 128 threads would spill.
THREADS, TILE_THREADS, MERGE_THREADS = 128, 256, 64
#: Programs that fill a device, a few for each of its 132 to 256 processors: fewer are split.
FULL_DEVICE = 512
MAX_SPLITS = 16
#: The instruction of a tile's dots; 16 rows take `mma.sync` on NVIDIA.
DOTS = {
    "sm_90": "wgmma.mma_async",
    "sm_100": "tcgen05.mma",
    "sm_103": "tcgen05.mma",
    "sm_107": "tcgen05.mma",
    "sm_120": "mma.sync",
    "gfx950": "v_mfma",
}


@triton.jit
def _take_keys(q_MD, k_KD, v_KD, visible_MK, scale, out_MD, max_M, sum_M):
    """Add some keys to Σ p·v, to the largest score so far and to Σ p."""
    score_MK = tl.dot(q_MD, tl.trans(k_KD)) * scale
    score_MK = tl.where(visible_MK, score_MK, float("-inf"))
    new_max_M = tl.maximum(max_M, tl.max(score_MK, 1))
    # A row that has seen nothing yet keeps −inf, and −inf − −inf would be NaN.
    base_M = tl.where(new_max_M == float("-inf"), 0.0, new_max_M)
    p_MK = tl.exp2(score_MK - base_M[:, None])
    shrink_M = tl.exp2(max_M - base_M)
    sum_M = sum_M * shrink_M + tl.sum(p_MK, 1)
    out_MD = tl.dot(p_MK.to(tl.bfloat16), v_KD, out_MD * shrink_M[:, None])
    return out_MD, new_max_M, sum_M


@triton.jit
def _load_queries(
    q, positions, sequences, lengths, tokens, head,
    G: tl.constexpr, R: tl.constexpr, D: tl.constexpr, TOKENS: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """Queries BF16 [M, D], rows of the output, which are real, last visible position, sequence."""
    ROWS: tl.constexpr = M // TOKENS
    m_M = tl.arange(0, M)
    token_M = tl.program_id(0) * TOKENS + m_M // ROWS
    real_M = (token_M < tokens) & (m_M % ROWS < R)
    row_M = (token_M.to(tl.int64) * G + head) * R + m_M % ROWS
    sequence_M = tl.load(sequences + token_M, mask=real_M, other=-1)
    last_M = tl.load(positions + token_M, mask=real_M, other=-1)
    last_M = tl.minimum(last_M, tl.load(lengths + sequence_M, mask=real_M, other=0) - 1)
    offset_MD = row_M[:, None] * D + tl.arange(0, D)[None, :]
    q_MD = tl.load(q + offset_MD, mask=real_M[:, None], other=0.0)
    return q_MD, row_M, real_M, last_M, sequence_M


@triton.jit
def _store_result(
    out, lse, out_MD, max_M, sum_M, row_M, real_M, rows, v_scale, SPLITS: tl.constexpr
):
    """The output, or with SPLITS > 1 this part's output and lse; 0 and −inf of nothing."""
    D: tl.constexpr = out_MD.shape[1]
    # The largest p is 1, so that only a row that saw nothing has a smaller sum.
    sum_M = tl.maximum(sum_M, 1.0)
    out_MD = out_MD / sum_M[:, None]
    if SPLITS > 1:
        row_M += tl.program_id(2).to(tl.int64) * rows
        tl.store(lse + row_M, (max_M + tl.log2(sum_M)) * LN_2, mask=real_M)
    else:
        out_MD *= v_scale
    offset_MD = row_M[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(out + offset_MD, out_MD.to(out.dtype.element_ty), mask=real_M[:, None])


@triton.jit
def attend_chosen_kernel(
    q, pages, positions, sequences, lengths, page_table, selection, out, lse,
    tokens, blocks, scale, v_scale,
    G: tl.constexpr, R: tl.constexpr, D: tl.constexpr, B: tl.constexpr, C: tl.constexpr,
    M: tl.constexpr, KEYS: tl.constexpr, FORMAT: tl.constexpr, QUADS: tl.constexpr,
    STAGED: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Attention of one token and KV head over the blocks it chose: grid (tokens, G, SPLITS).

    Args:
        q: BF16 [T, H, D].
        pages: U8 [P, Z], of the layout that G, B, D, FORMAT and QUADS say.
        positions, sequences: I32 [T]. lengths: I32 [Q]. page_table: I32 [Q, N], N = `blocks`.
        selection: I32 [G, T, C], −1 is none.
        out: [T, H, D] of any float type; with SPLITS > 1 F32 [X, T, H, D], and lse F32 [X, T, H].
        scale: of the scores, times K's scale, times log2 e.
        STAGED: as for `load_rows`.
    """
    head = tl.program_id(1)
    token = tl.program_id(0)
    q_MD, row_M, real_M, last_M, sequence_M = _load_queries(
        q, positions, sequences, lengths, tokens, head, G, R, D, 1, M
    )
    last, sequence = tl.max(last_M), tl.max(sequence_M)
    table = page_table + wide(sequence) * blocks
    chosen = selection + (head.to(tl.int64) * tokens + token) * C
    out_MD = tl.zeros((M, D), tl.float32)
    max_M = tl.full((M,), float("-inf"), tl.float32)
    sum_M = tl.zeros((M,), tl.float32)
    SHARE: tl.constexpr = (C + SPLITS - 1) // SPLITS
    first = tl.program_id(2) * SHARE
    for part in range(first * (B // KEYS), tl.minimum(first + SHARE, C) * (B // KEYS)):
        block = tl.load(chosen + part // (B // KEYS))
        token_K = part % (B // KEYS) * KEYS + tl.arange(0, KEYS)
        # No block's keys lie behind every position.
        start = tl.where(block >= 0, block * B, FAR)
        inside_K = start + token_K <= last
        page = tl.load(table + block, mask=start <= last, other=0).to(tl.int64)
        k_KD = load_rows(
            pages, page, head, token_K, inside_K, FORMAT, G, B, D, 2, False, QUADS, STAGED
        )
        v_KD = load_rows(
            pages, page, head, token_K, inside_K, FORMAT, G, B, D, 2, True, QUADS, STAGED
        )
        visible_MK = tl.broadcast_to(inside_K[None, :], (M, KEYS))
        out_MD, max_M, sum_M = _take_keys(q_MD, k_KD, v_KD, visible_MK, scale, out_MD, max_M, sum_M)
    rows = wide(tokens) * (G * R)
    _store_result(out, lse, out_MD, max_M, sum_M, row_M, real_M, rows, v_scale, SPLITS)


@triton.jit
def attend_all_kernel(
    q, pages, positions, sequences, lengths, page_table, out, lse,
    tokens, blocks, scale, v_scale,
    G: tl.constexpr, R: tl.constexpr, D: tl.constexpr, B: tl.constexpr, TOKENS: tl.constexpr,
    M: tl.constexpr, KEYS: tl.constexpr, FORMAT: tl.constexpr, QUADS: tl.constexpr,
    STAGED: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Attention of TOKENS tokens and one KV head over all keys: grid (tiles, G, SPLITS).

    A tile may hold tokens of several sequences: it goes through one after the other. Tokens of a
    sequence should lie together, or tiles go through sequences that they hold nothing of.
    """
    head = tl.program_id(1)
    q_MD, row_M, real_M, last_M, sequence_M = _load_queries(
        q, positions, sequences, lengths, tokens, head, G, R, D, TOKENS, M
    )
    out_MD = tl.zeros((M, D), tl.float32)
    max_M = tl.full((M,), float("-inf"), tl.float32)
    sum_M = tl.zeros((M,), tl.float32)
    first_sequence = tl.min(tl.where(real_M, sequence_M, FAR))
    for sequence in range(first_sequence, tl.max(sequence_M) + 1):
        table = page_table + wide(sequence) * blocks
        seen_M = tl.where(sequence_M == sequence, last_M, -1)
        last = tl.max(seen_M)
        share = tl.cdiv(tl.cdiv(last + 1, KEYS), SPLITS)
        first = tl.program_id(2) * share
        for part in range(first, tl.minimum(first + share, tl.cdiv(last + 1, KEYS))):
            key_K = part * KEYS + tl.arange(0, KEYS)
            token_K, inside_K = key_K % B, key_K <= last
            page = tl.load(table + part // (B // KEYS)).to(tl.int64)
            k_KD = load_rows(
                pages, page, head, token_K, inside_K, FORMAT, G, B, D, 2, False, QUADS, STAGED
            )
            v_KD = load_rows(
                pages, page, head, token_K, inside_K, FORMAT, G, B, D, 2, True, QUADS, STAGED
            )
            visible_MK = key_K[None, :] <= seen_M[:, None]
            out_MD, max_M, sum_M = _take_keys(
                q_MD, k_KD, v_KD, visible_MK, scale, out_MD, max_M, sum_M
            )
    rows = wide(tokens) * (G * R)
    _store_result(out, lse, out_MD, max_M, sum_M, row_M, real_M, rows, v_scale, SPLITS)


@triton.jit
def merge_partials_kernel(
    parts, lse, out, rows, v_scale, D: tl.constexpr, SPLITS: tl.constexpr, X: tl.constexpr
):
    """Output [rows, D] of SPLITS parts, F32 [SPLITS, rows, D], and their lse: grid (rows).

    Args:
        X: a power of two, SPLITS or more.
    """
    row = tl.program_id(0).to(tl.int64)
    x_X = tl.arange(0, X)
    row_X = x_X * wide(rows) + row
    lse_X = tl.load(lse + row_X, mask=x_X < SPLITS, other=float("-inf"))
    largest = tl.max(lse_X)
    base = tl.where(largest == float("-inf"), 0.0, largest)
    weight_X = tl.exp2((lse_X - base) * LOG2_E)
    offset_XD = row_X[:, None] * D + tl.arange(0, D)[None, :]
    part_XD = tl.load(parts + offset_XD, mask=(weight_X > 0)[:, None], other=0.0)
    total_D = tl.sum(part_XD * weight_X[:, None], 0)
    # The largest weight is 1.
    out_D = total_D / tl.maximum(tl.sum(weight_X), 1.0) * v_scale
    tl.store(out + row * D + tl.arange(0, D), out_D.to(out.dtype.element_ty))


def supports(target: str, layout: PageLayout, *, heads: int, staged: bool = False) -> Support:
    """Whether `attend_pages` runs on pages of `layout` for `heads` query heads.

    The dots are BF16 on every target. Native are caches that hold BF16; elements of the others are
    converted in registers.
    """
    group, dim, block = heads // layout.heads, layout.dim, layout.tokens
    if heads % layout.heads or layout.sides != 2:
        return Support(
            "unsupported", f"{heads} query heads for {layout.heads} KV heads with K and V"
        )
    if dim & (dim - 1) or dim > 128 or block & (block - 1) or block < MIN_ROWS or group > 64:
        return Support(
            "unsupported",
            "head dimensions are powers of two to 128, blocks powers of two from 16, query heads of"
            f" a KV head 64 at most: not {dim}, {block}, {group}",
        )
    dots = DOTS.get(target, "dots of BF16")
    if layout.format == "bf16":
        return Support("native", dots)
    how = f"staged to FP8 ({staging_path(target)})" if staged else "decoded"
    return Support("fallback", f"{dots}, {layout.format} {how} and converted to BF16")


def attend_pages(
    q_THD: Tensor,
    cache: PagedCache,
    batch: TokenBatch,
    lengths_Q: Tensor,
    selection_GTC: Tensor | None = None,
    *,
    staged: bool = False,
    scale: float | None = None,
    dtype: torch.dtype | None = None,
    splits: int | None = None,
) -> Tensor:
    """Attention output [T, H, D] of a batch over the pages of its sequences.

    Nothing waits for the device: programs and parts follow from shapes alone, so that launches can
    be recorded in a graph.

    Args:
        q_THD: BF16.
        batch: I32; tokens of a sequence lie together, and every visible position has a page.
        lengths_Q: I32, tokens of each sequence that its pages hold; later positions are not
            visible.
        selection_GTC: I32, chosen blocks; −1 is none. Without it all keys are visible.
        staged: elements of NVFP4 as rounded to E4M3, by the device's path.
        dtype: of the output, by default BF16.
        splits: parts of each token's blocks, by default what fills the device.

    Raises:
        ValueError: queries are not BF16, or `supports` says no to the shapes.
    """
    _check(q_THD, cache.layout, staged)
    tile, grid = _tile_and_grid(q_THD, cache.layout, batch, selection_GTC, splits)
    out_THD = torch.empty(q_THD.shape, dtype=dtype or q_THD.dtype, device=q_THD.device)
    parts_XTHD, lse_XTH, v_scale = out_THD, out_THD, _tensor_scale(cache, cache.v_scale)
    if grid[2] > 1:
        parts_XTHD = q_THD.new_empty((grid[2], *q_THD.shape), dtype=torch.float32)
        lse_XTH = q_THD.new_empty(parts_XTHD.shape[:3], dtype=torch.float32)
    page_table_QN = batch.page_table_QN.contiguous()
    inputs = (
        q_THD.contiguous(), cache.pages_PZ, batch.positions_T, batch.sequence_T, lengths_Q,
        page_table_QN,
    )  # fmt: skip
    scale = (q_THD.shape[2] ** -0.5 if scale is None else scale) * math.log2(math.e)
    scale = scale * _tensor_scale(cache, cache.k_scale)
    results = parts_XTHD, lse_XTH, len(q_THD), page_table_QN.shape[1], scale, v_scale
    path = staging_path(target_name()) if staged else ""
    flags = constants_of(cache.layout, q_THD.shape[1], tile, path) | {"SPLITS": grid[2]}
    flags |= options_of(flags["M"])
    if not len(q_THD):
        return out_THD
    if selection_GTC is None:
        attend_all_kernel[grid](*inputs, *results, TOKENS=tile, **flags)
    else:
        chosen_GTC = selection_GTC.contiguous()
        attend_chosen_kernel[grid](*inputs, chosen_GTC, *results, C=chosen_GTC.shape[2], **flags)
    if grid[2] > 1:
        merge_partials(parts_XTHD, lse_XTH, out_THD, v_scale)
    return out_THD


def merge_partials(
    parts_XTHD: Tensor, lse_XTH: Tensor, out_THD: Tensor, v_scale: float = 1.0
) -> None:
    """Write the output of the union of X disjoint parts of the keys, times `v_scale`.

    A part that saw nothing (lse −inf) counts nothing, whatever its output holds.
    """
    (splits, tokens, heads), dim = lse_XTH.shape, out_THD.shape[2]
    if tokens:
        merge_partials_kernel[(tokens * heads,)](
            parts_XTHD, lse_XTH, out_THD, tokens * heads, v_scale,
            D=dim, SPLITS=splits, X=triton.next_power_of_2(splits), **launch_options(MERGE_THREADS),
        )  # fmt: skip


def _check(q_THD: Tensor, layout: PageLayout, staged: bool) -> None:
    support = supports(target_name(), layout, heads=q_THD.shape[1], staged=staged)
    if not support.ok or q_THD.dtype != torch.bfloat16 or q_THD.shape[2] != layout.dim:
        given = f"{q_THD.dtype} {list(q_THD.shape)}"
        raise ValueError(f"no kernel for {given} over heads of {layout.dim}: {support.reason}")


def _tile_and_grid(
    q_THD: Tensor,
    layout: PageLayout,
    batch: TokenBatch,
    selection_GTC: Tensor | None,
    splits: int | None,
) -> tuple[int, tuple[int, int, int]]:
    """Tokens of a program; programs by tokens, KV heads and parts."""
    (sequences, blocks), (tokens, heads) = batch.page_table_QN.shape, q_THD.shape[:2]
    tile, choices = _tile(tokens, sequences, heads // layout.heads), blocks
    if selection_GTC is not None:
        tile, choices = 1, selection_GTC.shape[2]
    tiles = triton.cdiv(tokens, tile)
    return tile, (tiles, layout.heads, splits or _splits(tiles * layout.heads, choices))


def _tensor_scale(cache: PagedCache, scale: float) -> float:
    return 1.0 if cache.layout.format == "bf16" else scale


def _tile(tokens: int, sequences: int, group: int) -> int:
    """Tokens of a program over all keys: a tile's worth, or as many as a sequence has here."""
    each = triton.next_power_of_2(max(1, triton.cdiv(tokens, max(1, sequences))))
    return max(1, min(each, TILE_ROWS // triton.next_power_of_2(group)))


def _splits(programs: int, choices: int) -> int:
    """Parts of `choices` blocks with which `programs` fill the device, none of them empty."""
    wanted = max(1, min(FULL_DEVICE // max(1, programs), choices, MAX_SPLITS))
    return max(1, triton.cdiv(choices, triton.cdiv(choices, wanted)))


def constants_of(layout: PageLayout, heads: int, tile: int, staged: str) -> dict[str, object]:
    group = heads // layout.heads
    return {
        "G": layout.heads,
        "R": group,
        "D": layout.dim,
        "B": layout.tokens,
        "M": max(MIN_ROWS, tile * triton.next_power_of_2(group)),
        "KEYS": min(KEYS, layout.tokens),
        "FORMAT": layout.format,
        "QUADS": layout.v_scale_order == "quads",
        "STAGED": staged,
    }


def options_of(rows: int, target: str | None = None) -> dict[str, object]:
    """Fusing products and sums leaves roundings out, which the error bound allows."""
    threads = TILE_THREADS if rows >= 64 else THREADS
    gpu = None if target is None else TARGETS[target]
    return launch_options(threads, gpu, num_stages=2, enable_fp_fusion=True)

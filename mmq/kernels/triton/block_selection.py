"""Block selection kernels: scores from pages of index keys, and the top k of scores.

Reference: `mmq.kernels.reference.block_selection`.

    score[n]  = k_scale · max over visible keys s of block n of  Σ_e q[e] · k[s, e]
    selection = forced blocks, then the best by (score, lower block), `top_k` in all, ascending
    key       = forced · 2^49 + 2^48 + ordered(score) · 2^16 + (65535 − block)

Queries are BF16, keys BF16, E4M3 or NVFP4; both of the latter are BF16 numbers without loss (E2M1
times E4M3 has 6 significant bits), so every product is exact in F32 and the sum of E of them alone
rounds: `mmq.kernels.error_bounds.dot_error`. Selection is integer arithmetic on the bits of scores:
exact.

Four numbers, top_k 3: scores [0.5, 2, 0.5, −9], block 3 the local one, select [0, 1, 3]. As ordered
bits they are 0xBF000000, 0xC0000000, 0xBF000000, 0x3EEFFFFF.

Dimensions: T query tokens, G index heads, E index dimension, B tokens of a block, N blocks of the
page table, J blocks that a rank scores (all N, if it is alone), C chosen blocks; inside kernels
M rows of a tile (token · G + head), R rows of scores, K keys kept.
"""

from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kv_pages import PagedCache, TokenBatch
from ..reference.block_selection import check_selection
from ..reference.selection_ranks import owned_blocks
from ..support import Support
from .blocks import wide
from .cross_compile import ForwardVariant
from .launch import TARGETS, gpu_target, launch_options
from .small_floats import bits_of, decode_e2m1, decode_e4m3

#: Scores that a program of the selection holds: as 64-bit keys, 32 in each of 128 threads.
CHUNK = 4096
#: Up to how many one warp does it, which needs no barriers: 16 in each of 32 threads.
WARP_CHUNK = 512
#: Tokens in one program of the selection.
ROWS = 1
#: Blocks that one program scores.
COLUMNS = 16
#: Tokens of a tile where sequences have a few each, as in speculation.
FEW_TOKENS = 4
#: Where they have many: as many as spill no registers, also where keys are decoded there.
MANY_TOKENS = {"bf16": 32, "fp8": 16, "nvfp4": 16}
#: The least that the sides of a matrix product may have; one of them should have `LONG_SIDE`, or
#: tensor cores are used in smaller pieces.
SHORT_SIDE, LONG_SIDE = 16, 64


@triton.jit
def selection_keys(score_RN, block_N, local_R, LOCAL: tl.constexpr, INIT: tl.constexpr):
    """I64 [R, N] from F32 scores: unique, ordered as the selection is; 0 past the local block."""
    bits_RN = bits_of(score_RN)
    nan_RN = (bits_RN & 0x7FFFFFFF) > 0x7F800000
    bits_RN = tl.where(nan_RN, -246811958, bits_RN)  # 0xF149F2CA: −1e30
    bits_RN = tl.where(bits_RN == -2147483648, 0, bits_RN)  # −0
    ordered_RN = bits_RN ^ ((bits_RN >> 31) | -2147483648)
    forced_RN = (block_N[None, :] < INIT) | (block_N[None, :] > local_R[:, None] - LOCAL)
    high_RN = tl.where(forced_RN, 3, 1).to(tl.int64) << 48
    low_RN = (ordered_RN.to(tl.int64) & 0xFFFFFFFF) << 16
    key_RN = high_RN + low_RN + (65535 - block_N[None, :])
    return tl.where(block_N[None, :] <= local_R[:, None], key_RN, 0)


@triton.jit
def largest_keys(key_RN, TOP_K: tl.constexpr, K: tl.constexpr):
    """I64 [R, K]: the TOP_K largest of each row, descending, then 0. Keys are unique but for 0."""
    place_K = tl.arange(0, K)
    best_RK = tl.zeros((key_RN.shape[0], K), tl.int64)
    for place in range(TOP_K):
        largest_R1 = tl.max(key_RN, 1)[:, None]
        best_RK = tl.where(place_K[None, :] == place, largest_R1, best_RK)
        key_RN = tl.where(key_RN == largest_R1, 0, key_RN)
    return best_RK


@triton.jit
def best_keys(
    first_R, column_stride, local_R, columns, rank, RANKS: tl.constexpr,
    TOP_K: tl.constexpr, K: tl.constexpr, CHUNK: tl.constexpr,
    LOCAL: tl.constexpr, INIT: tl.constexpr,
):  # fmt: skip
    """I64 [R, K]: the TOP_K largest keys of each row of scores, descending, then 0.

    Args:
        first_R: pointers to column 0 of each row; column j is block j · RANKS + `rank`.
        local_R: each row's local block, −1 for a row that is none.
    """
    best_RK = tl.zeros((local_R.shape[0], K), tl.int64)
    seen = tl.minimum(columns, (tl.max(local_R, 0) + RANKS - rank) // RANKS)
    for start in range(0, seen, CHUNK):
        column_N = start + tl.arange(0, CHUNK)
        block_N = column_N * RANKS + rank
        inside_RN = (column_N < columns)[None, :] & (block_N[None, :] <= local_R[:, None])
        offset_N = column_N.to(tl.int64) * column_stride
        score_RN = tl.load(first_R[:, None] + offset_N[None, :], mask=inside_RN, other=0.0)
        key_RN = selection_keys(score_RN, block_N, local_R, LOCAL, INIT)
        top_RK = largest_keys(tl.where(inside_RN, key_RN, 0), TOP_K, K)
        if start == 0:
            best_RK = top_RK
        else:
            both_RW = tl.join(best_RK, top_RK).reshape(local_R.shape[0], 2 * K)
            best_RK = largest_keys(both_RW, TOP_K, K)
    return best_RK


@triton.jit
def store_blocks(selection, row_R, inside_R, key_RK, TOP_K: tl.constexpr):
    """Store the blocks of keys as I32 in rows of TOP_K, ascending, then −1 for each key 0."""
    place_K = tl.arange(0, key_RK.shape[1])
    block_RK = (65535 - (key_RK & 65535)).to(tl.int32)
    # Where there is none, numbers past every block, all different: each has its own place.
    order_RK = tl.where(key_RK > 0, block_RK, 65536 + place_K[None, :])
    before_RKK = order_RK[:, None, :] < order_RK[:, :, None]
    rank_RK = tl.sum(before_RKK.to(tl.int32), 2)
    target_RK = selection + row_R[:, None] * TOP_K + rank_RK
    value_RK = tl.where(key_RK > 0, block_RK, -1)
    tl.store(target_RK, value_RK, mask=inside_R[:, None] & (rank_RK < TOP_K))


@triton.jit
def row_scores(
    scores, positions, tokens, head_stride, token_stride, BLOCK: tl.constexpr, R: tl.constexpr
):
    """This program's rows of scores: pointers, local blocks, places in [G, T], which there are."""
    token_R = tl.program_id(0) * R + tl.arange(0, R)
    head = tl.program_id(1).to(tl.int64)
    inside_R = token_R < tokens
    local_R = tl.load(positions + token_R, mask=inside_R, other=-BLOCK) // BLOCK
    first_R = scores + head * head_stride + token_R.to(tl.int64) * token_stride
    return first_R, local_R, head * tokens + token_R, inside_R


@triton.jit
def select_blocks_kernel(
    scores, positions, selection, tokens, columns, head_stride, token_stride, column_stride,
    BLOCK: tl.constexpr, TOP_K: tl.constexpr, K: tl.constexpr, CHUNK: tl.constexpr,
    R: tl.constexpr, LOCAL: tl.constexpr, INIT: tl.constexpr,
):  # fmt: skip
    """From F32 scores [G, T, N]: I32 [G, T, C]. A program takes R tokens of one head."""
    first_R, local_R, row_R, inside_R = row_scores(
        scores, positions, tokens, head_stride, token_stride, BLOCK, R
    )
    key_RK = best_keys(first_R, column_stride, local_R, columns, 0, 1, TOP_K, K, CHUNK, LOCAL, INIT)
    store_blocks(selection, row_R, inside_R, key_RK, TOP_K)


@triton.jit
def _load_keys(page, FORMAT: tl.constexpr, BLOCK: tl.constexpr, DIM: tl.constexpr):
    """One page's index keys, BF16 [B, E], without the scale of the tensor."""
    key_B1 = tl.arange(0, BLOCK)[:, None]
    dim_1E = tl.arange(0, DIM)[None, :]
    if FORMAT == "bf16":
        key_BE = tl.load(page + key_B1 * DIM + dim_1E)
    elif FORMAT == "fp8":
        code_BE = tl.load(page + key_B1 * DIM + dim_1E).to(tl.int32)
        key_BE = decode_e4m3(code_BE).to(tl.bfloat16)
    else:
        byte_BP = tl.load(page + key_B1 * (DIM // 2) + tl.arange(0, DIM // 2)[None, :])
        byte_BP = byte_BP.to(tl.int32)
        code_BSJ = tl.join(byte_BP & 15, byte_BP >> 4).reshape(BLOCK, DIM // 16, 16)
        scales = page + BLOCK * (DIM // 2)
        scale_BS = tl.load(scales + key_B1 * (DIM // 16) + tl.arange(0, DIM // 16)[None, :])
        key_BSJ = decode_e2m1(code_BSJ) * decode_e4m3(scale_BS.to(tl.int32))[:, :, None]
        key_BE = key_BSJ.reshape(BLOCK, DIM).to(tl.bfloat16)
    return key_BE


@triton.jit
def _largest_products(q_ME, key_BE, limit_M, start, KEYS_FIRST: tl.constexpr):
    """F32 [M]: the largest dot product of each row with the keys `start` … up to its limit."""
    position_B = start + tl.arange(0, key_BE.shape[0])
    if KEYS_FIRST:  # few rows: the keys are the long side of the product
        dot_BM = tl.dot(key_BE, tl.trans(q_ME))
        seen_BM = position_B[:, None] <= limit_M[None, :]
        score_M = tl.max(tl.where(seen_BM, dot_BM, float("-inf")), 0)
    else:
        dot_MB = tl.dot(q_ME, tl.trans(key_BE))
        seen_MB = position_B[None, :] <= limit_M[:, None]
        score_M = tl.max(tl.where(seen_MB, dot_MB, float("-inf")), 1)
    # The maximum of numbers and NaN is a number: NaN says that there was no number.
    return tl.where(score_M != score_M, float("-inf"), score_M)


@triton.jit
def score_pages_kernel(
    index_q, pages, scores, positions, sequences, lengths, page_table, k_scale,
    tokens, columns, page_stride, table_stride, head_stride, token_stride, rank,
    RANKS: tl.constexpr, FORMAT: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr,
    M: tl.constexpr, BLOCK: tl.constexpr, DIM: tl.constexpr, COLUMNS: tl.constexpr,
    KEYS_FIRST: tl.constexpr,
):  # fmt: skip
    """F32 [G, T, J] from BF16 queries [T, G, E] and pages: −inf where a block has no visible key.

    A program takes TOKENS tokens and COLUMNS blocks of each of their sequences, one sequence after
    the other: tokens may come in any order, and no host has to sort them.

    Args:
        pages: to BF16 or U8.
        page_stride: in elements of `pages`.
        lengths: I32 [Q], keys of each sequence.
    """
    k_scale = tl.full((), k_scale, tl.float32)  # in the interpreter a Python float, that is F64
    row_M = tl.arange(0, M)
    token_M = tl.program_id(0) * TOKENS + row_M // HEADS
    inside_M = (row_M < TOKENS * HEADS) & (token_M < tokens)
    head_M = row_M % HEADS
    q_row_M = index_q + (token_M.to(tl.int64) * HEADS + head_M) * DIM
    q_ME = tl.load(q_row_M[:, None] + tl.arange(0, DIM)[None, :], mask=inside_M[:, None], other=0.0)
    position_M = tl.load(positions + token_M, mask=inside_M, other=-1)
    sequence_M = tl.load(sequences + token_M, mask=inside_M, other=-1)
    out_M = scores + head_M.to(tl.int64) * head_stride + token_M.to(tl.int64) * token_stride
    begin = tl.program_id(1) * COLUMNS
    end = tl.minimum(begin + COLUMNS, columns)
    first = tl.min(tl.where(inside_M, sequence_M, 2147483647), 0)
    for sequence in range(first, tl.max(sequence_M, 0) + 1):
        own_M = inside_M & (sequence_M == sequence)
        limit_M = tl.minimum(position_M, tl.load(lengths + sequence) - 1)
        limit_M = tl.where(own_M, limit_M, -1)
        table = page_table + wide(sequence) * table_stride
        blocks = (tl.max(limit_M, 0) + BLOCK) // BLOCK
        seen = tl.minimum(end, (blocks - 1 + RANKS - rank) // RANKS)
        for column in range(begin, seen):
            block = column * RANKS + rank
            number = tl.load(table + block)
            page = pages + tl.maximum(number, 0).to(tl.int64) * page_stride
            key_BE = _load_keys(page, FORMAT, BLOCK, DIM)
            score_M = _largest_products(q_ME, key_BE, limit_M, block * BLOCK, KEYS_FIRST)
            score_M = tl.where(number < 0, float("-inf"), score_M * k_scale)
            tl.store(out_M + column, score_M, mask=own_M)
        for column in range(tl.maximum(begin, seen), end):
            tl.store(out_M + column, tl.full((M,), float("-inf"), tl.float32), mask=own_M)


def score_pages(
    index_q_TGE: Tensor,
    index_cache: PagedCache,
    batch: TokenBatch,
    sequence_lengths: Tensor,
    *,
    rank: int = 0,
    ranks: int = 1,
    out_GTJ: Tensor | None = None,
) -> Tensor:
    """Score the blocks of each token's sequence, F32 [G, T, J].

    Args:
        index_q_TGE: BF16.
        index_cache: index keys, one side, one head.
        batch: tokens in any order, of any sequences.
        sequence_lengths: I32 [Q], keys in the cache; a token sees none at or past it.
        rank: column j is block j · `ranks` + `rank` of the page table's N.
        out_GTJ: written instead of a new tensor; its last dimension is contiguous.

    Returns:
        −inf where a block has no visible key, or no page.

    Raises:
        ValueError: shapes, formats or the tensor's scale are not what the kernel takes.
    """
    layout = index_cache.layout
    tokens, heads, dim = index_q_TGE.shape
    check_scoring(index_q_TGE, index_cache)
    sequences, blocks = batch.page_table_QN.shape
    columns = owned_blocks(blocks, rank, ranks)
    if out_GTJ is None:
        out_GTJ = index_q_TGE.new_empty((heads, tokens, columns), dtype=torch.float32)
    if not out_GTJ.numel():
        return out_GTJ
    pages = index_cache.pages_PZ
    if layout.format == "bf16":
        pages = pages.view(torch.bfloat16)
    tile = tile_tokens(tokens, sequences, layout.format)
    constants = score_constants(layout.format, heads, tile, layout.tokens, dim)
    grid = triton.cdiv(tokens, tile), triton.cdiv(columns, COLUMNS)
    score_pages_kernel[grid](
        index_q_TGE.contiguous(), pages, out_GTJ,
        batch.positions_T, batch.sequence_T, sequence_lengths, batch.page_table_QN,
        1.0 if layout.format == "bf16" else index_cache.k_scale,
        tokens, columns, pages.stride(0), batch.page_table_QN.stride(0),
        *out_GTJ.stride()[:2], rank,
        RANKS=ranks, **constants, **score_options(constants["M"]),
    )  # fmt: skip
    return out_GTJ


def check_scoring(index_q_TGE: Tensor, index_cache: PagedCache) -> None:
    """Raise ValueError where `score_pages` says so."""
    layout, dim = index_cache.layout, index_q_TGE.shape[2]
    if index_q_TGE.dtype != torch.bfloat16:
        raise ValueError(f"index queries are {index_q_TGE.dtype}, not bfloat16")
    if (layout.sides, layout.heads) != (1, 1):
        raise ValueError(
            f"index keys have 1 side and 1 head, not {layout.sides} and {layout.heads}"
        )
    if layout.dim != dim:
        raise ValueError(f"queries of {dim} numbers, keys of {layout.dim}")
    for name, size in (("index dimension", dim), ("block", layout.tokens)):
        if size < SHORT_SIDE or size & (size - 1):
            raise ValueError(f"{name} {size} is no power of two from {SHORT_SIDE} up")
    if not (index_cache.k_scale > 0 and math.isfinite(index_cache.k_scale)):
        raise ValueError(f"k_scale {index_cache.k_scale} is not positive and finite")


def tile_tokens(tokens: int, sequences: int, key_format: str) -> int:
    """Tokens of a tile, from shapes alone: a decode step must not wait for the device."""
    if tokens <= sequences:
        return 1
    return FEW_TOKENS if tokens <= FEW_TOKENS * sequences else MANY_TOKENS[key_format]


def score_options(rows: int, target: str | None = None) -> dict[str, object]:
    """Launch options of `score_pages_kernel` for tiles of `rows` rows."""
    gpu = TARGETS[target] if target else gpu_target()
    # The number of a page is loaded, then the page, then used: 3 stages, so that a decode step has
    # the next page on its way. Long tiles need the registers.
    warps, stages = (4, 3) if rows < LONG_SIDE else (8, 2)
    return launch_options(gpu.warp_size * warps, gpu, num_stages=stages)


def score_constants(key_format: str, heads: int, tokens: int, block: int, dim: int) -> dict:
    """The constants of `score_pages_kernel` for tiles of `tokens` tokens."""
    rows = max(SHORT_SIDE, triton.next_power_of_2(tokens * heads))
    return {
        "FORMAT": key_format, "HEADS": heads, "TOKENS": tokens, "M": rows, "BLOCK": block,
        "DIM": dim, "COLUMNS": COLUMNS, "KEYS_FIRST": rows < LONG_SIDE,
    }  # fmt: skip


def select_blocks(
    scores_GTN: Tensor,
    positions_T: Tensor,
    *,
    block: int,
    top_k: int = 16,
    local_blocks: int = 1,
    init_blocks: int = 0,
    out_GTC: Tensor | None = None,
) -> Tensor:
    """The reference's `select_blocks` in one kernel: F32 [G, T, N] to I32 [G, T, C].

    Args:
        out_GTC: written instead of a new tensor; contiguous.
    """
    heads, tokens, columns = scores_GTN.shape
    check_selection(columns, top_k, local_blocks, init_blocks)
    if out_GTC is None:
        out_GTC = scores_GTN.new_empty((heads, tokens, top_k), dtype=torch.int32)
    constants = selection_constants(columns, block, top_k, local_blocks, init_blocks)
    if out_GTC.numel():
        select_blocks_kernel[(triton.cdiv(tokens, ROWS), heads)](
            scores_GTN, positions_T, out_GTC, tokens, columns, *scores_GTN.stride(),
            **constants, **selection_options(constants["CHUNK"]),
        )  # fmt: skip
    return out_GTC


def selection_constants(
    columns: int, block: int, top_k: int, local_blocks: int, init_blocks: int
) -> dict[str, int]:
    """The constants of the kernels that find best keys among `columns` columns."""
    kept = triton.next_power_of_2(top_k)
    return {
        "BLOCK": block, "TOP_K": top_k, "K": kept, "R": ROWS,
        "CHUNK": max(kept, min(CHUNK, triton.next_power_of_2(max(1, columns)))),
        "LOCAL": local_blocks, "INIT": init_blocks,
    }  # fmt: skip


def selection_options(chunk: int, target: str | None = None) -> dict[str, object]:
    """Launch options of the kernels that find best keys: 1 warp or 4."""
    gpu = TARGETS[target] if target else gpu_target()
    return launch_options(gpu.warp_size * (1 if chunk <= WARP_CHUNK else 4), gpu)


#: The instruction that multiplies BF16 matrices, by target, as in the assembly.
PRODUCTS = {
    "sm_90": r"wgmma\.mma_async\S+\.bf16",
    "sm_100": r"tcgen05\.mma\S+kind::f16",
    "sm_103": r"tcgen05\.mma\S+kind::f16",
    "sm_107": r"tcgen05\.mma\S+kind::f16",
    "sm_120": r"mma\.sync\S+m16n8k16\S+\.bf16",
    "gfx950": r"v_mfma_f32_\w+_bf16",
}


def supports(target: str, *, key_format: str = "bf16", dim: int = 128, block: int = 128) -> Support:
    """Whether blocks can be scored and selected on `target`."""
    if target not in TARGETS:
        return Support("unsupported", f"never compiled for {target}")
    if key_format not in MANY_TOKENS:
        return Support("unsupported", f"no index keys in {key_format}")
    if any(size < SHORT_SIDE or size & (size - 1) for size in (dim, block)):
        return Support(
            "unsupported", f"{dim} × {block}: a tile's sides are powers of two from {SHORT_SIDE} up"
        )
    if key_format == "bf16":
        return Support("native", f"BF16 operands of {_INSTRUCTIONS[target]}")
    return Support("fallback", f"keys become BF16, without loss, for {_INSTRUCTIONS[target]}")


_INSTRUCTIONS = {
    "sm_90": "wgmma", "sm_100": "tcgen05.mma", "sm_103": "tcgen05.mma", "sm_107": "tcgen05.mma",
    "sm_120": "mma.sync", "gfx950": "v_mfma",
}  # fmt: skip
#: Maxima of a number and NaN that are NaN: scores rely on those that are the number.
_SPREADS_NAN = dict.fromkeys(TARGETS, r"max\.NaN|FMNMX\S*NAN") | {"gfx950": r"v_p?k?_?maximum"}
_INTEGERS = (
    "tokens", "columns", "rows", "page_stride", "table_stride", "head_stride",
    "token_stride", "column_stride", "rank", "ranks",
)  # fmt: skip
TYPES = {
    "index_q": "*bf16", "pages": "*u8", "scores": "*fp32", "positions": "*i32",
    "sequences": "*i32", "lengths": "*i32", "page_table": "*i32", "k_scale": "fp32",
    "selection": "*i32", "keys": "*i64", **dict.fromkeys(_INTEGERS, "i32"),
}  # fmt: skip
#: Any number of tokens and blocks, so that rows of scores are not aligned.
ODD = set(_INTEGERS) - {"page_stride"}


def _score_variant(key_format: str, tokens: int) -> ForwardVariant:
    constants = score_constants(key_format, 4, tokens, 128, 128)
    return ForwardVariant(
        name=f"index scores, {key_format} keys, tiles of {tokens}",
        kernel=score_pages_kernel,
        types=TYPES | {"pages": "*bf16" if key_format == "bf16" else "*u8"},
        constants=constants | {"RANKS": 1},
        options=functools.partial(score_options, constants["M"]),
        expect=PRODUCTS,
        forbid=_SPREADS_NAN,
        odd=ODD,
    )


def _select_variant(columns: int) -> ForwardVariant:
    constants = selection_constants(columns, 128, 16, 1, 0)
    return ForwardVariant(
        name=f"selection from {columns} blocks",
        kernel=select_blocks_kernel,
        types=TYPES,
        constants=constants | {"column_stride": 1},
        options=functools.partial(selection_options, constants["CHUNK"]),
        exact=True,
        odd=ODD,
    )


VARIANTS = [
    *(_score_variant(form, tokens) for form in MANY_TOKENS for tokens in (1, MANY_TOKENS[form])),
    *(_select_variant(columns) for columns in (128, CHUNK)),
]

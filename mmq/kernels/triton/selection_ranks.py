"""Block selection over ranks: a rank's best keys, and the merge of all ranks' keys.

Reference: `mmq.kernels.reference.selection_ranks`. Scores of a rank's own blocks come from
`block_selection.score_pages` with `rank` and `ranks`.

    rank r of P scores blocks j·P + r
    candidates  = its `top_k` largest keys
    selection   = the blocks of the `top_k` largest of all ranks' candidates

Between the two kernels the ranks gather keys, 8 · C bytes from each for each token and index head.

Four numbers, 2 ranks, top_k 2, nothing forced, scores [1, 5, 4, 3]: rank 0 sends the keys of blocks
2 and 0, rank 1 those of 1 and 3; the selection is [1, 2].

Dimensions: P ranks, T query tokens, G index heads, J blocks of one rank, C chosen blocks; inside
kernels R rows of keys, K keys kept, W keys of all ranks.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..reference.block_selection import check_selection
from .block_selection import (
    CHUNK,
    ODD,
    ROWS,
    TYPES,
    best_keys,
    largest_keys,
    row_scores,
    selection_constants,
    selection_options,
    store_blocks,
)
from .cross_compile import ForwardVariant
from .launch import TARGETS, launch_options


@triton.jit
def candidate_keys_kernel(
    scores, positions, keys, tokens, columns, rank, head_stride, token_stride, column_stride,
    RANKS: tl.constexpr, BLOCK: tl.constexpr, TOP_K: tl.constexpr, K: tl.constexpr,
    CHUNK: tl.constexpr, R: tl.constexpr, LOCAL: tl.constexpr, INIT: tl.constexpr,
):  # fmt: skip
    """From F32 scores [G, T, J] of one rank: its best keys, I64 [G, T, C], descending."""
    first_R, local_R, row_R, inside_R = row_scores(
        scores, positions, tokens, head_stride, token_stride, BLOCK, R
    )
    key_RK = best_keys(
        first_R, column_stride, local_R, columns, rank, RANKS, TOP_K, K, CHUNK, LOCAL, INIT
    )  # fmt: skip
    place_K = tl.arange(0, K)
    stored_RK = inside_R[:, None] & (place_K < TOP_K)[None, :]
    tl.store(keys + row_R[:, None] * TOP_K + place_K[None, :], key_RK, mask=stored_RK)


@triton.jit
def merge_candidates_kernel(
    keys, selection, rows, ranks,
    TOP_K: tl.constexpr, K: tl.constexpr, W: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """From I64 keys [P, G, T, C]: the selection, I32 [G, T, C]. `rows` is G · T."""
    row_R = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    inside_R = row_R < rows
    place_W = tl.arange(0, W)
    rank_W, from_W = place_W // K, place_W % K
    own_W = (rank_W < ranks) & (from_W < TOP_K)
    row_RW = rank_W.to(tl.int64)[None, :] * rows + row_R[:, None]
    inside_RW = inside_R[:, None] & own_W[None, :]
    key_RW = tl.load(keys + row_RW * TOP_K + from_W[None, :], mask=inside_RW, other=0)
    store_blocks(selection, row_R, inside_R, largest_keys(key_RW, TOP_K, K), TOP_K)


def candidate_keys(
    scores_GTJ: Tensor,
    positions_T: Tensor,
    *,
    rank: int,
    ranks: int,
    block: int,
    top_k: int = 16,
    local_blocks: int = 1,
    init_blocks: int = 0,
    out_GTC: Tensor | None = None,
) -> Tensor:
    """The reference's `candidate_keys` in one kernel: F32 [G, T, J], any strides, to I64 [G, T, C].

    Args:
        out_GTC: written instead of a new tensor; contiguous.
    """
    if not 0 <= rank < ranks:
        raise ValueError(f"no rank {rank} of {ranks}")
    heads, tokens, columns = scores_GTJ.shape
    check_selection((columns - 1) * ranks + rank + 1, top_k, local_blocks, init_blocks)
    if out_GTC is None:
        out_GTC = scores_GTJ.new_empty((heads, tokens, top_k), dtype=torch.int64)
    constants = selection_constants(columns, block, top_k, local_blocks, init_blocks)
    if out_GTC.numel():
        candidate_keys_kernel[(triton.cdiv(tokens, ROWS), heads)](
            scores_GTJ, positions_T, out_GTC, tokens, columns, rank, *scores_GTJ.stride(),
            RANKS=ranks, **constants, **selection_options(constants["CHUNK"]),
        )  # fmt: skip
    return out_GTC


def merge_candidates(keys_PGTC: Tensor, *, out_GTC: Tensor | None = None) -> Tensor:
    """The reference's `merge_candidates` in one kernel: I64 [P, G, T, C] to I32 [G, T, C].

    Args:
        out_GTC: written instead of a new tensor; contiguous.
    """
    ranks, heads, tokens, top_k = keys_PGTC.shape
    if out_GTC is None:
        out_GTC = keys_PGTC.new_empty((heads, tokens, top_k), dtype=torch.int32)
    if out_GTC.numel():
        merge_candidates_kernel[(triton.cdiv(heads * tokens, ROWS),)](
            keys_PGTC.contiguous(), out_GTC, heads * tokens, ranks,
            **merge_constants(ranks, top_k), **merge_options(),
        )  # fmt: skip
    return out_GTC


def merge_constants(ranks: int, top_k: int) -> dict[str, int]:
    """The constants of `merge_candidates_kernel`."""
    kept = triton.next_power_of_2(top_k)
    return {"TOP_K": top_k, "K": kept, "W": kept * triton.next_power_of_2(ranks), "R": ROWS}


def merge_options(target: str | None = None) -> dict[str, object]:
    """Launch options of `merge_candidates_kernel`: one warp."""
    return launch_options(1, TARGETS[target] if target else None)


def _merge_variant(ranks: int) -> ForwardVariant:
    return ForwardVariant(
        name=f"merge of {ranks} ranks' candidates",
        kernel=merge_candidates_kernel,
        types=TYPES,
        constants=merge_constants(ranks, 16),
        options=merge_options,
        exact=True,
        odd=ODD,
    )


def _candidates_variant(columns: int) -> ForwardVariant:
    constants = selection_constants(columns, 128, 16, 1, 0)
    return ForwardVariant(
        name=f"candidates from {columns} of a rank's blocks",
        kernel=candidate_keys_kernel,
        types=TYPES,
        constants=constants | {"RANKS": 8, "column_stride": 1},
        options=functools.partial(selection_options, constants["CHUNK"]),
        exact=True,
        odd=ODD,
    )


VARIANTS = [
    *(_candidates_variant(columns) for columns in (512, CHUNK)),
    *(_merge_variant(ranks) for ranks in (2, 8)),
]

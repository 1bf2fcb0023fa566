"""Block selection of a decode step, the context split over ranks; equal to that of one rank.

    rank r of P scores blocks j·P + r, j = 0, 1, …
    candidates  = its `top_k` largest keys         unique: see `block_selection.sortable_keys`
    selection   = the blocks of the `top_k` largest of all ranks' candidates

The keys are unique and their order is total, so the top k of a union is the top k of the parts'
top k's: the merge is exact, ties included. A rank sends `top_k` keys of 8 bytes for each token and
index head, whatever the length of the context; each reads 1/P of the index keys.

Four numbers, 2 ranks, top_k 2, nothing forced, scores [1, 5, 4, 3]: rank 0 has blocks 0 and 2 and
sends the keys of (4, block 2) and (1, block 0), rank 1 those of (5, block 1) and (3, block 3); the
two largest of the four are blocks 1 and 2, the selection [1, 2].

Source: vLLM ``models/minimax_m3/nvidia/indexer_decode_cp.py``; ATOM PR 2229.

Dimensions: P ranks, T query tokens, G index heads, N blocks, J blocks of one rank, C chosen blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .block_selection import best_keys, check_selection, selection_of_keys, sortable_keys


def owned_blocks(blocks: int, rank: int, ranks: int) -> int:
    """J: how many of `blocks` blocks rank `rank` of `ranks` scores."""
    return max(0, -(-(blocks - rank) // ranks))


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
) -> Tensor:
    """One rank's `top_k` best blocks as keys, I64 [G, T, C], descending; 0 where there are none.

    Args:
        scores_GTJ: F32; column j is block j · `ranks` + `rank`. Columns past a token's local block
            are not looked at.
        positions_T: of the tokens in the whole sequence.

    Raises:
        ValueError: as `select_blocks`; or there is no such rank.
    """
    if not 0 <= rank < ranks:
        raise ValueError(f"no rank {rank} of {ranks}")
    columns = scores_GTJ.shape[2]
    check_selection((columns - 1) * ranks + rank + 1, top_k, local_blocks, init_blocks)
    blocks_J = torch.arange(columns, device=scores_GTJ.device) * ranks + rank
    keys_GTJ = sortable_keys(
        scores_GTJ, positions_T, blocks_J,
        block=block, local_blocks=local_blocks, init_blocks=init_blocks,
    )  # fmt: skip
    return best_keys(keys_GTJ, top_k)


def merge_candidates(keys_PGTC: Tensor) -> Tensor:
    """The selection, as of `select_blocks`, I32 [G, T, C], of all ranks' keys, I64 [P, G, T, C]."""
    _, heads, tokens, top_k = keys_PGTC.shape
    keys_GTK = keys_PGTC.permute(1, 2, 0, 3).reshape(heads, tokens, -1)
    return selection_of_keys(best_keys(keys_GTK, top_k))

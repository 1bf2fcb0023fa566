"""Block selection of MiniMax Sparse Attention: which 16 blocks of keys a query token may read.

    score[n]  = max over visible keys s of block n of  Σ_e q[e] · k[s, e]     visible: s ≤ position
    selection = the local block, and the best of the other blocks ≤ it, up to `top_k` in all

Blocks are anchored at position 0: block n holds keys n·B … n·B + B − 1, and the local block of a
token is position div B. Each index head selects for one KV head, by itself. No scale is applied,
since a positive one changes no order.

The order is total, so that every backend and any split over ranks gives the same selection: forced
blocks first, then the higher score, then the lower block. −0 equals +0, −inf is a score like any
other, and a NaN score counts as −1e30. A key whose dot product is NaN is invisible.

Four numbers, as if they were a token's scores, with top_k 3 in blocks of 2 at position 6: the local
block is 3, the scores [0.5, 2, 0.5, −9] select {3} by force, 1 by its score, and of the equals 0
and 2 the lower: [0, 1, 3]. At position 5 block 3 is not there yet and all of 0, 1, 2 are taken.

Sources: vLLM ``models/minimax_m3/common/ops/index_topk.py`` (NaN, forced blocks) and
``nvidia/indexer_decode_cp.py`` (keys, ascending output); transformers 5.24 ``MiniMaxM3VLIndexer``.

Dimensions: T query tokens, G index heads, E index dimension, S key positions, B tokens of a block,
N blocks, C chosen blocks (top_k).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..kv_pages import PagedCache, TokenBatch
from .kv_cache import read_pages

#: What a NaN score counts as.
NAN_SCORE = -1e30
#: Blocks that a key can tell apart: 2^23 tokens in blocks of 128.
MAX_BLOCKS = 1 << 16
#: Dot products held at a time: 8 MiB of F32, which a processor's cache holds.
_CHUNK = 1 << 21

_FORCED = 1 << 49
_VALID = 1 << 48


def score_blocks(
    index_q_TGE: Tensor, index_k_SE: Tensor, positions_T: Tensor, block: int
) -> Tensor:
    """Score every block of one sequence for every token and index head, F32 [G, T, N].

    Args:
        index_q_TGE: F32 queries, normed and rotated; an engine has them rounded to BF16.
        index_k_SE: F32 keys of positions 0 … S − 1.
        positions_T: of the tokens, in any order.
        block: B; N is S div B, rounded up.

    Returns:
        −inf where a block has no visible key.
    """
    tokens, heads, _ = index_q_TGE.shape
    keys = index_k_SE.shape[0]
    scores_GTN = index_q_TGE.new_full((heads, tokens, -(-keys // block)), -torch.inf)
    step = max(1, _CHUNK // max(1, heads * keys))
    for start in range(0, tokens, step):
        chunk = slice(start, start + step)
        best_GTN = _score_chunk(index_q_TGE[chunk], index_k_SE, positions_T[chunk], block)
        scores_GTN[:, chunk, : best_GTN.shape[2]] = best_GTN
    return scores_GTN


def _score_chunk(
    index_q_TGE: Tensor, index_k_SE: Tensor, positions_T: Tensor, block: int
) -> Tensor:
    """The same for few tokens, [G, T, n]: blocks that none of them sees are left out."""
    tokens, heads, dim = index_q_TGE.shape
    seen = min(index_k_SE.shape[0], (int(positions_T.max()) // block + 1) * block)
    dots_QS = index_q_TGE.reshape(-1, dim) @ index_k_SE[:seen].T
    if seen % block:
        dots_QS = torch.nn.functional.pad(dots_QS, (0, -seen % block), value=-torch.inf)
    dots_TGNB = dots_QS.view(tokens, heads, -1, block)
    # Blocks before this one are visible to every token.
    first = min((int(positions_T.min()) + 1) // block, dots_TGNB.shape[2])
    key_S = torch.arange(first * block, dots_TGNB.shape[2] * block, device=positions_T.device)
    future_TNB = (key_S > positions_T[:, None]).view(tokens, -1, block)
    dots_TGNB[:, :, first:].masked_fill_(future_TNB[:, None], -torch.inf)
    best_TGN = dots_TGNB.amax(3)
    if bool(best_TGN.isnan().any()):
        dots_TGNB.nan_to_num_(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
        best_TGN = dots_TGNB.amax(3)
    return best_TGN.transpose(0, 1)


def score_pages(
    index_q_TGE: Tensor, index_cache: PagedCache, batch: TokenBatch, sequence_lengths: Tensor
) -> Tensor:
    """Score the blocks of each token's sequence, F32 [G, T, N] for the N blocks of the page table.

    Args:
        index_q_TGE: BF16, or F32 with BF16 values.
        index_cache: index keys, one side, one head.
        batch: tokens in any order, of any sequences.
        sequence_lengths: integers [Q], keys in the cache; a token sees none at or past it.

    Returns:
        −inf where a block has no visible key, or no page.
    """
    tokens, heads, _ = index_q_TGE.shape
    scores_GTN = torch.full((heads, tokens, batch.page_table_QN.shape[1]), -torch.inf)
    block = index_cache.layout.tokens
    for sequence, length in enumerate(sequence_lengths.tolist()):
        own_T = (batch.sequence_T == sequence).nonzero()[:, 0]
        pages_N = batch.page_table_QN[sequence, : -(-length // block)]
        if not (len(own_T) and length):
            continue
        keys_SGE, _ = read_pages(index_cache, pages_N.clamp(min=0), length)
        positions_T = batch.positions_T[own_T].clamp(max=length - 1)
        best_GTN = score_blocks(index_q_TGE[own_T].float(), keys_SGE[:, 0], positions_T, block)
        best_GTN = best_GTN.masked_fill(pages_N < 0, -torch.inf)
        scores_GTN[:, own_T, : len(pages_N)] = best_GTN
    return scores_GTN


def sortable_keys(
    scores_GTN: Tensor,
    positions_T: Tensor,
    blocks_N: Tensor,
    *,
    block: int,
    local_blocks: int,
    init_blocks: int,
) -> Tensor:
    """Unique I64 keys [G, T, N] whose order is the order of selection; 0 for blocks past the local.

        forced · 2^49 + 2^48 + ordered(score) · 2^16 + (65535 − block)

    with the bits of F32 made to order as unsigned numbers: all flipped if negative, else the sign.

    Args:
        blocks_N: the number of the block in each column.
    """
    scores_GTN = scores_GTN.masked_fill(scores_GTN.isnan(), NAN_SCORE) + 0.0  # −0 + 0 = +0
    bits_GTN = scores_GTN.contiguous().view(torch.int32).long()
    ordered_GTN = torch.where(bits_GTN < 0, ~bits_GTN, bits_GTN + (1 << 31)) & 0xFFFFFFFF
    local_T1 = (positions_T.long() // block)[:, None]
    forced_TN = (blocks_N < init_blocks) | (blocks_N > local_T1 - local_blocks)
    rank_TN = _VALID + _FORCED * forced_TN + (MAX_BLOCKS - 1 - blocks_N.long())
    return (rank_TN + (ordered_GTN << 16)).where(blocks_N <= local_T1, 0)


def best_keys(keys_GTN: Tensor, top_k: int) -> Tensor:
    """The `top_k` largest keys, I64 [G, T, C], descending; 0 where there are fewer."""
    best_GTC = keys_GTN.topk(min(top_k, keys_GTN.shape[2]), dim=2).values
    return torch.nn.functional.pad(best_GTC, (0, top_k - best_GTC.shape[2]))


def selection_of_keys(keys_GTC: Tensor) -> Tensor:
    """The blocks of keys, I32 [G, T, C]: ascending, then −1 for each key 0."""
    blocks_GTC = (MAX_BLOCKS - 1 - (keys_GTC & (MAX_BLOCKS - 1))).where(keys_GTC > 0, MAX_BLOCKS)
    blocks_GTC = blocks_GTC.sort(dim=2).values
    return blocks_GTC.where(blocks_GTC < MAX_BLOCKS, -1).int()


def select_blocks(
    scores_GTN: Tensor,
    positions_T: Tensor,
    *,
    block: int,
    top_k: int = 16,
    local_blocks: int = 1,
    init_blocks: int = 0,
) -> Tensor:
    """Choose `top_k` blocks for every token and index head, I32 [G, T, C].

    Args:
        scores_GTN: F32; columns past a token's local block are not looked at.
        positions_T: of the tokens.
        block: B.
        local_blocks: forced: the token's own block and those right before it.
        init_blocks: forced: the first blocks of the sequence.

    Returns:
        Block numbers, ascending, all those up to the local block if they are fewer than `top_k`;
        −1 in the places left over.

    Raises:
        ValueError: more blocks are forced than chosen, or more than 65,536 scored.
    """
    check_selection(scores_GTN.shape[2], top_k, local_blocks, init_blocks)
    blocks_N = torch.arange(scores_GTN.shape[2], device=scores_GTN.device)
    keys_GTN = sortable_keys(
        scores_GTN, positions_T, blocks_N,
        block=block, local_blocks=local_blocks, init_blocks=init_blocks,
    )  # fmt: skip
    return selection_of_keys(best_keys(keys_GTN, top_k))


def check_selection(blocks: int, top_k: int, local_blocks: int, init_blocks: int) -> None:
    """Raise ValueError where `select_blocks` says so."""
    if local_blocks + init_blocks > top_k:
        raise ValueError(
            f"{local_blocks} local and {init_blocks} first blocks are forced, {top_k} chosen"
        )
    if blocks > MAX_BLOCKS:
        raise ValueError(f"{blocks} blocks, of which keys can tell {MAX_BLOCKS} apart")

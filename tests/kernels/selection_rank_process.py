"""One rank of an indexer decode step, in a process of its own."""

from __future__ import annotations

import torch
from torch import Tensor

from mmq.kernels.reference.block_selection import score_blocks
from mmq.kernels.reference.selection_ranks import candidate_keys, merge_candidates

BLOCK = 8
_LENGTH = 40 * BLOCK + 3


def _inputs() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q_TGE = torch.randint(-2, 3, (3, 4, 16), generator=generator).float()
    k_SE = torch.randint(-2, 3, (_LENGTH, 16), generator=generator).float()
    return q_TGE, k_SE, torch.tensor([_LENGTH - 1, 200, 50])


def all_scores() -> tuple[Tensor, Tensor]:
    """Scores of all blocks, and the tokens' positions."""
    q_TGE, k_SE, positions_T = _inputs()
    return score_blocks(q_TGE, k_SE, positions_T, BLOCK), positions_T


def run(rank: int, ranks: int, store: str, results) -> None:
    """Put (rank, selection as lists) into `results`."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks
    )
    q_TGE, k_SE, positions_T = _inputs()
    k_SE[torch.arange(_LENGTH) // BLOCK % ranks != rank] = torch.nan
    own_GTJ = score_blocks(q_TGE, k_SE, positions_T, BLOCK)[..., rank::ranks]
    keys_GTC = candidate_keys(own_GTJ, positions_T, rank=rank, ranks=ranks, block=BLOCK)
    gathered = [torch.empty_like(keys_GTC) for _ in range(ranks)]
    torch.distributed.all_gather(gathered, keys_GTC)
    results.put((rank, merge_candidates(torch.stack(gathered)).tolist()))
    torch.distributed.destroy_process_group()

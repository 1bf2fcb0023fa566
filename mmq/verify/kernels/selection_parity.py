"""Block scores and selections beside their references.

Scores are sums of products: within `error_bounds.score_error` of those in F64. Selections are exact
given the kernel's own scores, and where sums are integers so is everything.

Dimensions: G index heads, T query tokens, E index dimension, N blocks, J blocks of a rank, C chosen
blocks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from mmq.kernels.error_bounds import score_error
from mmq.kernels.kv_pages import KvFormat
from mmq.kernels.reference import block_selection as reference
from mmq.kernels.reference import selection_ranks as ranks_reference
from mmq.kernels.reference.kv_cache import read_pages
from mmq.kernels.triton import block_selection, selection_ranks
from mmq.kernels.triton.launch import device
from mmq.verify.kernels.compare import Comparison, exactly, moved, within
from mmq.verify.kernels.geometry import Geometry
from mmq.verify.kernels.material import Material
from mmq.verify.kernels.paging import Paged, make_paged

#: Query tokens of the two sequences of a batch.
DECODE = 1, 1
#: Ranks over which a context is split.
RANKS = (1, 2, 8)


def scores_and_selection(material: Material, format: KvFormat) -> Iterator[Comparison]:
    """Prefill and decode: scores, then blocks."""
    for name, tokens in (("prefill", (material.geometry.queries, 2)), ("decode", DECODE)):
        paged = make_paged(material, format, tokens)
        scores_GTN = _kernel_scores(paged)
        exact_GTN, magnitude_GTN = _exact_scores(paged)
        bound_GTN = score_error(magnitude_GTN, material.geometry.dim)
        yield within(f"scores, {name}", scores_GTN, exact_GTN, bound_GTN)
        yield _selected(f"selection, {name}", material.geometry, scores_GTN, paged)
    empty = _without_tokens(make_paged(material, format, DECODE))
    yield exactly("no tokens", _kernel_scores(empty), torch.empty(0).reshape(_shape(empty)))


def over_ranks(material: Material) -> Iterator[Comparison]:
    """Each rank's candidates and their merge, of scores with ties, ±0, ±inf and NaN."""
    geometry = material.geometry
    rules = _rules(geometry)
    for kind, blocks in (("random", 3 * geometry.top_k + 1), ("special", geometry.top_k - 1)):
        scores_GTN, positions_T = _some_scores(material, kind, blocks)
        whole_GTC = reference.select_blocks(scores_GTN, positions_T, **rules)
        for ranks in RANKS:
            keys = []
            for rank in range(ranks):
                own = scores_GTN[..., rank::ranks], positions_T
                wanted = ranks_reference.candidate_keys(*own, rank=rank, ranks=ranks, **rules)
                got = selection_ranks.candidate_keys(
                    *moved(own, device()), rank=rank, ranks=ranks, **rules
                )
                keys.append(got)
                case = f"{kind} scores of {blocks} blocks, rank {rank} of {ranks}"
                yield exactly(f"keys, {case}", got.cpu(), wanted)
            merged_GTC = selection_ranks.merge_candidates(torch.stack(keys))
            yield exactly(
                f"{kind} scores of {blocks} blocks, {ranks} ranks", merged_GTC.cpu(), whole_GTC
            )
    yield from _rank_scores(material)


def _rank_scores(material: Material) -> Iterator[Comparison]:
    """A rank's scores are columns of those of one rank alone."""
    paged = make_paged(material, "bf16", DECODE)
    whole_GTN = _kernel_scores(paged)
    for rank in (0, 1):
        own_GTJ = _kernel_scores(paged, rank=rank, ranks=2)
        yield exactly(f"scores of rank {rank} of 2", own_GTJ, whole_GTN[..., rank::2])


def _kernel_scores(paged: Paged, **ranks: Any) -> Tensor:
    arguments = paged.index_q_TGE, paged.index_cache, paged.batch, paged.lengths_Q
    scores: Tensor = block_selection.score_pages(*moved(arguments, device()), **ranks)
    return scores.cpu()


def _exact_scores(paged: Paged) -> tuple[Tensor, Tensor]:
    """F64 scores, and the largest Σ|q|·|k| of each block: [G, T, N], −inf where there is no key."""
    cache, batch = paged.index_cache, paged.batch
    elements = dataclasses.replace(cache, k_scale=1.0)
    scale = 1.0 if cache.layout.format == "bf16" else _f32(cache.k_scale)
    both = torch.full((2, *_shape(paged)), -torch.inf, dtype=torch.float64)
    for sequence, length in enumerate(paged.lengths_Q.tolist()):
        own_T = (batch.sequence_T == sequence).nonzero()[:, 0]
        if not len(own_T):
            continue
        k_SGE, _ = read_pages(elements, batch.page_table_QN[sequence], length)
        q, k = paged.index_q_TGE[own_T].double(), k_SGE[:, 0].double() * scale
        for into, sides in zip(both, ((q, k), (q.abs(), k.abs())), strict=True):
            scores = reference.score_blocks(*sides, batch.positions_T[own_T], cache.layout.tokens)
            into[:, own_T, : scores.shape[2]] = scores
    return both[0], both[1]


def _selected(case: str, geometry: Geometry, scores_GTN: Tensor, paged: Paged) -> Comparison:
    arguments = scores_GTN, paged.batch.positions_T
    rules = _rules(geometry)
    got = block_selection.select_blocks(*moved(arguments, device()), **rules)
    return exactly(case, got.cpu(), reference.select_blocks(*arguments, **rules))


def _rules(geometry: Geometry) -> dict[str, Any]:
    return {
        "block": geometry.block, "top_k": geometry.top_k,
        "local_blocks": geometry.local_blocks, "init_blocks": geometry.init_blocks,
    }  # fmt: skip


def _some_scores(material: Material, kind: str, blocks: int) -> tuple[Tensor, Tensor]:
    geometry, generator = material.geometry, material.generator(10)
    shape = geometry.kv_heads, 5, blocks
    if kind == "random":
        scores_GTN = torch.randint(-8, 9, shape, generator=generator) / 4
    else:
        special = torch.tensor([0.0, -0.0, torch.nan, torch.inf, -torch.inf, -1e30, 1e-45, 2.0])
        scores_GTN = special[torch.randint(0, len(special), shape, generator=generator)]
    last = blocks * geometry.block - 1
    return scores_GTN, torch.tensor([last, last - 1, 0, last // 2, geometry.block]).int()


def _without_tokens(paged: Paged) -> Paged:
    batch = dataclasses.replace(
        paged.batch, positions_T=paged.batch.positions_T[:0], sequence_T=paged.batch.sequence_T[:0]
    )
    return paged._replace(index_q_TGE=paged.index_q_TGE[:0], batch=batch)


def _shape(paged: Paged) -> tuple[int, int, int]:
    tokens, heads, _ = paged.index_q_TGE.shape
    return heads, tokens, paged.batch.page_table_QN.shape[1]


def _f32(value: float) -> float:
    return torch.tensor(value, dtype=torch.float32).item()

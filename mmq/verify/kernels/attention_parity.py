"""Attention kernels over pages beside exact attention in F64, within the error of their roundings.

Dimensions: T query tokens, S keys, H query heads, G KV heads, D head dimension, C chosen blocks.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from mmq.kernels.error_bounds import BF16, F32, TRUNCATED, AttentionRoundings, attention_error
from mmq.kernels.kv_pages import KvFormat, PagedCache
from mmq.kernels.reference import block_attention as reference
from mmq.kernels.reference.kv_cache import read_pages
from mmq.kernels.triton import block_attention
from mmq.kernels.triton.launch import device
from mmq.verify.kernels.compare import Comparison, exactly, moved, within
from mmq.verify.kernels.material import Material
from mmq.verify.kernels.paging import Paged, choose_blocks, make_paged


def attention(material: Material, kind: str, format: str) -> Iterator[Comparison]:
    """`kind`: prefill or decode over chosen blocks, or dense over all keys.

    `format`: of the cache, "nvfp4 staged" with elements rounded to E4M3.
    """
    stored: KvFormat = "nvfp4" if format.startswith("nvfp4") else format  # type: ignore[assignment]
    staged = format.endswith("staged")
    queries = material.geometry.queries
    tokens = (1, 1) if kind == "decode" else (queries, 3)
    paged = make_paged(material, stored, tokens, "quads" if staged else "linear")
    chosen = None if kind == "dense" else choose_blocks(material, paged.batch.positions_T)
    # As a launch chooses them for a decode; a prefill of many tokens has one part.
    splits = None if kind == "decode" else 1
    got_THD = _kernel(paged, chosen, staged, splits)
    yield _bounded(f"{sum(tokens)} tokens", got_THD, paged, chosen, staged, splits)
    if kind == "dense":
        parts_THD = _kernel(paged, None, staged, 3)
        yield _bounded("all keys in 3 parts", parts_THD, paged, None, staged, 3)
    elif kind == "prefill":
        nothing_GTC = torch.full_like(choose_blocks(material, paged.batch.positions_T), -1)
        got_THD = _kernel(paged, nothing_GTC, staged, splits)
        yield exactly("no block chosen", got_THD, torch.zeros_like(got_THD))


def _kernel(paged: Paged, selection_GTC: Tensor | None, staged: bool, splits: int | None) -> Tensor:
    arguments = paged.q_THD, paged.cache, paged.batch, paged.lengths_Q, selection_GTC
    out: Tensor = block_attention.attend_pages(
        *moved(arguments, device()), staged=staged, splits=splits, dtype=torch.float32
    )
    return out.cpu()


def _bounded(
    case: str, got_THD: Tensor, paged: Paged, selection_GTC: Tensor | None, staged: bool,
    splits: int | None,
) -> Comparison:  # fmt: skip
    expected, bounds = [], []
    for s, length in enumerate(paged.lengths_Q.tolist()):
        row_T = paged.batch.sequence_T == s
        own_GTC = None if selection_GTC is None else selection_GTC[:, row_T]
        parts = splits or block_attention.MAX_SPLITS
        wanted, bound = _exact(paged, s, length, row_T, own_GTC, staged, parts)
        expected.append(wanted)
        bounds.append(bound)
    return within(case, got_THD, torch.cat(expected), torch.cat(bounds))


def _exact(
    paged: Paged, sequence: int, length: int, row_T: Tensor, selection_GTC: Tensor | None,
    staged: bool, parts: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """F64 [T, H, D] of one sequence, and how far the kernel may be from it."""
    cache, batch = paged.cache, paged.batch
    layout, q_THD = cache.layout, paged.q_THD[row_T]
    scaled = layout.format != "bf16"
    k_scale, v_scale = (cache.k_scale, cache.v_scale) if scaled else (1.0, 1.0)
    elements = PagedCache(layout, cache.pages_PZ)
    k_SGD, v_SGD = read_pages(elements, batch.page_table_QN[sequence], length, staged=staged)
    assert v_SGD is not None
    positions_T = batch.positions_T[row_T].long()
    visible_GTS = torch.stack(
        [
            reference.visible_keys(
                positions_T, length,
                None if selection_GTC is None else selection_GTC[g].long(), layout.tokens,
            )
            for g in range(layout.heads)
        ]
    )  # fmt: skip
    scale = layout.dim**-0.5 * k_scale
    tiles = -(-length // min(block_attention.KEYS, layout.tokens))
    roundings = AttentionRoundings(BF16, TRUNCATED, F32, tiles, parts)
    bound_THD = attention_error(q_THD, k_SGD, v_SGD, visible_GTS, scale, roundings)
    exact_THD = _attend(q_THD, k_SGD, v_SGD, visible_GTS, scale)
    return exact_THD * v_scale, bound_THD * v_scale


def _attend(
    q_THD: Tensor, k_SGD: Tensor, v_SGD: Tensor, visible_GTS: Tensor, scale: float
) -> Tensor:
    """Softmax over the visible keys, every number exact but for F64's roundings."""
    heads = k_SGD.shape[1]
    q_GTRD = q_THD.double().reshape(len(q_THD), heads, -1, q_THD.shape[2]).transpose(0, 1)
    score_GTRS = scale * (q_GTRD @ k_SGD.double().permute(1, 2, 0)[:, None])
    p_GTRS = score_GTRS.masked_fill(~visible_GTS[:, :, None], -torch.inf).softmax(-1)
    return (p_GTRS @ v_SGD.double().transpose(0, 1)[:, None]).transpose(0, 1).flatten(1, 2)

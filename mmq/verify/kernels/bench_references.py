"""Work to time on a CPU: the references, at M3's sizes with few tokens.

Dimensions: T query tokens, S keys, H query heads, G KV heads, D head dimension, M hidden.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from mmq.kernels.kv_pages import PagedCache, PageLayout
from mmq.kernels.reference import (
    block_attention,
    block_selection,
    fp8_staging,
    kv_cache,
    moe,
    qkv_rope,
    router,
)
from mmq.verify.kernels import operations as ops
from mmq.verify.kernels.bench_cases import Load, Work
from mmq.verify.kernels.geometry import Geometry
from mmq.verify.kernels.material import Material

#: What a core computes in tenths of a second.
CPU_LOAD = Load(prefill=512, sequences=16, context=4096, experts=1)


def reference_work(material: Material, load: Load) -> Iterator[Work]:
    """The references, each with the FLOPs of its matrix products."""
    geometry = material.geometry
    yield from _indexer(geometry, load)
    yield from _attention(geometry, load)
    yield from _projection(material, load)
    yield from _experts(material, load)
    yield from _bytes(geometry, load)


def _normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def _indexer(geometry: Geometry, load: Load) -> Iterator[Work]:
    tokens, keys = load.prefill, load.context
    q_TGE, k_SE = _normal(tokens, geometry.kv_heads, geometry.dim), _normal(keys, geometry.dim)
    positions_T = torch.arange(keys - tokens, keys)
    scores_GTN = block_selection.score_blocks(q_TGE, k_SE, positions_T, geometry.block)
    size = f"{tokens} tokens × {keys:,} keys"
    yield Work(
        "block scores", size, 2.0 * tokens * geometry.kv_heads * keys * geometry.dim,
        4.0 * (q_TGE.numel() + k_SE.numel() + scores_GTN.numel()), "f32",
        lambda: block_selection.score_blocks(q_TGE, k_SE, positions_T, geometry.block),
    )  # fmt: skip
    rules = {"block": geometry.block, "top_k": geometry.top_k}
    yield Work(
        "block selection", f"{tokens} tokens, {scores_GTN.shape[2]} blocks", 0.0,
        4.0 * scores_GTN.numel(), "f32",
        lambda: block_selection.select_blocks(scores_GTN, positions_T, **rules),
    )  # fmt: skip


def _attention(geometry: Geometry, load: Load) -> Iterator[Work]:
    tokens, keys = load.sequences, load.context
    q_THD = _normal(tokens, geometry.heads, geometry.dim)
    k_SGD, v_SGD = (_normal(keys, geometry.kv_heads, geometry.dim) for _ in range(2))
    positions_T = torch.arange(keys - tokens, keys)
    order = _normal(geometry.kv_heads, tokens, (keys - tokens) // geometry.block).argsort(-1)
    chosen_GTC = order[..., : geometry.top_k].int()
    seen = geometry.top_k * geometry.block
    for op, selection, visible in (
        ("attention over all keys", None, keys), ("attention over chosen blocks", chosen_GTC, seen)
    ):  # fmt: skip
        yield Work(
            op, f"{tokens} tokens × {visible:,} keys",
            4.0 * tokens * geometry.heads * visible * geometry.dim,
            8.0 * k_SGD.numel() * visible / keys, "f32",
            lambda selection=selection: block_attention.attend(  # type: ignore[misc]
                q_THD, k_SGD, v_SGD, positions_T, selection, block=geometry.block
            ),
        )  # fmt: skip


def _projection(material: Material, load: Load) -> Iterator[Work]:
    geometry, tokens = material.geometry, load.sequences
    w_ZM, x_TM = _normal(geometry.row.width, geometry.hidden), material.hidden(tokens)
    yield Work(
        "QKV projection", f"{tokens} tokens", 2.0 * tokens * w_ZM.numel(), 4.0 * w_ZM.numel(),
        "f32", lambda: qkv_rope.project_rows(x_TM, w_ZM),
    )  # fmt: skip
    rope = qkv_rope.Rope(geometry.rotary_dim, geometry.theta)
    rows, positions_T = _normal(load.prefill, geometry.row.width), torch.arange(load.prefill)
    yield Work(
        "norm and RoPE", f"{load.prefill} tokens", 0.0, 8.0 * rows.numel(), "f32",
        lambda: qkv_rope.project_heads(
            rows, geometry.row, material.norms, positions_T, rope
        ),
    )  # fmt: skip


def _experts(material: Material, load: Load) -> Iterator[Work]:
    geometry, tokens = material.geometry, load.sequences
    x_TM = material.hidden(load.prefill)
    yield Work(
        ops.ROUTER, f"{load.prefill} tokens",
        2.0 * load.prefill * geometry.experts * geometry.hidden, 4.0 * material.gate_EM.numel(),
        "f32", lambda: router.route(x_TM, material.gate_EM, material.bias_E),
    )  # fmt: skip
    packed = material.experts[0]
    dense = moe.Mlp(*(moe.to_f32(weight) for weight in packed))
    x_NM = x_TM[:tokens]
    elements = 3.0 * geometry.hidden * geometry.inner
    for name, weights, size in (("in F32", dense, 4.0), ("in NVFP4, decoded", packed, 9 / 16)):
        yield Work(
            f"expert {name}", f"{tokens} tokens", 2.0 * tokens * elements, size * elements, "f32",
            lambda weights=weights: moe.mlp(x_NM, *weights),  # type: ignore[misc]
        )  # fmt: skip


def _bytes(geometry: Geometry, load: Load) -> Iterator[Work]:
    tokens = load.prefill
    layout = PageLayout("nvfp4", geometry.kv_heads, geometry.block, geometry.dim)
    pages_PZ = torch.zeros(-(-tokens // geometry.block), layout.page_bytes, dtype=torch.uint8)
    cache = PagedCache(layout, pages_PZ, 0.01, 0.02)
    k, v = _normal(2, tokens, geometry.kv_heads, geometry.dim)
    slots_T, table_N = torch.arange(tokens), torch.arange(len(pages_PZ))
    moved = 8.0 * k.numel() + pages_PZ.numel()
    yield Work(
        ops.write_op("nvfp4"), f"write of {tokens} tokens", 0.0, moved, "f32",
        lambda: kv_cache.write_pages(cache, slots_T, k, v),
    )  # fmt: skip
    yield Work(
        ops.write_op("nvfp4"), f"read of {tokens} tokens", 0.0, moved, "f32",
        lambda: kv_cache.read_pages(cache, table_N, tokens),
    )  # fmt: skip
    packed = torch.randint(0, 256, (tokens, geometry.hidden // 2), dtype=torch.uint8)
    scale = torch.randint(0, 0x78, (tokens, geometry.hidden // 16), dtype=torch.uint8)
    yield Work(
        ops.STAGING, f"{2 * packed.numel():,} elements", 0.0,
        3.0 * packed.numel() + scale.numel(), "f32",
        lambda: fp8_staging.stage_rows(packed, scale),
    )  # fmt: skip

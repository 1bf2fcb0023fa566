"""Work to time on a GPU: the kernels at M3's sizes.

FLOPs are those of matrix products alone, 2 for a multiplication and its addition. Bytes are what
has to come from memory and go there once.

Dimensions: T query tokens, S keys, H query heads, G KV heads, D head dimension, M hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mmq.kernels.kv_pages import KvFormat, PagedCache, PageLayout, TokenBatch
from mmq.kernels.reference.moe import Mlp, Mxfp8Weight
from mmq.kernels.reference.qkv_rope import Destination, HeadNorms, rope_tables
from mmq.verify.kernels import operations as ops
from mmq.verify.kernels.geometry import Geometry
from mmq.verify.kernels.peaks import Format


class Work(NamedTuple):
    """One thing to time.

    Attributes:
        format: of the operands of its matrix products, which decides the peak.
    """

    op: str
    shape: str
    flops: float
    nbytes: float
    format: Format
    run: Callable[[], object]


class Load(NamedTuple):
    """How much of it: tokens of a prefill, sequences of a decode, and their context."""

    prefill: int
    sequences: int
    context: int
    experts: int


#: What a GPU is given: a prefill chunk, a decode batch, 32,768 tokens of context.
GPU_LOAD = Load(prefill=2048, sequences=64, context=32768, experts=128)


def kernel_work(geometry: Geometry, load: Load, device: torch.device) -> Iterator[Work]:
    """The kernels, one after the other: each frees what it needed before the next is made."""
    generator = torch.Generator(device).manual_seed(0)
    yield _staging(geometry, load, generator)
    for format in ops.FORMATS:
        for tokens in (load.sequences, load.prefill):
            yield _scores(geometry, load, tokens, format, generator)
    for kind in ops.ATTENTION:
        for cache in ops.CACHES:
            yield _attention(geometry, load, kind, cache, generator)
    for format in ops.FORMATS:
        yield _writing(geometry, load, format, generator)
    for tokens in (load.sequences, load.prefill):
        yield _projection(geometry, tokens, generator)
        yield _router(geometry, tokens, generator)
        for activations in ("bf16", "nvfp4"):
            yield _experts(geometry, load, tokens, activations, generator)


def _normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, device=generator.device)


def _codes(generator: torch.Generator, *shape: int, low: int = 0, high: int = 256) -> Tensor:
    where = {"generator": generator, "device": generator.device}
    return torch.randint(low, high, shape, dtype=torch.uint8, **where)  # type: ignore[call-overload, no-any-return]


def _staging(geometry: Geometry, load: Load, generator: torch.Generator) -> Work:
    from mmq.kernels.triton import fp8_staging

    rows, columns = load.prefill * 8, geometry.hidden
    packed = _codes(generator, rows, columns // 2)
    scale = _codes(generator, rows, columns // 16, high=0x78)
    elements = rows * columns
    return Work(
        ops.STAGING, f"{elements:,} elements", 0.0, elements * (1 / 2 + 1 / 16 + 1), "fp8",
        lambda: fp8_staging.stage_fp8(packed, scale),
    )  # fmt: skip


class _Pages(NamedTuple):
    cache: PagedCache
    batch: TokenBatch
    lengths_Q: Tensor


def _pages(
    geometry: Geometry, layout: PageLayout, sequences: int, tokens: int, context: int,
    generator: torch.Generator,
) -> _Pages:  # fmt: skip
    """Sequences of `context` keys whose last `tokens` are queries, pages in any order."""
    device = generator.device
    blocks = -(-context // geometry.block)
    order_P = torch.randperm(sequences * blocks, generator=generator, device=device)
    # Bytes that are numbers in every format: BF16 of about 1, E4M3 of 1.5 and more.
    bytes_PZ = _codes(generator, sequences * blocks, layout.page_bytes, low=0x38, high=0x40)
    one_T = torch.arange(context - tokens, context, dtype=torch.int32, device=device)
    sequence_T = torch.arange(sequences, device=device).repeat_interleave(tokens).int()
    table_QN = order_P.int().reshape(sequences, blocks)
    batch = TokenBatch(one_T.repeat(sequences), sequence_T, table_QN)
    lengths_Q = torch.full((sequences,), context, dtype=torch.int32, device=device)
    return _Pages(PagedCache(layout, bytes_PZ, 0.01, 0.02), batch, lengths_Q)


def _scores(
    geometry: Geometry, load: Load, tokens: int, format: KvFormat, generator: torch.Generator
) -> Work:
    from mmq.kernels.triton import block_selection

    decode = tokens == load.sequences
    sequences, each = (tokens, 1) if decode else (1, tokens)
    layout = PageLayout(format, 1, geometry.block, geometry.dim, sides=1)
    pages = _pages(geometry, layout, sequences, each, load.context, generator)
    heads = geometry.kv_heads
    q_TGE = _normal(generator, tokens, heads, geometry.dim).bfloat16()

    def run() -> Tensor:
        scores_GTN = block_selection.score_pages(q_TGE, *pages)
        selection: Tensor = block_selection.select_blocks(
            scores_GTN, pages.batch.positions_T, block=geometry.block, top_k=geometry.top_k
        )
        return selection

    return Work(
        ops.selection_op(format), f"{tokens:,} tokens of {sequences} × {load.context:,} keys",
        2.0 * tokens * heads * load.context * geometry.dim,
        pages.cache.pages_PZ.numel() + tokens * heads * load.context / geometry.block * 4 * 2,
        "bf16", run,
    )  # fmt: skip


def _attention(
    geometry: Geometry, load: Load, kind: str, cache: str, generator: torch.Generator
) -> Work:
    from mmq.kernels.triton import block_attention

    stored: KvFormat = "nvfp4" if cache.startswith("nvfp4") else cache  # type: ignore[assignment]
    decode = kind == "decode"
    sequences, each = (load.sequences, 1) if decode else (1, load.prefill)
    # All keys of a prefill's own tokens; chosen blocks out of the whole context.
    context = load.prefill if kind == "dense" else load.context
    layout = PageLayout(stored, geometry.kv_heads, geometry.block, geometry.dim)
    pages = _pages(geometry, layout, sequences, each, context, generator)
    tokens, seen = sequences * each, geometry.top_k * geometry.block
    q_THD = _normal(generator, tokens, geometry.heads, geometry.dim).bfloat16()
    selection_GTC = None
    if kind == "dense":
        pairs, read = each * (each + 1) / 2, float(pages.cache.pages_PZ.numel())
    else:
        selection_GTC = _chosen(geometry, tokens, context, generator)
        pairs = float(tokens * seen)
        whole = float(pages.cache.pages_PZ.numel())
        read = min(whole, tokens * geometry.top_k * layout.page_bytes)
    size = f"{tokens:,} tokens of {sequences} × {context:,} keys"
    return Work(
        ops.attention_op(kind, cache), size, 4.0 * pairs * geometry.heads * geometry.dim,
        read + 2 * q_THD.numel() * 2, "bf16",
        lambda: block_attention.attend_pages(
            q_THD, *pages, selection_GTC, staged=cache.endswith("staged")
        ),
    )  # fmt: skip


def _chosen(geometry: Geometry, tokens: int, context: int, generator: torch.Generator) -> Tensor:
    """Distinct blocks at random, all before the queries' own."""
    blocks = max(geometry.top_k, (context - tokens) // geometry.block)
    order = torch.rand(geometry.kv_heads, tokens, blocks, generator=generator,
                       device=generator.device).argsort(-1)  # fmt: skip
    return order[..., : geometry.top_k].int().contiguous()


def _writing(geometry: Geometry, load: Load, format: KvFormat, generator: torch.Generator) -> Work:
    from mmq.kernels.triton import kv_cache

    tokens = load.prefill
    layout = PageLayout(format, geometry.kv_heads, geometry.block, geometry.dim)
    pages = -(-tokens // geometry.block)
    cache = PagedCache(layout, _codes(generator, pages, layout.page_bytes), 0.01, 0.02)
    slots_T = torch.arange(tokens, device=generator.device)
    k, v = _normal(generator, 2, tokens, geometry.kv_heads, geometry.dim).bfloat16()
    return Work(
        ops.write_op(format), f"{tokens:,} tokens", 0.0, k.numel() * 4 + cache.pages_PZ.numel(),
        "bf16", lambda: kv_cache.write_pages(cache, slots_T, k, v),
    )  # fmt: skip


def _projection(geometry: Geometry, tokens: int, generator: torch.Generator) -> Work:
    from mmq.kernels.triton import qkv_rope

    row, device = geometry.row, generator.device
    w = qkv_rope.Mxfp8(
        _codes(generator, row.width, geometry.hidden, low=0x30, high=0x48),
        _codes(generator, row.width, geometry.hidden // 32, low=120, high=124),
    )
    x_TM = _normal(generator, tokens, geometry.hidden).bfloat16()
    pages = -(-tokens // geometry.block)
    layouts = (
        PageLayout("nvfp4", geometry.kv_heads, geometry.block, geometry.dim),
        PageLayout("nvfp4", 1, geometry.block, geometry.dim, sides=1),
    )
    caches = [PagedCache(each, _codes(generator, pages, each.page_bytes)) for each in layouts]
    positions_T = torch.arange(tokens, device=device)
    where = Destination(positions_T, caches[0], caches[1])
    ones = torch.zeros(4, geometry.dim, device=device).bfloat16()
    norms = HeadNorms(ones[0], ones[1], ones[2], ones[3])
    tables = rope_tables(positions_T, geometry.rotary_dim)
    out = tokens * row.width * 2
    return Work(
        ops.projection_op("bf16"), f"{tokens:,} tokens",
        2.0 * tokens * row.width * geometry.hidden,
        w.codes.numel() * 33 / 32 + x_TM.numel() * 2 + out, "bf16",
        lambda: qkv_rope.project_and_insert(x_TM, w, row, norms, tables, where),
    )  # fmt: skip


def _router(geometry: Geometry, tokens: int, generator: torch.Generator) -> Work:
    from mmq.kernels.triton import router

    x_TM = _normal(generator, tokens, geometry.hidden).bfloat16()
    gate_EM = _normal(generator, geometry.experts, geometry.hidden) * 0.02
    bias_E = _normal(generator, geometry.experts)
    return Work(
        ops.ROUTER, f"{tokens:,} tokens", 2.0 * tokens * geometry.experts * geometry.hidden,
        x_TM.numel() * 2 + gate_EM.numel() * 4 + tokens * geometry.experts * 4, "f32",
        lambda: router.route(x_TM, gate_EM, bias_E, top_k=geometry.top_experts),
    )  # fmt: skip


def _experts(
    geometry: Geometry, load: Load, tokens: int, activations: str, generator: torch.Generator
) -> Work:
    from mmq.kernels.triton import moe, router

    width, inner, experts = geometry.hidden, geometry.inner, load.experts
    device = generator.device
    ones_E = torch.ones(experts, device=device)

    def stack(rows: int, columns: int) -> Any:
        return moe.Stack(
            _codes(generator, experts, rows, columns // 2),
            _codes(generator, experts, rows, columns // 16, low=0x28, high=0x40),
            ones_E * columns**-0.5, ones_E,
        )  # fmt: skip

    def shared(rows: int, columns: int) -> Mxfp8Weight:
        return Mxfp8Weight(
            _codes(generator, rows, columns, low=0x30, high=0x48),
            _codes(generator, rows, columns // 32, low=118, high=122),
        )

    shapes = (inner, width), (inner, width), (width, inner)
    mlp = Mlp(*(shared(*shape) for shape in shapes))
    gate, up, down = (stack(*shape) for shape in shapes)
    layer = moe.Layer(gate, up, down, 1.0, mlp)
    x_TM = _normal(generator, tokens, width).bfloat16()
    gate_EM = _normal(generator, experts, width) * 0.02
    routing = router.route(x_TM, gate_EM, None, top_k=geometry.top_experts)
    reached = len(torch.unique(routing.experts_TK))
    one = 3.0 * width * inner
    native = activations == "nvfp4"
    return Work(
        ops.W4A4 if native else ops.W4A16, f"{tokens:,} tokens, {reached} of {experts} experts",
        2.0 * tokens * (geometry.top_experts + 1) * one,
        reached * one * 9 / 16 + one * 33 / 32 + 2 * x_TM.numel() * 2,
        "nvfp4" if native else "bf16",
        lambda: moe.moe(x_TM, routing, layer, activations=activations),
    )  # fmt: skip

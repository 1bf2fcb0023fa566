"""Norm, RoPE and the packed row: the reference against its formulas, splits by rank, writes."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from tolerances import gamma, norm_error

from mmq.kernels.kv_pages import PagedCache, PageLayout
from mmq.kernels.reference.kv_cache import read_pages
from mmq.kernels.reference.qkv_rope import (
    Destination,
    HeadNorms,
    RowLayout,
    apply_rope,
    encode_queries,
    gemma_norm,
    project_heads,
    project_rows,
    rope_tables,
    split_row,
    write_heads,
)

M3 = RowLayout()
DENSE = RowLayout(index_heads=0)
NAMES = ("q_D", "k_D", "index_q_E", "index_k_E")


def norms(layout=M3, seed=3):
    generator = torch.Generator().manual_seed(seed)
    dims = [layout.dim] * 2 + [layout.index_dim] * 2 * bool(layout.index_heads)
    return HeadNorms(*(torch.randn(d, generator=generator).bfloat16() * 0.3 for d in dims))


def row(tokens, layout=M3, seed=4):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, layout.width, generator=generator).bfloat16()


def test_the_four_numbers():
    n_T1D = gemma_norm(torch.tensor([[[3.0, 4.0, 0.0, 0.0]]]), torch.zeros(4), 0.0)
    assert torch.equal(n_T1D, torch.tensor([[[3.0, 4.0, 0.0, 0.0]]]) * torch.tensor(1 / 2.5))
    a, b, *rest = apply_rope(n_T1D, *rope_tables(torch.tensor([1]), 2)).flatten().tolist()
    assert (round(a, 3), round(b, 3), rest) == (-0.698, 1.874, [0, 0])


def root(x: Fraction) -> Fraction:
    """√x to 60 digits."""
    digits = 10**120
    return Fraction(math.isqrt(x.numerator * digits // x.denominator), 10**60)


@pytest.mark.parametrize("gemma", [True, False])
@pytest.mark.parametrize(("dim", "depth"), [(128, 7), (96, 7), (5, 4)])
def test_norm_in_rational_arithmetic(dim, depth, gemma):
    """96 = 2^5 · 3 and 5 have sums that go on from left to right."""
    generator = torch.Generator().manual_seed(dim)
    weight = torch.randn(dim, generator=generator).bfloat16()
    eps = 1e-6
    exact_eps = Fraction(float(np.float32(eps)))
    for size in (1e-6, 1e-3, 1.0, 1e9):
        x_D = torch.randn(dim, generator=generator).bfloat16() * size
        exact_D = [Fraction(x) for x in x_D.tolist()]
        r = root(sum(x * x for x in exact_D) / dim + exact_eps)
        got_D = gemma_norm(x_D, weight, eps, gemma).tolist()
        for x, w, got in zip(exact_D, weight.tolist(), got_D, strict=True):
            want = x / r * (Fraction(w) + gemma)
            assert abs(Fraction(got) - want) <= abs(want) * Fraction(norm_error(depth))


def test_sums_add_neighbours_first():
    """2^24 + 1 + 1 is 2^24 from left to right, and 2^24 + 2 if the ones are added first."""
    x_D = torch.tensor([4096.0, 0.0, 1.0, 1.0])
    assert (2.0**24 + 1) + 1 == 2.0**24 + 2 != np.float32(2.0**24) + np.float32(1)
    mean = (2.0**24 + 2) / 4
    n_D = gemma_norm(x_D, torch.zeros(4), 0.0)
    assert n_D[2] == torch.tensor(1.0) / torch.tensor(mean).sqrt()
    odd_D = torch.tensor([1.0, 1.0, 4096.0])
    assert gemma_norm(odd_D, torch.zeros(3), 0.0)[0] == 1 / torch.tensor((2**24 + 2) / 3).sqrt()


def test_bf16_and_f32_inputs_are_the_same_numbers():
    x, w = row(3)[:, :128], norms().q_D
    assert torch.equal(gemma_norm(x, w, 1e-6), gemma_norm(x.float(), w.float(), 1e-6))


def test_turning_leaves_position_zero_and_the_rest():
    x_THD = torch.randn(5, 2, 128, generator=torch.Generator().manual_seed(5))
    positions = torch.tensor([0, 1, 4095, 524_288, 1_048_575])
    y_THD = apply_rope(x_THD, *rope_tables(positions))
    assert torch.equal(y_THD[0], x_THD[0])
    assert torch.equal(y_THD[..., 64:], x_THD[..., 64:])


def test_turning_is_complex_multiplication():
    """(a + ib)(cos t + i sin t) in F64, with the roundings of two products and a sum."""
    x_THD = torch.randn(4, 2, 128, generator=torch.Generator().manual_seed(6))
    cos, sin = rope_tables(torch.tensor([3, 129, 65_536, 1_000_000]))
    pair, turn = torch.complex(*x_THD[..., :64].double().chunk(2, -1)), torch.complex(cos, sin)
    want = pair * turn.to(torch.complex128)[:, None]
    got = torch.complex(*apply_rope(x_THD, cos, sin)[..., :64].double().chunk(2, -1))
    for side in ("real", "imag"):
        products = (pair.real * getattr(turn, side)[:, None]).abs()
        other = "imag" if side == "real" else "real"
        products += (pair.imag * getattr(turn, other)[:, None]).abs()
        assert ((getattr(got, side) - getattr(want, side)).abs() <= gamma(2) * products).all()


@pytest.mark.parametrize("layout", [M3, DENSE], ids=["sparse", "dense"])
def test_parts_of_the_row(layout):
    """Every column is one part's, in order, and V is the row's own."""
    row_TZ = torch.arange(layout.width, dtype=torch.float32)[None] + 1
    parts = list(split_row(row_TZ, layout))
    assert torch.equal(torch.cat([p.flatten() for p in parts]), row_TZ[0])
    assert [p.shape[1] for p in parts] == [64, 4, 4, layout.index_heads, bool(layout.index_heads)]
    heads = project_heads(row_TZ, layout, norms(layout), torch.tensor([9]))
    assert torch.equal(heads.v_TGD, parts[2])
    assert (heads.index_q_TGE is None) == (heads.index_k_TE is None) == (layout == DENSE)


def test_heads_are_independent():
    """A head's numbers come from its own columns and its part's weight."""
    row_TZ, positions = row(2), torch.tensor([5, 70_000])
    before = project_heads(row_TZ, M3, norms(), positions)
    changed = row_TZ.clone()
    changed[:, 65 * 128 : 66 * 128] += 1  # the second KV head's K
    after = project_heads(changed, M3, norms(), positions)
    different = [
        (x != y).flatten(2).any(2).any(0) for x, y in zip(before[:4], after[:4], strict=True)
    ]
    assert [d.nonzero().flatten().tolist() for d in different] == [[], [1], [], []]
    assert torch.equal(before.index_k_TE, after.index_k_TE)


def test_zero_tokens():
    heads = project_heads(row(0), M3, norms(), torch.zeros(0, dtype=torch.int32))
    assert [x.shape for x in heads] == [
        (0, 64, 128),
        (0, 4, 128),
        (0, 4, 128),
        (0, 4, 128),
        (0, 128),
    ]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_have_slices(ranks):
    row_TZ, positions = row(3), torch.tensor([0, 127, 1_048_575])
    whole = project_heads(row_TZ, M3, norms(), positions)
    own = M3.shard(ranks)
    for rank in range(ranks):
        columns = M3.shard_columns(rank, ranks)
        assert len(columns) == own.width
        part = project_heads(row_TZ[:, columns], own, norms(), positions)
        for got, all_heads in zip(part[:4], whole[:4], strict=True):
            n = all_heads.shape[1] // ranks
            assert torch.equal(got, all_heads[:, rank * n : (rank + 1) * n])
        assert torch.equal(part.index_k_TE, whole.index_k_TE)


def test_ranks_cover_every_column():
    columns = torch.cat([M3.shard_columns(rank, 4) for rank in range(4)])
    counts = torch.bincount(columns, minlength=M3.width)
    assert (counts[: M3.starts[4]] == 1).all()
    assert (counts[M3.starts[4] :] == 4).all()


def test_rows_of_the_projection():
    """Integers whose sums F32 holds: any order gives them, and BF16 rounds each once."""
    generator = torch.Generator().manual_seed(7)
    x_TM = torch.randint(-8, 9, (5, 96), generator=generator).bfloat16()
    w_ZM = torch.randint(-8, 9, (40, 96), generator=generator).bfloat16()
    exact = (x_TM.long() @ w_ZM.long().T).float().bfloat16()
    assert torch.equal(project_rows(x_TM, w_ZM), exact)
    assert project_rows(x_TM, w_ZM).dtype == torch.bfloat16


def test_queries_saturate():
    q = torch.tensor([0.0, -0.0, 1.0, 449.0, -1e9, 465.0])
    assert encode_queries(q, "fp8").tolist() == [0x00, 0x80, 0x38, 0x7E, 0xFE, 0x7E]
    assert encode_queries(q, "bf16").dtype == torch.bfloat16


def destination(slots_T, format="bf16", layout=M3, order="linear", pages=3):
    """Caches of 0xEE bytes."""

    def cache(page):
        pages_PZ = torch.full((pages, page.page_bytes), 0xEE, dtype=torch.uint8)
        return PagedCache(page, pages_PZ, 0.02, 0.3)

    main = cache(PageLayout(format, layout.kv_heads, v_scale_order=order))
    index = cache(PageLayout(format, 1, sides=1)) if layout.index_heads else None
    return Destination(slots_T, main, index, "bf16", "fp8")


def test_heads_are_where_slots_say():
    """Positions 130, 129 and 0 of a sequence whose blocks are pages 2 and 0; one goes nowhere."""
    heads = project_heads(row(4), M3, norms(), torch.tensor([130, 129, 7, 0]))
    where = destination(torch.tensor([2, 1, -1, 2 * 128]))
    q, index_q = write_heads(heads, where)
    assert torch.equal(q, heads.q_THD.bfloat16())
    assert torch.equal(index_q, encode_queries(heads.index_q_TGE, "fp8"))
    table_N = torch.tensor([2, 0])
    k_SGD, v_SGD = read_pages(where.cache, table_N, 131)
    keys_SGD, none = read_pages(where.index_cache, table_N, 131)
    assert none is None
    at = [130, 129, 0]
    for got, written in ((k_SGD, heads.k_TGD), (v_SGD, heads.v_TGD)):
        assert torch.equal(got[at], written[[0, 1, 3]].bfloat16().float())
    assert torch.equal(keys_SGD[at, 0], heads.index_k_TE[[0, 1, 3]].bfloat16().float())
    elements = where.cache.pages_PZ.view(torch.int16)
    poison = torch.tensor(0xEEEE - 0x10000, dtype=torch.int16)
    assert (elements != poison).sum() == 3 * 2 * 4 * 128


@pytest.mark.parametrize("format", ["fp8", "nvfp4"])
def test_order_of_scales_moves_bytes_alone(format):
    heads = project_heads(row(4), M3, norms(), torch.arange(4))
    read = []
    for order in ("linear", "quads"):
        where = destination(torch.arange(4), format, order=order)
        write_heads(heads, where)
        read.append(read_pages(where.cache, torch.tensor([0]), 4))
    assert all(torch.equal(x, y) for x, y in zip(*read, strict=True))


def test_heads_that_do_not_fit_the_caches():
    slots_T, positions = torch.arange(2), torch.arange(2)
    heads = project_heads(row(2), M3, norms(), positions)
    dense = project_heads(row(2, DENSE), DENSE, norms(DENSE), positions)
    for wrong, where, message in [
        (heads, destination(slots_T[:1]), "1 slots for 2 tokens"),
        (heads, destination(slots_T, layout=M3.shard(2)), "does not fit pages"),
        (heads, destination(slots_T, layout=DENSE), "index cache"),
        (dense, destination(slots_T), "index cache"),
    ]:
        with pytest.raises(ValueError, match=message):
            write_heads(wrong, where)
    other = destination(slots_T)
    keys = PagedCache(PageLayout("bf16", 1, tokens=64, sides=1), torch.zeros(1, 16384).byte())
    with pytest.raises(ValueError, match="index pages"):
        write_heads(heads, replace(other, index_cache=keys))


def test_weights_in_one_tensor():
    sparse, dense = norms(), norms(DENSE)
    assert torch.equal(
        sparse.stacked_5D[[0, 1, 3, 4]], torch.stack([*(vars(sparse)[n] for n in NAMES)])
    )
    assert (dense.stacked_5D[2:] == 0).all()
    with pytest.raises(ValueError, match="64"):
        _ = HeadNorms(torch.zeros(128), torch.zeros(64)).stacked_5D


def test_misfits_are_refused():
    with pytest.raises(ValueError, match="9856"):
        list(split_row(row(1, DENSE), M3))
    with pytest.raises(ValueError, match="8 ranks"):
        M3.shard(8)
    with pytest.raises(ValueError, match="10 query heads"):
        RowLayout(heads=10)

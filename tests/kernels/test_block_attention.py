"""Reference attention against exact attention in F64, torch's own, and itself in other forms."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from attention_cases import (
    M3,
    ODD_GROUP,
    SINGLE,
    SMALL,
    assert_close,
    assert_pages_close,
    choose_blocks,
    make_operands,
    make_paged,
    normal,
    visible,
)
from mutation import load_mutant
from tolerances import BF16, AttentionRoundings, attention_error

from mmq.kernels.kv_pages import PagedCache, PageLayout
from mmq.kernels.reference import block_attention as reference
from mmq.kernels.reference.kv_cache import read_pages

ROUNDINGS = AttentionRoundings()

forms = pytest.mark.parametrize("masked_keys", [0, 1e9], ids=["blocks", "masked"])
selections = pytest.mark.parametrize("selected", [False, True], ids=["all", "chosen"])


def test_four_numbers():
    k_SGD, v_SGD = (torch.tensor(x).view(4, 1, 1) for x in ([0.0, 9, 0.5, 1], [7.0, 7, 1, 5]))
    out, lse = reference.attend_with_lse(
        torch.tensor([[[2.0]]]), k_SGD, v_SGD, torch.tensor([3]), torch.tensor([[[1]]]),
        block=2, scale=1.0,
    )  # fmt: skip
    assert out.item() == pytest.approx((math.exp(-1) + 5) / (math.exp(-1) + 1))
    assert lse.item() == pytest.approx(2 + math.log(math.exp(-1) + 1))


@selections
@forms
@pytest.mark.parametrize(
    ("geometry", "keys", "positions"),
    [
        (SMALL, 200, range(200)),
        (SMALL, 77, [76, 0, 31, 32, 15, 16]),
        (SINGLE, 50, range(50)),
        (ODD_GROUP, 83, range(3, 83, 5)),
        (M3, 300, [0, 127, 128, 299]),
    ],
    ids=["small", "unordered", "single", "odd group", "M3"],
)
def test_exact_attention(monkeypatch, geometry, keys, positions, masked_keys, selected):
    monkeypatch.setattr(reference, "MASKED_KEYS", masked_keys)
    operands = make_operands(geometry, keys, list(positions))
    selection_GTC = choose_blocks(geometry, operands.positions_T) if selected else None
    visible_GTS = visible(geometry, keys, operands.positions_T, selection_GTC)
    got_THD = reference.attend(*operands, selection_GTC, block=geometry.block)
    assert_close(got_THD, operands, visible_GTS, geometry.dim**-0.5, ROUNDINGS)


def test_long_context_at_m3_geometry():
    """More than 16 blocks, so that some are not chosen; a partial block at the end."""
    operands = make_operands(M3, 2500, [2499, 2303, 2304, 2048, 130])
    selection_GTC = choose_blocks(M3, operands.positions_T)
    visible_GTS = visible(M3, 2500, operands.positions_T, selection_GTC)
    assert visible_GTS[:, 0].sum(1).tolist() == [15 * 128 + 68] * 4
    got_THD = reference.attend(*operands, selection_GTC)
    assert_close(got_THD, operands, visible_GTS, 128**-0.5, ROUNDINGS)
    dense_GTS = visible(M3, 2500, operands.positions_T)
    with pytest.raises(AssertionError):
        assert_close(got_THD, operands, dense_GTS, 128**-0.5, ROUNDINGS)


def test_context_that_all_blocks_cover_is_dense():
    """16 blocks of 128 are all of 2,048 tokens: the same keys, and the same bits where masked."""
    operands = make_operands(M3, 2048, [2047, 2046, 1920, 1919, 5])
    blocks_N = torch.arange(16)
    selection_GTC = blocks_N.where(blocks_N <= operands.positions_T[:, None] // 128, -1)
    for chosen_TC in selection_GTC.expand(4, -1, -1):
        sparse_TS = reference.visible_keys(operands.positions_T, 2048, chosen_TC)
        assert torch.equal(sparse_TS, reference.visible_keys(operands.positions_T, 2048))
    sparse_THD = reference.attend(*operands, selection_GTC.expand(4, -1, -1))
    assert torch.equal(sparse_THD, reference.attend(*operands))


def test_torch_attention():
    """`scaled_dot_product_attention` with the mask written out shares no code with us."""
    operands = make_operands(SMALL, 150, range(150))
    selection_GTC = choose_blocks(SMALL, operands.positions_T)
    visible_GTS = visible(SMALL, 150, operands.positions_T, selection_GTC)
    q_HTD, k_GSD, v_GSD = (x.transpose(0, 1) for x in operands[:3])
    theirs_HTD = torch.nn.functional.scaled_dot_product_attention(
        q_HTD[None], k_GSD[None], v_GSD[None], visible_GTS.repeat_interleave(4, 0)[None],
        enable_gqa=True,
    )[0]  # fmt: skip
    ours_THD = reference.attend(*operands, selection_GTC, block=16)
    bound_THD = attention_error(*operands[:3], visible_GTS, 32**-0.5, ROUNDINGS)
    assert ((ours_THD - theirs_HTD.transpose(0, 1)).abs() <= 2 * bound_THD).all()


def test_order_and_padding_of_a_selection_do_not_matter():
    operands = make_operands(SMALL, 200, range(100, 200))
    selection_GTC = choose_blocks(SMALL, operands.positions_T)
    padded_GTC = torch.full((2, 100, 9), -1, dtype=torch.int32)
    padded_GTC[..., 1::2] = selection_GTC.sort(-1, descending=True).values
    visible_GTS = visible(SMALL, 200, operands.positions_T, selection_GTC)
    for chosen_GTC in (selection_GTC, padded_GTC):
        got_THD = reference.attend(*operands, chosen_GTC, block=16)
        assert_close(got_THD, operands, visible_GTS, 32**-0.5, ROUNDINGS)


@selections
def test_tokens_at_a_time_do_not_matter(monkeypatch, selected):
    monkeypatch.setattr(reference, "SCORES", 1000)
    operands = make_operands(SMALL, 200, torch.randperm(200))
    selection_GTC = choose_blocks(SMALL, operands.positions_T) if selected else None
    visible_GTS = visible(SMALL, 200, operands.positions_T, selection_GTC)
    got_THD = reference.attend(*operands, selection_GTC, block=16)
    assert_close(got_THD, operands, visible_GTS, 32**-0.5, ROUNDINGS)


@forms
def test_the_only_visible_key_is_the_token_itself(monkeypatch, masked_keys):
    """Position 0, and the first token of a block that chose its own block alone."""
    monkeypatch.setattr(reference, "MASKED_KEYS", masked_keys)
    operands = make_operands(SMALL, 100, [0, 16, 96])
    selection_GTC = torch.tensor([0, 1, 6])[None, :, None].expand(2, -1, -1)
    got_TGRD = reference.attend(*operands, selection_GTC, block=16).view(3, 2, 4, 32)
    assert torch.equal(got_TGRD, operands.v_SGD[[0, 16, 96], :, None].expand_as(got_TGRD))


@forms
def test_a_query_that_sees_nothing(monkeypatch, masked_keys):
    monkeypatch.setattr(reference, "MASKED_KEYS", masked_keys)
    operands = make_operands(SMALL, 40, [20, 39])
    selection_GTC = torch.tensor([[[-1, 2], [-1, 1]]] * 2)  # block 2 lies behind position 20
    out_THD, lse_TH = reference.attend_with_lse(*operands, selection_GTC, block=16)
    assert (out_THD[0] == 0).all() and (lse_TH[0] == -torch.inf).all()
    assert out_THD[1].isfinite().all() and lse_TH[1].isfinite().all()


def test_no_tokens_and_no_keys():
    assert reference.attend(*make_operands(SMALL, 40, [])).shape == (0, 8, 32)
    assert (reference.attend(*make_operands(SMALL, 0, [0])) == 0).all()


def test_type_of_the_output():
    operands = make_operands(SMALL, 40, [39])
    f32_THD = reference.attend(*operands)
    q_THD = operands.q_THD.bfloat16()
    assert f32_THD.dtype == torch.float32
    assert torch.equal(reference.attend(q_THD, *operands[1:]), f32_THD.bfloat16())
    assert torch.equal(reference.attend(q_THD, *operands[1:], dtype=torch.float32), f32_THD)


def test_heads_that_do_not_divide():
    with pytest.raises(ValueError, match="8 query heads are no multiple of 3"):
        reference.attend(normal(1, 8, 16), normal(4, 3, 16), normal(4, 3, 16), torch.tensor([0]))


def test_merging_parts():
    """Keys dealt out to parts by their block: the merged output is that of all keys."""
    operands = make_operands(SMALL, 100, range(60, 100))
    parts = [
        reference.attend_with_lse(*operands, torch.tensor(blocks).expand(2, 40, -1), block=16)
        for blocks in ([0, 3], [1], [6, 5], [-1], [2, 4])  # block 6 is seen by some tokens only
    ]
    out_XTHD, lse_XTH = (torch.stack(x) for x in zip(*parts, strict=True))
    out_XTHD[lse_XTH == -torch.inf] = torch.nan
    merged_THD, lse_TH = reference.merge_partials(out_XTHD, lse_XTH)
    dense_GTS = visible(SMALL, 100, operands.positions_T)
    roundings = AttentionRoundings(parts=5)
    assert_close(merged_THD, operands, dense_GTS, 32**-0.5, roundings)
    whole = reference.attend_with_lse(*operands, block=16)[1]
    assert torch.allclose(lse_TH, whole, rtol=0, atol=20 * 2.0**-24 * whole.abs().max().item())
    nothing = reference.merge_partials(out_XTHD[3:4], lse_XTH[3:4])
    assert (nothing[0] == 0).all() and (nothing[1] == -torch.inf).all()


@selections
@pytest.mark.parametrize("order", ["linear", "quads"])
@pytest.mark.parametrize("format", ["bf16", "fp8", "nvfp4", "nvfp4 staged"])
def test_pages(format, order, selected):
    format, staged = format.split()[0], "staged" in format
    paged = make_paged(SMALL, format, [70, 1, 33, 0, 48], [9, 1, 2, 0, 0], order)
    selection_GTC = paged.selection_GTC if selected else None
    got_THD = reference.attend_pages(
        *paged.arguments, selection_GTC, staged=staged, dtype=torch.float32
    )
    assert_pages_close(got_THD, SMALL, paged, ROUNDINGS, selected=selected, staged=staged)


def test_pages_of_no_tokens_and_of_one_side():
    paged = make_paged(SMALL, "fp8", [20, 40], [0, 0])
    assert reference.attend_pages(*paged.arguments).shape == (0, 8, 32)
    layout = PageLayout("fp8", 2, 16, 32, sides=1)
    keys = PagedCache(layout, torch.zeros(8, layout.page_bytes, dtype=torch.uint8))
    paged = make_paged(SMALL, "fp8", [20], [1])
    with pytest.raises(ValueError, match="hold no V"):
        reference.attend_pages(paged.q_THD, keys, *paged.arguments[2:])


def test_positions_behind_the_length_are_not_visible():
    paged = make_paged(SMALL, "bf16", [40], [8])
    shorter_Q = torch.tensor([35], dtype=torch.int32)
    got_THD = reference.attend_pages(*paged[:3], shorter_Q)
    before = dataclasses.replace(paged.batch, positions_T=paged.batch.positions_T.clamp(max=34))
    wanted_THD = reference.attend_pages(*paged[:2], before, paged.lengths_Q)
    assert torch.equal(got_THD, wanted_THD)


@pytest.mark.parametrize("format", ["bf16", "fp8", "nvfp4", "nvfp4 staged"])
def test_elements_are_exact_in_bf16(format):
    """What kernels multiply; the tensor's scales are apart."""
    paged = make_paged(SMALL, format.split()[0], [160], [1])
    unit = PagedCache(paged.cache.layout, paged.cache.pages_PZ)
    table_N = paged.batch.page_table_QN[0]
    for x_SGD in read_pages(unit, table_N, 160, staged="staged" in format):
        assert torch.equal(x_SGD.bfloat16().float(), x_SGD)


def check(module):
    """A few of the comparisons above, of both forms, pages and merging."""
    operands = make_operands(SMALL, 100, range(1, 100, 3))
    selection_GTC = choose_blocks(SMALL, operands.positions_T)
    visible_GTS = visible(SMALL, 100, operands.positions_T, selection_GTC)
    for module.MASKED_KEYS in (0, 1e9):
        got_THD = module.attend(*operands, selection_GTC, block=16)
        assert_close(got_THD, operands, visible_GTS, 32**-0.5, ROUNDINGS)
    blocks = [torch.tensor(b).expand(2, 33, -1) for b in ([0, 1, 2], [3, 4], [5, 6])]
    parts = zip(*(module.attend_with_lse(*operands, b, block=16) for b in blocks), strict=True)
    merged_THD = module.merge_partials(*(torch.stack(part) for part in parts))[0]
    dense_GTS = visible(SMALL, 100, operands.positions_T)
    assert_close(merged_THD, operands, dense_GTS, 32**-0.5, AttentionRoundings(parts=3))
    paged = make_paged(SMALL, "nvfp4", [70, 33, 48], [9, 2, 1], "quads")
    got_THD = module.attend_pages(*paged.arguments, paged.selection_GTC, dtype=torch.float32)
    assert_pages_close(got_THD, SMALL, paged, ROUNDINGS, selected=True)


def test_the_check_passes():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "MASKED_KEYS", reference.MASKED_KEYS)
        check(reference)


MUTANTS = {
    "not itself": ("key_S <= positions_T[:, None]", "key_S < positions_T[:, None]"),
    "the next too": ("key_S <= positions_T[:, None]", "key_S - 1 <= positions_T[:, None]"),
    "no mask inside chosen blocks": ("key_TCB > positions_T[:, None, None]", "key_TCB < -999"),
    "blocks count from 1": ("chosen_TN[:, key_S // block]", "chosen_TN[:, (key_S + 1) // block]"),
    "selection of g − 1": ("selection_GTC[g, now].long()", "selection_GTC[g - 1, now].long()"),
    "values of g − 1": ("v_GSD[g, :keys]", "v_GSD[g - 1, :keys]"),
    "scale 1/D": ("dim**-0.5 if scale is None else scale)", "1 / dim if scale is None else scale)"),
    "query heads dealt out": (
        "q_THD.reshape(tokens, kv_heads, heads // kv_heads, dim)",
        "q_THD.reshape(tokens, -1, kv_heads, dim).transpose(1, 2)",
    ),
    "merged without weights": ("(weight_XTH[..., None] * part_XTHD).sum(0)", "part_XTHD.mean(0)"),
    "K's scale ignored": ("scale=scale * k_scale", "scale=scale"),
    "V's scale ignored": ("v_scale * attend(", "1.0 * attend("),
    "V's scales in the other order": (
        "dataclasses.replace(cache, k_scale=1.0, v_scale=1.0)",
        "PagedCache(dataclasses.replace(layout, v_scale_order='linear'), cache.pages_PZ)",
    ),
    "a row of another sequence": ("batch.page_table_QN[sequence]", "batch.page_table_QN[0]"),
}  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS)
def test_planted_mistakes_are_found(mutant, tmp_path):
    module = load_mutant(reference, *MUTANTS[mutant], tmp_path)
    with pytest.raises((AssertionError, ValueError)):
        check(module)


def test_bound_tells_bf16_probabilities():
    """The bound of F32 is worst-case, yet too narrow for an implementation that rounds more."""
    operands = make_operands(SMALL, 200, range(200))
    visible_GTS = visible(SMALL, 200, operands.positions_T)
    score_GTRS = torch.einsum("tgrd,sgd->gtrs", operands.q_THD.view(200, 2, 4, 32), operands.k_SGD)
    p_GTRS = (32**-0.5 * score_GTRS).masked_fill(~visible_GTS[:, :, None], -torch.inf).softmax(-1)
    rough_THD = torch.einsum("gtrs,sgd->tgrd", p_GTRS.bfloat16().float(), operands.v_SGD)
    rough_THD = rough_THD.flatten(1, 2)
    assert_close(rough_THD, operands, visible_GTS, 32**-0.5, AttentionRoundings(p=BF16))
    with pytest.raises(AssertionError):
        assert_close(rough_THD, operands, visible_GTS, 32**-0.5, ROUNDINGS)

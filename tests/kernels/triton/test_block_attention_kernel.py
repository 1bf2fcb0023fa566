"""The attention kernels in Triton's interpreter against exact attention, within their bound.

Dimensions: T query tokens, H query heads, G KV heads, D head dimension, X parts.
"""

from __future__ import annotations

import dataclasses
import functools
from contextlib import nullcontext

import pytest
import torch

pytest.importorskip("triton", reason="needs triton, which has wheels for Linux only")

import attention_runs
from attention_cases import (
    M3,
    ODD_GROUP,
    SINGLE,
    SMALL,
    Geometry,
    assert_pages_close,
    make_paged,
)
from tolerances import BF16, TRUNCATED, AttentionRoundings, merge_error

from mmq.kernels.kv_pages import PageLayout
from mmq.kernels.reference import block_attention as reference
from mmq.kernels.triton.block_attention import KEYS, supports

selections = pytest.mark.parametrize("selected", [False, True], ids=["all", "chosen"])


#: The least that shows every mistake.
TINY = Geometry(4, 2, 32, 16, 2)


def kernel_roundings(geometry, longest: int, splits: int = 1, out: float = 2.0**-24):
    """Of a kernel: its probabilities, its dots, and a new maximum with every tile of keys."""
    tiles = -(-longest // min(KEYS, geometry.block))
    return AttentionRoundings(BF16, TRUNCATED, out, tiles, splits)


@pytest.fixture
def attend(interpreted):
    """A function (geometry, paged, selected, **options): the kernels' output, found to be right."""

    def run(geometry, paged, selected, *, target="sm_90", **options):
        selection_GTC = paged.selection_GTC if selected else None
        call = functools.partial(attention_runs.attend, target=target, **options)
        got_THD = interpreted(call, paged.arguments, selection_GTC)
        longest, splits = int(paged.lengths_Q.max()), options.get("splits") or 16
        roundings = kernel_roundings(geometry, longest, splits)
        staged = options.get("staged", False)
        assert_pages_close(got_THD, geometry, paged, roundings, selected=selected, staged=staged)
        return got_THD

    return run


slow = pytest.mark.slow


@selections
@pytest.mark.parametrize(
    ("format", "order", "splits"),
    [
        ("bf16", "linear", 1),
        ("fp8", "linear", 3),
        ("nvfp4", "quads", 1),
        ("nvfp4 staged", "quads", 3),
        pytest.param("bf16", "linear", 3, marks=slow),
        pytest.param("fp8", "linear", 1, marks=slow),
        pytest.param("nvfp4", "linear", 1, marks=slow),
        pytest.param("nvfp4", "linear", 3, marks=slow),
        pytest.param("nvfp4", "quads", 3, marks=slow),
        pytest.param("nvfp4 staged", "linear", 1, marks=slow),
        pytest.param("nvfp4 staged", "quads", 1, marks=slow),
    ],
)
def test_ragged_batch(attend, format, order, splits, selected):
    """Odd lengths, one token, none; sequences that share a tile; pages in any order."""
    paged = make_paged(SMALL, format.split()[0], [37, 1, 19, 0, 32], [3, 1, 1, 0, 1], order)
    attend(SMALL, paged, selected, splits=splits, staged="staged" in format)


@selections
@pytest.mark.parametrize("geometry", [SINGLE, ODD_GROUP], ids=["single", "odd group"])
def test_groups_of_other_sizes(attend, geometry, selected):
    attend(geometry, make_paged(geometry, "fp8", [40], [3]), selected, splits=1)


@pytest.mark.parametrize("target", ["sm_100", "sm_107", "gfx950"])
def test_staging_of_other_targets(attend, target):
    paged = make_paged(SMALL, "nvfp4", [40], [2], "quads")
    attend(SMALL, paged, True, staged=True, target=target, splits=1)


def test_chosen_blocks_at_m3_geometry(attend):
    """2,500 tokens of context, 16 of 20 blocks, a partial block at the end, NVFP4."""
    paged = make_paged(M3, "nvfp4", [2500], [1], "quads")
    kernel_THD = attend(M3, paged, True)
    dense_THD = reference.attend_pages(*paged.arguments, dtype=torch.float32)
    assert (kernel_THD - dense_THD).abs().max() > 0.1 * dense_THD.abs().max()


def test_tile_of_all_keys_at_m3_geometry(attend):
    attend(M3, make_paged(M3, "fp8", [150, 70], [7, 2]), False, splits=1)


def test_context_that_all_blocks_cover(attend):
    """As many blocks as there are: chosen blocks and all keys within twice the bound."""
    paged = make_paged(SMALL, "fp8", [64], [3])
    blocks_N = torch.arange(4, dtype=torch.int32)
    local_T1 = paged.batch.positions_T[:, None] // 16
    every_GTC = blocks_N.where(blocks_N <= local_T1, -1).expand(2, -1, -1)
    attend(SMALL, paged._replace(selection_GTC=every_GTC), True, splits=1)
    attend(SMALL, paged, False, splits=1)


@selections
def test_decode_is_prefill(attend, selected):
    """Tokens of a sequence at once and one at a time, split: each within its bound of exact
    attention, and so within both of each other."""
    together = make_paged(SMALL, "fp8", [50], [2])
    attend(SMALL, together, selected, splits=1)
    for t in range(2):
        row = slice(t, t + 1)
        batch = dataclasses.replace(
            together.batch,
            positions_T=together.batch.positions_T[row],
            sequence_T=together.batch.sequence_T[row],
        )
        alone = together._replace(
            q_THD=together.q_THD[row], batch=batch, selection_GTC=together.selection_GTC[:, row]
        )
        attend(SMALL, alone, selected)


@selections
@pytest.mark.parametrize("splits", [2, 3, 7])
def test_splits_do_not_matter(attend, splits, selected):
    """More parts than blocks too: the rest see nothing."""
    attend(SMALL, make_paged(SMALL, "fp8", [70], [1]), selected, splits=splits)


@pytest.mark.parametrize("splits", [1, 2])
@selections
def test_the_only_visible_key_is_the_token_itself(attend, selected, splits):
    paged = make_paged(SMALL, "bf16", [1, 17], [1, 1])
    only_GTC = (paged.batch.positions_T // 16)[None, :, None].expand(2, -1, -1)
    got_THD = attend(SMALL, paged._replace(selection_GTC=only_GTC), selected, splits=splits)
    if selected:
        whole = reference.attend_pages(*paged.arguments, only_GTC, dtype=torch.float32)
        assert torch.equal(got_THD, whole)


@pytest.mark.parametrize("splits", [1, 2])
def test_tokens_that_see_nothing(interpreted, splits):
    """No block, and a block that lies behind the token: 0, as the reference has it."""
    paged = make_paged(SMALL, "fp8", [40], [2])
    nothing_GTC = torch.tensor([[-1, -1], [-1, 9]], dtype=torch.int32).expand(2, -1, -1)
    call = functools.partial(attention_runs.attend, splits=splits)
    assert (interpreted(call, paged.arguments, nothing_GTC) == 0).all()
    assert (reference.attend_pages(*paged.arguments, nothing_GTC) == 0).all()


@selections
def test_no_tokens(interpreted, selected):
    paged = make_paged(SMALL, "fp8", [40], [0])
    selection_GTC = paged.selection_GTC if selected else None
    for splits in (None, 2):
        call = functools.partial(attention_runs.attend, splits=splits)
        assert interpreted(call, paged.arguments, selection_GTC).shape == (0, 8, 32)


@selections
def test_positions_behind_the_length_are_not_visible(interpreted, selected):
    paged = make_paged(SMALL, "bf16", [36], [5])
    selection_GTC = paged.selection_GTC if selected else None
    shorter = *paged.arguments[:3], torch.tensor([33], dtype=torch.int32)
    before = dataclasses.replace(paged.batch, positions_T=paged.batch.positions_T.clamp(max=32))
    clamped = *paged.arguments[:2], before, paged.lengths_Q
    call = functools.partial(attention_runs.attend, splits=1)
    runs = [interpreted(call, arguments, selection_GTC) for arguments in (shorter, clamped)]
    assert torch.equal(*runs)


@pytest.mark.parametrize("splits", [1, 2])
def test_type_of_the_output(interpreted, splits):
    paged = make_paged(SMALL, "fp8", [40], [2])
    f32_THD, bf16_THD = (
        interpreted(
            functools.partial(attention_runs.attend, dtype=dtype, splits=splits),
            paged.arguments,
            paged.selection_GTC,
        )
        for dtype in (torch.float32, None)
    )
    assert bf16_THD.dtype == torch.bfloat16
    assert torch.equal(f32_THD.bfloat16(), bf16_THD)


def test_merging_parts(interpreted):
    """Weights from 1 to e^−90, parts that saw nothing and hold NaN, a token that none saw."""
    generator = torch.Generator().manual_seed(1)
    parts_XTHD = torch.randn(5, 3, 2, 16, generator=generator)
    lse_XTH = torch.randn(5, 3, 2, generator=generator) * 30
    lse_XTH[1], lse_XTH[:, 2, 1] = -torch.inf, -torch.inf
    parts_XTHD[lse_XTH == -torch.inf] = torch.nan
    got_THD = interpreted(attention_runs.merge, parts_XTHD, lse_XTH, 3.0)
    wanted_THD, _ = reference.merge_partials(parts_XTHD, lse_XTH)
    largest = parts_XTHD.nan_to_num().abs().amax(0)
    apart = 2 * merge_error(5, float(lse_XTH[lse_XTH.isfinite()].abs().max()))
    assert ((got_THD / 3 - wanted_THD).abs() <= apart * largest).all()
    assert (got_THD[2, 1] == 0).all()


@pytest.mark.parametrize(
    ("layout", "heads", "reason"),
    [
        (PageLayout("fp8", 3, 16, 32), 8, "8 query heads for 3 KV heads"),
        (PageLayout("fp8", 2, 16, 48), 8, "not 48, 16, 4"),
        (PageLayout("fp8", 2, 24, 32), 8, "not 32, 24, 4"),
        (PageLayout("fp8", 2, 8, 32), 8, "not 32, 8, 4"),
        (PageLayout("fp8", 1, 16, 32), 128, "not 32, 16, 128"),
        (PageLayout("fp8", 2, 16, 256), 8, "not 256, 16, 4"),
        (PageLayout("fp8", 2, 16, 32, sides=1), 8, "with K and V"),
    ],
)
def test_shapes_that_no_kernel_takes(layout, heads, reason):
    support = supports("sm_100", layout, heads=heads)
    assert not support.ok and reason in support.reason


def test_what_is_not_supported_is_refused(interpreted):
    paged = make_paged(SMALL, "bf16", [20], [1])
    for q_THD in (paged.q_THD.float(), paged.q_THD[..., :16], paged.q_THD[:, :7]):
        with pytest.raises(ValueError, match="no kernel for"):
            interpreted(attention_runs.attend, (q_THD, *paged.arguments[1:]))


#: A mistake, what it makes of the source, and the kernel and parts where it shows.
MUTANTS = {
    "not itself": (
        "inside_K = start + token_K <= last",
        "inside_K = start + token_K < last",
        "chosen",
        1,
    ),
    "no mask in a chosen block": (
        "inside_K = start + token_K <= last",
        "inside_K = start + token_K < FAR",
        "chosen",
        1,
    ),
    "selection of g − 1": (
        "(head.to(tl.int64) * tokens + token)",
        "((1 - head).to(tl.int64) * tokens + token)",
        "chosen",
        1,
    ),
    "scale times ln 2": (" * math.log2(math.e)", "", "all", 1),
    "output not rescaled": ("out_MD * shrink_M[:, None])", "out_MD)", "all", 1),
    "sum not rescaled": ("sum_M * shrink_M + ", "sum_M + ", "all", 1),
    "merged without weights": (
        "tl.exp2((lse_X - base) * LOG2_E)",
        "tl.where(lse_X > -1e30, 1.0, 0.0)",
        "all",
        2,
    ),
    "lse in base 2": ("(max_M + tl.log2(sum_M)) * LN_2", "max_M + tl.log2(sum_M)", "chosen", 2),
    "V's scales in the other order": ('order == "quads"', 'order != "quads"', "chosen", 1),
    "K's scale ignored": (" * _tensor_scale(cache, cache.k_scale)", "", "all", 1),
    "V's scale ignored": ("        out_MD *= v_scale\n", "        pass\n", "all", 1),
    "V's scale ignored, merged": (
        "tl.maximum(tl.sum(weight_X), 1.0) * v_scale",
        "tl.maximum(tl.sum(weight_X), 1.0)",
        "all",
        2,
    ),
    "a tile's tokens see each other": (
        "key_K[None, :] <= seen_M[:, None]",
        "key_K[None, :] <= last",
        "all",
        1,
    ),
    "other sequences' tokens too": (
        "tl.where(sequence_M == sequence, last_M, -1)",
        "last_M",
        "all",
        1,
    ),
    "what is not written is read": (
        "= key_K % B, key_K <= last",
        "= key_K % B, key_K < FAR",
        "all",
        1,
    ),
    "pages in order": (
        "tl.load(table + part // (B // KEYS)).to(tl.int64)",
        "wide(part // (B // KEYS))",
        "all",
        1,
    ),
    "query heads dealt out": (
        "* G + head) * R + m_M % ROWS",
        "* R + m_M % ROWS) * G + head",
        "all",
        1,
    ),
}
#: As right as the original.
MUTANTS |= {
    f"none: {kernel} in {splits}": ("FULL_DEVICE = 512", "FULL_DEVICE = 511", kernel, splits)
    for kernel in ("all", "chosen")
    for splits in (1, 2)
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_planted_mistakes_are_found(interpreted, tmp_path, mutant):
    *mistake, kernel, splits = MUTANTS[mutant]
    selected = kernel == "chosen"
    format = "nvfp4" if "other order" in mutant else "fp8"
    # As many pages each: a mistake is to give wrong numbers, not to read beside the memory.
    paged = make_paged(TINY, format, [50, 60], [1, 2], "quads")
    call = functools.partial(attention_runs.attend_wrongly, splits=splits)
    selection_GTC = paged.selection_GTC if selected else None
    got_THD = interpreted(call, mistake, tmp_path, paged.arguments, selection_GTC)
    roundings = kernel_roundings(TINY, 60, splits)
    right = "none" in mutant
    with nullcontext() if right else pytest.raises(AssertionError):
        assert_pages_close(got_THD, TINY, paged, roundings, selected=selected)

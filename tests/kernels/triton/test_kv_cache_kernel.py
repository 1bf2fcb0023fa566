"""KV cache kernels: the reference's bytes for the same F32 rows, its numbers back, sound code."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("triton", reason="needs triton, which has wheels for Linux only")

import kv_cache_runs as runs
import torch

from mmq.kernels.kv_pages import PagedCache, PageLayout
from mmq.kernels.reference import kv_cache as reference
from mmq.kernels.triton import fp8_staging, kv_cache
from mmq.kernels.triton.cross_compile import check
from mmq.kernels.triton.fp8_staging import PATHS
from mmq.kernels.triton.kv_cache import VARIANTS, supports
from mmq.kernels.triton.launch import TARGETS

UNTOUCHED, PAGES = 0xEE, 3
SCALES = float(np.float32(0.01)), float(np.float32(0.03))
FORMATS = ["nvfp4", "fp8", "bf16"]

MODULES = fp8_staging, kv_cache

layouts = pytest.mark.parametrize(
    "layout",
    [
        PageLayout("nvfp4"),
        PageLayout("nvfp4", v_scale_order="quads"),
        PageLayout("nvfp4", heads=1, sides=1),
        PageLayout("nvfp4", heads=2, tokens=16, dim=32, v_scale_order="quads"),
        PageLayout("fp8"),
        PageLayout("fp8", heads=1, sides=1),
        PageLayout("bf16", heads=2, tokens=16),
        PageLayout("bf16", heads=1, sides=1),
    ],
    ids=lambda p: f"{p.format}-{p.heads}x{p.tokens}x{p.dim}-{p.sides}-{p.v_scale_order}",
)


def empty(layout):
    return np.full((PAGES, layout.page_bytes), UNTOUCHED, np.uint8)


def rows(layout, tokens, seed=1):
    """K and V, F32 [T, G, D]; zeros, −0, tiny and huge numbers among them."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((2, tokens, layout.heads, layout.dim)).astype(np.float32)
    if tokens > 5:
        x[:, 1, :, :16] = 0
        x[:, 2, :, 16:32] *= 2.0**-40
        x[:, 3] *= 1e4
        x[:, 4] = -0.0
        x[:, 5] *= 2.0**-130
    return x[0], x[1] if layout.sides == 2 else None


def scattered(layout, tokens, seed=3):
    rng = np.random.default_rng(seed)
    slots = rng.permutation(PAGES * layout.tokens)[:tokens]
    return np.where(rng.random(len(slots)) > 1 / 3, slots, -1).astype(np.int64)


def by_reference(layout, slots, k, v):
    cache = PagedCache(layout, torch.from_numpy(empty(layout)), *SCALES)
    k, v = (None if x is None else torch.from_numpy(x) for x in (k, v))
    reference.write_pages(cache, torch.from_numpy(slots), k, v)
    return cache.pages_PZ.numpy()


@layouts
@pytest.mark.parametrize("tokens", [1, 37])
def test_pages_have_the_reference_bytes(interpreted, layout, tokens):
    k, v = rows(layout, tokens)
    slots = scattered(layout, tokens)
    pages = interpreted(runs.written, layout, empty(layout), slots, k, v, SCALES)
    np.testing.assert_array_equal(pages, by_reference(layout, slots, k, v))
    assert (pages == UNTOUCHED).any() and (tokens == 1 or (pages != UNTOUCHED).any())


@pytest.mark.parametrize("form", FORMATS)
def test_no_tokens_and_tokens_without_a_slot(interpreted, form):
    layout = PageLayout(form)
    for tokens in (0, 3):
        k, v = rows(layout, tokens)
        slots = np.full(tokens, -1, np.int64)
        pages = interpreted(runs.written, layout, empty(layout), slots, k, v, SCALES)
        assert (pages == UNTOUCHED).all()


@pytest.mark.parametrize("form", FORMATS)
def test_rows_in_bf16_and_at_a_stride(interpreted, form):
    """K and V as a projection leaves them: BF16, or columns of a wider row."""
    layout = PageLayout(form, heads=2, tokens=16, dim=64)
    k, v = (torch.from_numpy(x).bfloat16() for x in rows(layout, 21))
    slots = scattered(layout, 21)
    wanted = by_reference(layout, slots, k.float().numpy(), v.float().numpy())
    bits = (x.view(torch.int16).numpy() for x in (k, v))
    pages = interpreted(runs.written, layout, empty(layout), slots, *bits, SCALES)
    np.testing.assert_array_equal(pages, wanted)
    wide = np.full((21, 300), np.nan, np.float32)
    wide[:, 3:131], wide[:, -128:] = (x.float().flatten(1).numpy() for x in (k, v))
    pages = interpreted(runs.written_from_rows, layout, empty(layout), slots, wide, SCALES)
    np.testing.assert_array_equal(pages, wanted)


def filled(layout, seed=8):
    """Pages of every slot, and their bytes."""
    tokens = PAGES * layout.tokens
    return by_reference(layout, np.arange(tokens), *rows(layout, tokens, seed))


@layouts
@pytest.mark.parametrize("tokens", [0, 1, 37])
def test_reading_gives_the_reference_numbers(interpreted, layout, tokens):
    pages, table = filled(layout), np.array([2, 0, 1], np.int32)
    cache = PagedCache(layout, torch.from_numpy(pages), *SCALES)
    staged = [False, True] if layout.format == "nvfp4" else [False]
    for flag in staged:
        ours = interpreted(runs.read, layout, pages, table, tokens, SCALES, None, flag)
        wanted = reference.read_pages(cache, torch.from_numpy(table), tokens, staged=flag)
        for got, want in zip(ours, wanted, strict=True):
            assert (got is None) == (want is None)
            if got is not None:
                np.testing.assert_array_equal(got, want.numpy(), strict=True)


@pytest.mark.parametrize("target", TARGETS)
def test_staging_by_the_path_of_each_target(interpreted, target):
    layout = PageLayout("nvfp4", heads=2, tokens=16, v_scale_order="quads")
    pages, table = filled(layout), np.array([1], np.int32)
    pages[:, layout.k_scales : layout.k_scales + 16] = 0x75  # 208, under which 4 and 6 saturate
    cache = PagedCache(layout, torch.from_numpy(pages), *SCALES)
    ours = interpreted(runs.read, layout, pages, table, 16, SCALES, target, True)
    wanted = reference.read_pages(cache, torch.from_numpy(table), 16, staged=True)
    exact = reference.read_pages(cache, torch.from_numpy(table), 16)
    for got, want, other in zip(ours, wanted, exact, strict=True):
        np.testing.assert_array_equal(got, want.numpy())
        assert (got != other.numpy()).any()


@pytest.mark.parametrize("staged", ["", "portable", "qmul4"])
@pytest.mark.parametrize("form", FORMATS)
def test_elements_that_attention_loads(interpreted, form, staged):
    """One head of one page, without the tensor's scale; 0 for what is masked, whatever it holds."""
    layout = PageLayout(form, heads=2, tokens=16, v_scale_order="quads")
    pages = filled(layout)
    cache = PagedCache(layout, torch.from_numpy(pages))
    sides = reference.read_pages(cache, torch.tensor([2]), 16, staged=bool(staged))
    # K of head 0, tokens 0 and 1: NaN; in NVFP4 −6 under NaN.
    pages[2, : 2 * layout.head_token_bytes] = 0xFF
    pages[2, layout.k_scales : layout.k_scales + 2 * layout.head_token_scales] = 0x7F
    for v, want in enumerate(sides):
        for head in range(2):
            arguments = layout, pages, 2, head, (3, 13), bool(v), staged
            ours = interpreted(runs.loaded, *arguments)
            np.testing.assert_array_equal(ours[3:13], want[3:13, head].numpy())
            masked = np.delete(ours, slice(3, 13), 0)
            assert not masked.any() and not np.signbit(masked).any()


@pytest.mark.parametrize("mistake", runs.MISTAKES)
def test_planted_mistakes_are_caught(interpreted, mistake):
    form = runs.MISTAKES[mistake][0]
    layout = PageLayout(form, heads=2, tokens=16, dim=32, v_scale_order="quads")
    k, v = rows(layout, 37)
    slots = scattered(layout, 37)
    arguments = layout, empty(layout), slots, k, v, SCALES
    wanted = by_reference(layout, slots, k, v)
    assert (interpreted(runs.written_wrongly, mistake, *arguments) != wanted).any()
    arguments = layout, empty(layout), *arguments[2:]
    np.testing.assert_array_equal(interpreted(runs.written, *arguments), wanted)


def test_no_kernel_is_left_out():
    written = {
        v for module in MODULES for name, v in vars(module).items() if name.endswith("_kernel")
    }
    assert written == {v.kernel for module in MODULES for v in module.VARIANTS}


def test_support_says_how():
    assert supports("sm_100", "nvfp4", staged=True).path == "native"
    assert supports("sm_90", "nvfp4", staged=True).path == "fallback"
    assert supports("sm_100", "nvfp4").path == "fallback"
    assert supports("gfx950", "bf16") == ("native", "bytes as they are")
    assert not supports("sm_100", "int8").ok


by_name = {variant.name: variant for variant in VARIANTS}
#: The widest of each kind; the others are in the full table.
FAST = ["KV write nvfp4 quads from bf16", "KV read nvfp4 quads staged"]


@pytest.mark.parametrize("target", ["sm_100", "gfx950"])
@pytest.mark.parametrize("name", FAST)
def test_code_on_two_targets(name, target):
    assert check(by_name[name].compile(target), by_name[name]) == []


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
def test_code_on_every_target(variant, target):
    compiled = variant.compile(target)
    assert check(compiled, variant) == []
    assert max(compiled.loads) == (8 if "read nvfp4" in variant.name else 16)


@pytest.mark.parametrize("target", ["sm_100", "sm_120"])
def test_an_exact_read_has_no_staging_instruction(target):
    """What `check` looks for in a staged read is not there by itself."""
    variant = replace(by_name["KV read nvfp4 linear"], expect=by_name[FAST[1]].expect)
    assert check(variant.compile(target), variant) == [f"no {variant.expect[target]}"]
    assert set(PATHS) == set(TARGETS)

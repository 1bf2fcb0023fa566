"""KV cache pages of the reference: every byte by addresses written out once more, and back.

Dimensions: T tokens, G heads, D head dimension, P pages, Z bytes of a page, S positions.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import rational_oracle as oracle
import torch

from mmq.kernels.kv_pages import PagedCache, PageLayout, TokenBatch
from mmq.kernels.reference import kv_cache
from mmq.kernels.reference.e4m3 import decode_e2m1, decode_e4m3, encode_e4m3
from mmq.kernels.reference.fp8_staging import stage_rows
from mmq.kernels.reference.kv_cache import decode_rows, encode_rows, read_pages, write_pages
from mmq.kernels.reference.nvfp4 import quantize_nvfp4, unpack_nibbles

FORMATS = ["nvfp4", "fp8", "bf16"]
UNTOUCHED = 0xEE
K_SCALE, V_SCALE = 0.01, 0.03

layouts = pytest.mark.parametrize(
    "layout",
    [
        PageLayout("nvfp4"),
        PageLayout("nvfp4", v_scale_order="quads"),
        PageLayout("nvfp4", heads=1, sides=1),
        PageLayout("nvfp4", heads=3, tokens=8, dim=48, v_scale_order="quads"),
        PageLayout("nvfp4", heads=2, tokens=5, dim=32),
        PageLayout("fp8"),
        PageLayout("fp8", heads=1, sides=1),
        PageLayout("bf16", heads=2, tokens=16),
        PageLayout("bf16", heads=1, sides=1),
    ],
    ids=lambda p: f"{p.format}-{p.heads}x{p.tokens}x{p.dim}-{p.sides}-{p.v_scale_order}",
)


def empty(layout, pages=5, k_scale=K_SCALE, v_scale=V_SCALE):
    shape = pages, layout.page_bytes
    return PagedCache(layout, torch.full(shape, UNTOUCHED, dtype=torch.uint8), k_scale, v_scale)


def rows(layout, tokens, seed=1):
    """K and V, F32 [T, G, D]; blocks of zeros, of tiny and of huge numbers among them."""
    generator = torch.Generator().manual_seed(seed)
    sides = []
    for _ in range(layout.sides):
        x_TGD = torch.randn(tokens, layout.heads, layout.dim, generator=generator)
        if tokens > 3:
            x_TGD[1, :, :16] = 0
            x_TGD[2, :, 16:32] *= 2.0**-40
            x_TGD[3] *= 1e4
        sides.append(x_TGD)
    return sides[0], sides[1] if layout.sides == 2 else None


def scattered(tokens, layout, pages=5, seed=3):
    """Slots in no order, a third of them −1."""
    generator = torch.Generator().manual_seed(seed)
    slots = torch.randperm(pages * layout.tokens, generator=generator)[:tokens]
    return slots.where(torch.rand(tokens, generator=generator) > 1 / 3, -1)


def expected_page_bytes(cache, slots, k, v):
    """The pages after a write, byte by byte, addresses as the layout's documentation has them."""
    layout = cache.layout
    pages = cache.pages_PZ.numpy().copy()
    width, scales = layout.head_token_bytes, layout.dim // 16
    data = layout.heads * layout.tokens * width
    side_bytes = data + (layout.heads * layout.tokens * scales if layout.format == "nvfp4" else 0)
    for side, (x, scale) in enumerate([(k, cache.k_scale), (v, cache.v_scale)][: layout.sides]):
        for t, slot in enumerate(slots.tolist()):
            if slot < 0:
                continue
            page, token = divmod(slot, layout.tokens)
            for g in range(layout.heads):
                row, first = g * layout.tokens + token, side * side_bytes
                stored, block_scales = row_bytes(x[t, g], layout.format, scale)
                pages[page, first + row * width :][:width] = stored
                for s, byte in enumerate(block_scales):
                    at = row * scales + s
                    if side and layout.v_scale_order == "quads":
                        quad, rest = divmod(token, 4)
                        at = g * layout.tokens * scales + quad * 4 * scales + 4 * s + rest
                    pages[page, first + data + at] = byte
    return pages


def row_bytes(x_D, form, scale):
    """One row by the functions for weights."""
    s2 = torch.tensor(scale, dtype=torch.float32)
    if form == "nvfp4":
        packed, scales, _ = quantize_nvfp4(x_D[None], s2)
        return packed[0].numpy(), scales[0].numpy()
    if form == "fp8":
        return encode_e4m3(x_D / s2).numpy(), []
    return x_D.bfloat16().view(torch.uint8).numpy(), []


def check_written(layout, tokens=40):
    cache, (k, v) = empty(layout), rows(layout, tokens)
    slots = scattered(min(tokens, 5 * layout.tokens), layout)
    k, v = k[: len(slots)], None if v is None else v[: len(slots)]
    wanted = expected_page_bytes(cache, slots, k, v)
    write_pages(cache, slots, k, v)
    np.testing.assert_array_equal(cache.pages_PZ.numpy(), wanted)


@layouts
def test_every_byte(layout):
    """Written ones where they belong, all others untouched; tokens of slot −1 go nowhere."""
    check_written(layout)


@pytest.mark.parametrize("tokens", [0, 1, 7])
@pytest.mark.parametrize("form", FORMATS)
def test_few_tokens(form, tokens):
    check_written(PageLayout(form), tokens)


def test_nothing_but_tokens_without_a_slot():
    cache = empty(PageLayout("nvfp4"))
    write_pages(cache, torch.full((3,), -1), *rows(cache.layout, 3))
    assert (cache.pages_PZ == UNTOUCHED).all()


@layouts
@pytest.mark.parametrize("tokens", [0, 1, 7, 21])
def test_reading_back(layout, tokens):
    """What is read is what was encoded, by blocks of a table in no order, partly filled."""
    cache, (k, v) = empty(layout), rows(layout, tokens)
    page_table = torch.tensor([[3, 0, 4, 1, 2]], dtype=torch.int32)
    positions = torch.arange(tokens, dtype=torch.int32)
    batch = TokenBatch(positions, torch.zeros(tokens, dtype=torch.int32), page_table)
    write_pages(cache, batch.slots(layout.tokens), k, v)
    for staged in (False, True):
        read = read_pages(cache, page_table[0], tokens, staged=staged)
        for x, source, scale in zip(read, (k, v), (K_SCALE, V_SCALE), strict=True):
            if source is None:
                assert x is None
                continue
            assert x.shape == source.shape and x.dtype == torch.float32
            for t in range(tokens):
                encoded = encode_rows(source[t], layout.format, scale)
                restored = decode_rows(*encoded, layout.format, scale, staged=staged)
                assert torch.equal(x[t], restored)


def test_values_read_back():
    """element · scale, the element E2M1 times block scale; or that product rounded to E4M3."""
    x_RD = torch.randn(9, 64, generator=torch.Generator().manual_seed(5))
    data, scales = encode_rows(x_RD, "nvfp4", K_SCALE)
    s2 = torch.tensor(K_SCALE, dtype=torch.float32)
    elements = decode_e2m1(unpack_nibbles(data)) * decode_e4m3(scales).repeat_interleave(16, 1)
    assert torch.equal(decode_rows(data, scales, "nvfp4", K_SCALE), elements * s2)
    assert torch.equal(elements.bfloat16().float(), elements)
    staged = decode_rows(data, scales, "nvfp4", K_SCALE, staged=True)
    assert torch.equal(staged, decode_e4m3(stage_rows(data, scales)) * s2)
    assert not torch.equal(staged, elements * s2)
    assert torch.equal(decode_rows(data, scales, "nvfp4", 1.0), elements)
    data, none = encode_rows(x_RD, "fp8", K_SCALE)
    assert torch.equal(decode_rows(data, none, "fp8", K_SCALE), decode_e4m3(data) * s2)
    data, none = encode_rows(x_RD, "bf16", K_SCALE)
    assert torch.equal(decode_rows(data, none, "bf16", K_SCALE), x_RD.bfloat16().float())


def test_nvfp4_by_exact_arithmetic():
    """A few rows against the rational oracle, which shares nothing with the reference."""
    x_RD = torch.randn(4, 32, generator=torch.Generator().manual_seed(6)) * 3
    s2 = float(np.float32(0.0123))
    data, scales = encode_rows(x_RD, "nvfp4", s2)
    for row, packed, row_scales in zip(x_RD, data, scales, strict=True):
        for block in range(2):
            numbers = [oracle.Fraction(float(x)) for x in row[16 * block : 16 * block + 16]]
            code = oracle.max_code(numbers, oracle.Fraction(s2))
            assert row_scales[block] == code
            wanted = oracle.elements(numbers, code, oracle.Fraction(s2))
            assert unpack_nibbles(packed[None])[0, 16 * block :][:16].tolist() == wanted


def test_example():
    x = torch.tensor([[0.5, -0.03, 0.125, 0] + [0.0] * 12])
    data, scales = encode_rows(x, "nvfp4", 2.0**-7)
    assert scales.tolist() == [[0x53]] and data[0, :2].tolist() == [0x97, 0x03]
    back = decode_rows(data, scales, "nvfp4", 2.0**-7)[0, :4].tolist()
    assert back == pytest.approx([0.5156, -0.0430, 0.1289, 0], abs=5e-5)
    staged = decode_rows(data, scales, "nvfp4", 2.0**-7, staged=True)[0, :4]
    assert (staged * 128).tolist() == [64, -5.5, 16, 0]
    data, none = encode_rows(x, "fp8", 2.0**-7)
    assert data[0, :4].tolist() == [0x68, 0xC7, 0x58, 0x00] and none.shape == (1, 0)
    assert (decode_rows(data, none, "fp8", 2.0**-7) * 128)[0, :4].tolist() == [64, -3.75, 16, 0]


@pytest.mark.parametrize(
    ("form", "bytes_of_a_page", "bytes_of_a_token"),
    [("bf16", 262_144, 122_880), ("fp8", 131_072, 61_440), ("nvfp4", 73_728, 34_560)],
)
def test_bytes_of_pages_and_of_tokens(form, bytes_of_a_page, bytes_of_a_token):
    """Of pages as they are allocated: 60 layers of 4 heads, 128 tokens and 128 elements."""
    layout = PageLayout(form)
    cache = empty(layout, pages=3)
    assert cache.pages_PZ.nbytes == 3 * bytes_of_a_page
    tokens = 3 * layout.tokens
    assert 60 * cache.pages_PZ.nbytes == bytes_of_a_token * tokens
    # Every byte of a full page is somebody's.
    write_pages(cache, torch.arange(tokens), *rows(layout, tokens))
    written = cache.pages_PZ.clone()
    other = empty(layout, pages=3)
    other.pages_PZ.fill_(0x11)
    write_pages(other, torch.arange(tokens), *rows(layout, tokens))
    assert torch.equal(other.pages_PZ, written)


def test_bytes_of_index_keys():
    """57 sparse layers with one key of 128: 14,592, 7,296 and 4,104 bytes a token."""
    of_a_token = [
        57 * empty(PageLayout(f, heads=1, sides=1), 1).pages_PZ.nbytes // 128
        for f in ("bf16", "fp8", "nvfp4")
    ]
    assert of_a_token == [14_592, 7_296, 4_104]


def test_orders_of_v_scales():
    """Quads hold the same scales in other places; K and the data do not differ."""
    linear, quads = (empty(PageLayout("nvfp4", v_scale_order=o), 1) for o in ("linear", "quads"))
    k, v = rows(linear.layout, 128)
    for cache in (linear, quads):
        write_pages(cache, torch.arange(128), k, v)
    a, b = linear.pages_PZ[0], quads.pages_PZ[0]
    start = linear.layout.v_scales
    assert torch.equal(a[:start], b[:start]) and not torch.equal(a[start:], b[start:])
    assert torch.equal(a[start:].sort()[0], b[start:].sort()[0])
    # Head 2, token 6, scale 5: byte 6 · 8 + 5, or 1 · 32 + 4 · 5 + 2.
    assert a[start + 2 * 1024 + 53] == b[start + 2 * 1024 + 54]


def test_a_later_write_replaces_only_its_slots():
    cache = empty(PageLayout("nvfp4", v_scale_order="quads"), 1)
    write_pages(cache, torch.arange(128), *rows(cache.layout, 128, seed=1))
    first, _ = read_pages(cache, torch.tensor([0]), 128)
    k, v = rows(cache.layout, 2, seed=2)
    write_pages(cache, torch.tensor([17, 90]), k, v)
    second, _ = read_pages(cache, torch.tensor([0]), 128)
    changed = (first != second).flatten(1).any(1).nonzero().ravel()
    assert changed.tolist() == [17, 90]


def test_sides_that_do_not_fit_are_refused():
    k, v = rows(PageLayout("fp8"), 1)
    with pytest.raises(ValueError, match="1 sides for pages of 2"):
        write_pages(empty(PageLayout("fp8")), torch.tensor([0]), k, None)
    with pytest.raises(ValueError, match="2 sides for pages of 1"):
        write_pages(empty(PageLayout("fp8", sides=1)), torch.tensor([0]), k, v)


@pytest.mark.parametrize("table", [[0], [0, -1]], ids=str)
def test_positions_without_a_page_are_refused(table):
    with pytest.raises(ValueError, match="129 tokens need 2 pages"):
        read_pages(empty(PageLayout("fp8")), torch.tensor(table), 129)


def swapped_nibbles(codes):
    return codes[:, 1::2] | (codes[:, 0::2] << 4)


def one_scale(cache):
    return sides_of(replace(cache, v_scale=cache.k_scale))


def other_order(cache):
    order = "linear" if cache.layout.v_scale_order == "quads" else "quads"
    return sides_of(replace(cache, layout=replace(cache.layout, v_scale_order=order)))


def quads_in_k(cache):
    k = kv_cache._side(cache, 0, cache.layout.k_scales, 4, cache.k_scale)
    return [k, sides_of(cache)[1]]


def sides_exchanged(cache):
    k, v = sides_of(cache)
    return [v._replace(scale=k.scale), k._replace(scale=v.scale)]


def zero_scale(x, s2):
    return max_scale(x, s2).where(x.unflatten(1, (-1, 16)).any(-1), 0)


sides_of, max_scale = kv_cache._sides, kv_cache.max_scale

MISTAKES = {
    "high nibble first": ("pack_nibbles", swapped_nibbles),
    "one scale for both sides": ("_sides", one_scale),
    "V's scales in the other order": ("_sides", other_order),
    "K's scales in quads": ("_sides", quads_in_k),
    "K and V exchanged": ("_sides", sides_exchanged),
    "scale of zero for a zero block": ("max_scale", zero_scale),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_planted_mistakes_are_caught(monkeypatch, mistake):
    layout = PageLayout("nvfp4", heads=2, tokens=8, dim=32, v_scale_order="quads")
    monkeypatch.setattr(kv_cache, *MISTAKES[mistake])
    with pytest.raises(AssertionError):
        check_written(layout)


def test_planted_slot_that_wraps_around_is_caught():
    """−1 as an index is the last row: without the mask the last page would be written."""
    cache = empty(PageLayout("fp8"), 2)
    k, v = rows(cache.layout, 2)
    write_pages(cache, torch.tensor([3, -1]), k, v)
    assert (cache.pages_PZ[1] == UNTOUCHED).all()
    write_pages(cache, torch.tensor([3, -1]) % 256, k, v)
    assert not (cache.pages_PZ[1] == UNTOUCHED).all()

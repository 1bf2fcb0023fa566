"""KV cache kernels: rows of K and V encoded into pages, and read back.

Reference: `mmq.kernels.reference.kv_cache`, operation by operation.

    BF16     data = bf16(x)
    FP8      data = e4m3(clamp(x / scale, −448, 448))
    NVFP4    block scale = e4m3(clamp(amax16 / (6 · scale), 2^−9, 448)), 1 where the quotient is 0
             code = e2m1(x / (e4m3(block scale) · scale))
    back     element · scale; the element bf16, e4m3, e2m1 · e4m3(block scale), or staged the last
             rounded to E4M3: each exact in BF16

Four numbers, [0.5, −0.03, 0.125, 0] with scale 2^−7, in NVFP4: block scale 0x53 (11), bytes 0x97,
0x03, elements [66, −5.5, 16.5, 0], staged [64, −5.5, 16, 0]. Where bytes lie in a page is
`mmq.kernels.kv_pages`; slots are page · B + offset, negative for tokens that go nowhere.
`store_rows` and `load_rows` are for other kernels too: fused ones that have rows in registers, and
attention, which takes elements as operands.

Dimensions: T tokens of a program, D head dimension, S = D/16 scales, P = D/2 bytes, B tokens of a
page, K positions of a tile, HEADS KV heads of a page, SIDES 2 for K and V, 1 for index keys.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kv_pages import PagedCache, PageLayout
from ..support import Support
from .cross_compile import ForwardVariant
from .fp8_staging import INSTRUCTIONS, PATHS, stage_tile, staging_path
from .fp8_staging import supports as staging_supports
from .launch import TARGETS, launch_options, target_name
from .nvfp4 import max_scale
from .small_floats import (
    bf16_bits,
    bits_of,
    decode_e2m1,
    decode_e4m3,
    encode_e2m1,
    encode_magnitude,
)

THREADS = 128
#: Tokens of a program that writes: of one head, so that a thread has whole blocks of 16.
WRITE_TOKENS = 16
#: Positions of a program that reads.
READ_TOKENS = 16


def supports(target: str, format: str, *, staged: bool = False) -> Support:
    """Writing and reading is arithmetic on every target; staging has its own paths."""
    if format == "nvfp4" and staged:
        return staging_supports(target)
    reasons = {
        "bf16": "bytes as they are",
        "fp8": "E4M3 by integer arithmetic, IEEE division",
        "nvfp4": "E2M1 and E4M3 by integer arithmetic, IEEE divisions",
    }
    if format not in reasons:
        return Support("unsupported", f"no format {format}")
    return Support("native" if format == "bf16" else "fallback", reasons[format])


@triton.jit
def encode_e4m3(values):
    """E4M3 codes, U8, of finite F32 numbers: to nearest even, saturating; −0 stays −0."""
    code = encode_magnitude(tl.minimum(tl.abs(values), 448.0), 3, 7)
    return (code | ((bits_of(values) >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def encode_nvfp4(x_TD, scale):
    """Packed codes U8 [T, D/2] and block scales U8 [T, D/16] of finite F32 rows."""
    T: tl.constexpr = x_TD.shape[0]
    D: tl.constexpr = x_TD.shape[1]
    BLOCKS: tl.constexpr = T * D // 16
    x_BJ = x_TD.reshape(BLOCKS, 16)
    scale_B = max_scale(x_BJ, scale)
    step_BJ = tl.broadcast_to((decode_e4m3(scale_B) * scale)[:, None], (BLOCKS, 16))
    code_BJ = encode_e2m1(tl.div_rn(x_BJ, step_BJ))
    even_TP, odd_TP = tl.split(code_BJ.reshape(T, D // 2, 2))
    packed_TP = (even_TP | (odd_TP << 4)).to(tl.uint8)
    return packed_TP, scale_B.to(tl.uint8).reshape(T, D // 16)


@triton.jit
def _scale_offsets(head, token_K, B: tl.constexpr, S: tl.constexpr, QUADS: tl.constexpr):
    """I32 [K, S]: where the block scales of some tokens of a page lie in their region."""
    s_1S = tl.arange(0, S)[None, :]
    token_K1 = token_K[:, None]
    first_K1 = token_K1 // 4 * (4 * S) + token_K1 % 4 if QUADS else token_K1 * S
    return head * (B * S) + first_K1 + s_1S * (4 if QUADS else 1)


@triton.jit
def store_rows(
    pages, x_TD, slot_T, head, scale,
    FORMAT: tl.constexpr, HEADS: tl.constexpr, B: tl.constexpr, SIDES: tl.constexpr,
    V: tl.constexpr, QUADS: tl.constexpr,
):  # fmt: skip
    """Encode rows of one head and store them in their pages.

    Args:
        pages: to U8.
        x_TD: finite F32, D a power of two.
        slot_T: I64, negative for rows that go nowhere.
        head: I32.
        scale: F32 of the tensor; for BF16 not used.
        V: V's side of a page of two, else K's.
        QUADS: V's block scales lie in quads of tokens.
    """
    T: tl.constexpr = x_TD.shape[0]
    D: tl.constexpr = x_TD.shape[1]
    BYTES: tl.constexpr = D // 2 if FORMAT == "nvfp4" else (D if FORMAT == "fp8" else 2 * D)
    S: tl.constexpr = D // 16 if FORMAT == "nvfp4" else 0
    DATA: tl.constexpr = HEADS * B * BYTES
    SIDE: tl.constexpr = DATA + HEADS * B * S
    kept_T1 = (slot_T >= 0)[:, None]
    token_T = (slot_T % B).to(tl.int32)
    side_T1 = (slot_T // B * (SIDES * SIDE) + V * SIDE)[:, None]
    row_T1 = side_T1 + ((head * B + token_T) * BYTES)[:, None]
    if FORMAT == "bf16":
        words = pages.to(tl.pointer_type(tl.uint16))
        at_TD = row_T1 // 2 + tl.arange(0, D)[None, :]
        tl.store(words + at_TD, bf16_bits(x_TD), mask=kept_T1)
    elif FORMAT == "fp8":
        code_TD = encode_e4m3(tl.div_rn(x_TD, tl.full((T, D), scale, tl.float32)))
        tl.store(pages + row_T1 + tl.arange(0, D)[None, :], code_TD, mask=kept_T1)
    else:
        tl.static_assert(FORMAT == "nvfp4", "no such format")
        packed_TP, scale_TS = encode_nvfp4(x_TD, tl.full((), scale, tl.float32))
        tl.store(pages + row_T1 + tl.arange(0, D // 2)[None, :], packed_TP, mask=kept_T1)
        at_TS = side_T1 + DATA + _scale_offsets(head, token_T, B, S, V and QUADS)
        tl.store(pages + at_TS, scale_TS, mask=kept_T1)


@triton.jit
def load_rows(
    pages, page, head, token_K, inside_K,
    FORMAT: tl.constexpr, HEADS: tl.constexpr, B: tl.constexpr, D: tl.constexpr,
    SIDES: tl.constexpr, V: tl.constexpr, QUADS: tl.constexpr, STAGED: tl.constexpr,
):  # fmt: skip
    """Elements of one head and some tokens of a page, without the tensor's scale: BF16 [K, D].

    Args:
        pages: to U8.
        page: I64.
        token_K: I32, offsets in the page.
        inside_K: those to load; the others are 0, and their page is not touched.
        V, QUADS: as for `store_rows`.
        STAGED: "" for the exact elements of NVFP4, or a path of `fp8_staging`.
    """
    K: tl.constexpr = token_K.shape[0]
    BYTES: tl.constexpr = D // 2 if FORMAT == "nvfp4" else (D if FORMAT == "fp8" else 2 * D)
    S: tl.constexpr = D // 16 if FORMAT == "nvfp4" else 0
    DATA: tl.constexpr = HEADS * B * BYTES
    SIDE: tl.constexpr = DATA + HEADS * B * S
    side = page * (SIDES * SIDE) + V * SIDE
    row_K1 = ((head * B + token_K) * BYTES)[:, None]
    inside_K1 = inside_K[:, None]
    if FORMAT == "bf16":
        data = (pages + side).to(tl.pointer_type(tl.uint16))
        at_KD = row_K1 // 2 + tl.arange(0, D)[None, :]
        bits_KD = tl.load(data + at_KD, mask=inside_K1, other=0)
        element_KD = bits_KD.to(tl.bfloat16, bitcast=True)
    elif FORMAT == "fp8":
        at_KD = row_K1 + tl.arange(0, D)[None, :]
        code_KD = tl.load(pages + side + at_KD, mask=inside_K1, other=0)
        element_KD = code_KD.to(tl.float8e4nv, bitcast=True).to(tl.bfloat16)
    else:
        tl.static_assert(FORMAT == "nvfp4", "no such format")
        at_KP = row_K1 + tl.arange(0, D // 2)[None, :]
        packed_KP = tl.load(pages + side + at_KP, mask=inside_K1, other=0)
        at_KS = _scale_offsets(head, token_K, B, S, V and QUADS)
        scale_KS = tl.load(pages + side + DATA + at_KS, mask=inside_K1, other=0)
        if STAGED == "":
            byte_KP = packed_KP.to(tl.int32)
            code_KD = tl.join(byte_KP & 15, byte_KP >> 4).reshape(K, D)
            step_KS = decode_e4m3(scale_KS.to(tl.int32))
            step_KSJ = tl.broadcast_to(step_KS[:, :, None], (K, S, 16))
            element_KD = (decode_e2m1(code_KD) * step_KSJ.reshape(K, D)).to(tl.bfloat16)
        else:
            element_KD = stage_tile(packed_KP, scale_KS, STAGED).to(tl.bfloat16)
    return element_KD


@triton.jit
def _write(
    pages, x, stride, slots, tokens, scale, T: tl.constexpr, D: tl.constexpr,
    FORMAT: tl.constexpr, HEADS: tl.constexpr, B: tl.constexpr, SIDES: tl.constexpr,
    V: tl.constexpr, QUADS: tl.constexpr,
):  # fmt: skip
    token_T = tl.program_id(0) * T + tl.arange(0, T)
    head = tl.program_id(1)
    inside_T = token_T < tokens
    slot_T = tl.load(slots + token_T, mask=inside_T, other=-1)
    at_TD = (token_T.to(tl.int64) * stride + head * D)[:, None] + tl.arange(0, D)[None, :]
    x_TD = tl.load(x + at_TD, mask=inside_T[:, None], other=0).to(tl.float32)
    store_rows(pages, x_TD, slot_T, head, scale, FORMAT, HEADS, B, SIDES, V, QUADS)


@triton.jit
def write_pages_kernel(
    pages, k, v, k_stride, v_stride, slots, tokens, k_scale, v_scale,
    T: tl.constexpr, D: tl.constexpr, FORMAT: tl.constexpr, HEADS: tl.constexpr, B: tl.constexpr,
    SIDES: tl.constexpr, QUADS: tl.constexpr,
):  # fmt: skip
    """From rows, F32 or BF16, of `k_stride` and `v_stride` elements a token, and slots I64.

    Programs: tokens / T, heads, sides.
    """
    if tl.program_id(2) == 0:
        _write(
            pages, k, k_stride, slots, tokens, k_scale, T, D, FORMAT, HEADS, B, SIDES, False, QUADS
        )
    else:
        _write(
            pages, v, v_stride, slots, tokens, v_scale, T, D, FORMAT, HEADS, B, SIDES, True, QUADS
        )


@triton.jit
def _read(
    pages, page_table, tokens, out, scale, T: tl.constexpr, D: tl.constexpr,
    FORMAT: tl.constexpr, HEADS: tl.constexpr, B: tl.constexpr, SIDES: tl.constexpr,
    V: tl.constexpr, QUADS: tl.constexpr, STAGED: tl.constexpr,
):  # fmt: skip
    tl.static_assert(B % T == 0, "a program's tokens lie in one page")
    start = tl.program_id(0) * T
    head = tl.program_id(1)
    page = tl.load(page_table + start // B).to(tl.int64)
    position_T = start + tl.arange(0, T)
    inside_T = position_T < tokens
    element_TD = load_rows(
        pages, page, head, position_T % B, inside_T, FORMAT, HEADS, B, D, SIDES, V, QUADS, STAGED
    )
    value_TD = element_TD.to(tl.float32)
    if FORMAT != "bf16":
        value_TD *= tl.full((), scale, tl.float32)
    row_T = position_T.to(tl.int64) * HEADS + head
    at_TD = row_T[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(out + at_TD, value_TD, mask=inside_T[:, None])


@triton.jit
def read_pages_kernel(
    pages, page_table, tokens, k, v, k_scale, v_scale,
    T: tl.constexpr, D: tl.constexpr, FORMAT: tl.constexpr, HEADS: tl.constexpr, B: tl.constexpr,
    SIDES: tl.constexpr, QUADS: tl.constexpr, STAGED: tl.constexpr,
):  # fmt: skip
    """The first `tokens` positions of a sequence as F32 [S, HEADS, D]; programs as for writing."""
    if tl.program_id(2) == 0:
        _read(
            pages, page_table, tokens, k, k_scale, T, D, FORMAT, HEADS, B, SIDES, False, QUADS,
            STAGED,
        )  # fmt: skip
    else:
        _read(
            pages, page_table, tokens, v, v_scale, T, D, FORMAT, HEADS, B, SIDES, True, QUADS,
            STAGED,
        )  # fmt: skip


def write_pages(cache: PagedCache, slots_T: Tensor, k_TGD: Tensor, v_TGD: Tensor | None) -> None:
    """Encode K and V of a batch into their pages, in place.

    Args:
        slots_T: integers, each slot at most once; negative for tokens that go nowhere.
        k_TGD, v_TGD: finite F32 or BF16, tokens at any stride; no V where the pages have one side.

    Raises:
        ValueError: V is given to pages of one side, or missing for two.
    """
    layout = cache.layout
    sides = [k_TGD] if v_TGD is None else [k_TGD, v_TGD]
    if len(sides) != layout.sides:
        raise ValueError(f"{len(sides)} sides for pages of {layout.sides}")
    k_TW, v_TW = (_rows(side) for side in (sides[0], sides[-1]))
    if not len(slots_T):
        return
    write_pages_kernel[(triton.cdiv(len(slots_T), WRITE_TOKENS), layout.heads, layout.sides)](
        cache.pages_PZ, k_TW, v_TW, k_TW.stride(0), v_TW.stride(0), slots_T.long(), len(slots_T),
        cache.k_scale, cache.v_scale, T=WRITE_TOKENS, **layout_constants(layout),
        **launch_options(THREADS),
    )  # fmt: skip


def read_pages(
    cache: PagedCache, page_table_N: Tensor, tokens: int, *, staged: bool = False
) -> tuple[Tensor, Tensor | None]:
    """K and V of the first `tokens` positions of a sequence, F32 [S, G, D]; no V of one side.

    Args:
        page_table_N: the page of each block, on the pages' device.
        staged: NVFP4 as rounded to E4M3 on the way, by the device's path.

    Raises:
        ValueError: a position has no page.
    """
    layout, pages_PZ = cache.layout, cache.pages_PZ
    blocks = triton.cdiv(tokens, layout.tokens)
    if len(page_table_N) < blocks or (page_table_N[:blocks] < 0).any():
        raise ValueError(f"{tokens} tokens need {blocks} pages, got {page_table_N.tolist()}")
    shape = layout.sides, tokens, layout.heads, layout.dim
    sides = torch.empty(shape, dtype=torch.float32, device=pages_PZ.device)
    path = staging_path(target_name()) if staged and layout.format == "nvfp4" else ""
    if tokens:
        read_pages_kernel[(triton.cdiv(tokens, READ_TOKENS), layout.heads, layout.sides)](
            pages_PZ, page_table_N, tokens, sides[0], sides[-1], cache.k_scale, cache.v_scale,
            T=READ_TOKENS, **layout_constants(layout), STAGED=path, **launch_options(THREADS),
        )  # fmt: skip
    return sides[0], sides[1] if layout.sides == 2 else None


def _rows(x_TGD: Tensor) -> Tensor:
    """[T, G · D], a token's heads side by side."""
    return x_TGD if x_TGD.dim() == 2 else x_TGD.flatten(1)


def layout_constants(layout: PageLayout) -> dict[str, object]:
    """What the kernels here are to know of a layout."""
    return {
        "D": layout.dim,
        "FORMAT": layout.format,
        "HEADS": layout.heads,
        "B": layout.tokens,
        "SIDES": layout.sides,
        "QUADS": layout.v_scale_order == "quads",
    }


_TYPES = {
    "pages": "*u8", "slots": "*i64", "page_table": "*i32", "tokens": "i32",
    "k_stride": "i32", "v_stride": "i32", "k_scale": "fp32", "v_scale": "fp32",
}  # fmt: skip


def _options(target: str) -> dict[str, object]:
    return launch_options(THREADS, TARGETS[target])


def _written(format: str, order: str = "linear", source: str = "*bf16") -> ForwardVariant:
    constants = layout_constants(PageLayout(format, v_scale_order=order)) | {"T": WRITE_TOKENS}
    types = _TYPES | {"k": source, "v": source}
    name = f"KV write {format} {order} from {source[1:]}"
    return ForwardVariant(
        name, write_pages_kernel, types, constants, _options, exact=True, odd=("tokens",)
    )


def _readable(format: str, order: str = "linear", *, staged: bool = False) -> ForwardVariant:
    constants = layout_constants(PageLayout(format, v_scale_order=order)) | {"T": READ_TOKENS}
    expect = {target: INSTRUCTIONS[path] for target, path in PATHS.items()} if staged else {}
    return ForwardVariant(
        f"KV read {format} {order}" + (" staged" if staged else ""),
        read_pages_kernel,
        _TYPES | {"k": "*fp32", "v": "*fp32"},
        constants | {"STAGED": ""},
        _options,
        expect=expect,
        target_constants={t: {"STAGED": path} for t, path in PATHS.items()} if staged else {},
        exact=True,
        odd=("tokens",),
    )


VARIANTS = [
    _written("nvfp4", source="*fp32"),
    _written("nvfp4", "quads"),
    _written("fp8"),
    _written("bf16"),
    _readable("nvfp4"),
    _readable("nvfp4", "quads", staged=True),
    _readable("fp8"),
    _readable("bf16"),
]

"""From a layer's input to its attention heads on a GPU, in one kernel or in steps.

Reference: `mmq.kernels.reference.qkv_rope`. Kernels: `qkv_kernels`.

    project_rows         row = bf16(x · Wᵀ), [q | k | v | index_q | index_k]
    insert_heads         row → norm, RoPE → q and index_q; K, V and index_k in pages
    project_and_insert   both: a tile of the row never leaves the registers
    project_heads        row → norm, RoPE, all in F32, to be written by `kv_cache.write_pages`

All ways run the same device functions, and the GEMM on the same tiles, so that pages have the same
bytes. Four numbers of a head, x = [3, 4, 0, 0] with w = 0, ε = 0, R = 2: n = [1.2, 1.6, 0, 0], at
position 1 [−0.698, 1.874, 0, 0].

Dimensions: T tokens, M hidden, Z columns of the row, D2 half of the elements that turn; in
variants D head dimension, R elements that turn, H query heads, G KV heads.
"""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from ..reference.qkv_rope import Destination, HeadNorms, Heads, RowLayout
from ..support import Support
from .cross_compile import ForwardVariant
from .launch import TARGETS, launch_options, target_name
from .qkv_kernels import insert_heads_kernel, project_and_insert_kernel, project_rows_kernel


class Mxfp8(NamedTuple):
    """A matrix [rows, M]: E4M3 codes U8, and E8M0 exponents U8 [rows, M/32]."""

    codes: Tensor
    exponents: Tensor


class Tile(NamedTuple):
    """Tokens of a program, columns of a step of its sum, and how it is launched."""

    tokens: int
    columns: int
    threads: int
    stages: int


#: 64 to 80 registers a thread; twice the rows would take twice as many.
INSERT = Tile(16, 0, 128, 1)
#: For decoding; 16 rows are what `mma.sync` multiplies.
NARROW = Tile(16, 64, 128, 3)
#: The same with block scales: CDNA4's 16 × 16 multiply of FP8 takes 128 columns at a time.
NARROW_SCALED = Tile(16, 128, 128, 2)
#: The widest whose norm, in registers after the sum, spills on no target.
WIDE = Tile(64, 64, 256, 3)
#: `tcgen05.mma` with block scales takes 128 rows; fewer would be decoded, silently.
TALL = Tile(128, 128, 256, 2)

_NATIVE = {
    "sm_100": "tcgen05.mma kind::mxf8f6f4",
    "sm_103": "tcgen05.mma kind::mxf8f6f4",
    "sm_107": "tcgen05.mma kind::mxf8f6f4",
    "sm_120": "mma.sync kind::mxf8f6f4",
    "gfx950": "v_mfma_scale_f32 f8f6f4",
}


def supports(target: str, x: str = "bf16", w: str = "mxfp8") -> Support:
    """How the QKV GEMM multiplies activations and weights, each "bf16" or "mxfp8".

    Norm, RoPE and KV write are F32 and integer arithmetic on every target.
    """
    if target not in TARGETS:
        return Support("unsupported", f"no kernel is compiled for {target}")
    if {x, w} - {"bf16", "mxfp8"}:
        return Support("unsupported", f"no GEMM of {x} and {w}")
    if x == w == "bf16":
        return Support("native", "BF16 tensor cores")
    if x == w == "mxfp8" and target in _NATIVE:
        return Support("native", _NATIVE[target])
    return Support("fallback", "MXFP8 decoded to BF16, exactly, for BF16 tensor cores")


def project_rows(x: Tensor | Mxfp8, w: Tensor | Mxfp8, layout: RowLayout) -> Tensor:
    """The packed row of x · Wᵀ, BF16 [T, Z].

    Args:
        x: [T, M], w: [Z, M], each BF16 or MXFP8; M a multiple of 32.

    Raises:
        ValueError: shapes that do not fit.
        NotImplementedError: the device is no target of `supports`.
    """
    tokens, arguments, constants, options = _gemm(x, w, layout)
    row_TZ = _empty((tokens, layout.width), torch.bfloat16, arguments[0].device)
    if tokens:
        project_rows_kernel[_grid(tokens, constants["T"], layout)](
            *arguments, row_TZ, tokens, arguments[0].shape[1], layout.width,
            D=layout.dim, **constants, **options,
        )  # fmt: skip
    return row_TZ


def project_heads(
    row_TZ: Tensor, layout: RowLayout, norms: HeadNorms, tables: tuple[Tensor, Tensor]
) -> Heads:
    """Normed and turned heads of a row, BF16 or F32, all F32: what `insert_heads` writes.

    Args:
        tables: `rope_tables` of the tokens' positions, made on the host.

    Raises:
        ValueError: shapes that do not fit.
    """
    q, k, v, index_q, index_k = _insert(row_TZ, layout, norms, tables, None)
    has_index = layout.index_heads > 0
    return Heads(q, k, v, index_q if has_index else None, index_k[:, 0] if has_index else None)


def insert_heads(
    row_TZ: Tensor,
    layout: RowLayout,
    norms: HeadNorms,
    tables: tuple[Tensor, Tensor],
    destination: Destination,
) -> tuple[Tensor, Tensor | None]:
    """K, V and index keys of a row to their pages, in place; returns q [T, H, D] and index_q.

    Raises:
        ValueError: shapes that do not fit.
    """
    q, _, _, index_q, _ = _insert(row_TZ, layout, norms, tables, destination)
    return q, index_q if layout.index_heads else None


def project_and_insert(
    x: Tensor | Mxfp8,
    w: Tensor | Mxfp8,
    layout: RowLayout,
    norms: HeadNorms,
    tables: tuple[Tensor, Tensor],
    destination: Destination,
) -> tuple[Tensor, Tensor | None]:
    """`project_rows` and `insert_heads` in one kernel, with the same bytes.

    Raises:
        ValueError: shapes that do not fit.
        NotImplementedError: the device is no target of `supports`.
    """
    tokens, arguments, gemm_constants, options = _gemm(x, w, layout)
    heads, finish, constants = _finish(tokens, layout, norms, tables, destination)
    if tokens:
        project_and_insert_kernel[_grid(tokens, gemm_constants["T"], layout)](
            *arguments, *finish, tokens, arguments[0].shape[1],
            **gemm_constants, **constants, **options,
        )  # fmt: skip
    return heads[0], heads[3] if layout.index_heads else None


def _insert(row_TZ, layout, norms, tables, destination):
    tokens, width = row_TZ.shape
    if width != layout.width or row_TZ.stride(1) != 1:
        raise ValueError(f"a row of {width} columns, {row_TZ.stride(1)} apart, for {layout}")
    heads, arguments, constants = _finish(tokens, layout, norms, tables, destination)
    if tokens:
        insert_heads_kernel[_grid(tokens, INSERT.tokens, layout)](
            row_TZ, *arguments, tokens, row_TZ.stride(0), T=INSERT.tokens, **constants,
            **launch_options(INSERT.threads, num_stages=INSERT.stages),
        )  # fmt: skip
    return heads


def _grid(tokens: int, tile: int, layout: RowLayout) -> tuple[int, int]:
    return triton.cdiv(tokens, tile), layout.width // layout.dim


def _gemm(x, w, layout):
    """Tokens, arguments, constants and options of the GEMM."""
    x_mxfp8, w_mxfp8 = isinstance(x, Mxfp8), isinstance(w, Mxfp8)
    x_TM, x_exponents = x if x_mxfp8 else (x, x)
    w_ZM, w_exponents = w if w_mxfp8 else (w, w)
    tokens, M = x_TM.shape
    if tuple(w_ZM.shape) != (layout.width, M) or M % 32:
        raise ValueError(f"W {list(w_ZM.shape)} for x {list(x_TM.shape)} and {layout}")
    how = supports(target_name(), *("mxfp8" if mx else "bf16" for mx in (x_mxfp8, w_mxfp8)))
    if not how.ok:
        raise NotImplementedError(how.reason)
    native = x_mxfp8 and w_mxfp8 and how.path == "native"
    narrow = NARROW_SCALED if native else NARROW
    tile = TALL if "tcgen05" in how.reason else narrow if tokens <= narrow.tokens else WIDE
    arguments = [t.contiguous() for t in (x_TM, x_exponents, w_ZM, w_exponents)]
    constants = {"T": tile.tokens, "K": tile.columns, "NATIVE": native}
    return tokens, arguments, constants, launch_options(tile.threads, num_stages=tile.stages)


def _finish(tokens, layout, norms, tables, destination):
    """Heads q, k, v, index_q, index_k, of which pages are whole, and the arguments and constants
    of a kernel that are about them."""
    (cos_TD2, sin_TD2), dim = tables, layout.dim
    if cos_TD2.shape != sin_TD2.shape or len(cos_TD2) != tokens or 2 * cos_TD2.shape[1] > dim:
        raise ValueError(f"tables {list(cos_TD2.shape)} for {tokens} tokens, heads of {dim}")
    if (layout.index_heads and layout.index_dim != dim) or dim & (dim - 1) or dim < 16:
        raise ValueError(f"heads of {dim} and {layout.index_dim}: not one power of two from 16 on")
    if destination is None:
        heads = [_empty((tokens, n, dim), torch.float32, cos_TD2.device) for n in _counts(layout)]
        slots_T, scales = cos_TD2, (1.0, 1.0, 1.0)
        constants = {"B": 1, "FORMAT": "none", "V_QUADS": False, "INDEX_FORMAT": "none"}
    else:
        heads, slots_T, scales, constants = _pages(tokens, layout, destination)
    weights_5D = norms.stacked_5D.to(cos_TD2.device)
    tables = cos_TD2.contiguous(), sin_TD2.contiguous()
    arguments = [weights_5D, *tables, slots_T, *heads, norms.eps, *scales]
    constants |= {"H": layout.heads, "G": layout.kv_heads, "INDEX": layout.index_heads}
    constants |= {"D": dim, "R": 2 * cos_TD2.shape[1], "GEMMA": norms.gemma}
    return heads, arguments, constants


def _counts(layout: RowLayout) -> tuple[int, ...]:
    """Heads of each part; one index key where there is none, since a kernel's pointers must be."""
    return layout.heads, layout.kv_heads, layout.kv_heads, layout.index_heads, 1


def _pages(tokens: int, layout: RowLayout, destination: Destination):
    """Queries to be written, pages, slots, scales and constants of a destination."""
    destination.check(layout, tokens)
    cache, index_cache = destination.cache, destination.index_cache or destination.cache
    if not (cache.pages_PZ.is_contiguous() and index_cache.pages_PZ.is_contiguous()):
        raise ValueError("pages with gaps between them")
    types = {"bf16": torch.bfloat16, "fp8": torch.uint8}
    q, index_q = (
        _empty((tokens, n, layout.dim), types[format], cache.pages_PZ.device)
        for n, format in (
            (layout.heads, destination.q_format),
            (layout.index_heads, destination.index_q_format),
        )
    )
    constants = {
        "B": cache.layout.tokens,
        "FORMAT": cache.layout.format,
        "V_QUADS": cache.layout.v_scale_order == "quads",
        "INDEX_FORMAT": index_cache.layout.format,
    }
    heads = [q, cache.pages_PZ, cache.pages_PZ, index_q, index_cache.pages_PZ]
    scales = cache.k_scale, cache.v_scale, index_cache.k_scale
    return heads, destination.slots_T.long(), scales, constants


def _empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


_TYPES = {
    "x": "*bf16", "x_exponents": "*u8", "w": "*u8", "w_exponents": "*u8", "row": "*bf16",
    "weights_5D": "*bf16", "cos": "*fp32", "sin": "*fp32", "slots": "*i64",
    "q": "*bf16", "k": "*u8", "v": "*u8", "index_q": "*bf16", "index_k": "*u8",
    "eps": "fp32", "k_scale": "fp32", "v_scale": "fp32", "index_scale": "fp32",
    "tokens": "i32", "M": "i32", "Z": "i32",
}  # fmt: skip
_HEADS = {
    "D": 128, "H": 64, "G": 4, "INDEX": 4, "R": 64, "GEMMA": True,
    "B": 128, "V_QUADS": False, "FORMAT": "nvfp4", "INDEX_FORMAT": "nvfp4",
}  # fmt: skip
_NARROW_MMA = dict.fromkeys(TARGETS, r"mma\.sync.*bf16") | {"gfx950": r"v_mfma_f32_.*bf16"}
_BF16_MMA = {
    **_NARROW_MMA,
    "sm_90": r"wgmma\.mma_async.*bf16",
    **dict.fromkeys(("sm_100", "sm_103", "sm_107"), r"tcgen05\.mma.*kind::f16"),
}
_BLOCK_MMA_128 = dict.fromkeys(
    ("sm_100", "sm_103", "sm_107"), r"tcgen05\.mma.*kind::mxf8f6f4.block_scale"
)
_BLOCK_MMA = {
    "sm_120": r"mma\.sync.*kind::mxf8f6f4.block_scale",
    "gfx950": "v_mfma_scale_f32_.*f8f6f4",
}


def _options(tile: Tile):
    def of(target: str) -> dict[str, object]:
        return launch_options(tile.threads, TARGETS[target], num_stages=tile.stages)

    return of


def _inserting(name: str, types: dict[str, str], **constants: object) -> ForwardVariant:
    return ForwardVariant(
        f"norm, RoPE, KV write: {name}", insert_heads_kernel, _TYPES | types,
        _HEADS | {"T": INSERT.tokens} | constants, _options(INSERT), exact=True, odd=("tokens",),
    )  # fmt: skip


def _projecting(
    name: str, tile: Tile, expect: dict[str, str], x: str, *, native: bool, fused: bool
) -> ForwardVariant:
    heads = _HEADS if fused else {"D": _HEADS["D"]}
    return ForwardVariant(
        f"QKV {name}{' to pages' if fused else ''}, {tile.tokens} tokens",
        project_and_insert_kernel if fused else project_rows_kernel,
        _TYPES | {"x": x},
        heads | {"T": tile.tokens, "K": tile.columns, "NATIVE": native},
        _options(tile),
        expect=expect,
        # Half a tile of 128 tokens is 64 numbers a thread, and as many of their turned twins.
        spill_bound=dict.fromkeys(TARGETS, 40) if fused and tile is TALL else {},
        odd=("tokens",),
        targets=tuple(expect),
    )


_F32_HEADS = dict.fromkeys(("q", "k", "v", "index_q", "index_k"), "*fp32")
VARIANTS = [
    _inserting("NVFP4", {}),
    _inserting("NVFP4 in quads, index keys FP8", {}, V_QUADS=True, INDEX_FORMAT="fp8"),
    _inserting(
        "FP8, queries too", {"q": "*u8", "index_q": "*u8"}, FORMAT="fp8", INDEX_FORMAT="fp8"
    ),
    _inserting("BF16", {}, FORMAT="bf16", INDEX_FORMAT="bf16"),
    _inserting("F32 heads of an F32 row", {"row": "*fp32"} | _F32_HEADS, FORMAT="none"),
    *(
        _projecting(name, tile, expect, x, native=native, fused=fused)
        for fused in (False, True)
        for name, tile, expect, x, native in (
            ("BF16 × MXFP8", WIDE, _BF16_MMA, "*bf16", False),
            ("BF16 × MXFP8", NARROW, _NARROW_MMA, "*bf16", False),
            ("MXFP8 × MXFP8, decoded", WIDE, {"sm_90": _BF16_MMA["sm_90"]}, "*u8", False),
            ("MXFP8 × MXFP8", TALL, _BLOCK_MMA_128, "*u8", True),
            ("MXFP8 × MXFP8", WIDE, _BLOCK_MMA, "*u8", True),
            ("MXFP8 × MXFP8", NARROW_SCALED, _BLOCK_MMA, "*u8", True),
        )
    ),
]

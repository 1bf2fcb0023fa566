"""The attention kernels as they are launched: what each compiles to on every target.

A tile's dots take what the target has for BF16 matrices: `wgmma` (sm_90), `tcgen05.mma` (sm_100,
sm_103, sm_107), `mma.sync` (sm_120), 32×32×16 MFMA (gfx950). The 16 query heads of a single token
are too few rows for the first two, and take `mma.sync` on all of NVIDIA's, 16×16×32 MFMA on AMD's.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..kv_pages import PageLayout
from .block_attention import (
    MERGE_THREADS,
    attend_all_kernel,
    attend_chosen_kernel,
    constants_of,
    merge_partials_kernel,
    options_of,
)
from .cross_compile import ForwardVariant
from .fp8_staging import INSTRUCTIONS, PATHS
from .launch import TARGETS, launch_options

_TYPES = {
    "q": "*bf16", "pages": "*u8", "positions": "*i32", "sequences": "*i32", "lengths": "*i32",
    "page_table": "*i32", "selection": "*i32", "lse": "*fp32", "parts": "*fp32",
    "tokens": "i32", "blocks": "i32", "rows": "i32", "scale": "fp32", "v_scale": "fp32",
}  # fmt: skip
#: Counts that are no multiple of anything.
ODD = ("tokens", "blocks", "rows")

_MMA = r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.bf16\.bf16\.f32"
_TCGEN05 = r"tcgen05\.mma\.cta_group::1\.kind::f16"
_ROW_DOTS = dict.fromkeys(TARGETS, _MMA) | {"gfx950": "v_mfma_f32_16x16x32_bf16"}
_TILE_DOTS = {
    "sm_90": r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k16\.f32\.bf16\.bf16",
    "sm_100": _TCGEN05,
    "sm_103": _TCGEN05,
    "sm_107": _TCGEN05,
    "sm_120": _MMA,
    "gfx950": "v_mfma_f32_32x32x16_bf16",
}


def _variant(
    name: str,
    layout: PageLayout,
    heads: int,
    *,
    choices: int | None = None,
    tile: int = 1,
    splits: int = 1,
    staged: bool = False,
    spill_bound: Mapping[str, int] | None = None,
) -> ForwardVariant:
    """Over chosen blocks if `choices` says how many, else over all keys."""
    constants = constants_of(layout, heads, tile, "") | {"SPLITS": splits}
    constants |= {"TOKENS": tile} if choices is None else {"C": choices}
    rows = constants["M"]
    expect = _TILE_DOTS if rows >= 64 else _ROW_DOTS
    if staged:
        expect = {t: rf"(?s)\A(?=.*{expect[t]}).*{INSTRUCTIONS[PATHS[t]]}" for t in expect}
    return ForwardVariant(
        name,
        attend_all_kernel if choices is None else attend_chosen_kernel,
        _TYPES | {"out": "*bf16" if splits == 1 else "*fp32"},
        constants,
        lambda target: options_of(rows, target),
        expect=expect,
        spill_bound=spill_bound or {},
        target_constants={t: {"STAGED": path} for t, path in PATHS.items()} if staged else {},
        odd=ODD,
    )


def _merge(splits: int) -> ForwardVariant:
    return ForwardVariant(
        f"merge of {splits} parts",
        merge_partials_kernel,
        _TYPES | {"out": "*bf16"},
        {"D": 128, "SPLITS": splits, "X": 16},
        lambda target: launch_options(MERGE_THREADS, TARGETS[target]),
        odd=ODD,
    )


_BF16, _FP8, _NVFP4 = PageLayout("bf16"), PageLayout("fp8"), PageLayout("nvfp4")
_QUADS = PageLayout("nvfp4", v_scale_order="quads")
_SMALL = PageLayout("nvfp4", heads=2, tokens=16, dim=32)

VARIANTS = [
    _variant("chosen blocks, bf16", _BF16, 64, choices=16),
    _variant("chosen blocks, fp8", _FP8, 64, choices=16),
    _variant("chosen blocks, nvfp4", _NVFP4, 64, choices=16),
    _variant("chosen blocks, nvfp4 quads", _QUADS, 64, choices=16),
    _variant("chosen blocks, nvfp4 staged", _QUADS, 64, choices=16, staged=True),
    _variant("chosen blocks in 16 parts, nvfp4", _QUADS, 64, choices=16, splits=16),
    _variant("chosen blocks in 16 parts, fp8", _FP8, 64, choices=16, splits=16),
    _variant("chosen blocks, 64 query heads a KV head", _FP8, 256, choices=16),
    _variant("chosen blocks of a small model", _SMALL, 8, choices=4),
    _variant("all keys, tiles of 8, bf16", _BF16, 64, tile=8),
    _variant("all keys, tiles of 8, fp8", _FP8, 64, tile=8),
    # Two registers at most, of the 255 that a thread can have.
    _variant("all keys, tiles of 8, nvfp4", _NVFP4, 64, tile=8, spill_bound={"sm_120": 8}),
    _variant("all keys, tiles of 8, nvfp4 quads", _QUADS, 64, tile=8),
    _variant("all keys, tiles of 8, nvfp4 staged", _QUADS, 64, tile=8, staged=True),
    _variant("all keys, tiles of 4, fp8", _FP8, 64, tile=4),
    _variant("all keys in 16 parts, fp8", _FP8, 64, splits=16),
    _variant("all keys in 16 parts, nvfp4", _QUADS, 64, splits=16),
    _variant("all keys of a small model", _SMALL, 8, tile=32),
    _merge(16),
    _merge(3),
]

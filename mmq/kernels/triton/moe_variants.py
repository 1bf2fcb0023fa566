"""The kernels of router and MoE layer as they are launched, and what must be in their code.

Every NVFP4 × NVFP4 dot of a target that has an instruction for it must use that instruction: where
Triton finds its operands unsuitable (fewer than 128 rows, 16 tokens or 4 warps) it decodes them
instead, and says nothing. The router must have F32 multiply-adds and no tensor-core rounding.
"""

from __future__ import annotations

from .cross_compile import ForwardVariant
from .expert_gemm import combine_kernel, down_kernel, gate_up_kernel
from .launch import TARGETS, launch_options
from .moe import COLUMNS, ROWS, SLOTS, THREADS, TILE, supports
from .router import COLUMNS as ROUTER_COLUMNS
from .router import THREADS as ROUTER_THREADS
from .router import TOKENS, router_kernel

_TYPES = {
    "x": "*bf16", "x_packed": "*u8", "x_scale": "*u8", "w1": "*u8", "w1_scale": "*u8",
    "w3": "*u8", "w3_scale": "*u8", "w2": "*u8", "w2_scale": "*u8", "alpha1_E": "*fp32",
    "alpha3_E": "*fp32", "alpha2_E": "*fp32", "shared_w1": "*u8", "shared_w1_scale": "*u8",
    "shared_w3": "*u8", "shared_w3_scale": "*u8", "shared_w2": "*u8", "shared_w2_scale": "*u8",
    "slots": "*i32", "block_expert": "*i32", "block_first": "*i32", "block_count": "*i32",
    "act": "*bf16", "act_packed": "*u8", "act_scale": "*u8", "act_s2_E": "*fp32",
    "alpha": "fp32", "limit": "fp32", "beta": "fp32", "experts": "i32", "routed": "i32",
    "top_k": "i32", "M": "i32", "inner": "i32", "shares": "*fp32", "out": "*bf16", "y": "*bf16",
    "scaling": "fp32", "tokens": "i32", "hidden": "*bf16", "gate": "*fp32", "bias": "*fp32",
    "scores": "*fp32", "experts_TK": "*i32", "shares_TK": "*fp32",
}  # fmt: skip
#: Arguments that are no multiples of 16.
_ODD = ("experts", "routed", "top_k", "tokens")

#: Arguments that are None without quantised activations, or without a shared expert.
_QUANTISED_ONLY = ("x_packed", "x_scale", "act_packed", "act_scale")
_SHARED_ONLY = tuple(name for name in _TYPES if name.startswith("shared_"))

_BF16_DOT = {
    "sm_90": r"wgmma\.mma_async\S*\.bf16\.bf16",
    "sm_100": r"tcgen05\.mma\S*kind::f16",
    "sm_103": r"tcgen05\.mma\S*kind::f16",
    "sm_107": r"tcgen05\.mma\S*kind::f16",
    "sm_120": r"mma\.sync\S*\.bf16\.bf16",
    "gfx950": r"v_mfma_f32_\w+_bf16",
}
_NVFP4_DOT = dict.fromkeys(
    ("sm_100", "sm_103", "sm_107"), r"tcgen05\.mma\S*kind::mxf4nvf4\.block_scale\.block16"
) | {"sm_120": r"mma\.sync\S*kind::mxf4nvf4\.block_scale\.scale_vec::4X\S*\.ue4m3"}
_NO_TENSOR_CORES = dict.fromkeys(TARGETS, r"tf32|mma\.sync|wgmma\.mma|tcgen05\.mma") | {
    "gfx950": r"xf32|mfma_f32_\w+_(?:bf16|f16)"
}
_F32_DOT = dict.fromkeys(TARGETS, r"fma\.rn\.f32") | {"gfx950": r"v_mfma_f32_\w+_f32|v_(?:pk_)?fma"}


def _options(threads: int):
    return lambda target: launch_options(threads, TARGETS[target])


def _gemm(name: str, kernel, activations: str, slots: int, shared: bool = True) -> ForwardVariant:
    quantised = activations == "nvfp4"
    constants = {"ROWS": ROWS, "N": slots, "BK": COLUMNS, "QUANTISED": quantised, "SHARED": shared}
    absent = () if quantised else _QUANTISED_ONLY
    absent += () if shared else _SHARED_ONLY
    native = {t for t in TARGETS if supports(t, activations=activations).path == "native"}
    return ForwardVariant(
        f"{name}, {activations} activations, {slots} slots{'' if shared else ', none shared'}",
        kernel,
        _TYPES,
        constants | {name: None for name in absent if name in kernel.arg_names},
        _options(THREADS),
        expect={t: (_NVFP4_DOT if t in native else _BF16_DOT)[t] for t in TARGETS},
        # Without a shared expert nothing else is multiplied: the native dot must be the only one.
        forbid={} if shared else {t: _BF16_DOT[t] for t in native},
        target_constants={t: {"NATIVE": t in native} for t in TARGETS},
        odd=_ODD,
    )


def _router(name: str, hidden: str) -> ForwardVariant:
    constants = {"N": TOKENS, "E": 128, "BM": ROUTER_COLUMNS, "TOP_K": 4, "BIAS": True}
    return ForwardVariant(
        name, router_kernel, _TYPES | {"hidden": hidden}, constants, _options(ROUTER_THREADS),
        expect=_F32_DOT, forbid=_NO_TENSOR_CORES, odd=_ODD,
    )  # fmt: skip


VARIANTS = [
    *(
        _gemm(name, kernel, activations, slots)
        for name, kernel in (("gate and up", gate_up_kernel), ("down", down_kernel))
        for activations in ("bf16", "nvfp4")
        for slots in (SLOTS[0], SLOTS[-1])
    ),
    _gemm("gate and up", gate_up_kernel, "nvfp4", SLOTS[0], shared=False),
    _gemm("down", down_kernel, "nvfp4", SLOTS[0], shared=False),
    ForwardVariant(
        "combine", combine_kernel, _TYPES, {"C": TILE, "SHARED": True}, _options(TILE // 16),
        exact=True, odd=_ODD,
    ),
    _router("router of BF16", "*bf16"),
    _router("router of F32", "*fp32"),
]  # fmt: skip

"""NVFP4 to FP8: four codes times one block scale are four E4M3 codes.

Reference: `mmq.kernels.reference.fp8_staging`.

    staged = e4m3(clamp(e2m1(code) · e4m3(scale), −448, 448))      to nearest, ties to even

Four numbers: codes [3, 7, 15, 1] under scale 0x6B (88) give [0x70, 0x7E, 0xFE, 0x63] (128, 448,
−448, 44). Every path gives the same bits, NaN scales (0x7F for every code) and negative ones
included:

    qmul4      sm_100a, sm_103a     one multiplication of four codes (`mul…e4m3x4.e2m1x4.e4m3x4`)
    f16        sm_107, sm_120       E2M1 to F16, multiplied in F16, to E4M3
    f16-bits   sm_90                the same, E2M1 to F16 by its bits
    cdna4      gfx950               the same by its own conversions (`v_cvt_scalef32_pk_*`)
    portable   any                  F32 and integer arithmetic

Dimensions: B rows, D elements of a row, P = D/2 bytes, S = D/16 scales, W = D/4 words.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..support import Support
from . import staging_asm
from .blocks import load_run, store_run, wide
from .cross_compile import ForwardVariant
from .launch import TARGETS, device, launch_options, target_name
from .small_floats import decode_e2m1, decode_e4m3, encode_magnitude

_QMUL4: tl.constexpr = staging_asm.QMUL4
_F16: tl.constexpr = staging_asm.F16
_F16_BITS: tl.constexpr = staging_asm.F16_BITS
_F16_OF_FP4: tl.constexpr = staging_asm.F16_OF_FP4
_F16_OF_FP8: tl.constexpr = staging_asm.F16_OF_FP8
_F16_PRODUCT: tl.constexpr = staging_asm.F16_PRODUCT
_F16_MINIMUM: tl.constexpr = staging_asm.F16_MINIMUM
_F16_MAXIMUM: tl.constexpr = staging_asm.F16_MAXIMUM
_FP8_OF_F16: tl.constexpr = staging_asm.FP8_OF_F16

#: The path of each target that has one of its own.
PATHS = {
    "sm_90": "f16-bits",
    "sm_100": "qmul4",
    "sm_103": "qmul4",
    "sm_107": "f16",
    "sm_120": "f16",
    "gfx950": "cdna4",
}
#: The instruction that shows which path a target took.
INSTRUCTIONS = {
    "qmul4": r"mul\.rn\.satfinite\.e4m3x4\.e2m1x4\.e4m3x4",
    "f16": r"cvt\.rn\.f16x2\.e2m1x2[\s\S]*cvt\.rn\.satfinite\.e4m3x2\.f16x2",
    "f16-bits": r"mul\.rn\.f16x2[\s\S]*cvt\.rn\.satfinite\.e4m3x2\.f16x2",
    "cdna4": r"v_cvt_scalef32_pk_f16_fp4[\s\S]*v_cvt_scalef32_pk_fp8_f16",
}

THREADS = 128
#: Elements of a program: 16 bytes of packed codes a thread.
TILE = THREADS * 32


def staging_path(target: str) -> str:
    """The path that is fastest on a target, by its name."""
    return PATHS.get(target, "portable")


def supports(target: str) -> Support:
    """Native where one instruction does it; the same bits by others everywhere else."""
    path = staging_path(target)
    if path == "qmul4":
        return Support("native", "mul.rn.satfinite.e4m3x4.e2m1x4.e4m3x4 (QMUL4)")
    reasons = {
        "f16": "no QMUL4: converted to F16, multiplied, converted to E4M3",
        "f16-bits": "no QMUL4 and no conversion of E2M1: placed as F16 bits",
        "cdna4": "no QMUL4: v_cvt_scalef32_pk_f16_fp4, v_pk_mul_f16, v_cvt_scalef32_pk_fp8_f16",
        "portable": "integer arithmetic",
    }
    return Support("fallback", reasons[path])


@triton.jit
def _asm_pair(asm: tl.constexpr, left, right, constraints: tl.constexpr):
    """`asm` of two operands: U32."""
    return tl.inline_asm_elementwise(
        asm, constraints, [left, right], dtype=tl.uint32, is_pure=True, pack=1
    )


@triton.jit
def _asm_one(asm: tl.constexpr, operand):
    """An AMD instruction of one operand: U32."""
    return tl.inline_asm_elementwise(asm, "=v,v", [operand], dtype=tl.uint32, is_pure=True, pack=1)


@triton.jit
def _two_by_cdna4(codes, scale_pair):
    """Two E4M3 codes, U32 below 2^16, of the two E2M1 codes of the low byte, U32."""
    limit = tl.full(codes.shape, 0x5F005F00, tl.uint32)  # 448 and 448 as F16
    product = _asm_pair(_F16_PRODUCT, _asm_one(_F16_OF_FP4, codes), scale_pair, "=v,v,v")
    product = _asm_pair(_F16_MINIMUM, product, limit, "=v,v,v")
    product = _asm_pair(_F16_MAXIMUM, product, limit | 0x80008000, "=v,v,v")
    return _asm_one(_FP8_OF_F16, product) & 0xFFFF


@triton.jit
def _by_cdna4(codes, scales):
    """Four by AMD's conversions; NaN, which minimum and maximum drop, put back."""
    scale_pair = _asm_one(_F16_OF_FP8, scales)
    word = _two_by_cdna4(codes & 0xFF, scale_pair) | (_two_by_cdna4(codes >> 8, scale_pair) << 16)
    return tl.where((scales & 0x7F) == 0x7F, tl.full(word.shape, 0x7F7F7F7F, tl.uint32), word)


@triton.jit
def _by_arithmetic(codes, scale):
    """Four by F32 products and integers, from I32 codes and scale."""
    e4m3 = decode_e4m3(scale)
    word = tl.zeros_like(codes)
    for i in tl.static_range(4):
        product = decode_e2m1((codes >> (4 * i)) & 15) * e4m3
        code = encode_magnitude(tl.minimum(tl.abs(product), 448.0), 3, 7)
        code |= (((codes >> (4 * i + 3)) ^ (scale >> 7)) & 1) << 7
        word |= tl.where((scale & 127) == 127, 127, code) << (8 * i)
    return word.to(tl.uint32, bitcast=True)


@triton.jit
def stage_words(codes, scale, PATH: tl.constexpr):
    """Four E4M3 codes in U32, the first in the low byte.

    Args:
        codes: U16, four E2M1 codes each, the first in the low nibble.
        scale: U8 of the same shape, the E4M3 scale of the four.
    """
    scales = scale.to(tl.uint32) * 0x01010101
    if PATH == "qmul4":
        word = _asm_pair(_QMUL4, codes, scales, "=r,h,r")
    elif PATH == "f16":
        word = _asm_pair(_F16, codes, scales, "=r,h,r")
    elif PATH == "f16-bits":
        word = _asm_pair(_F16_BITS, codes, scales, "=r,h,r")
    elif PATH == "cdna4":
        word = _by_cdna4(codes.to(tl.uint32), scales)
    else:
        tl.static_assert(PATH == "portable", "no such path")
        word = _by_arithmetic(codes.to(tl.int32), scale.to(tl.int32))
    return word


@triton.jit
def stage_tile(packed_BP, scale_BS, PATH: tl.constexpr):
    """NVFP4 rows as float8e4nv [B, D], which converts exactly to F16, BF16 and F32.

    Args:
        packed_BP: U8 [B, D/2], the even column in the low nibble.
        scale_BS: U8 [B, D/16].
        PATH: one of the paths above; `staging_path` knows the target's.
    """
    B: tl.constexpr = packed_BP.shape[0]
    P: tl.constexpr = packed_BP.shape[1]
    even_BW, odd_BW = tl.split(packed_BP.reshape(B, P // 2, 2))
    codes_BW = even_BW.to(tl.uint16) | (odd_BW.to(tl.uint16) << 8)
    scale_BS4 = tl.broadcast_to(scale_BS[:, :, None], (B, P // 8, 4))
    word_BW = stage_words(codes_BW, scale_BS4.reshape(B, P // 2), PATH)
    even = tl.join(word_BW & 0xFF, (word_BW >> 16) & 0xFF)  # bytes 0 and 2
    odd = tl.join((word_BW >> 8) & 0xFF, word_BW >> 24)
    code_BD = tl.join(even, odd).reshape(B, 2 * P).to(tl.uint8)
    return code_BD.to(tl.float8e4nv, bitcast=True)


@triton.jit
def stage_kernel(packed, scale, staged, blocks, TILE: tl.constexpr, PATH: tl.constexpr):
    """From packed U8 and scale U8 of `blocks` blocks of 16: E4M3 codes U8."""
    B: tl.constexpr = TILE // 16
    packed_BP = load_run(packed, wide(blocks) * 8, B * 8).reshape(B, 8)
    scale_B1 = load_run(scale, wide(blocks), B).reshape(B, 1)
    code_BJ = stage_tile(packed_BP, scale_B1, PATH).to(tl.uint8, bitcast=True)
    store_run(staged, code_BJ.reshape(TILE), wide(blocks) * 16)


def stage_fp8(packed_RP: Tensor, scale_RB: Tensor, path: str | None = None) -> Tensor:
    """E4M3 codes, U8 [R, D], of NVFP4 rows: U8 [R, D/2] under E4M3 scales U8 [R, D/16].

    Args:
        path: instead of the device's own.
    """
    staged = torch.empty(len(packed_RP), packed_RP.shape[1] * 2, dtype=torch.uint8, device=device())
    arguments = packed_RP.contiguous(), scale_RB.contiguous(), staged, scale_RB.numel()
    path = path or staging_path(target_name())
    grid = (triton.cdiv(staged.numel(), TILE),)
    if staged.numel():
        stage_kernel[grid](*arguments, TILE=TILE, PATH=path, **launch_options(THREADS))
    return staged


def _options(target: str) -> dict[str, object]:
    return launch_options(THREADS, TARGETS[target])


def _variant(name: str, paths: dict[str, str]) -> ForwardVariant:
    return ForwardVariant(
        name,
        stage_kernel,
        {"packed": "*u8", "scale": "*u8", "staged": "*u8", "blocks": "i32"},
        {"TILE": TILE},
        _options,
        expect={
            target: INSTRUCTIONS[path] for target, path in paths.items() if path in INSTRUCTIONS
        },
        target_constants={target: {"PATH": path} for target, path in paths.items()},
        exact=True,
    )


VARIANTS = [
    _variant("NVFP4 → FP8 staging", PATHS),
    _variant("NVFP4 → FP8 staging, portable", dict.fromkeys(TARGETS, "portable")),
]

"""What the interpreting process runs of the staging kernel, and broken variants of it. NumPy in,
NumPy out."""

from __future__ import annotations

from contextlib import contextmanager

import torch
import triton
import triton.language as tl

from mmq.kernels.triton import fp8_staging, interpreter
from mmq.kernels.triton.interpreter import twin
from mmq.kernels.triton.launch import pretended


def staged(packed, scale, path):
    """E4M3 codes of packed rows by a path; by that of the pretended target where it is None."""
    arguments = torch.from_numpy(packed), torch.from_numpy(scale), path
    return fp8_staging.stage_fp8(*arguments).numpy()


def staged_as(packed, scale, target):
    """As a launch on `target` does it, and the assembly that ran."""
    texts = set()

    def noting(asm):
        texts.add(asm)
        return twin(asm)

    with pretended(target), replaced(interpreter, "twin", noting):
        return staged(packed, scale, None), texts


@triton.jit
def _tile_kernel(packed, scale, out, R: tl.constexpr, D: tl.constexpr, PATH: tl.constexpr):
    r = tl.arange(0, R)[:, None]
    packed_RP = tl.load(packed + r * (D // 2) + tl.arange(0, D // 2)[None, :])
    scale_RS = tl.load(scale + r * (D // 16) + tl.arange(0, D // 16)[None, :])
    tile_RD = fp8_staging.stage_tile(packed_RP, scale_RS, PATH)
    tl.store(out + r * D + tl.arange(0, D)[None, :], tile_RD.to(tl.float32))


def tile_values(packed, scale, path):
    """The numbers of rows of several blocks, F32 [R, D]."""
    rows, columns = len(packed), 2 * packed.shape[1]
    out = torch.full((rows, columns), torch.nan)
    arguments = torch.from_numpy(packed), torch.from_numpy(scale), out
    _tile_kernel[(1,)](*arguments, rows, columns, path)
    return out.numpy()


@triton.jit
def _high_nibble_first(codes, scale, PATH: tl.constexpr):
    swapped = ((codes >> 4) & 0x0F0F) | ((codes & 0x0F0F) << 4)
    return fp8_staging_stage_words(swapped, scale, PATH)


@triton.jit
def _bytes_reversed(codes, scale, PATH: tl.constexpr):
    return fp8_staging_stage_words((codes >> 8) | (codes << 8), scale, PATH)


@triton.jit
def _scale_without_sign(codes, scale, PATH: tl.constexpr):
    return fp8_staging_stage_words(codes, scale & 0x7F, PATH)


@triton.jit
def _nan_left_to_amd(codes, scales):
    scale_pair = fp8_staging._asm_one(fp8_staging._F16_OF_FP8, scales)
    low = fp8_staging._two_by_cdna4(codes & 0xFF, scale_pair)
    return low | (fp8_staging._two_by_cdna4(codes >> 8, scale_pair) << 16)


@triton.jit
def _not_clamped(codes, scale_pair):
    product = fp8_staging._asm_pair(
        fp8_staging._F16_PRODUCT,
        fp8_staging._asm_one(fp8_staging._F16_OF_FP4, codes),
        scale_pair,
        "=v,v,v",
    )
    return fp8_staging._asm_one(fp8_staging._FP8_OF_F16, product)


fp8_staging_stage_words = fp8_staging.stage_words

#: mistake → what it replaces, by what, and the path that it is made on
MISTAKES = {
    "high nibble first": ("stage_words", _high_nibble_first, "qmul4"),
    "bytes reversed": ("stage_words", _bytes_reversed, "f16"),
    "sign of the scale lost": ("stage_words", _scale_without_sign, "f16-bits"),
    "NaN dropped by minimum and maximum": ("_by_cdna4", _nan_left_to_amd, "cdna4"),
    "high bytes of AMD's conversion kept": ("_two_by_cdna4", _not_clamped, "cdna4"),
}


@contextmanager
def replaced(module, name, function):
    """A module with another function under `name`."""
    former = getattr(module, name)
    setattr(module, name, function)
    try:
        yield
    finally:
        setattr(module, name, former)


def staged_wrongly(packed, scale, mistake):
    """By a kernel with a planted mistake."""
    name, function, path = MISTAKES[mistake]
    with replaced(fp8_staging, name, function):
        return staged(packed, scale, path)

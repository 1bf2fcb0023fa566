"""Largest magnitudes, exactly: F32's bits without the sign grow with the number.

References: `mmq.kernels.reference.backend.mxfp8_amax` and `mmq.kernels.scan.float_amax`.

    amax = max |x|        of MXFP8 numbers e4m3(code) · 2^(b − 127), of BF16 or of F32 numbers

Four BF16 numbers 0x3F80 (1), 0xC000 (−2), 0x0001, 0x8000 (−0) have the magnitudes 0x3F80, 0x4000,
0x0001, 0x0000; the largest is 0x4000, 2. Each program writes the largest of its tile.
"""

import triton
import triton.language as tl

from .blocks import load_numbers, wide
from .mxfp8 import load_mxfp8
from .small_floats import bits_of


@triton.jit
def mxfp8_amax_kernel(codes, exponents, largest, groups, TILE: tl.constexpr):
    """The largest magnitude bits of each tile, I32, from codes U8 and exponents U8."""
    magnitude = bits_of(load_mxfp8(codes, exponents, wide(groups), TILE)) & 0x7FFFFFFF
    tl.store(largest + tl.program_id(0), tl.max(magnitude, 0))


@triton.jit
def float_amax_kernel(values, largest, count, TILE: tl.constexpr):
    """The same from F32 numbers, or from BF16 bits (U16)."""
    magnitude = bits_of(load_numbers(values, wide(count), TILE)) & 0x7FFFFFFF
    tl.store(largest + tl.program_id(0), tl.max(magnitude, 0))

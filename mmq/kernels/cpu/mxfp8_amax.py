"""The largest magnitude of an MXFP8 tensor, reading almost none of its elements.

    amax = max over blocks of e4m3(largest |code|) · 2^(b − 127)

Four blocks with exponents [120, 119, 120, 117]: if a block at 120 holds 256 · 2^−7 = 2, no element
at 119 can pass it, since 448 · 2^−8 = 1.75, and only the two blocks at 120 are read. Quantisers
that follow OCP give every block a largest code of at least 256, so the highest exponent decides;
other tensors cost more reads and give the exact answer too.
"""

from __future__ import annotations

import numpy as np

from ..results import U8
from .compiled import E4M3, E8M0

_LARGEST_CODE = 0x7E


def mxfp8_amax(codes_OK: U8, exponent_OG: U8) -> np.float32:
    """F32 maximum of a tensor without NaN; inf where an element overflows F32."""
    blocks = codes_OK.reshape(-1, 32)
    exponents = exponent_OG.reshape(-1)
    amax = np.float32(0.0)
    with np.errstate(over="ignore"):
        for exponent in range(int(exponents.max(initial=0)), -1, -1):
            if E4M3[_LARGEST_CODE] * E8M0[exponent] <= amax:
                break
            largest_code = int((blocks[exponents == exponent] & 127).max(initial=0))
            amax = max(amax, E4M3[largest_code] * E8M0[exponent])
    return amax

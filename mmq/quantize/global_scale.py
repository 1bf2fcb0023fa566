"""The one F32 scale an NVFP4 tensor carries beside its block scales.

    max   s2 = f32(amax) / 2688        2688 = 6 · 448, the largest E2M1 times the largest E4M3
    mse   s2 = 19/16 · 2^−n            n the largest integer with amax ≤ 6 · 256 · s2

Four numbers: a tensor [0.5, −21, 3, 8] has amax 21. For `max` scaling s2 = 21 / 2688 = 0.0078125 =
2^−7: its largest block then wants the block scale 21 / (6 · s2) = 448, the top of E4M3, and nothing
saturates. For `mse` 21 ≤ 1536 · 19/16 · 2^−n holds up to n = 6, so s2 = 19/16 · 2^−6 = 0.0186, the
largest block wants 189 (at most 256), and the codes above it, which the search may prefer, exist.

One mantissa for all tensors makes everything but exponents the same for all of them: tables can be
made once, and both forms of the scale restore each other exactly. Why 19/16: docs/numerics.md and
``scripts/choose_global_mantissa.py``. `four-over-six` takes the same scale, since its 4 is a larger
code too.

ModelOpt and torchao store s2 itself, the *multiplier*; compressed-tensors and the M3.1 checkpoints
store fl(1 / s2), the *divisor*. ModelOpt emits s2 = 0 for an all-zero tensor (and NaN weights with
it) and a subnormal s2 for a tiny one; mmq emits neither. Source of the first rule: ModelOpt
``NVFP4QTensor.get_weights_scaling_factor_2``.
"""

from __future__ import annotations

import math

import numpy as np

#: Largest E2M1 magnitude times largest E4M3 magnitude.
NVFP4_RANGE = np.float32(6.0 * 448.0)

#: For searches: the largest block's `max` scale stays at or below 256, six codes below E4M3's last.
SEARCH_RANGE = 6.0 * 256.0

#: The mantissa of every global scale that a search uses.
SEARCH_MANTISSA = 19 / 16

#: Smallest normal F32. A subnormal s2 is flushed to zero by GPUs, and below 2^−128 its reciprocal
#: is inf.
MIN_GLOBAL_SCALE = np.float32(2.0**-126)


def nvfp4_global_scale(amax: np.float32, search: str = "max") -> np.float32:
    """The multiplier s2 of a tensor, or of tensors that share one, of largest magnitude `amax`.

    Args:
        amax: F32, finite, not negative; the maximum over all tensors that are to share the scale.
        search: the rule for block scales that s2 is to serve: "max", "mse" or "four-over-six".

    Returns:
        A normal, positive F32 whose reciprocal is finite, and 1 for an all-zero tensor. "max":
        amax / 2688, raised to 2^−126 where that would be subnormal. Others: 19/16 · 2^−n, n at most
        126. No upper clamp is needed: the largest F32 gives 1.27e35 and 3.95e35, whose reciprocals
        are still normal.

    Raises:
        ValueError: amax is negative, infinite or NaN, or the search is unknown.
    """
    amax = np.float32(amax)
    if not (np.isfinite(amax) and amax >= 0):
        raise ValueError(f"amax must be finite and not negative, got {amax}")
    if search not in ("max", "mse", "four-over-six"):
        raise ValueError(f"unknown scale search {search!r}")
    if amax == 0:
        return np.float32(1.0)
    if search == "max":
        return np.float32(max(amax / NVFP4_RANGE, MIN_GLOBAL_SCALE))
    # 1824 has 7 significant bits and amax 24: F64 compares them exactly.
    largest = SEARCH_RANGE * SEARCH_MANTISSA
    n = math.frexp(largest / float(amax))[1]
    while float(amax) > math.ldexp(largest, -n):
        n -= 1
    return np.float32(math.ldexp(SEARCH_MANTISSA, -min(n, 126)))


def reciprocal_scale(scale: np.float32) -> np.float32:
    """fl(1 / scale): from multiplier to divisor and back.

    Applying it twice restores s2 only where both divisions are exact, or lucky: about one value in
    seven comes back one ulp off. A lossless round trip therefore has to remember the first value.

    Raises:
        ValueError: `scale` or its reciprocal is not a normal positive F32.
    """
    scale = np.float32(scale)
    if not (np.isfinite(scale) and scale >= MIN_GLOBAL_SCALE):
        raise ValueError(f"a global scale must be a normal positive F32, got {scale}")
    reciprocal = np.float32(1.0) / scale
    if reciprocal < MIN_GLOBAL_SCALE:
        raise ValueError(f"the reciprocal of the global scale {scale} is subnormal: {reciprocal}")
    return reciprocal

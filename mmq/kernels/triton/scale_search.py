"""Block scales with the least error, and the better of two.

Reference: `mmq.kernels.reference.scale_search`, operation by operation.

    s2       = c · 2^−n with 1 ≤ c < 2                    t = x · 2^n
    d(S)     = t − q · e4m3(S) · c                        q = e2m1(x / (e4m3(S) · s2))
    error(S) = tree over the 16 columns of f32(d(S)²)     chosen: the code S of least error

Four numbers, as if they were a block, with s2 = 2^−7 (c = 1, n = 7): [0.5, −0.34, 0.25, 0] are
t = [64, −43.52, 32, 0]; the `max` code 0x53 (11) has the error 4 + 0.23 + 1 and stays.

The reference tries all 126 codes. Here those are left out that cannot win, m being the `max` code
and S its scale:

- More than 16 below m, without weights. The step is then below S·c/4.26, so the largest element,
  at least 5.64 S·c, misses its place by more than 4.23 S·c, which squared exceeds 16 (S·c)², and 16
  elements that are off by S·c at most, half of the widest gap, are all that m costs.
- Above max(m + 8, 15), where sources have at most 8 significant bits and c at most 12. Such a code
  is 2^j times another one from m + 1 on, whose elements include all of its own up to 6 S, so that
  no element gets nearer; and the other one wins ties, being nearer to m. That each element does
  get its nearest neighbour is where the bits are needed: a quotient is then either exactly a
  midpoint or, at 2^−20 of it or more, not rounded to it. F32 sources are tried with all codes.
"""

import triton
import triton.language as tl

from .small_floats import (
    bits_of,
    decode_e2m1,
    decode_e4m3,
    decode_e8m0,
    encode_e2m1,
    encode_magnitude,
    number_of,
)


@triton.jit
def encode_scale(wanted_B):
    """E4M3 codes, I32, of F32 scales clamped to 2^−9 … 448."""
    return encode_magnitude(tl.minimum(tl.maximum(wanted_B, 2.0**-9), 448.0), 3, 7)


@triton.jit
def _tree_sum(x_BJ):
    """Σ of 16 columns: neighbours first, then neighbouring sums; F32 [B]."""
    B: tl.constexpr = x_BJ.shape[0]
    even, odd = tl.split(x_BJ.reshape(B, 2, 2, 2, 2))
    even, odd = tl.split(even + odd)
    even, odd = tl.split(even + odd)
    even, odd = tl.split(even + odd)
    return even + odd


@triton.jit
def _block_errors(x_BJ, t_BJ, scale_B, s2, c, weights_BJ, WEIGHTED: tl.constexpr):
    """error(S) of each block under its scale code: F32 [B]."""
    B: tl.constexpr = x_BJ.shape[0]
    e4m3_B = decode_e4m3(scale_B)
    step_BJ = tl.broadcast_to((e4m3_B * s2)[:, None], (B, 16))
    q_BJ = decode_e2m1(encode_e2m1(tl.div_rn(x_BJ, step_BJ))).to(tl.float64)
    d_BJ = t_BJ.to(tl.float64) - q_BJ * (e4m3_B.to(tl.float64) * c)[:, None]
    square_BJ = (d_BJ * d_BJ).to(tl.float32)
    if WEIGHTED:
        square_BJ = square_BJ * weights_BJ
    return _tree_sum(square_BJ)


@triton.jit
def better_scale(
    x_BJ, first_B, s2, weights_BJ,
    SEARCH: tl.constexpr, SHORT: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """E4M3 codes, I32 [B], by the rule SEARCH; `first_B` are the `max` codes, which win ties.

    Args:
        SEARCH: "mse" or "four-over-six".
        SHORT: whether all x have at most 8 significant bits.
        WEIGHTED: whether `weights_BJ` count.
    """
    B: tl.constexpr = x_BJ.shape[0]
    bits = bits_of(s2)
    c = number_of((bits & 0x7FFFFF) | (127 << 23)).to(tl.float64)
    # Exact in F32 but for overflow, in hopeless blocks, and below 2^−126, whose square is 0 anyway.
    t_BJ = x_BJ * decode_e8m0(254 - (bits >> 23))
    amax_B = tl.max(tl.abs(x_BJ), 1)
    if SEARCH == "four-over-six":
        quarter_B = tl.div_rn(amax_B, tl.full((B,), 4.0 * s2, tl.float32))
        best_B = encode_scale(quarter_B)
        first_error_B = _block_errors(x_BJ, t_BJ, first_B, s2, c, weights_BJ, WEIGHTED)
        best_error_B = _block_errors(x_BJ, t_BJ, best_B, s2, c, weights_BJ, WEIGHTED)
        best_B = tl.where(best_error_B < first_error_B, best_B, first_B)
    else:
        best_B = first_B + 127  # farther than any code
        least_B = tl.full((B,), float("inf"), tl.float32)
        highest_B = 126 - first_B
        if SHORT:
            window_B = tl.minimum(tl.maximum(15 - first_B, 8), highest_B)
            highest_B = tl.where((bits & 0xFFF) == 0, window_B, highest_B)
        lowest = 1 - tl.max(first_B, 0)
        if not WEIGHTED:
            lowest = tl.maximum(lowest, -16)
        for offset in range(lowest, tl.max(highest_B, 0) + 1):
            # A block with fewer codes than others tries its last one again, which changes nothing.
            code_B = tl.minimum(tl.maximum(first_B + offset, 1), 126)
            error_B = _block_errors(x_BJ, t_BJ, code_B, s2, c, weights_BJ, WEIGHTED)
            nearer_B = tl.abs(code_B - first_B) < tl.abs(best_B - first_B)
            # Codes ascend, so that of two equally near ones the smaller stays.
            better_B = (error_B < least_B) | ((error_B == least_B) & nearer_B)
            best_B = tl.where(better_B, code_B, best_B)
            least_B = tl.where(better_B, error_B, least_B)
    # From here on no scale can hold a block, all saturate, and squares may overflow.
    hopeless_B = amax_B.to(tl.float64) >= s2.to(tl.float64) * 2.0**60
    return tl.where(hopeless_B, first_B, best_B)

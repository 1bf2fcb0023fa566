"""How far rounding can move a result: bounds derived from the operations, none of them tuned.

    fl(a ∘ b) = (a ∘ b)(1 + δ), |δ| ≤ u        u = 2^−24 for F32, 2^−8 for BF16
    γ_n = n·u / (1 − n·u)                      bounds a product of n factors (1 + δ)^±1

Four numbers, F32: γ_1 = 5.96e−8, γ_8 = 4.77e−7, γ_128 = 7.63e−6; BF16: γ_1 = 3.92e−3.

Source: N. J. Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., §2.2, §3.1, §4.2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

#: Unit round-off: half the distance from 1 to the next larger number.
F32 = 2.0**-24
BF16 = 2.0**-8


def gamma(roundings: float, unit: float = F32) -> float:
    """γ_n: the relative error of a result that `roundings` roundings in a row can cause."""
    return roundings * unit / (1 - roundings * unit)


def norm_error(depth: int) -> float:
    """Relative error of an element of an F32 RMS norm whose sum adds a term `depth` times at most.

    A square takes 1 rounding, its sums `depth`, the division by D and ε one each: all terms are
    positive, so mean + ε is off by γ_(depth + 3). The root halves that. Root, reciprocal, product,
    1 + w and the last product add 5; half a rounding more covers what is of second order.
    """
    return gamma((depth + 3) / 2 + 5.5)


def rope_error(
    first: Tensor, second: Tensor, cos: Tensor, sin: Tensor, depth: int
) -> tuple[Tensor, Tensor]:
    """Absolute errors, F64, of a normed pair that is turned: a·cos − b·sin and b·cos + a·sin.

    Args:
        first, second: a and b in F64; cos, sin: as the kernel has them, taken for exact.
        depth: as in `norm_error`.
    """
    relative = norm_error(depth)
    relative += gamma(2) * (1 + relative)  # a product and a sum
    return (
        relative * ((first * cos).abs() + (second * sin).abs()),
        relative * ((second * cos).abs() + (first * sin).abs()),
    )


def score_error(magnitude: Tensor, dim: int, roundings: int = 1) -> Tensor:
    """Absolute error of a block's index score, the largest of dot products of `dim` numbers.

    Sums may be taken in any order, each rounding up to 2u: accumulators of matrix units may cut off
    instead of rounding. The error of a maximum is at most the largest error of what it is taken of.

    Args:
        magnitude: the largest Σ|q|·|k| of the keys that the block shows.
        roundings: of a product besides: by the tensor's scale, or of the key itself.

    Source: Fasi, Higham, Mikaitis, Pranesh, Numerical behavior of NVIDIA tensor cores, 2021.
    """
    return gamma(dim + roundings, 2 * F32) * magnitude


#: Relative error of exp on the hardware, in units of round-off: PTX promises 2^−22 for
#: ex2.approx.f32, and the product with log2(e) before it adds |x| more.
EXP_ROUNDINGS = 4


def products_apart(magnitudes: Tensor, length: int) -> Tensor:
    """How far two F32 sums of the same `length` products can be apart, in any two orders.

    Roundings count double, as in `score_error`: accumulators of matrix units may cut off.

    Args:
        magnitudes: Σ |a·b|.
    """
    return 2 * gamma(length, 2 * F32) * magnitudes


def rounded_apart(values: Tensor, apart: Tensor, unit: float = BF16) -> Tensor:
    """How far two numbers `apart` from each other are once each of them is rounded.

    Each moves by half a step at most. Numbers that are equal before are equal after.
    """
    return (apart + 2 * unit * (values.abs() + apart)).where(apart > 0, 0.0)


def sigmoid_error(x: Tensor, sigmoid: Tensor) -> Tensor:
    """Error of 1 / (1 + exp(−x)) in F32: exp's counts by 1 − s; the sum adds 1.

    The division adds 4: PTX promises 2 ulp for div.full.f32.
    """
    exp_roundings = EXP_ROUNDINGS + x.abs()
    return gamma(1) * sigmoid * ((1 - sigmoid) * exp_roundings + 5) + 2.0**-125


def router_scores_apart(magnitudes: Tensor, logits: Tensor, length: int) -> Tensor:
    """How far two implementations' scores can be apart: sigmoids of sums of `length` products.

    The slope of a sigmoid is 1/4 at most.

    Args:
        magnitudes: Σ |x·gate|, as `logits` in F64.
    """
    score = logits.sigmoid()
    return products_apart(magnitudes, length) / 4 + 2 * sigmoid_error(logits, score)


#: Relative norm of what a MoE layer in BF16 loses to F32: gate, up, act, out, share, sum, scaling
#: and result are rounded, by u / √3 each in the mean square, and √(8 / 3) < 2.
BF16_LAYER = 2 * BF16
#: The steepest slope of x · sigmoid(x).
SWISH_SLOPE = 1.1


def swiglu_apart(
    gate: Tensor, up: Tensor, gate_apart: Tensor, up_apart: Tensor, *,
    alpha: float, limit: float, beta: float,
) -> Tensor:  # fmt: skip
    """How far two results of `swiglu_oai` can be apart whose arguments are so far apart.

    Clamping brings nothing apart. g · sigmoid(alpha · g) is swish(alpha · g) / alpha: its slope is
    that of swish, its magnitude |g| at most. Four roundings and the sigmoid's are each one's own.
    """
    g, u = gate.clamp(max=limit), up.clamp(-limit, limit) + beta
    sigmoid = (alpha * g).sigmoid()
    own = gamma(4) * sigmoid + sigmoid_error(alpha * g, sigmoid)
    moved = SWISH_SLOPE * gate_apart * (u.abs() + up_apart) + g.abs() * up_apart
    return moved + 2 * own * (g * u).abs()


#: Relative error of 2^x and ln: PTX gives 2^−22 for `ex2.approx.ftz.f32`; others are closer.
EXP = 2.0**-22
#: Of the difference of two lse, over 1 + their size: a logarithm and 4 roundings each.
LSE = 2 * (EXP + 4 * F32)
#: Unit of sums inside tensor cores, which truncate. Source: M. Fasi et al., Numerical behavior of
#: NVIDIA tensor cores (2021), §4.
TRUNCATED = 2.0**-23
#: Below this, exponentials may be flushed to 0.
TINY = 2.0**-126


@dataclass(frozen=True)
class AttentionRoundings:
    """What an implementation of attention rounds, and how often.

    Attributes:
        p: unit of the probabilities as they enter the dot with V.
        dot: unit of a sum inside a dot.
        out: unit of the stored output.
        rescales: how often a sum is multiplied when a larger score turns up; 0 if the largest is
            known beforehand.
        parts: outputs that are merged by their lse.
    """

    p: float = F32
    dot: float = F32
    out: float = F32
    rescales: int = 0
    parts: int = 1


def attention_error(
    q_THD: Tensor,
    k_SGD: Tensor,
    v_SGD: Tensor,
    visible_GTS: Tensor,
    scale: float,
    roundings: AttentionRoundings,
) -> Tensor:
    """How far an implementation can be from exact attention of its operands: F64 [T, H, D].

    With s the scores, m the largest that an implementation has seen, w = softmax(s), W = Σ w·|v|:

    - A score is off by e ≤ γ_(D + 3)·scale·Σ|q||k|: D products and sums in any order, three
      roundings for the scale.
    - s − m is rounded, and so are the differences between successive m, which add up to no more
      than the range of the scores: 2·u·range. That m itself is rounded cancels in the quotient.
    - Every exponential is off by `EXP`, every product with one by a rounding. So p is off by
      η = exp(max e + 2·u·range)·((1 + EXP)·(1 + u))^(rescales + 1) − 1.
    - Σ p·v takes p rounded once more, and S + rescales roundings; Σ p as many, of F32.
    - Σ p·v / Σ p is off by (θ_n + θ_d) / (1 − θ_d) · W. Division and the products with V's scale
      take 5 roundings (`div.full.f32` is off by two units), and the output is rounded when stored.
    - Merging: see `merge_error`.
    - An exponential that is flushed or subnormal is off by `TINY` at most, beside a sum of 1.

    Args:
        q_THD, k_SGD, v_SGD: the operands as the implementation has them.
        visible_GTS: bool; every query sees a key.
        scale: of the scores, without the rounding that the implementation gives it.
    """
    keys, r = len(k_SGD), roundings
    weighted_GTRD, size_GTR, range_GTR, highest_GTR = _attention_sizes(
        q_THD, k_SGD, v_SGD, visible_GTS, scale
    )
    score_GTR = gamma(k_SGD.shape[2] + 3, r.dot) * size_GTR
    exponent_GTR = score_GTR + 2 * F32 * (range_GTR + 2 * score_GTR)
    if r.parts > 1:
        lse_GTR = highest_GTR.abs() + score_GTR + math.log(keys)
        exponent_GTR = exponent_GTR + LSE * (1 + lse_GTR)
    steps = r.rescales + r.parts
    growth_GTR = exponent_GTR.exp() * ((1 + EXP) * (1 + F32)) ** (steps + 1)
    numerator_GTR = growth_GTR * (1 + r.p) * (1 + gamma(keys + steps, r.dot)) - 1
    denominator_GTR = growth_GTR * (1 + gamma(keys + steps)) - 1
    relative_GTR = (numerator_GTR + denominator_GTR) / (1 - denominator_GTR)
    relative_GTR = (1 + relative_GTR) * (1 + gamma(5)) * (1 + r.out) - 1
    error_GTRD = relative_GTR[..., None] * weighted_GTRD + 2 * keys * TINY * v_SGD.abs().max()
    return error_GTRD.transpose(0, 1).flatten(1, 2)


def merge_error(parts: int, largest_lse: float) -> float:
    """How far a merge of parts by their lse can be from exact, over the largest part's output.

    The difference of two lse is off by `LSE`; the weights are exponentials again, and the sums have
    a term for each part.
    """
    weight = math.exp(LSE * (1 + largest_lse)) * (1 + EXP) * (1 + gamma(parts + 2)) - 1
    return (1 + 2 * weight / (1 - weight)) * (1 + gamma(5)) - 1


def _attention_sizes(
    q_THD: Tensor, k_SGD: Tensor, v_SGD: Tensor, visible_GTS: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Σ w·|v|, and of the visible keys: max scale·Σ|q||k|, range and maximum of the scores; F64."""
    heads = k_SGD.shape[1]
    q_GTRD = q_THD.double().reshape(len(q_THD), heads, -1, q_THD.shape[2]).transpose(0, 1)
    k_GDS = k_SGD.double().permute(1, 2, 0)[:, None]
    hidden_GTS = ~visible_GTS[:, :, None]
    score_GTRS = scale * (q_GTRD @ k_GDS)
    size_GTRS = scale * (q_GTRD.abs() @ k_GDS.abs())
    seen_GTRS = score_GTRS.masked_fill(hidden_GTS, -torch.inf)
    highest_GTR = seen_GTRS.amax(-1)
    return (
        seen_GTRS.softmax(-1) @ v_SGD.double().abs().transpose(0, 1)[:, None],
        size_GTRS.masked_fill(hidden_GTS, 0).amax(-1),
        highest_GTR - score_GTRS.masked_fill(hidden_GTS, torch.inf).amin(-1),
        highest_GTR,
    )

"""Analytic KV-cache scales: bounds that no input can pass, so they need no calibration data.

    K:  |k_i|  ≤  √D · max_j |1 + w_j|                  (per-head RMS norm, then RoPE)
    V:  |v_i|  ≤  √H · ‖ W_v[i, :] ∘ (1 + γ) ‖₂          (RMS-normed input of width H)
    scale = bound / 448, rounded up to F32; value = scale · e4m3, or scale · e4m3 · e2m1 block-wise

Four numbers: D = 4, w = (0, 0.5, −0.25, 0) → bound 2 · 1.5 = 3, scale 3/448 = 0.00669643.

Derivation: docs/kv-cache.md. Every sum runs in a fixed order of elementwise float64 operations, so
the bits are the same on every machine.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Float64: TypeAlias = npt.NDArray[np.float64]

#: Largest finite E4M3 value.
E4M3_MAX = 448.0
_MIN_NORMAL = np.float32(2.0**-126)


def k_bound(weight_D: Float64, head_dim: int, *, gemma: bool = True) -> float:
    """Largest |k| after the per-head norm and RoPE, for any hidden state.

    An RMS-normed vector has norm at most √D, its elements are scaled by at most max|1+w|, and
    RoPE rotates pairs, which keeps their norm.

    Args:
        weight_D: key norm weight, float64 [D].
        gemma: whether the norm scales by 1 + w (M3) rather than by w.
    """
    gain = np.abs(1.0 + weight_D if gemma else weight_D)
    return float(np.sqrt(np.float64(head_dim)) * gain.max())


def v_bound(weight_OK: npt.NDArray[np.float32], gamma_K: Float64, *, gemma: bool = True) -> float:
    """Largest |v| for any hidden state, by Cauchy-Schwarz on each row of v_proj.

    Args:
        weight_OK: dequantised v_proj, float32 [O, K].
        gamma_K: input norm weight, float64 [K].
    """
    gain = 1.0 + gamma_K if gemma else gamma_K
    width = weight_OK.shape[1]
    rows = np.square(weight_OK.astype(np.float64) * gain)
    norm = np.sqrt(_ordered_row_sums(rows).max())
    return float(norm * np.sqrt(np.float64(width)))


def _ordered_row_sums(values_OK: Float64) -> Float64:
    """Row sums by halving: elementwise adds only, so no library's summation order leaks in."""
    width = 1 << (values_OK.shape[1] - 1).bit_length()
    padded = np.zeros((values_OK.shape[0], width))
    padded[:, : values_OK.shape[1]] = values_OK
    while width > 1:
        width //= 2
        padded = padded[:, :width] + padded[:, width:]
    return np.asarray(padded[:, 0])


def scale_from_bound(bound: float) -> np.float32:
    """bound / 448 as F32, rounded up, so that bound itself still fits the format."""
    scale = np.float32(bound / E4M3_MAX)
    if float(scale) * E4M3_MAX < bound:
        scale = np.nextafter(scale, np.float32(np.inf))
    return max(scale, _MIN_NORMAL)

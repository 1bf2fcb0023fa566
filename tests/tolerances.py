"""Every tolerance of the tests, by name; each is derived in `mmq.kernels.error_bounds`."""

from __future__ import annotations

from mmq.kernels.error_bounds import (
    BF16,
    BF16_LAYER,
    F32,
    TRUNCATED,
    AttentionRoundings,
    attention_error,
    gamma,
    merge_error,
    norm_error,
    products_apart,
    rope_error,
    rounded_apart,
    router_scores_apart,
    score_error,
    swiglu_apart,
)

__all__ = [
    "BF16",
    "BF16_LAYER",
    "F32",
    "TRUNCATED",
    "AttentionRoundings",
    "attention_error",
    "gamma",
    "merge_error",
    "norm_error",
    "products_apart",
    "rope_error",
    "rounded_apart",
    "router_scores_apart",
    "score_error",
    "swiglu_apart",
]

"""Weights to measure scale searches on: four distributions; the seeds are in the scripts."""

from __future__ import annotations

from typing import Any

import numpy as np

#: Standard deviation, or scale, of a typical projection.
SCALE = 0.02


def gaussian(rng: np.random.Generator, rows: int, columns: int) -> Any:
    """N(0, 0.02²)."""
    return SCALE * rng.standard_normal((rows, columns))


def llm_like(rng: np.random.Generator, rows: int, columns: int) -> Any:
    """Gaussian rows of lognormal width (σ = 0.5), one element in a thousand ten times as large."""
    values = SCALE * rng.standard_normal((rows, columns)) * rng.lognormal(0, 0.5, (rows, 1))
    values[rng.random((rows, columns)) < 0.001] *= 10
    return values


def student_t4(rng: np.random.Generator, rows: int, columns: int) -> Any:
    """Student's t with four degrees of freedom: heavy tails everywhere."""
    return SCALE * rng.standard_t(4, (rows, columns))


def laplace(rng: np.random.Generator, rows: int, columns: int) -> Any:
    """Two-sided exponential."""
    return SCALE * rng.laplace(size=(rows, columns))


DISTRIBUTIONS = {
    "Gaussian": gaussian,
    "LLM-like": llm_like,
    "student-t4": student_t4,
    "Laplace": laplace,
}


def samples(seed: int, rows: int, columns: int) -> dict[str, Any]:
    """F32 [rows, columns] of each distribution, each from its own generator."""
    return {
        name: draw(np.random.default_rng([seed, index]), rows, columns).astype(np.float32)
        for index, (name, draw) in enumerate(DISTRIBUTIONS.items())
    }

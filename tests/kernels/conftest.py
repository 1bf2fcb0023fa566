"""Input domains for the kernels: every code under every largest code, every exponent, every BF16.

Dimensions: O rows, K columns, G = K/32.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

GOLDEN = Path(__file__).parents[1] / "data" / "nvfp4-golden.json"


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """The reference works on small tensors: threads would mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def golden():
    return json.loads(GOLDEN.read_text())["cases"]


@pytest.fixture(scope="session")
def all_codes_under_every_max():
    """E4M3 codes U8 [O, 32]: for each m from 0 to 126, every ±c with c ≤ m, m itself in each 16."""
    halves = []
    for largest in range(127):
        signed = np.array([c | s for c in range(largest + 1) for s in (0, 128)], np.uint8)
        signed = np.append(signed, np.full(-signed.size % 15, largest, np.uint8)).reshape(-1, 15)
        half = np.insert(signed, 0, largest, axis=1)
        # The largest code must not always come first, nor be positive.
        half = np.stack([np.roll(row, i % 16) for i, row in enumerate(half)])
        half[1::2] ^= 128
        halves.append(half)
    halves = np.concatenate(halves)
    if len(halves) % 2:
        halves = np.concatenate([halves, halves[:1]])
    return halves.reshape(-1, 32)


@pytest.fixture(scope="session")
def mxfp8_domain(all_codes_under_every_max):
    """codes U8 [O, K], exponents U8 [O, G]: the codes above under each exponent to 246.

    From 247 on the largest codes overflow F32, and callers refuse those.
    """
    codes = all_codes_under_every_max
    exponents = np.repeat(np.arange(247, dtype=np.uint8), len(codes))
    return np.tile(codes, (247, 1)), exponents[:, None]


@pytest.fixture(scope="session")
def all_bf16_pairs():
    """BF16 bits U16 [O, 32]: every finite number, signs mixed, in three arrangements.

    Sorted blocks span little, shuffled blocks everything from 0 to the largest number.
    """
    finite = np.array([b for b in range(65536) if b & 0x7F80 != 0x7F80], np.uint16)
    by_magnitude = finite[np.argsort(finite & 0x7FFF, kind="stable")]
    shuffled = np.random.default_rng(1).permutation(finite)
    # Magnitudes 32 places apart in one block: up to two octaves, where all codes and ties occur.
    whole = by_magnitude[: by_magnitude.size // 512 * 512]
    strided = whole.reshape(-1, 16, 32).transpose(0, 2, 1)
    return np.concatenate([by_magnitude, shuffled, strided.reshape(-1)]).reshape(-1, 32)


def _random_mxfp8(rows, columns, seed):
    rng = np.random.default_rng(seed)
    exponents = rng.integers(108, 118, (rows, columns // 32)).astype(np.uint8)
    codes = rng.integers(0, 127, (rows, columns)).astype(np.uint8)
    return codes | (rng.integers(0, 2, (rows, columns)) << 7).astype(np.uint8), exponents


@pytest.fixture
def random_mxfp8():
    """A function of (rows, columns, seed) that gives MXFP8 codes and exponents without NaN."""
    return _random_mxfp8

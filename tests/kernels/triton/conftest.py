"""A process in which Triton interprets: the variable counts when Triton is imported, and the tests
of the compiler need a Triton that compiles."""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

import pytest


def _with_tile(tile, function, *arguments):
    from mmq.kernels.triton import backend

    backend.TILE, backend.PACKED_TILE = tile, 2 * tile
    return function(*arguments)


@pytest.fixture(scope="session")
def interpreted():
    """A function (function, *arguments) that calls it where TRITON_INTERPRET=1.

    Programs take 16 times the elements they take on a GPU, unless `tile` says otherwise: the
    interpreter spends its time on programs and operations, not on elements.
    """
    pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TRITON_INTERPRET", "1")
        assert pool.submit(os.getenv, "TRITON_INTERPRET").result(timeout=60) == "1"

    def call(function, *arguments, tile=32768):
        return pool.submit(_with_tile, tile, function, *arguments).result(timeout=600)

    with pool:
        yield call

"""A process in which Triton interprets: the variable counts when Triton is imported, and the tests
of the compiler need a Triton that compiles."""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

import pytest


@pytest.fixture(scope="session")
def interpreted():
    """A function (function, *arguments) that calls it where TRITON_INTERPRET=1.

    Programs take 16 times the elements they take on a GPU, unless `tile` says otherwise: the
    interpreter spends its time on programs and operations, not on elements.
    """
    from interpreted_process import call_with_tile  # imports Triton, which not every machine has

    pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TRITON_INTERPRET", "1")
        assert pool.submit(os.getenv, "TRITON_INTERPRET").result(timeout=60) == "1"

    def call(function, *arguments, tile=32768):
        return pool.submit(call_with_tile, tile, function, *arguments).result(timeout=600)

    with pool:
        yield call

"""A process in which Triton interprets: the variable counts when Triton is imported, and the tests
of the compiler need a Triton that compiles."""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

import pytest


@pytest.fixture(scope="session")
def interpreted():
    """A function (function, *arguments) that calls it where TRITON_INTERPRET=1."""
    pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TRITON_INTERPRET", "1")
        assert pool.submit(os.getenv, "TRITON_INTERPRET").result(timeout=60) == "1"
    with pool:
        yield lambda function, *arguments: pool.submit(function, *arguments).result(timeout=600)

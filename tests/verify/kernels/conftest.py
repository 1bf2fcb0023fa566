"""A process in which Triton interprets, shared by the tests that run kernels."""

from __future__ import annotations

import importlib.util

import pytest

from mmq.verify.kernels.run import Worker


@pytest.fixture(scope="session")
def interpreting():
    """The worker of level kernels: `interpreting.call(function, …)` runs where kernels run."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs triton, which has wheels for Linux only")
    with Worker(interpreted=True) as process:
        yield process

"""The bundled small model on a loopback Hub, and the action with mmq on its PATH."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from actions_runner import Runner
from ci_places import ROOT, SOURCE
from loopback_hub.hub_server import LoopbackHub

from mmq.demo.bundled import bundled_model


@pytest.fixture
def hub():
    with LoopbackHub() as server:
        server.add_folder(SOURCE, bundled_model())
        yield server


@pytest.fixture
def environment(hub, tmp_path):
    """Variables of a CI job that has mmq on its PATH and this Hub; no home of anybody's."""
    own = str(Path(sys.executable).parent)
    variables = {
        "PATH": os.pathsep.join([own, os.environ["PATH"]]),
        "HOME": str(tmp_path / "home"), "HF_HOME": str(tmp_path / "hf"), "PAUSE": "0",
        # on a busy machine a second thread waits for its core, and everything for it
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    # the action gets its token as an input
    return variables | {k: v for k, v in hub.environment.items() if k != "HF_TOKEN"}


@pytest.fixture(scope="session")
def numba_cache(tmp_path_factory):
    """What one run compiled, the next finds, as with the action's cache."""
    return tmp_path_factory.mktemp("numba")


@pytest.fixture
def runner(tmp_path, environment, numba_cache):
    temporary = tmp_path / "runner"
    temporary.mkdir()
    (temporary / "mmq-numba").symlink_to(numba_cache)
    return Runner(ROOT, temporary, environment)

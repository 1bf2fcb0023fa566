"""Converted checkpoints as loaders see them: the small model, and the release at its true scale."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from loading import Files, Tensor, read_files

from mmq.console import Console
from mmq.convert.checkpoint import open_checkpoint
from mmq.convert.configs import build_configs
from mmq.convert.options import ConvertOptions
from mmq.convert.plan import build_plan
from mmq.convert.run import RunSettings, convert
from mmq.demo.small_model import build_small_model

LAYOUTS = ("modelopt", "minimax")
RELEASE = "minimax-m3-mxfp8"


@pytest.fixture(scope="session")
def small_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_small_model(tmp_path_factory.mktemp("small") / "source")


@pytest.fixture(scope="session")
def small_folders(small_source: Path) -> dict[str, Path]:
    """The small model converted to each layout."""
    folders = {}
    for layout in LAYOUTS:
        out = small_source.parent / layout
        convert(
            str(small_source), out, ConvertOptions(layout=layout), RunSettings(jobs=1),
            Console("quiet"),
        )  # fmt: skip
        folders[layout] = out
    return folders


@pytest.fixture(scope="session")
def release_files() -> dict[str, Files]:
    """What converting the release would write, in names, dtypes, shapes and configs."""
    return {layout: _planned(layout) for layout in LAYOUTS}


def _planned(layout: str) -> Files:
    plan = build_plan(open_checkpoint(RELEASE), ConvertOptions(layout=layout))
    configs = build_configs(plan)
    tensors = {o.name: Tensor(o.dtype, o.shape) for unit in plan.units for o in unit.outputs}
    return Files(configs["config.json"], configs.get("hf_quant_config.json"), tensors)


@pytest.fixture
def small(small_folders: dict[str, Path]) -> Callable[[str], Files]:
    """Layout → the small checkpoint, fresh, to be damaged."""
    return lambda layout: read_files(small_folders[layout])


@pytest.fixture(params=["small", "release"])
def files(request: pytest.FixtureRequest) -> Callable[[str], Files]:
    """Layout → the checkpoint, at small and at true scale."""

    def of(layout: str) -> Files:
        if request.param == "release":
            found: Files = request.getfixturevalue("release_files")[layout]
            return found
        return read_files(request.getfixturevalue("small_folders")[layout])

    return of

"""Conversions to plant faults in: one per layout, made once, copied for each test."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
from planted import Planted

from mmq.console import Console
from mmq.convert.options import ConvertOptions
from mmq.convert.run import RunSettings, convert


def converted(source: Path, out: Path, **options) -> Planted:
    """Convert a source, in silence."""
    quiet = Console("quiet", stdout=io.StringIO(), stderr=io.StringIO())
    convert(str(source), out, ConvertOptions(**options), RunSettings(jobs=1), quiet)
    return Planted(out, source)


@pytest.fixture(scope="session")
def conversions(good_folder, tmp_path_factory) -> dict[str, Planted]:
    """Several shards each, so that one can be lost."""
    root = tmp_path_factory.mktemp("conversions")
    return {
        layout: converted(good_folder, root / layout, layout=layout, max_shard_bytes=250_000)
        for layout in ("modelopt", "minimax")
    }


@pytest.fixture
def modelopt(conversions, tmp_path) -> Planted:
    """A private copy in the modelopt layout, mmq's own."""
    return Planted.copy(conversions["modelopt"], tmp_path / "modelopt")


@pytest.fixture
def minimax(conversions, tmp_path) -> Planted:
    """A private copy in the minimax layout, mmq's own."""
    return Planted.copy(conversions["minimax"], tmp_path / "minimax")


@pytest.fixture
def make(tmp_path) -> Callable[..., Planted]:
    """Convert any source with any options."""

    def run(source: Path, name: str = "out", **options) -> Planted:
        return converted(source, tmp_path / name, **options)

    return run

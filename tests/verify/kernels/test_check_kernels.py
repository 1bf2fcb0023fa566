"""`make check-kernels` compiles every kernel of every module for every target it is made for."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs triton, which has wheels for Linux only")

import mmq.kernels.triton as package
from mmq.kernels.triton.launch import TARGETS

ROOT = Path(__file__).parents[3]
#: Modules whose tests are named otherwise than by variant.
BY_TARGET = {
    "fp8_staging": ("test_own_path_compiles_to_its_instruction", "test_portable_path_compiles")
}


def modules_with_variants():
    names = [module.name for module in pkgutil.iter_modules(package.__path__)]
    modules = [importlib.import_module(f"{package.__name__}.{name}") for name in names]
    return {
        module.__name__.rpartition(".")[2]: module.VARIANTS
        for module in modules
        if hasattr(module, "VARIANTS")
    }


def escaped(name):
    """A variant's name as pytest has it in the name of a test."""
    return name.encode("unicode_escape").decode("ascii")


@pytest.mark.slow
def test_every_variant_has_a_test_on_every_target():
    command = (ROOT / "Makefile").read_text("utf-8").split("check-kernels:")[1].splitlines()[1]
    options = command.partition("-m pytest ")[2]
    assert options == '-m "slow or not slow" tests/kernels/triton tests/verify/kernels'
    collected = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-o", "addopts=", "-q",
         "-p", "no:cacheprovider", "tests/kernels/triton"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    tests = collected.splitlines()
    missing = []
    for module, variants in modules_with_variants().items():
        if module in BY_TARGET:
            missing += [
                (name, t)
                for name in BY_TARGET[module]
                for t in TARGETS
                if not any(test.endswith(f"::{name}[{t}]") for test in tests)
            ]
            continue
        for variant in variants:
            for target in getattr(variant, "targets", TARGETS):
                names = f"[{escaped(variant.name)}-{target}]", f"[{target}-{escaped(variant.name)}]"
                if not any(test.endswith(names) for test in tests):
                    missing.append((variant.name, target))
    assert missing == []
    assert len(modules_with_variants()) >= 8

"""A module with one mistake planted in its source."""

from __future__ import annotations

import importlib.util
import itertools
from pathlib import Path
from types import ModuleType

_numbers = itertools.count()


def load_mutant(module: ModuleType, right: str, wrong: str, folder: Path) -> ModuleType:
    """`module` with `wrong` where its source says `right`, which it says once."""
    source = Path(module.__file__).read_text("utf-8")
    assert source.count(right) == 1, f"{source.count(right)} times: {right}"
    parent = module.__name__.rpartition(".")[0]
    grandparent = parent.rpartition(".")[0]
    source = source.replace(right, wrong)
    source = source.replace("from ..", f"from {grandparent}.").replace("from .", f"from {parent}.")
    name = f"{module.__name__.replace('.', '_')}_mutant_{next(_numbers)}"
    path = folder / f"{name}.py"
    path.write_text(source, "utf-8")
    spec = importlib.util.spec_from_file_location(name, path)
    mutant = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mutant)
    return mutant

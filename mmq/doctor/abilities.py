"""Which backends there are, and what of mmq works with them."""

from __future__ import annotations

import os
import warnings

from mmq.doctor.facts import Fact, first_line, load
from mmq.doctor.libraries import library, remedy_for

#: The library that each backend of `mmq.kernels.ops` stands or falls with.
_STANDS_ON = {"cpu": "numba", "triton": "triton", "torch-table": "torch", "reference": "torch"}
_NO_GPU = "--device cpu gives the same bytes"


def backend_facts() -> list[Fact]:
    """Each backend of `mmq.kernels.ops`, and which one "auto" is."""
    ops = load("mmq.kernels.ops")
    facts = []
    for name, module in ops.BACKENDS.items():
        try:
            load(module)
            facts.append(Fact(name, True, "can be imported"))
        except Exception as error:
            facts.append(Fact(name, False, first_line(error), _remedy(name)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        chosen = ops.resolve_backend("auto")
    if chosen == "cpu":
        return [*facts, Fact("auto", True, "is cpu")]
    return [*facts, Fact("auto", False, f"is {chosen}: the same bytes, slowly", _remedy("cpu"))]


def _remedy(backend: str) -> str:
    if backend == "cpu" and os.environ.get("NUMBA_DISABLE_JIT", "0") != "0":
        return "unset NUMBA_DISABLE_JIT"
    return remedy_for(_STANDS_ON[backend])


def ability_facts() -> list[Fact]:
    """What a user would ask for, and why not."""
    torch, triton = library("torch"), library("triton")
    gpu = bool(torch.ok) and load("torch").cuda.is_available()
    usable = bool(gpu and triton.ok)
    no = "no: no GPU" if triton.ok else "no: triton cannot be imported"
    kernels = "executed natively" if usable else "emulated by Triton's interpreter"
    return [
        Fact("convert --device cpu", True, "yes"),
        _ability("convert --device cuda", usable, "yes", no, _NO_GPU),
        _ability(
            "verify --level structure, weights, logits", bool(torch.ok), "on the CPU",
            "no: torch cannot be imported", torch.remedy,
        ),
        _ability(
            "verify --level kernels", bool(triton.ok), kernels,
            "needs triton: every operation is skipped", triton.remedy,
        ),
        _ability(
            "bench --kernels --device cuda", usable, "yes", no,
            "mmq bench --kernels --device cpu times the references",
        ),
    ]  # fmt: skip


def _ability(name: str, ok: bool, yes: str, no: str, remedy: str | None) -> Fact:
    return Fact(name, True, yes) if ok else Fact(name, False, no, remedy)

"""All facts, by section."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mmq.doctor.abilities import ability_facts, backend_facts
from mmq.doctor.disk import disk_facts
from mmq.doctor.facts import Fact, first_line
from mmq.doctor.gpus import gpu_facts
from mmq.doctor.hub import hub_facts
from mmq.doctor.libraries import library_facts
from mmq.doctor.machine import machine_facts


def examined(folder: Path, *, measure: bool, network: bool) -> dict[str, list[Fact]]:
    """Facts by section; nothing is compiled, and no kernel runs.

    Args:
        measure: write and read 256 MB in `folder`.
        network: ask the Hub.
    """
    sections: dict[str, Callable[[], list[Fact]]] = {
        "machine": lambda: [*machine_facts(), *disk_facts(folder, measure=measure)],
        "libraries": library_facts,
        "GPUs": gpu_facts,
        "backends of weight operations": backend_facts,
        "Hugging Face Hub": lambda: hub_facts(ask=network),
        "what works": ability_facts,
    }
    return {title: _looked(look) for title, look in sections.items()}


def _looked(look: Callable[[], list[Fact]]) -> list[Fact]:
    """A section; what breaks one must not hide the others."""
    try:
        return look()
    except Exception as error:
        text = f"{type(error).__name__}: {first_line(error)}"
        return [
            Fact(
                "not looked at",
                False,
                text,
                "see to what else is not ok, then run mmq doctor again",
            )
        ]

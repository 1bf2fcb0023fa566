"""What inspect and convert --dry-run share: making a plan, and saying what was found on the way."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from mmq.console import Console


@contextmanager
def collector_paused() -> Iterator[None]:
    """A plan of the release is half a million tuples without cycles; looking for cycles among
    them takes a third of the time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def say_findings(console: Console, findings: Iterable[dict[str, Any]]) -> None:
    """Findings about a source or a plan."""
    from mmq.report.findings import Finding

    for finding in findings:
        console.finding(Finding(**finding), talk=True)

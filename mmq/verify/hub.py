"""Locations on the Hub: level structure looks at headers only, the others at a copy."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from pathlib import Path

from mmq.console import Console
from mmq.convert.hub_copy import local_copy
from mmq.errors import UsageError
from mmq.hub.location import parse_location
from mmq.hub.snapshot import open_snapshot
from mmq.hub.stand_in import write_stand_in
from mmq.verify.subject import Subject


def needs_report_path(out: str, level: str | None, report_path: Path | None) -> bool:
    """Whether OUT is on the Hub, where no report can be put.

    Raises:
        UsageError: the level writes more than a report.
    """
    remote = parse_location(out) is not None
    if remote and level == "logits" and report_path is None:
        raise UsageError(
            "hub-needs-output", f"{out} is on the Hub: nothing can be written into it",
            where=out, hint="-o FILE says where the report and what goes with it shall lie",
        )  # fmt: skip
    return remote


def local_locations(
    out: str, against: str | None, level: str | None, folder: Path | None, console: Console
) -> tuple[str, str | None]:
    """OUT and SRC as paths where the level reads weights; unchanged where headers will do.

    Raises:
        UsageError: files are needed, and nobody said where to put them.
    """
    if level == "structure" or against is None:
        return out, against
    return local_copy(out, folder, console), local_copy(against, folder, console)


def stand_in(location: str) -> tuple[Subject, Path] | None:
    """A subject without weights and the folder that stands in for it; None for no Hub location.

    Raises:
        BadInputError: refused.  IncompleteError: not reachable.
    """
    repository = parse_location(location)
    if repository is None:
        return None
    snapshot = open_snapshot(repository)
    if not snapshot.files and snapshot.cached is not None:
        return Subject(location, snapshot.cached), snapshot.cached
    folder = Path(tempfile.mkdtemp(prefix="mmq-hub-"))
    subject = Subject(location, folder, headers_only=True)
    weakref.finalize(subject, shutil.rmtree, folder, ignore_errors=True)
    write_stand_in(snapshot, folder, everything=True)
    return subject, folder

"""Locations on the Hub, by what a level reads of them.

             OUT                     --against SRC
structure    headers                 headers
weights      a whole copy            each shard while a job reads it
logits       a whole copy            a whole copy
"""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from mmq.console import Console
from mmq.convert.downloads import Downloads, DownloadSettings, ahead, checkpoints_of
from mmq.convert.hub_copy import local_copy
from mmq.convert.side_files import SideFile
from mmq.convert.source_files import nearest
from mmq.convert.work import SOURCE
from mmq.errors import UsageError
from mmq.hub.location import parse_location
from mmq.hub.snapshot import open_snapshot
from mmq.hub.stand_in import write_stand_in
from mmq.report.file_names import VERIFY_FOLDER
from mmq.report.hub_lines import short_bytes
from mmq.verify.expectation import Expectation
from mmq.verify.subject import Subject

if TYPE_CHECKING:
    from mmq.verify.jobs import ShardJob


@dataclass(frozen=True)
class DownloadPlace:
    """Where a verification's downloads lie.

    Attributes:
        beside: the folder the report goes to; None where nothing may be written beside OUT.
    """

    settings: DownloadSettings = field(default_factory=DownloadSettings)
    beside: Path | None = None

    @property
    def default(self) -> Path:
        """Where they lie unless --download-dir says."""
        return (self.beside or Path()).absolute() / VERIFY_FOLDER / "source"

    def check(self, nbytes: int) -> None:
        """Before they come.

        Raises:
            UsageError: nothing can be written beside the report, and nobody said where else.
        """
        if self.settings.folder is not None:
            return
        if self.beside is None or not os.access(nearest(self.beside), os.W_OK):
            what = "OUT is on the Hub" if self.beside is None else f"{self.beside} is not writable"
            raise UsageError(
                "hub-needs-files", f"the source's shards have to lie somewhere, and {what}",
                got=f"{short_bytes(nbytes)} to download",
                hint="--download-dir DIR; or -o FILE, beside which they will lie",
            )  # fmt: skip


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
    """OUT and SRC as paths where all of them is needed; unchanged where less will do.

    Raises:
        UsageError: files are needed, and nobody said where to put them.
    """
    if level == "structure" or against is None:
        return out, against
    out = local_copy(out, folder, console)
    if level == "logits":
        instead = "; or --level weights, which needs a few shards at a time"
        against = local_copy(against, folder, console, instead=instead)
    return out, against


def source_downloads(
    subject: Subject, expectation: Expectation, jobs: Sequence[ShardJob],
    sides: Sequence[SideFile], place: DownloadPlace, console: Console, *, workers: int = 1,
) -> Downloads[ShardJob]:  # fmt: skip
    """What jobs read of sources on the Hub, brought when they need it.

    Args:
        workers: jobs that run at a time.
        sides: side files of the source; those that OUT has in the same size are read.

    Raises:
        UsageError: they would have no place.
    """
    source, plan = expectation.source, expectation.plan
    wanted = sides if place.settings.keep else _equal_in_size(subject, sides)
    downloads = Downloads(
        {SOURCE: source} if plan is None else checkpoints_of(plan), jobs, wanted, place.settings,
        place.default, console, ahead=ahead(workers),
    )  # fmt: skip
    if downloads.nbytes:
        place.check(downloads.nbytes)
    return downloads


def _equal_in_size(subject: Subject, sides: Sequence[SideFile]) -> list[SideFile]:
    assert subject.root is not None
    there = ((subject.root / side.name, side) for side in sides)
    return [s for path, s in there if path.is_file() and path.stat().st_size == s.nbytes]


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

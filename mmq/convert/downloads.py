"""The Hub's side of a run: where downloads go, whether they fit, what is left of them.

OUT/.mmq/source/ORG--NAME/COMMIT/    by default, for `convert`; goes with the journal
DIR/ORG--NAME/COMMIT/                --download-dir DIR; --keep-downloads leaves a whole
                                     checkpoint there, which is a SRC like any other
OUT/.mmq/hub.json                    commits of this run, for the one that resumes it

`convert` and level weights of `verify` (mmq/verify/hub.py) share all of it but the default folder.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, NamedTuple

from mmq.console import Console
from mmq.convert.checkpoint import Checkpoint, read_json_object
from mmq.convert.download_plan import DownloadPlan, U, plan_downloads, present_files
from mmq.convert.journal import FOLDER
from mmq.convert.plan import ConversionPlan
from mmq.convert.side_files import SideFile
from mmq.convert.source_files import (
    FolderLock,
    SourceFiles,
    fetch_extra,
    free_bytes,
    nearest,
    remove_others,
)
from mmq.convert.work import SOURCE, WorkUnit
from mmq.convert.writer import json_bytes, write_file
from mmq.errors import BadInputError, MachineError, UsageError
from mmq.hub.stand_in import JSON_NAMES
from mmq.report.hub_lines import short_bytes

#: Room for journal, index and file-system overhead beyond the files themselves.
SPARE_BYTES = 64 << 20
_PINS_NAME = "hub.json"


@dataclass(frozen=True)
class DownloadSettings:
    """Where downloads lie, and whether they stay; none of it changes output bytes."""

    folder: Path | None = None
    keep: bool = False

    @classmethod
    def of(cls, folder: str | None, keep: bool) -> DownloadSettings:
        """From the command line's words.

        Raises:
            UsageError: downloads are to stay in a folder that goes.
        """
        if keep and folder is None:
            raise UsageError(
                "option-conflict", "--keep-downloads needs a place that stays",
                hint="--download-dir DIR",
            )  # fmt: skip
        return cls(None if folder is None else Path(folder).expanduser().absolute(), keep)


def default_folder(out: Path) -> Path:
    """Where downloads go when nobody says."""
    return out / FOLDER / "source"


def read_pins(out: Path, *, restart: bool) -> dict[str, str]:
    """Commits by `org/name@revision` of the unfinished run in OUT, so that it goes on with them."""
    path = out / FOLDER / _PINS_NAME
    if restart or not path.is_file():
        return {}
    try:
        return {str(k): str(v) for k, v in read_json_object(path).items()}
    except BadInputError:
        return {}


def write_pins(out: Path, pins: Mapping[str, str]) -> None:
    """Keep them until the run is finished."""
    if pins:
        write_file(out / FOLDER / _PINS_NAME, json_bytes(pins))


def ahead(jobs: int) -> int:
    """Units whose shards may be here at a time: those that run, and one more."""
    return jobs + 1


class Output(NamedTuple):
    """What a run writes besides downloads."""

    folder: Path
    nbytes: int


class Downloads(Generic[U]):
    """What a run needs from the Hub; a context manager around its units.

    Args:
        checkpoints: what the units' tasks read, by origin; the source among them.
        units: what is to run, in its natural order.
        sides: the side files that are wanted.
        default: where downloads lie unless the settings say; a folder for nothing else.
        ahead: units whose shards may be here at a time.
        output: what the units write, which needs room too; None: nothing.

    Attributes:
        units: what is to run, in order.
        paths: where readers find each shard.
        sides: the side files, where they can be copied from.
        gate: for `executor.run_units`; None when nothing is downloaded.
    """

    def __init__(
        self, checkpoints: Mapping[str, Checkpoint], units: Sequence[U], sides: Sequence[SideFile],
        settings: DownloadSettings, default: Path, console: Console, *, ahead: int,
        output: Output | None = None,
    ) -> None:  # fmt: skip
        self._console = console
        self._folder = settings.folder or default
        self._own = settings.folder is None
        self._keep = settings.keep
        self._source = checkpoints[SOURCE]
        self._plan = plan_downloads(checkpoints, units, sides, self._folder, keep=settings.keep)
        self._ahead = ahead
        self._output = output or Output(self._folder, 0)
        self._lock: FolderLock | None = None
        self._files: SourceFiles | None = None
        self.units = list(self._plan.units)
        self.paths = self._plan.paths
        self.sides = list(self._plan.sides)

    @property
    def nbytes(self) -> int:
        """All that is brought, if nothing of it is there yet."""
        return self._plan.nbytes

    @property
    def gate(self) -> SourceFiles | None:
        return self._files

    def status(self) -> str:
        """For the label of a progress line."""
        return self._files.status() if self._files is not None else ""

    def __enter__(self) -> Downloads[U]:
        """Bring the side files, and begin with the shards.

        Raises:
            MachineError: no room.  RefusedError: another run works in that folder.
        """
        plan, console = self._plan, self._console
        if not (plan.used or plan.extra):
            self._afford()
            return self
        self._lock = FolderLock(self._folder)
        try:
            if self._own:
                remove_others(self._folder, {*plan.used, *plan.extra, self._lock.path})
            budget = self._afford()
            console.note(
                f"downloading {short_bytes(plan.nbytes)} in {len(plan.used) + len(plan.extra)}"
                f" files, at most {short_bytes(min(plan.nbytes, budget + plan.extra_bytes))} of it"
                " here at a time"
            )
            with console.progress(plan.extra_bytes, "fetching side files") as progress:
                fetch_extra(plan, lambda n: progress.advance(n))
        except BaseException:
            self._unlock()
            raise
        self._files = SourceFiles(plan, budget, keep=self._keep)
        self._files.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        if self._files is not None:
            self._files.stop()
        self._unlock()

    def finish(self) -> None:
        """The run has what it came for: what was kept becomes a checkpoint, the rest goes."""
        hub = self._source.hub
        if not self._keep:
            for path in self._plan.extra:
                path.unlink(missing_ok=True)
        if self._keep and hub is not None and hub.snapshot.files:
            for name in JSON_NAMES:
                if (hub.folder / name).is_file():
                    target = self._folder / hub.snapshot.slug / name
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(hub.folder / name, target)
        if not self._keep:
            remove_empty(self._plan, self._folder)

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None
            if self._own:
                for folder in (self._folder, self._folder.parent):
                    with suppress(OSError):  # it holds something
                        folder.rmdir()

    def _afford(self) -> int:
        """Bytes of shards to hold at a time: to be one unit ahead, or what there is room for.

        Raises:
            MachineError: not even one unit at a time fits.
        """
        plan, (out, written) = self._plan, self._output
        if not (written or plan.used or plan.extra):
            return 0
        present = present_files({*plan.used, *plan.extra})
        shards = present & plan.used
        here = sum(size_on_disk(path) for path in present)
        if self._keep:
            least = most = sum(plan.remote[p].nbytes for p in plan.used)
        else:
            least, most = (plan.peak(n, shards) for n in (1, self._ahead))
        lacking = max(least + plan.extra_bytes - here, 0)
        one_disk = nearest(self._folder).stat().st_dev == nearest(out).stat().st_dev
        free = free_bytes(self._folder) + here - plan.extra_bytes - SPARE_BYTES
        if one_disk or not plan.used:
            free -= written
            check_space(out, written + lacking, "the output" if written else "downloads")
        else:
            check_space(out, written)
            check_space(self._folder, lacking, "downloads")
        return max(least, min(most, free))


def conversion_downloads(
    plan: ConversionPlan, pending: Sequence[WorkUnit], sides: Sequence[SideFile], out: Path,
    settings: DownloadSettings, jobs: int, console: Console,
) -> Downloads[WorkUnit]:  # fmt: skip
    """Those of a conversion.

    Args:
        pending: units that are not done.
    """
    written = sum(u.file_bytes for u in pending) + sum(s.nbytes for s in sides)
    return Downloads(
        checkpoints_of(plan), pending, sides, settings, default_folder(out), console,
        ahead=ahead(jobs), output=Output(out, written),
    )  # fmt: skip


def checkpoints_of(plan: ConversionPlan) -> dict[str, Checkpoint]:
    """What a plan's tasks read, by origin."""
    return {SOURCE: plan.source, **plan.others}


def size_on_disk(path: Path) -> int:
    """Bytes of a download that are there, finished or not."""
    from mmq.hub.download import PARTIAL

    found = (path, path.with_name(path.name + PARTIAL))
    return sum(p.stat().st_size for p in found if p.is_file())


def download_summary(
    plan: ConversionPlan,
    sides: Sequence[SideFile],
    out: Path,
    settings: DownloadSettings,
    jobs: int,
) -> dict[str, Any] | None:
    """What `--dry-run` says of downloads; None when the source is here."""
    downloads = plan_downloads(
        checkpoints_of(plan), plan.units, sides, settings.folder or default_folder(out),
        keep=settings.keep,
    )  # fmt: skip
    if not (downloads.used or downloads.extra):
        return None
    units = ahead(min(jobs, len(plan.units)))
    total = sum(downloads.remote[path].nbytes for path in downloads.used)
    return {
        "files": len(downloads.used) + len(downloads.extra),
        "bytes": downloads.nbytes,
        "held_bytes": downloads.extra_bytes + (total if settings.keep else downloads.peak(units)),
        "least_bytes": downloads.extra_bytes + (total if settings.keep else downloads.peak(1)),
    }


def remove_empty(plan: DownloadPlan[Any], folder: Path) -> None:
    """Folders of the commits, once nothing lies in them."""
    commits = {folder / r.snapshot.slug for r in (*plan.remote.values(), *plan.extra.values())}
    for commit in commits:
        below = sorted((p for p in commit.rglob("*") if p.is_dir()), reverse=True)
        for path in (*below, commit, commit.parent):
            if path.is_dir() and not any(path.iterdir()):
                path.rmdir()


def check_space(folder: Path, nbytes: int, what: str = "the output") -> None:
    """Refuse what does not fit.

    Raises:
        MachineError: too little room.
    """
    free = free_bytes(folder)
    needed = nbytes + SPARE_BYTES
    if free < needed:
        raise MachineError(
            "disk-space",
            f"{folder} has no room for {what}",
            where=str(folder),
            got=f"{free:,} bytes free",
            expected=f"{needed:,} bytes",
            hint="free space, or choose another disk"
            + ("" if what == "the output" else " with --download-dir"),
        )

"""A whole repository of the Hub on disk, for work that needs all of a checkpoint at once.

Forwards (`calibrate`, level logits of `verify`) read layers again and again, and an OUT that is to
be verified is read by several levels; they work on a copy: the Hub's cache where it holds all of
the commit, else DIR/ORG--NAME/COMMIT, which stays for the next command.
"""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path

from mmq.console import Console
from mmq.convert.downloads import check_space, size_on_disk
from mmq.convert.source_files import FolderLock
from mmq.errors import UsageError
from mmq.hub.download import download
from mmq.hub.location import HubLocation, parse_location
from mmq.hub.snapshot import Snapshot, open_snapshot
from mmq.report.hub_lines import short_bytes


def local_copy(location: str, folder: Path | None, console: Console, *, instead: str = "") -> str:
    """A path that holds what a location names; other locations than the Hub's come back unchanged.

    Args:
        folder: --download-dir.
        instead: what else could be done about a checkpoint that is not here, for the hint.

    Raises:
        UsageError: it would have to be downloaded, and nobody said where to.
        BadInputError: refused, or of another digest.  IncompleteError: not reachable.
        MachineError: no room.
    """
    repository = parse_location(location)
    if repository is None:
        return location
    snapshot = open_snapshot(repository)
    if snapshot.cached is not None and all(map(snapshot.cached_file, snapshot.files)):
        return str(snapshot.cached)
    if folder is None:
        raise _no_folder(location, repository, snapshot, instead)
    target = folder / snapshot.slug
    files = {name: target / name for name in sorted(snapshot.files)}
    total = sum(f.size for f in snapshot.files.values())
    lacking = max(total - sum(map(size_on_disk, files.values())), 0)
    check_space(folder, lacking, "downloads")
    if lacking:
        console.note(f"downloading all of {location}, {short_bytes(lacking)}; it stays in {target}")
    lock = FolderLock(folder)
    stop = threading.Event()
    try:
        with console.progress(total, f"downloading {repository.repo}") as progress:
            for name, path in files.items():
                download(snapshot, name, path, stop, partial(progress.advance, label=name))
    finally:
        stop.set()
        lock.close()
    return str(target)


def _no_folder(
    location: str, repository: HubLocation, snapshot: Snapshot, instead: str
) -> UsageError:
    total = sum(file.size for file in snapshot.files.values())
    return UsageError(
        "hub-needs-files",
        f"all of {location} has to be on disk at once, and it is not here",
        where=location,
        got=f"{short_bytes(total)} to download",
        hint=f"--download-dir DIR; or hf download {repository.repo} --revision {snapshot.commit}"
        f" --local-dir DIR, and name DIR{instead}",
    )

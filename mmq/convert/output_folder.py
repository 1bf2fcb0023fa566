"""May we write here? Finished, unfinished and foreign output folders, and what may be removed."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from mmq.convert.checkpoint import (
    CONFIG_NAME,
    HF_QUANT_CONFIG_NAME,
    INDEX_NAME,
    read_json_object,
)
from mmq.convert.journal import FOLDER, LOCATION, Journal, fingerprint_diff, lasting
from mmq.convert.plan import ConversionPlan
from mmq.convert.relayout import MANIFEST_NAME
from mmq.convert.side_files import SideFile
from mmq.convert.source_revision import recorded_source
from mmq.convert.work import IMPORTANCE, SOURCE
from mmq.convert.writer import PARTIAL, disk_error
from mmq.errors import BadInputError, MmqError, RefusedError, UsageError
from mmq.report.file_names import CONVERT_REPORT, VERIFY_FOLDER, VERIFY_REPORT, VERIFY_TOKENS

#: Where runs keep what they need while they last.
_WORK_FOLDERS = (f"{FOLDER}/", f"{VERIFY_FOLDER}/")
#: Files beside the weights that speak of one run, so that a new run replaces them.
_OF_ONE_RUN = frozenset(
    {CONVERT_REPORT, VERIFY_REPORT, VERIFY_TOKENS, "tensors.csv", CONFIG_NAME, HF_QUANT_CONFIG_NAME}
)
_SHARD_NAME = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")


def refuse_overlap(plan: ConversionPlan, side_files: list[SideFile], out: Path) -> None:
    """Refuse OUT inside SRC and SRC inside OUT, links resolved; --experts-from counts as SRC.

    A source of links into OUT counts too: --overwrite would remove what they lead to.

    Raises:
        UsageError: a source has no weights to convert.  RefusedError: they overlap.
    """
    dst = out.resolve()
    read = [side.path for side in side_files]
    for origin, source in {SOURCE: plan.source, **plan.others}.items():
        if source.root is None:
            raise UsageError(
                "source-has-no-weights",
                f"{source.location} is a header manifest: it can be planned, not converted",
                where=source.location,
                hint="add --dry-run, or name a folder that holds the weights",
            )
        if source.hub is not None:  # it lies nowhere yet, or in the Hub's cache
            continue
        src = source.root.resolve()
        read += [shard.path for shard in source.shards.values()]
        if origin == IMPORTANCE:  # a file, not a folder of its own
            continue
        if src == dst or src in dst.parents or dst in src.parents:
            raise _overlap(out, f"{dst} and {src}")
    for path in read:
        real = path.resolve()
        if dst in real.parents:
            raise _overlap(out, f"{path} leads to {real}")


def _overlap(out: Path, got: str) -> RefusedError:
    return RefusedError(
        "output-overlaps-source",
        "the output folder and the source must not contain each other",
        where=str(out),
        got=got,
        hint="choose an OUT beside the source",
    )


def prepare(
    out: Path, journal: Journal, fingerprint: Mapping[str, Any], writes: Iterable[str], *,
    restart: bool, overwrite: bool,
) -> str:  # fmt: skip
    """Make the folder ready and return "fresh", "resume" or "finished".

    Args:
        writes: names this run will write, but for the index; --overwrite may replace them.

    Raises:
        RefusedError: another run's output, other settings, foreign files.  MachineError: the
            folder cannot be written.
    """
    writes = set(writes)
    try:
        _refuse_file(out)
        # a run killed before its first record leaves only the journal's own folder
        if not out.exists() or (not journal.exists and {p.name for p in out.iterdir()} <= {FOLDER}):
            out.mkdir(parents=True, exist_ok=True)
            journal.lock()
            journal.begin(fingerprint, writes)
            return "fresh"
        return _existing(out, journal, fingerprint, writes, restart=restart, overwrite=overwrite)
    except OSError as error:
        raise disk_error(error, out) from error


def _refuse_file(out: Path) -> None:
    """OUT, or what it would lie in, must not be a file."""
    for path in (out, *out.parents):
        if path.is_dir():
            return
        if path.exists() or path.is_symlink():
            what = "a file" if path.exists() else "a link to what does not exist"
            raise UsageError(
                "output-not-folder", f"{path} is no folder", where=str(out), got=what,
                expected="a folder, or a name that is free", hint=f"mmq convert SRC {path}-nvfp4",
            )  # fmt: skip


def _existing(
    out: Path, journal: Journal, fingerprint: Mapping[str, Any], writes: set[str], *,
    restart: bool, overwrite: bool,
) -> str:  # fmt: skip
    finished = (out / INDEX_NAME).is_file()
    if journal.exists and not finished:
        return _unfinished(out, journal, fingerprint, writes, restart=restart)
    if not overwrite:
        diff = _differences(out, fingerprint) if finished else ["files that no mmq run wrote"]
        if not diff:
            return "finished"
        state = "a finished checkpoint" if finished else "files that are not an mmq run's"
        if finished and (origin := _origin(out)) not in (None, fingerprint.get(LOCATION)):
            state += f", made from {_short(origin)}; this is {_short(fingerprint.get(LOCATION))}"
        raise RefusedError(
            "output-not-empty",
            f"{out} holds {state}",
            where=str(out),
            got=f"{_shown(diff)} ({', '.join(sorted(p.name for p in out.iterdir())[:5])}, …)",
            expected="an empty folder, or this command's own run",
            hint="--overwrite replaces checkpoint files; or choose another OUT",
        )
    old = _removable(out, writes)
    journal.lock()
    _clear(out, old, writes)
    journal.begin(fingerprint, writes)
    return "fresh"


def _unfinished(
    out: Path, journal: Journal, fingerprint: Mapping[str, Any], writes: set[str], *, restart: bool
) -> str:
    journal.lock()
    if not restart:
        try:
            old = journal.read_fingerprint()
        except RefusedError:
            journal.unlock()
            raise
        diff = fingerprint_diff(old, fingerprint)
        if not diff:
            return "resume"
        journal.unlock()
        raise _run_differs(out, old, fingerprint, diff)
    ours = journal.read_files() | writes
    known = [
        path for path in sorted(out.rglob("*"))
        if path.is_file() and _is_ours(path.relative_to(out).as_posix(), ours)
    ]  # fmt: skip
    _clear(out, known, set())
    journal.begin(fingerprint, writes)
    return "fresh"


def _run_differs(
    out: Path, old: Mapping[str, Any], new: Mapping[str, Any], diff: list[str]
) -> RefusedError:
    """Another run's folder: whose, and the command that goes on with it."""
    first, now = old.get(LOCATION), new.get(LOCATION)
    if first in (None, now) or old.get("options") != new["options"]:
        origin = [f"{LOCATION}: {first} → {now}"] if first not in (None, now) else []
        return RefusedError(
            "run-differs",
            f"{out} holds an unfinished run with other settings or another source",
            where=str(out),
            got=_shown(origin + diff),
            expected="the same source and options",
            hint="repeat the first command, or --restart to discard the unfinished run",
        )
    # what else differs follows from the source
    again = shlex.join(["mmq", "convert", str(first), str(out)])
    return RefusedError(
        "run-differs", f"{out} holds an unfinished run from {_short(first)}, this is {_short(now)}",
        where=str(out), got=_short(now), expected=_short(first),
        hint=f"{again} goes on with it, with the same options; --restart discards it",
    )  # fmt: skip


def _short(location: object) -> str:
    """A location with as much of its commit as people compare."""
    return re.sub(r"@([0-9a-f]{7})[0-9a-f]{33}$", r"@\1", str(location))


def _shown(diff: list[str]) -> str:
    return "; ".join(diff[:8]) + (f"; and {len(diff) - 8} more" if len(diff) > 8 else "")


def _is_ours(name: str, ours: set[str]) -> bool:
    """Whether a file, or the partial of one, is named in `ours` or is an output shard."""
    bare = name.removesuffix(PARTIAL)
    return bare in ours or _SHARD_NAME.fullmatch(bare) is not None


def _clear(out: Path, old: list[Path], writes: set[str]) -> None:
    """Remove old files; an empty stand-in keeps the mode of those that will be written again.

    A stand-in is never taken for a shard: it has no record, and no index says it is finished.
    """
    # the index first, so that no moment looks finished
    for path in sorted(old, key=lambda p: p.name != INDEX_NAME):
        keeps = path.relative_to(out).as_posix() in writes and not path.is_symlink()
        mode = path.stat().st_mode & 0o777 if keeps else 0
        path.unlink(missing_ok=True)
        if keeps:
            path.touch()
            path.chmod(mode)
    for folder in sorted({p.parent for p in old} - {out}, reverse=True):
        with suppress(OSError):
            folder.rmdir()


def _differences(out: Path, fingerprint: Mapping[str, Any]) -> list[str]:
    """How a finished folder differs from what this command would make; empty when it does not."""
    try:
        manifest = read_json_object(out / MANIFEST_NAME)
    except BadInputError:
        return ["it is not this command's"]
    # through JSON, as the stored one went: tuples and integer keys compare equal
    wanted = json.loads(json.dumps(lasting(fingerprint)))
    stored = manifest.get("fingerprint")
    if stored != wanted:
        return fingerprint_diff(stored if isinstance(stored, dict) else {}, wanted)
    finished = (out / INDEX_NAME).stat().st_mtime_ns
    read = (fingerprint["source"], *fingerprint["others"].values())
    newer = [f"{name}: newer than the output" for shards in read for name, shard in shards.items()
             if shard["mtime_ns"] > finished]  # fmt: skip
    files = [(out / entry["name"], entry["bytes"]) for entry in manifest.get("files", [])]
    damaged = [
        f"{path.name}: {f'{path.stat().st_size:,} bytes' if path.is_file() else 'absent'},"
        f" {nbytes:,} when written"
        for path, nbytes in files
        if not path.is_file() or path.stat().st_size != nbytes
    ]
    return newer + damaged


def _origin(out: Path) -> str | None:
    """Where a finished folder came from, as its manifest or its report tell; None for neither."""
    with suppress(BadInputError):
        if recorded := recorded_source(read_json_object(out / MANIFEST_NAME)):
            return recorded
        source = read_json_object(out / CONVERT_REPORT).get("source")
        place = source.get("location") if isinstance(source, dict) else None
        # a relative one says nothing without the folder that it was typed in
        return place if isinstance(place, str) and Path(place).is_absolute() else None
    return None


def _named_files(out: Path) -> set[str]:
    """Files that the folder's own index and manifest name."""
    names: set[str] = set()
    for file, key in ((INDEX_NAME, "weight_map"), (MANIFEST_NAME, "files")):
        path = out / file
        if not path.is_file():
            continue
        try:
            value = read_json_object(path).get(key)
        except MmqError:
            continue
        if isinstance(value, dict):
            names.update(str(v) for v in value.values())
        elif isinstance(value, list):
            names.update(str(v.get("name")) for v in value if isinstance(v, dict))
    return {n for n in names if ".." not in Path(n).parts and not Path(n).is_absolute()}


def _removable(out: Path, writes: set[str]) -> list[Path]:
    """Files of an old checkpoint that --overwrite may remove.

    Raises:
        RefusedError: the folder holds anything else.
    """
    ours = writes | _named_files(out) | {INDEX_NAME, MANIFEST_NAME, *_OF_ONE_RUN}
    found: list[Path] = []
    foreign: list[str] = []
    for path in sorted(out.rglob("*")):
        name = path.relative_to(out).as_posix()
        if (path.is_dir() and not path.is_symlink()) or name.startswith(_WORK_FOLDERS):
            continue
        known = _is_ours(name, ours)
        (found if known else foreign).append(path if known else name)  # type: ignore[arg-type]
    if foreign:
        raise RefusedError(
            "output-foreign-files",
            f"{out} holds {len(foreign)} file(s) that no index or manifest names, so --overwrite"
            " leaves them alone",
            where=str(out),
            got=", ".join(foreign[:8]),
            hint="move them away, or choose another OUT",
        )
    return found

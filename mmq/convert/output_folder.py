"""May we write here? Finished, unfinished and foreign output folders, and what may be removed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mmq.convert.checkpoint import INDEX_NAME, Checkpoint, read_json_object
from mmq.convert.journal import FOLDER, Journal, fingerprint_diff, lasting
from mmq.convert.relayout import MANIFEST_NAME
from mmq.convert.writer import PARTIAL
from mmq.errors import BadInputError, MmqError, RefusedError, UsageError

#: Reports beside the checkpoint; they speak of one run, so a new run replaces them.
REPORT_NAMES = ("mmq-convert.json", "mmq-verify.json", "tensors.csv", "config.json",
                "hf_quant_config.json")  # fmt: skip
_SHARD_NAME = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")


def refuse_overlap(source: Checkpoint, out: Path) -> None:
    """Refuse OUT inside SRC and SRC inside OUT, links resolved.

    Raises:
        UsageError: they overlap.
    """
    if source.root is None:
        raise UsageError(
            "source-has-no-weights",
            f"{source.location} is a header manifest: it can be planned, but has nothing to convert",
            where=source.location,
            hint="add --dry-run, or name a folder that holds the weights",
        )
    src, dst = source.root.resolve(), out.resolve()
    if src == dst or src in dst.parents or dst in src.parents:
        raise RefusedError(
            "output-overlaps-source",
            "the output folder and the source must not contain each other",
            where=str(out),
            got=f"{dst} and {src}",
            hint="choose an OUT beside the source",
        )


def prepare(
    out: Path, journal: Journal, fingerprint: Mapping[str, Any], writes: Iterable[str], *,
    restart: bool, overwrite: bool,
) -> str:  # fmt: skip
    """Make the folder ready and return "fresh", "resume" or "finished".

    Args:
        writes: names this run will write; --overwrite may remove them.

    Raises:
        RefusedError: another run's output, other settings, foreign files.
    """
    if out.exists() and not out.is_dir():
        raise UsageError("output-not-folder", f"{out} is no folder", where=str(out))
    # a run killed before its first record leaves only the journal's own folder
    if not out.exists() or (not journal.exists and {p.name for p in out.iterdir()} <= {FOLDER}):
        out.mkdir(parents=True, exist_ok=True)
        journal.lock()
        journal.begin(fingerprint)
        return "fresh"
    finished = (out / INDEX_NAME).is_file()
    if journal.exists and not finished:
        return _unfinished(out, journal, fingerprint, restart=restart)
    if finished and not overwrite and _same_run(out, fingerprint):
        return "finished"
    if not overwrite:
        state = "a finished checkpoint" if finished else "files that are not an mmq run's"
        raise RefusedError(
            "output-not-empty",
            f"{out} holds {state}",
            where=str(out),
            got=", ".join(sorted(p.name for p in out.iterdir())[:5]),
            expected="an empty folder, or this command's own unfinished run",
            hint="--overwrite replaces checkpoint files; or choose another OUT",
        )
    old = _removable(out, set(writes))
    journal.lock()
    # the index first, so that no moment looks finished
    for path in sorted(old, key=lambda p: p.name != INDEX_NAME):
        path.unlink(missing_ok=True)
    journal.begin(fingerprint)
    return "fresh"


def _unfinished(
    out: Path, journal: Journal, fingerprint: Mapping[str, Any], *, restart: bool
) -> str:
    journal.lock()
    diff = fingerprint_diff(journal.read_fingerprint(), fingerprint)
    if not diff and not restart:
        return "resume"
    if not restart:
        journal.unlock()
        shown = "; ".join(diff[:8]) + (f"; and {len(diff) - 8} more" if len(diff) > 8 else "")
        raise RefusedError(
            "run-differs",
            f"{out} holds an unfinished run with other settings or another source",
            where=str(out),
            got=shown,
            expected="the same source and options",
            hint="repeat the first command, or --restart to discard the unfinished run",
        )
    for path in out.iterdir():
        if _SHARD_NAME.fullmatch(path.name.removesuffix(PARTIAL)):
            path.unlink()
    journal.begin(fingerprint)
    return "fresh"


def _same_run(out: Path, fingerprint: Mapping[str, Any]) -> bool:
    """Whether a finished folder is exactly what this command would make, files all there."""
    path = out / MANIFEST_NAME
    if not path.is_file():
        return False
    try:
        manifest = read_json_object(path)
    except BadInputError:
        return False
    # through JSON, as the stored one went: tuples and integer keys compare equal
    if manifest.get("fingerprint") != json.loads(json.dumps(lasting(fingerprint))):
        return False
    return all(
        (out / entry["name"]).is_file() and (out / entry["name"]).stat().st_size == entry["bytes"]
        for entry in manifest.get("files", [])
    )


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
    ours = writes | _named_files(out) | {INDEX_NAME, MANIFEST_NAME, *REPORT_NAMES}
    found: list[Path] = []
    foreign: list[str] = []
    for path in sorted(out.rglob("*")):
        name = path.relative_to(out).as_posix()
        if (path.is_dir() and not path.is_symlink()) or name.startswith(FOLDER + "/"):
            continue
        bare = name.removesuffix(PARTIAL)
        known = bare in ours or _SHARD_NAME.fullmatch(bare) is not None
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

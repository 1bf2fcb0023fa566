"""May this folder be published? Verified, with a verdict that allows it, and unchanged since.

The bytes are hashed anew: a report speaks of the files it judged, not of what lies there today.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from mmq.console import Console
from mmq.convert.relayout import MANIFEST_NAME
from mmq.convert.writer import file_sha256
from mmq.errors import RefusedError
from mmq.publish.folder import CARD_NAME, VERIFY_NAME, OutputFolder
from mmq.report.findings import Finding
from mmq.report.schema import GateResult, VerifyReport

#: Verdicts that may be published.
GOOD_VERDICTS = ("pass", "warn")
_VERIFY = "mmq verify OUT --against SRC"


class Fingerprint(NamedTuple):
    """A file's SHA-256, and what would show that it changed after it was read."""

    sha256: str
    bytes: int
    mtime_ns: int


def hash_folder(folder: OutputFolder, console: Console) -> dict[str, Fingerprint]:
    """Every file that the manifest names, and the manifest; reads all of them once."""
    names = [*(f.name for f in folder.files), MANIFEST_NAME]
    sizes = {name: (folder.root / name).stat() for name in names}
    found: dict[str, Fingerprint] = {}
    with console.progress(sum(s.st_size for s in sizes.values()), "hashing") as progress:
        for name, stat in sizes.items():
            digest = file_sha256(folder.root / name, progress.advance)
            found[name] = Fingerprint(digest, stat.st_size, stat.st_mtime_ns)
    return found


def report_problems(folder: OutputFolder) -> list[Finding]:
    """Reasons not to publish that the report alone tells: none, its verdict, too low a level."""
    report = folder.verify
    if report is None:
        return [
            Finding("publish-unverified", "error", f"there is no {VERIFY_NAME}: nobody verified it",
                    where=str(folder.root))
        ]  # fmt: skip
    found = list(_verdict(report))
    judged = {f.name for f in report.files}
    if unjudged := sorted(folder.weights - judged):
        found.append(
            Finding("publish-weights-unverified", "error",
                    f"{VERIFY_NAME} judged no bytes of {len(unjudged)} weight file(s), such as"
                    f" {unjudged[0]}: level weights did not run", where=unjudged[0])
        )  # fmt: skip
    return found


def stale_files(folder: OutputFolder, hashes: Mapping[str, Fingerprint]) -> list[Finding]:
    """Files that are not what was verified; what no report judged must be the manifest's."""
    judged = {f.name: f.sha256 for f in folder.verify.files} if folder.verify else {}
    recorded = {f.name: f.sha256 for f in folder.files}
    found = []
    for name, seen in hashes.items():
        expected = judged.get(name) or recorded.get(name, seen.sha256)
        # the author may edit the card
        if name != CARD_NAME and seen.sha256 != expected:
            found.append(
                Finding("publish-stale", "error", f"{name} is not the file that was verified",
                        where=name, got=seen.sha256, expected=expected)
            )  # fmt: skip
    return found


def _verdict(report: VerifyReport) -> Iterator[Finding]:
    if report.verdict not in GOOD_VERDICTS:
        errors = sum(f.severity == "error" for f in report.findings)
        yield Finding(
            "publish-verdict", "error",
            f"its verification says {report.verdict}, with {errors} error(s)", where=VERIFY_NAME,
            got=report.verdict, expected=" or ".join(GOOD_VERDICTS),
        )  # fmt: skip
    elif wrong := _belied(report):
        yield Finding(
            "publish-verdict", "error", f"its verification says {report.verdict}, and {wrong}",
            where=VERIFY_NAME, got="a report that contradicts itself", expected="mmq's own",
        )  # fmt: skip


def _belied(report: VerifyReport) -> str:
    """What of a report its good verdict does not fit; "" when all does."""
    bad = [f"level {level.level} {level.status}" for level in report.levels
           if level.status not in GOOD_VERDICTS]  # fmt: skip
    bad += [f"an error: {f.id}" for f in report.findings if f.severity == "error"]
    bad += [f"gate {gate.gate} {gate.status}" for gate in _gates(report)
            if gate.status not in GOOD_VERDICTS]  # fmt: skip
    return bad[0] if bad else ""


def _gates(report: VerifyReport) -> Iterator[GateResult]:
    yield from report.logits.gates if report.logits else ()


def refuse(found: list[Finding], allow_unverified: bool, root: Path, console: Console) -> None:
    """Say what was found; stop unless the caller takes the blame.

    Raises:
        RefusedError: there are reasons, and --allow-unverified was not given.
    """
    for finding in found:
        severity = "warning" if allow_unverified else "error"
        console.finding(finding._replace(severity=severity), talk=True)
    if found and not allow_unverified:
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise RefusedError(
            "publish-refused", f"not published: {found[0].message}{more}",
            where=str(root), hint=f"{_VERIFY}; or --allow-unverified, and the card will say so",
        )  # fmt: skip

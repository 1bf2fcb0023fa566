"""A report without the folders of the machine it was made on.

    /home/jo doe/src                                   src
    scales from /home/jo doe/kv.json were used         scales from kv.json were used
    work/client/src    (an option or a location)       src
    org/name@main      (read from the Hub)             org/name@main

Paths become their last part, wherever they stand. Absolute ones are known by their form; relative
ones, and spaces in any, by what the report's options and locations say. Hashes and everything
measured stay. What is neither JSON nor UTF-8 (NaN, half a surrogate pair) becomes what is.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from mmq.publish.folder import (
    CONVERT_NAME,
    VERIFY_NAME,
    OutputFolder,
    bare,
    file_options,
)
from mmq.report.schema import ConvertReport, VerifyReport

_ENDPOINTS = ("source", "output", "checkpoint", "against")
#: Fields that are one path, if they begin like one; others are text that may hold some.
_PLACES = ("location", "where", "got", "expected", "tokens_file")
_PART = r"[^\s/'\"`,;:()<>|]+"
_ABSOLUTE = rf"(?:file://)?(?:~[\w.-]*/|\.{{1,2}}/|/{_PART}/)(?:{_PART}/)*{_PART}/?"
_SECOND = re.compile(r"\s['\"]?(?:~|\.{1,2})?/")
_SURROGATE = re.compile("[\ud800-\udfff]")


def public_reports(folder: OutputFolder) -> dict[str, bytes]:
    """The reports to publish, by file name: those that were judged, read once."""
    reports = {CONVERT_NAME: folder.convert, VERIFY_NAME: folder.verify}
    cut = _cutter(_paths(folder))
    return {name: _public(report, cut) for name, report in reports.items() if report is not None}


def _public(report: ConvertReport | VerifyReport, cut: Callable[[str], str]) -> bytes:
    value = _without(report.model_dump(), cut)
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    return f"{text}\n".encode()


def _paths(folder: OutputFolder) -> Iterator[str]:
    """Every path that options and locations tell of."""
    yield from file_options(folder.manifest).values()
    if folder.convert is not None:
        told = {"options": folder.convert.options, "hub": folder.manifest.get("hub")}
        yield from file_options(told).values()
    yield from (str(Path.home()), str(Path.cwd()), str(folder.root.absolute()))
    for report in (folder.convert, folder.verify):
        for key in _ENDPOINTS:
            endpoint = getattr(report, key, None)
            if endpoint is not None and not _on_the_hub(endpoint.location, endpoint.repo):
                yield endpoint.location
    if folder.verify and folder.verify.logits and folder.verify.logits.tokens_file:
        yield folder.verify.logits.tokens_file


def _on_the_hub(location: str, repo: str) -> bool:
    return bool(repo) and location.removeprefix("hf://").partition("@")[0] == repo


def _cutter(paths: Iterable[str]) -> Callable[[str], str]:
    """What replaces paths in a text, those that hold these included."""
    known: set[str] = set()
    for path in paths:
        pure = PurePosixPath(path)
        # one word, such as `src`, tells nothing and stands in other texts
        known |= {str(pure)} if len(pure.parts) > 1 else set()
        known |= {str(p) for p in pure.parents if len(p.parts) > 2}
    words = "|".join(re.escape(p) for p in sorted(known, key=len, reverse=True))
    below = rf"(?:{words})(?:/{_PART})*(?![\w-])/?|" if words else ""
    pattern = re.compile(rf"(?<![\w./:@~-])(?:{below}{_ABSOLUTE})")
    return lambda text: pattern.sub(lambda match: PurePosixPath(match[0]).name, text)


def _without(value: Any, cut: Callable[[str], str], key: str = "") -> Any:
    if isinstance(value, dict):
        return _without_keys(value, cut)
    if isinstance(value, list):
        return [_without(item, cut, key) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if not isinstance(value, str):
        return value
    text = _SURROGATE.sub("\ufffd", value)
    whole = key in _PLACES and bare(text) != text and not _SECOND.search(text)
    return bare(text) if whole else cut(text)


def _without_keys(value: dict[str, Any], cut: Callable[[str], str]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, item in value.items():
        name = once = cut(_SURROGATE.sub("\ufffd", str(key)))
        number = 2
        while name in result:
            name, number = f"{once} ({number})", number + 1
        result[name] = _without(item, cut, key)
    return result

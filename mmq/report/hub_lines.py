"""What reports say of a source on the Hub."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def commit_lines(data: Mapping[str, Any]) -> list[str]:
    """The commit that `mmq inspect` read, and what that took."""
    hub = data.get("hub")
    if not hub:
        return []
    took = f" ({hub['requests']} requests, {short_bytes(hub['bytes'])})" if hub["requests"] else ""
    return [f"commit   {hub['commit']} of {hub['revision']}{took}"]


def download_lines(resources: Mapping[str, Any]) -> list[str]:
    """What `--dry-run` says a conversion downloads, and how much of it lies here at a time."""
    download = resources.get("download")
    if not download:
        return []
    files = f"{download['files']:,} file{'s' if download['files'] != 1 else ''}"
    held, least = download["held_bytes"], download["least_bytes"]
    line = f"download {short_bytes(download['bytes'])} in {files}"
    line += f", at most {short_bytes(held)} here at a time"
    return [line + (f" ({short_bytes(least)} where the disk is full)" if least < held else "")]


def next_line(report: Mapping[str, Any], src: str, out: str) -> str:
    """What to do after a conversion; a repository is named at the commit that was converted."""
    source = report["source"]
    repo, commit = source.get("repo"), source.get("commit")
    if repo and src.removeprefix("hf://").partition("@")[0] == repo:
        src = f"{repo}@{commit}"
    return f"next     mmq verify {out} --against {src}"


def short_bytes(nbytes: int) -> str:
    """A size in one decimal unit."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6)):
        if nbytes >= factor:
            return f"{nbytes / factor:.2f} {unit}"
    return f"{nbytes / 1000:.1f} kB"

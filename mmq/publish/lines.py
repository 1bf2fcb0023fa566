"""What `mmq publish` prints: what went where and in which order; dry: the card's changes too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmq.report.escape import plain
from mmq.report.figures import plural
from mmq.report.tables import columns, short_size

#: Files of one batch that are listed one by one; before anything is sent, all of them are.
MOST_FILES = 12


def published_lines(data: Mapping[str, Any]) -> list[str]:
    """`data` is what `mmq publish --json` gives."""
    will = data["dry_run"]
    batches = data["batches"]
    sent = [item for batch in batches for item in batch]
    total = sum(item["bytes"] for item in sent)
    lines = [_where(data)]
    if not sent and not data["removed"]:
        return [*lines, f"nothing to send: {plural(len(data['kept']), 'file')} there already"]
    verb = "would send" if will else "sent"
    lines.append(f"{verb} {plural(len(sent), 'file')}, {total:,} B = {short_size(total)}; "
                 f"{plural(len(data['kept']), 'file')} there already")  # fmt: skip
    for number, batch in enumerate(batches, 1):
        if data["at_once"]:
            head = "the one commit" if number == len(batches) else f"upload {number}"
        else:
            last = number == len(batches)
            head = f"commit {number}" + (" (from here on it is a model)" if last else "")
        lines += ["", head, *_files(batch, len(batch) if will else MOST_FILES)]
    lines += [f"  removed: {plain(name)}" for name in data["removed"]]
    if will and data["card_diff"]:
        lines += ["", "README.md", *(f"  {plain(line)}" for line in data["card_diff"])]
    return lines if will else [*lines, "", f"the Hub holds every file as sent: {data['url']}"]


def _where(data: Mapping[str, Any]) -> str:
    repo = plain(data["repo"])
    if data["new_repository"]:
        made = "would be made" if data["dry_run"] else "made"
        state = f"{made}, {'private' if data['private'] else 'public'}"
    else:
        state = "private" if data["private"] else "public"
    goal = plain(data["revision"])
    if data["pull_request"] and not goal.startswith("refs/"):
        goal = "a pull request"
    elif data["new_branch"]:
        goal += " (would be made)" if data["dry_run"] else " (made)"
    return f"{repo} ({state}), {goal}"


def _files(batch: list[Mapping[str, Any]], most: int) -> list[str]:
    shown = batch
    if len(batch) > most:
        shown = [*batch[: most - 3], *batch[-2:]]
    rows = columns([(plain(i["name"]), f"{i['bytes']:,} B", i["sha256"][:12]) for i in shown], 1)
    lines = [f"  {row}" for row in rows]
    if len(shown) < len(batch):
        lines.insert(most - 3, f"  … {len(batch) - len(shown)} more")
    return lines

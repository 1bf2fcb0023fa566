"""Which names a branch of the Hub may have, and what is a pull request's reference.

v1.0, release/2026         branches
refs/pr/3                  the commits of pull request 3
a b, ../x, x.lock, 40 hex  neither: git-check-ref-format(1), and a commit's id can only be read
"""

from __future__ import annotations

import re

_PULL_REQUEST = re.compile(r"refs/pr/[1-9]\d*")
_WRONG = {
    "it names a commit, and commits cannot be committed to": r"^[0-9a-fA-F]{40}$",
    "refs/… names no branch, apart from refs/pr/NUMBER": r"^refs/",
    "a branch's name has no spaces and none of ~ ^ : ? * [ \\": r"[\s\x00-\x1f\x7f~^:?*\[\\]",
    'a branch\'s name has no "..", "//" or "@{"': r"\.\.|//|@\{",
    "no part of a branch's name begins with . or ends in .lock": r"(^|/)\.|\.lock(/|$)",
    "a branch's name does not begin with - or /, or end in / or .": r"^[-/]|[/.]$",
    "it is no name": r"^@?$",
}


def is_pull_request(revision: str) -> bool:
    """Whether it is the reference of a pull request."""
    return _PULL_REQUEST.fullmatch(revision) is not None


def branch_problem(revision: str) -> str:
    """Why nothing can be committed to a revision of this name; "" if something can."""
    if is_pull_request(revision):
        return ""
    return next((why for why, form in _WRONG.items() if re.search(form, revision)), "")

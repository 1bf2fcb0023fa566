"""What the Hub's refusals mean, and what to do about them.

The Hub answers 401 both to a wrong token and, without one, to a repository that does not exist;
`X-Error-Code` tells more where it is sent. Source: huggingface_hub, utils/_http.py,
`hf_raise_for_status`.
"""

from __future__ import annotations

from collections.abc import Mapping

from mmq.errors import BadInputError, MmqError
from mmq.hub.location import HubLocation
from mmq.hub.token_place import token_place, token_remedy

_LOGIN = "hf auth login   (or set HF_TOKEN)"


def refusal(
    status: int, headers: Mapping[str, str], location: HubLocation, file: str | None,
    endpoint: str, *, sent: bool = False,
) -> MmqError:  # fmt: skip
    """The error that a final status amounts to.

    Args:
        file: the file that was asked for; None for the repository's listing.
        sent: whether a token went with the request.
    """
    repo, code = location.repo, headers.get("x-error-code", "")
    got = f"HTTP {status}" + (f", {code}" if code else "")
    if code == "GatedRepo":
        return BadInputError(
            "hub-gated", f"{repo} is gated: its terms have to be accepted once", where=repo,
            got=got,
            hint=f"accept them at {endpoint}/{repo}, then: hf auth login",
        )  # fmt: skip
    if status == 401 and (code or not sent):
        return BadInputError(
            "hub-login", f"the Hub shows {repo} to nobody without a valid token, or has no such"
            " repository; no folder has this name either", where=repo, got=got, hint=_LOGIN,
        )  # fmt: skip
    if status == 401:
        return BadInputError(
            "hub-login", f"the Hub does not know the token in {token_place()}, so it does not show"
            f" {repo}", where=repo, got=got, hint=token_remedy(),
        )  # fmt: skip
    if status == 403:
        return BadInputError(
            "hub-forbidden", f"this token may not read {repo}", where=repo, got=got,
            hint="a token with read access to it: hf auth login",
        )  # fmt: skip
    if code == "RevisionNotFound":
        return BadInputError(
            "hub-revision-not-found", f"{repo} has no revision {location.revision}",
            where=str(location), got=got, expected="a branch, a tag or a commit",
        )  # fmt: skip
    if code == "EntryNotFound" or (status == 404 and file is not None):
        return BadInputError(
            "hub-file-not-found", f"{repo} lists {file}, but does not have it",
            where=f"{location}: {file}", got=got, hint="run the same command again",
        )  # fmt: skip
    if status == 404:
        return BadInputError(
            "hub-repo-not-found", f"there is neither a folder nor a repository {repo}", where=repo,
            got=got, hint="check the spelling; for a private one: hf auth login",
        )  # fmt: skip
    return BadInputError(
        "hub-refused", f"the Hub refuses {file or 'the listing'} of {repo}",
        where=str(location), got=got,
    )  # fmt: skip

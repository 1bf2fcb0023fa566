"""What a failure of the Hub's means, and whether trying again can help.

408, 429, 5xx, no connection    may pass: exit 5 once the tries are used up
401, 403                        no access: exit 6, at once
404                             absent, or hidden from this token
400, 413, 422                   it does not take this: exit 4
409, 412                        somebody else was faster: exit 7
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from mmq.errors import BadInputError, IncompleteError, MachineError, MmqError, RefusedError
from mmq.hub.retries import told_wait
from mmq.hub.token_place import token_remedy

#: Statuses that may be gone at the next try.
RETRIED = frozenset({408, 429, 500, 502, 503, 504})
AGAIN = "run the same command again: what has arrived is not sent again"
#: huggingface_hub says which file it was in words only.
_UPLOADING = re.compile(r"Error while uploading '(.*)' to the Hub")

_MAY_WRITE = "hf auth login with a token that may write to it, or set HF_TOKEN"


class HubAbsentError(BadInputError):
    """The repository or the revision is not there, or this token may not see it."""


class Failure(NamedTuple):
    """What to say of a failure.

    Attributes:
        may_pass: whether another try can help.
        wait: seconds that the Hub asks for before it; None when it does not say.
    """

    error: MmqError
    may_pass: bool = False
    wait: float | None = None


def failure(
    what: str, error: Exception, repo: str, hidden: Callable[[str], str], *, known: bool
) -> Failure | None:
    """The failure behind an exception of huggingface_hub's; None where the Hub had no part in it.

    Args:
        what: what was going on, such as "committing".
        hidden: takes secrets out of what the Hub says (before it is cut short).
        known: whether a token was sent.
    """
    import httpx2
    from huggingface_hub.errors import HfHubHTTPError

    chain = list(_causes(error))
    names = [m[1] for cause in chain if (m := _UPLOADING.match(str(cause)))]
    what = f"{what} {names[0]}" if names else what
    for cause in chain:
        if isinstance(cause, MmqError):
            return Failure(cause)
        if isinstance(cause, HfHubHTTPError):
            status = cause.response.status_code
            told = hidden(cause.server_message or "")
            problem = _of_status(what, status, told, repo, known)
            return Failure(problem, status in RETRIED, asked_wait(status, cause.response.headers))
    for cause in chain:
        if isinstance(cause, httpx2.TransportError | ConnectionError | TimeoutError):
            text = f"the connection to the Hub failed while {what}: {type(cause).__name__}"
            got = str(cause) or None
            return Failure(
                IncompleteError("publish-unreachable", text, where=repo, got=got, hint=AGAIN), True
            )
    return None


def asked_wait(status: int, headers: Mapping[str, str]) -> float | None:
    """Seconds that the Hub asks for; its RateLimit header is on every answer, and counts on 429."""
    return told_wait(headers) if status == 429 or "retry-after" in headers else None


def _of_status(what: str, status: int, told: str, repo: str, known: bool) -> MmqError:
    text = f"the Hub answers {status} while {what}"
    said = told[:300] or None
    # without a token (in a dry run) the Hub does not tell what is absent from what is private
    if status == 404 or (status == 401 and not known):
        return HubAbsentError("publish-absent", f"{text}: it is not there", where=repo, got=said)
    if status in (401, 403):
        why = "does not know the token" if status == 401 else "does not allow it"
        return MachineError(
            "publish-access", f"{text}: it {why}", where=repo, got=said,
            hint=token_remedy() if status == 401 else _MAY_WRITE,
        )  # fmt: skip
    if status in (400, 413, 422):
        return BadInputError("publish-rejected", f"{text}: it refuses this", where=repo, got=said)
    if status in (409, 412):
        return RefusedError(
            "publish-conflict", f"{text}: somebody else changed the repository", where=repo,
            got=said, hint=AGAIN,
        )  # fmt: skip
    return IncompleteError("publish-failed", text, where=repo, got=said, hint=AGAIN)


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)

"""HTTP as the Hub speaks it: addresses, the token, redirects to storage, ranges.

    {endpoint}/api/models/{repo}/revision/{revision}?blobs=true     commit, files, sizes, digests
    {endpoint}/{repo}/resolve/{commit}/{file}                       bytes, or a redirect to storage

Storage is on another host and must not see the token; its signed address serves many ranges, and
is asked for again once it has expired. Files kept by Xet come through the Hub's HTTP bridge, which
is one of those redirects.

Session, endpoint, token and timeout are huggingface_hub's, with its environment variables.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote, urljoin, urlsplit

from mmq import __version__
from mmq.errors import BadInputError, IncompleteError, UsageError
from mmq.hub.location import HubLocation
from mmq.hub.refusals import refusal
from mmq.hub.retries import FIRST_TRIES, RETRIED, PassingError, Patience, Stopped, told_wait
from mmq.hub.token_place import token_place, token_remedy

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_MAX_REDIRECTS = 5
#: What storage answers when its signed address is too old.
_EXPIRED = frozenset({400, 401, 403, 404, 410})
#: Bytes that count as progress, so that a server that sends one at a time is given up on.
_PROGRESS_BYTES = 64 << 10
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(?:\d+|\*)")


def endpoint() -> str:
    """The Hub's address (HF_ENDPOINT).

    Raises:
        UsageError: it is none that could be asked, as without its `http://`.
    """
    from huggingface_hub import constants

    address = str(constants.ENDPOINT).rstrip("/")
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        # a password in it is nobody's business
        shown = address.rpartition("@")[2]
        raise UsageError(
            "hub-endpoint", f"HF_ENDPOINT is {shown!r}, which is no address", where="HF_ENDPOINT",
            got=shown, expected="an address such as https://huggingface.co",
            hint="unset HF_ENDPOINT" if "://" in address or not shown
            else f"export HF_ENDPOINT=http://{shown}",
        )  # fmt: skip
    return address


def is_offline() -> bool:
    """Whether HF_HUB_OFFLINE forbids to ask anybody."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


class RemoteFile:
    """A file at a fixed commit, and where its bytes were found last.

    Args:
        name: path in the repository; None for the listing.
    """

    def __init__(self, location: HubLocation, name: str | None, url: str, size: int = 0) -> None:
        self.location, self.name, self.size = location, name, size
        self.url = url
        self.storage: str | None = None

    def __str__(self) -> str:
        return f"{self.location}: {self.name}" if self.name else str(self.location)


def listing_file(location: HubLocation) -> RemoteFile:
    """The repository's listing at a revision."""
    repo, revision = location.repo, quote(location.revision, safe="")
    return RemoteFile(
        location, None, f"{endpoint()}/api/models/{repo}/revision/{revision}?blobs=true"
    )


def repository_file(location: HubLocation, commit: str, name: str, size: int) -> RemoteFile:
    """A file of a commit."""
    url = f"{endpoint()}/{location.repo}/resolve/{commit}/{quote(name)}"
    return RemoteFile(location, name, url, size)


def read_all(file: RemoteFile, stop: threading.Event) -> bytes:
    """The whole answer, of unknown length: the listing, with which everything begins.

    Raises:
        BadInputError: refused.  IncompleteError: not reachable, after bounded tries.
    """
    patience = Patience(str(file), str(file), stop, FIRST_TRIES)
    while True:
        try:
            with _answer(file, None) as answer:
                return b"".join(_chunks(answer, stop))
        except PassingError as failure:
            try:
                patience.wait(failure)
            except IncompleteError as error:
                raise _not_listed(file, error) from None


def _not_listed(file: RemoteFile, error: IncompleteError) -> IncompleteError:
    """What was typed may be a folder's name as well: both that it could be are told."""
    repo = file.location.repo
    if Path(repo).exists():
        return error
    parent = Path(repo).parent
    return IncompleteError(
        error.id, f"there is no folder {repo}, and the Hub could not be asked for {file.location}",
        where=shown_address(file.url), got=error.got,
        hint=f"a folder? ls {parent if parent.is_dir() else '.'}; a repository? run the same"
        " command again when the Hub answers (mmq doctor)",
    )  # fmt: skip


def read_range(file: RemoteFile, start: int, nbytes: int, stop: threading.Event) -> bytearray:
    """`nbytes` from byte `start`; a cut connection goes on where it was cut.

    Raises:
        BadInputError: refused.  IncompleteError: not reachable, after bounded tries.  Stopped.
    """
    patience = Patience(str(file), str(file), stop)
    data = bytearray()
    renewed = 0
    while len(data) < nbytes:
        try:
            with _answer(file, (start + len(data), start + nbytes - 1)) as answer:
                _skip_to(answer, start + len(data))
                for chunk in _chunks(answer, stop):
                    data += chunk[: nbytes - len(data)]
                    if len(data) == nbytes:
                        break
            if len(data) < nbytes:
                raise PassingError("the connection was cut")
        except PassingError as failure:
            if len(data) - renewed >= _PROGRESS_BYTES:
                patience.renew()
                renewed = len(data)
            patience.wait(failure)
    return data


def shown_address(url: str) -> str:
    """An address without its query, and without the password that HF_ENDPOINT may hold."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="").geturl()


class _Answer:
    """A response whose status is fine; `position` is where in the file its body starts."""

    def __init__(self, response: Any, position: int) -> None:
        self.response, self.position = response, position
        self.skip = 0


def _skip_to(answer: _Answer, wanted: int) -> None:
    """A server without ranges sends everything: what comes before `wanted` is dropped."""
    if answer.position > wanted:
        raise PassingError("the server sent another range than it was asked for")
    answer.skip = wanted - answer.position


def _chunks(answer: _Answer, stop: threading.Event) -> Iterator[bytes]:
    """The body's bytes as they come."""
    try:
        # as they come: pieces of a size of ours would lose what came before a cut
        for chunk in answer.response.iter_raw():
            if stop.is_set():
                raise Stopped
            dropped = min(answer.skip, len(chunk))
            answer.skip -= dropped
            if dropped < len(chunk):
                yield chunk[dropped:]
    except _network_errors() as error:
        raise PassingError(_reason(error)) from None


@contextmanager
def _answer(file: RemoteFile, span: tuple[int, int] | None) -> Iterator[_Answer]:
    """One request, redirects followed."""
    for _ in range(_MAX_REDIRECTS):
        # other threads may replace either address meanwhile
        storage = file.storage
        url = storage or file.url
        with _request(url, span) as response:
            status = response.status_code
            if status in _REDIRECTS and "location" in response.headers:
                _redirect(file, urljoin(url, response.headers["location"]))
                continue
            if storage is not None and status in _EXPIRED:
                file.storage = None
                raise PassingError(f"storage answered HTTP {status}")
            if status in RETRIED:
                raise PassingError(f"HTTP {status}", told_wait(response.headers))
            if status not in (200, 206):
                raise refusal(
                    status, response.headers, file.location, file.name, endpoint(),
                    sent=_sends_token(url),
                )  # fmt: skip
            yield _Answer(response, _position(response) if status == 206 else 0)
            return
    raise PassingError("redirected in a circle")


def _redirect(file: RemoteFile, target: str) -> None:
    """Remember where a redirect led: a renamed repository, or storage."""
    if _host(target) == _host(endpoint()):
        file.url = target
    else:
        file.storage = target


def _position(response: Any) -> int:
    match = _CONTENT_RANGE.fullmatch(response.headers.get("content-range", ""))
    if match is None:
        raise PassingError("the server sent a range without saying which")
    return int(match[1])


@contextmanager
def _request(url: str, span: tuple[int, int] | None) -> Iterator[Any]:
    from huggingface_hub import constants, get_session
    from huggingface_hub.errors import OfflineModeIsEnabled

    headers = _headers(url)
    if span is not None:
        headers["Range"] = f"bytes={span[0]}-{span[1]}"
    try:
        with get_session().stream(
            "GET", url, headers=headers, follow_redirects=False,
            timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
        ) as response:  # fmt: skip
            yield response
    except OfflineModeIsEnabled:
        raise IncompleteError(
            "hub-offline", "HF_HUB_OFFLINE is set, and the cache does not hold what is needed",
            where=urlsplit(url).path, hint="unset HF_HUB_OFFLINE",
        ) from None  # fmt: skip
    except _network_errors() as error:
        raise PassingError(_reason(error)) from None


def _headers(url: str) -> dict[str, str]:
    """Who we are; the token only for the Hub itself."""
    from huggingface_hub import get_token

    headers = {"User-Agent": f"mmq/{__version__}", "Accept-Encoding": "identity"}
    token = get_token() if _may_see_token(url) else None
    if token is None:
        return headers
    if not (token.isascii() and token.isprintable()):
        # the HTTP library would quote it in its complaint
        raise BadInputError(
            "hub-token", "the Hub's token holds characters that no token has", where=token_place(),
            hint=token_remedy(),
        )  # fmt: skip
    return {**headers, "Authorization": f"Bearer {token}"}


def _may_see_token(url: str) -> bool:
    from huggingface_hub import constants

    return _host(url) == _host(endpoint()) and not constants.HF_HUB_DISABLE_IMPLICIT_TOKEN


def _sends_token(url: str) -> bool:
    """Whether a request to this address has the token with it."""
    return "Authorization" in _headers(url)


def _host(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    return parts.scheme, parts.netloc


def _network_errors() -> tuple[type[BaseException], ...]:
    """What the HTTP library raises: its own errors, and the system's."""
    from huggingface_hub.errors import HfHubHTTPError

    return (*HfHubHTTPError.__bases__, OSError)


def _reason(error: BaseException) -> str:
    """The kind of failure; its text may quote a signed address, so only the system's is used."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return f"{type(error).__name__}: {cause.strerror}"
        cause = cause.__cause__ or cause.__context__
    return type(error).__name__

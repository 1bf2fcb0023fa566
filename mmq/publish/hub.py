"""The Hub, as publishing needs it: few calls, bounded retries, errors that say what to do.

huggingface_hub retries the requests of an upload by itself (5 times, waiting as Retry-After says);
commits, trees and branches it does not, so `Hub` does (commits: `hub_commits`). Waits are told; one
that the Hub wants to be longer than `LONGEST_WAIT` ends the run, to be taken up again later. 401
and 403 end it at once.
The token is in no message: it lives in the client, and the console hides it.

Uploads go through Xet where the hf_xet package is installed and HF_HUB_DISABLE_XET is not set; that
path is huggingface_hub's own, and mmq's tests do not reach it.
"""

from __future__ import annotations

import contextlib
import logging
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from mmq import __version__
from mmq.console import Console
from mmq.errors import IncompleteError, MachineError, MmqError
from mmq.hub.client import endpoint
from mmq.publish.hub_errors import AGAIN, RETRIED, HubAbsentError, asked_wait, failure

if TYPE_CHECKING:
    import httpx2
    from huggingface_hub import CommitOperationAdd, HfApi, ModelInfo

MAIN = "main"
#: Tries of one call, seconds before the second one (doubled each time), and what a wait may last.
TRIES, FIRST_WAIT, LONGEST_WAIT = 6, 1.0, 600.0
#: Seconds: to connect, and between bytes (a commit of many files takes the Hub a while).
CONNECT_TIMEOUT, READ_TIMEOUT = 30.0, 300.0

_T = TypeVar("_T")


class RemoteFile(NamedTuple):
    """A file of a repository: its git blob id, and its SHA-256 where it is a large one."""

    name: str
    bytes: int
    blob: str
    sha256: str | None


class RepoState(NamedTuple):
    """A repository at one revision.

    Attributes:
        base: where `files` were found: the revision, or main, from which it would be branched.
        head: the commit of `base` when it was read; None where there is none.
    """

    exists: bool
    private: bool
    has_revision: bool
    base: str
    files: dict[str, RemoteFile]
    head: str | None = None

    @property
    def at(self) -> str:
        """The revision whose files these are and stay."""
        return self.head or self.base


class Hub:
    """One repository of one Hub.

    Address and token are huggingface_hub's, with its environment variables.
    """

    def __init__(self, repo: str, console: Console) -> None:
        from huggingface_hub import HfApi, get_token

        self.repo = repo
        self.endpoint = endpoint()
        self._console = console
        self.token = get_token()
        if self.token:
            console.hide(self.token)
        self._factory: Callable[[], httpx2.Client] | None = None
        self.api: HfApi = HfApi(
            endpoint=self.endpoint, token=self.token or False, library_name="mmq",
            library_version=__version__,
        )  # fmt: skip

    def need_token(self) -> None:
        """Without a token there is no point in beginning.

        Raises:
            MachineError: there is none.
        """
        if not self.token:
            raise MachineError(
                "publish-no-token", "there is no token for the Hub", where=self.endpoint,
                hint="hf auth login, or set HF_TOKEN",
            )  # fmt: skip

    @contextlib.contextmanager
    def session(self) -> Iterator[Hub]:
        """huggingface_hub with timeouts, without bars and log lines of its own, while it lasts."""
        from huggingface_hub import set_client_factory
        from huggingface_hub.utils import _http
        from huggingface_hub.utils import logging as hub_logging
        from huggingface_hub.utils.tqdm import (
            are_progress_bars_disabled,
            disable_progress_bars,
            enable_progress_bars,
        )

        quiet, verbosity = are_progress_bars_disabled(), hub_logging.get_verbosity()
        # whoever uses huggingface_hub in this process may have a factory of their own
        self._factory = before = _http._GLOBAL_CLIENT_FACTORY
        set_client_factory(self._client)
        disable_progress_bars()
        hub_logging.set_verbosity(logging.ERROR)
        try:
            yield self
        finally:
            set_client_factory(before)
            hub_logging.set_verbosity(verbosity)
            if not quiet:
                enable_progress_bars()

    def _client(self) -> httpx2.Client:
        assert self._factory is not None
        client = self._factory()
        hooks = client.event_hooks
        client.event_hooks = {
            "request": [*hooks.get("request", []), _limit_patience],
            "response": [*hooks.get("response", []), self._seen],
        }
        return client

    def _seen(self, response: httpx2.Response) -> None:
        """Every answer passes here: tell of waits, and refuse those that are too long."""
        if response.status_code in RETRIED:
            wait = asked_wait(response.status_code, response.headers)
            if wait is not None and wait > LONGEST_WAIT:
                raise IncompleteError(
                    "publish-rate-limit", f"the Hub asks to wait {wait:,.0f} s before going on",
                    where=self.repo, got=str(response.status_code), hint=AGAIN,
                )  # fmt: skip
            # whether there is another try is for whoever asked to say
            self._console.note(
                f"the Hub answers {response.status_code}"
                + ("" if wait is None else f" and asks to wait {wait:,.0f} s")
            )

    def state(self, revision: str) -> RepoState:
        """What is there; a repository or revision that is not there is no error."""
        main = self._absent_is_none(lambda: self.api.model_info(self.repo))
        if main is None:
            return RepoState(False, False, False, MAIN, {})
        private = bool(getattr(main, "private", False))
        found = main if revision == MAIN else self._absent_is_none(lambda: self._info(revision))
        base, head = (MAIN, main.sha) if found is None else (revision, found.sha)
        files = self._absent_is_none(lambda: self.files(head or base)) or {}
        return RepoState(True, private, found is not None, base, files, head)

    def _info(self, revision: str) -> ModelInfo:
        return self.api.model_info(self.repo, revision=revision)

    def head(self, revision: str) -> str:
        """The commit that a branch or reference points to (asked once, without tries)."""
        return str(self._info(revision).sha)

    def files(self, revision: str) -> dict[str, RemoteFile]:
        """Files at a revision, by name (asked once, without tries)."""
        from huggingface_hub.hf_api import RepoFile

        entries = self.api.list_repo_tree(self.repo, recursive=True, revision=revision)
        found = {}
        for entry in entries:
            if isinstance(entry, RepoFile):
                digest = entry.lfs.sha256 if entry.lfs else None
                found[entry.path] = RemoteFile(entry.path, entry.size, entry.blob_id, digest)
        return found

    def tree(self, revision: str) -> dict[str, RemoteFile]:
        """Files at a revision, by name."""
        return self.call("reading the tree", lambda: self.files(revision))

    def read(self, name: str, revision: str) -> bytes:
        """A small file's bytes."""

        def fetch() -> bytes:
            with tempfile.TemporaryDirectory(prefix="mmq-") as folder:
                path = self.api.hf_hub_download(
                    self.repo, name, revision=revision, local_dir=folder
                )
                return Path(path).read_bytes()

        return self.call(f"reading {name}", fetch)

    def create(self, private: bool) -> None:
        """The repository, unless it is there; its owner's default decides where not `private`."""
        self.call(
            "creating the repository",
            lambda: self.api.create_repo(self.repo, private=private or None, exist_ok=True),
        )

    def branch(self, name: str, start: str | None) -> None:
        """A branch from a commit (None: from main), unless it is there."""
        self.call(
            "creating the branch",
            lambda: self.api.create_branch(self.repo, branch=name, revision=start, exist_ok=True),
        )

    def check_card(self, text: str) -> None:
        """Let the Hub judge a README before anything large is sent.

        Raises:
            BadInputError: it would be refused.
        """
        from huggingface_hub import get_session
        from huggingface_hub.utils._headers import build_hf_headers
        from huggingface_hub.utils._http import hf_raise_for_status

        def ask() -> None:
            response = get_session().post(
                f"{self.endpoint}/api/validate-yaml", json={"content": text, "repoType": "model"},
                headers=build_hf_headers(token=self.token or False),
            )  # fmt: skip
            hf_raise_for_status(response)

        self.call("checking the card", ask)

    def upload(self, additions: Sequence[CommitOperationAdd], revision: str, *, pr: bool) -> None:
        """Send large files' contents to the store; nothing is visible until a commit names them."""

        def send() -> None:
            self.api.preupload_lfs_files(
                self.repo, list(additions), revision=revision, create_pr=pr, free_memory=False
            )

        # these requests are retried inside huggingface_hub
        self.call("uploading", send, tries=1)

    @property
    def by_xet(self) -> bool:
        """Whether large files go through hf_xet, which reads them out of our sight."""
        from huggingface_hub.utils._runtime import is_xet_available

        return bool(is_xet_available())

    def _absent_is_none(self, function: Callable[[], _T]) -> _T | None:
        try:
            return self.call("reading the repository", function)
        except HubAbsentError:
            return None

    def call(self, what: str, function: Callable[[], _T], *, tries: int = TRIES) -> _T:
        """Call; try again what may pass, and turn the rest into an MmqError.

        Raises:
            MachineError: no access.  IncompleteError: it may work later.  BadInputError: refused.
        """
        wait = FIRST_WAIT
        for left in reversed(range(tries)):
            try:
                return function()
            except MmqError:
                raise
            except Exception as error:
                hidden, known = self._console.hidden, bool(self.token)
                found = failure(what, error, self.repo, hidden, known=known)
                if found is None:
                    raise
                if not found.may_pass or not left:
                    # the cause's text may hold what was sent
                    raise found.error from None
            seconds = wait if found.wait is None else found.wait
            self._console.note(f"{what}: try {tries - left + 1} of {tries} in {seconds:,.0f} s")
            time.sleep(seconds)
            wait *= 2
        raise AssertionError("unreachable")


def _limit_patience(request: httpx2.Request) -> None:
    """Timeouts for every request; huggingface_hub asks for none, call by call."""
    limits = dict.fromkeys(("read", "write", "pool"), READ_TIMEOUT)
    request.extensions["timeout"] = {"connect": CONNECT_TIMEOUT, **limits}

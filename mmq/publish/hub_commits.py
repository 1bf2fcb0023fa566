"""Commits that lose nothing: not somebody else's, and not our own when an answer is lost.

Each commit names the one it follows (`parent_commit`), the first of them the one that the card and
the files were read at. If the Hub answers that there is another one by now (412), somebody has
changed the repository, and nothing of theirs is overwritten. If no answer comes, the commit may be
there all the same: it is looked for before it is tried again, or two of it would be made, and its
deletions would fail the second time.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from mmq.errors import RefusedError
from mmq.publish.hub import Hub, RemoteFile

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete


class Change(NamedTuple):
    """One commit.

    Attributes:
        held: whether a tree is as the commit would make it.
    """

    additions: Sequence[CommitOperationAdd]
    removed: Sequence[str]
    message: str
    description: str
    held: Callable[[Mapping[str, RemoteFile]], bool]

    def operations(self) -> list[CommitOperationAdd | CommitOperationDelete]:
        """Fresh ones, since create_commit takes none twice; uploaded contents stay known."""
        from huggingface_hub import CommitOperationDelete

        added = [copy.copy(addition) for addition in self.additions]
        return [*added, *(CommitOperationDelete(name, is_folder=False) for name in self.removed)]


class _Landed(NamedTuple):
    revision: str
    head: str


@dataclass
class CommitLine:
    """Where commits go, one upon the other.

    Attributes:
        revision: the branch or reference; once a pull request is open, its own.
        head: the commit that the next one follows; None in a repository without any.
        opens_pr: whether the next commit opens a pull request.
    """

    hub: Hub
    revision: str
    head: str | None
    opens_pr: bool = False

    def commit(self, change: Change) -> None:
        """Commit, and move on to what came of it.

        Raises:
            RefusedError: somebody else has committed.  MmqError: it did not work.
        """
        tried = False

        def send() -> _Landed:
            nonlocal tried
            if tried and (found := self._arrived(change)):
                return found
            tried = True
            info = self.hub.api.create_commit(
                self.hub.repo, change.operations(), commit_message=change.message,
                commit_description=change.description, revision=self.revision,
                create_pr=self.opens_pr, parent_commit=self.head,
            )  # fmt: skip
            return _Landed(info.pr_revision or self.revision, info.oid)

        try:
            landed = self.hub.call("committing", send)
        except RefusedError:
            # the Hub may have carried out a try that it gave no answer to
            found = self.hub.call("reading the tree", lambda: self._arrived(change))
            if found is None:
                raise
            landed = found
        self.revision, self.head, self.opens_pr = landed.revision, landed.head, False

    def _arrived(self, change: Change) -> _Landed | None:
        """Where the commit is, if it has been made."""
        places = _pull_requests(self.hub, change.message) if self.opens_pr else [self.revision]
        for place in places:
            head = self.hub.head(place)
            if change.held(self.hub.files(head)):
                return _Landed(place, head)
        return None


def open_pull_request(hub: Hub, title: str, head: str | None) -> str | None:
    """The reference of our open pull request of this title, if it starts from `head`."""

    def ask() -> str | None:
        for reference in _pull_requests(hub, title):
            commits = hub.api.list_repo_commits(hub.repo, revision=reference)
            if head in {commit.commit_id for commit in commits}:
                return reference
        return None

    return hub.call("looking for a pull request", ask)


def _pull_requests(hub: Hub, title: str) -> list[str]:
    """References of the token's owner's pull requests of this title that are open."""
    author = hub.api.whoami()["name"]
    found = hub.api.get_repo_discussions(
        hub.repo, author=author, discussion_type="pull_request", discussion_status="open"
    )
    return [p.git_reference for p in found if p.title == title and p.git_reference]

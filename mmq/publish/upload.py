"""Sending a folder so that what is visible is always either nothing, or all of it.

    nothing there yet    weights in batches, a commit each; then their digests are compared;
                         then one commit with configs, index and card
    a model is there,    weights go to the store, where nobody sees them; then one commit
    or a pull request    replaces everything at once, and removes what spoke of the old model

Either way a file that the Hub has with the same digest is not sent again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mmq.errors import BadInputError, MmqError, VerdictError
from mmq.publish.branch_names import is_pull_request
from mmq.publish.folder import CARD_NAME
from mmq.publish.hub import Hub, RemoteFile
from mmq.publish.hub_commits import Change, CommitLine
from mmq.publish.upload_plan import MODEL_FILES, Item, UploadPlan, same

if TYPE_CHECKING:
    from mmq.console import Console
    from mmq.publish.additions import Addition, Tally


@dataclass
class Uploader:
    """Carries out one plan.

    Attributes:
        line: where the commits go.
        before: names that were there at the beginning.
        message / description: of the last commit; the others' are made from it.
    """

    line: CommitLine
    plan: UploadPlan
    before: Collection[str]
    message: str
    description: str
    console: Console
    _hub: Hub = field(init=False)

    def run(self) -> None:
        """Send everything; afterwards `line.revision` has it all.

        Raises:
            VerdictError: the Hub holds other bytes than were sent.  MmqError: it did not work.
        """
        from mmq.publish.additions import Tally

        self._hub = self.line.hub
        plan = self.plan
        total = sum(item.nbytes for item in plan.sent)
        with self.console.progress(total, "uploading") as progress:
            tally = Tally(progress)
            waiting = [self._batch(n, batch, tally) for n, batch in enumerate(plan.batches, 1)]
            weights = [item for batch in plan.batches for item in batch]
            if not plan.at_once:
                # before the index makes it a model
                self._compare([*weights, *(item for item in plan.kept if item.weights)])
                waiting, weights = [], []
            self._last([a for additions in waiting for a in additions], weights, tally)
        try:
            self._compare([*plan.sent, *plan.kept])
        except VerdictError:
            self._withdraw()
            raise

    def _batch(self, number: int, batch: tuple[Item, ...], tally: Tally) -> list[Addition]:
        from mmq.publish.additions import Addition

        additions = [Addition(item, tally) for item in batch]
        # hf_xet tells nothing while it sends, so it gets one file at a time
        step = 1 if self._hub.by_xet else len(batch)
        for start in range(0, len(batch), step):
            part = slice(start, start + step)
            self._hub.upload(additions[part], self.line.revision, pr=self.line.opens_pr)
            for item in batch[part]:
                _check_unchanged(item)
                tally.done(item)
        if not self.plan.at_once:
            part_of = f"weights, part {number} of {len(self.plan.batches)}"
            self._commit(additions, batch, (), f"{self.message}: {part_of}")
        return additions

    def _last(self, waiting: list[Addition], weights: Sequence[Item], tally: Tally) -> None:
        from mmq.publish.additions import Addition

        last, removed = self.plan.last, self.plan.removed
        additions = [*waiting, *(Addition(item, tally) for item in last)]
        if not additions and not removed:
            return
        for item in last:
            _check_unchanged(item)
        self._commit(additions, [*weights, *last], removed, self.message, self.description)
        for item in last:
            tally.done(item)

    def _commit(
        self, additions: Sequence[Addition], items: Sequence[Item], removed: Sequence[str],
        message: str, description: str = "",
    ) -> None:  # fmt: skip
        def held(files: Mapping[str, RemoteFile]) -> bool:
            there = all(same(item, files.get(item.name)) for item in items)
            return there and not any(name in files for name in removed)

        self.line.commit(Change(additions, removed, message, description, held))

    def _compare(self, items: Sequence[Item]) -> None:
        """What the Hub says it holds, against what was sent."""
        remote = self._hub.tree(self._at)
        bad = [item for item in items if not same(item, remote.get(item.name))]
        if bad:
            more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
            raise VerdictError(
                "publish-digest", f"the Hub does not hold {bad[0].name} as it was sent{more}",
                where=bad[0].name, got=_shown(remote.get(bad[0].name)),
                expected=f"{bad[0].nbytes:,} bytes, {bad[0].sha256}",
                hint="run the same command again; a .gitignore in the repository that names the"
                " file must go first",
            )  # fmt: skip

    @property
    def _at(self) -> str:
        """Our own last commit; somebody else's may lie on top of it."""
        return self.line.head or self.line.revision

    def _withdraw(self) -> None:
        """Take away what makes it a model, and what is damaged; a failure of this is told."""
        if is_pull_request(self.line.revision):
            self.console.warn(f"{self.line.revision} holds damaged files: do not merge it")
            return
        try:
            remote = self._hub.tree(self._at)
            wanted = (*self.plan.sent, *self.plan.kept)
            bad = {i.name for i in wanted if not same(i, remote.get(i.name))} | {*MODEL_FILES}
            # an author's card is not ours to delete
            bad = bad - {CARD_NAME} if CARD_NAME in self.before else bad | {CARD_NAME}
            names = sorted(name for name in bad if name in remote)
            self._commit((), (), names, f"{self.message}: withdrawn, files differ")
            self.console.warn(f"removed from the repository again: {', '.join(names)}")
        except MmqError as error:
            self.console.warn(
                f"the repository holds a damaged model, and it could not be withdrawn:"
                f" {error.message}; delete {' and '.join(MODEL_FILES)} there"
            )


def _shown(found: RemoteFile | None) -> str:
    return "absent" if found is None else f"{found.bytes:,} bytes, {found.sha256 or found.blob}"


def _check_unchanged(item: Item) -> None:
    if item.path is None:
        return
    stat = item.path.stat()
    if (stat.st_size, stat.st_mtime_ns) != (item.nbytes, item.mtime_ns):
        raise BadInputError(
            "publish-file-changed", f"{item.name} changed while it was being sent",
            where=item.name, hint="make sure nothing writes to OUT, verify again, then publish",
        )  # fmt: skip

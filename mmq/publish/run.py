"""`mmq publish`, from a verified folder to a repository on the Hub.

open ─► verified and unchanged? ─► card, recipe: valid? ─► what is there? ─► send ─► compare
Nothing is sent before everything that can be judged here has been judged.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from mmq.console import Console
from mmq.convert.relayout import MANIFEST_NAME
from mmq.errors import BadInputError, IncompleteError, RefusedError, UsageError
from mmq.publish.branch_names import branch_problem, is_pull_request
from mmq.publish.card import ExistingCard
from mmq.publish.eval_results import EvalDataset
from mmq.publish.folder import CARD_NAME, OutputFolder, file_options, open_output
from mmq.publish.front_matter import options_overruled, read_front, split_card
from mmq.publish.gate import Fingerprint, hash_folder, refuse, report_problems, stale_files
from mmq.publish.hub import MAIN, Hub, RepoState
from mmq.publish.hub_commits import CommitLine, open_pull_request
from mmq.publish.hub_errors import AGAIN
from mmq.publish.items import all_items, check_items
from mmq.publish.leftovers import leftovers
from mmq.publish.token_check import live_tokens, refuse_tokens
from mmq.publish.upload import Uploader
from mmq.publish.upload_plan import UploadPlan, plan_upload

#: What a repository has that nobody has put anything into.
_NEW_FILES = frozenset({".gitattributes"})


@dataclass(frozen=True)
class PublishSettings:
    """What `mmq publish` is asked to do.

    Attributes:
        base_model: the source's repository.
        license: license, license_name and license_link, as far as given.
        images: container images by engine, in place of the known ones.
    """

    repo: str
    revision: str | None = None
    create_pr: bool = False
    private: bool = False
    dry_run: bool = False
    allow_unverified: bool = False
    base_model: str | None = None
    license: Mapping[str, str] = field(default_factory=dict)
    images: Mapping[str, str] = field(default_factory=dict)
    eval_dataset: EvalDataset | None = None

    def check(self) -> None:
        """Refuse what contradicts itself.

        Raises:
            UsageError: it does.
        """
        from huggingface_hub.errors import HFValidationError
        from huggingface_hub.utils._validators import validate_repo_id

        for word in (self.repo, self.base_model):
            try:
                if word is not None:
                    validate_repo_id(word)
                    if "/" not in word:
                        raise HFValidationError("the owner is missing")
            except HFValidationError as error:
                raise UsageError(
                    "option-value",
                    f"{word} is no repository: {error}",
                    got=word,
                    expected="ORG/NAME",
                ) from None
        if self.revision is not None and (why := branch_problem(self.revision)):
            raise UsageError(
                "option-value", f"--revision {self.revision}: {why}", got=self.revision,
                expected="a branch, or refs/pr/NUMBER",
            )  # fmt: skip
        if self.create_pr and self.revision:
            raise UsageError(
                "option-conflict", "--create-pr goes to main; --revision names another branch"
            )


class Published(NamedTuple):
    """What came of it.

    Attributes:
        before: what was there.
        private: whether the repository is, or would be.
        revision: where it is, or would be: a branch, or a pull request's reference.
        card_diff: the README's changes, as a unified diff.
    """

    plan: UploadPlan
    before: RepoState
    private: bool
    endpoint: str
    revision: str
    card_diff: list[str]


class _Goal(NamedTuple):
    """Where it goes, and what is there.

    Attributes:
        opens_pr: whether it goes into a pull request that is yet to be opened.
        message: the last commit's, and the pull request's title.
    """

    revision: str
    state: RepoState
    opens_pr: bool
    message: str


def publish(out: Path, settings: PublishSettings, console: Console) -> Published:
    """Publish OUT, or say what that would send.

    Raises:
        RefusedError: not verified, failed, or changed since.  BadInputError: the card or the
        folder is not in order.  MachineError: no access.  IncompleteError: stopped on the way.
        VerdictError: the Hub holds other bytes than were sent.
    """
    settings.check()
    folder = open_output(out)
    hub = Hub(settings.repo, console)
    if not settings.dry_run:
        hub.need_token()
    found = report_problems(folder)
    refuse(found, settings.allow_unverified, out, console)
    _tell_names(folder, console)
    with hub.session():
        # before the hours of hashing and sending
        goal = _goal(folder, settings, hub, console)
        _check_visibility(goal.state, settings)
        hashes = hash_folder(folder, console)
        stale = stale_files(folder, hashes)
        refuse(stale, settings.allow_unverified, out, console)
        blame = "; ".join(f.message for f in (*found, *stale))
        return _publish(folder, hashes, settings, hub, goal, blame, console)


def _goal(folder: OutputFolder, settings: PublishSettings, hub: Hub, console: Console) -> _Goal:
    """The branch, or the pull request: an open one of an earlier run, or a new one."""
    message = f"Model converted by mmq {folder.versions.get('mmq', '')}".rstrip()
    revision = settings.revision or MAIN
    state = hub.state(revision)
    # without a token nobody is known to have opened one
    if settings.create_pr and state.exists and hub.token:
        if reference := open_pull_request(hub, message, state.head):
            console.note(f"{reference} is open already: it goes there")
            return _Goal(reference, hub.state(reference), False, message)
    elif is_pull_request(revision) and not state.has_revision:
        raise UsageError(
            "option-value", f"{settings.repo} has no {revision}", got=revision,
            hint="--create-pr opens a pull request",
        )  # fmt: skip
    return _Goal(revision, state, settings.create_pr, message)


def _publish(
    folder: OutputFolder, hashes: Mapping[str, Fingerprint], settings: PublishSettings, hub: Hub,
    goal: _Goal, blame: str, console: Console,
) -> Published:  # fmt: skip
    """Make the card, compare with what is there, send."""
    state = goal.state
    existing = _existing_card(folder, hashes, hub, state, console)
    items = all_items(folder, hashes, settings, existing, blame)
    check_items(items)
    refuse_tokens(items, live_tokens(hub.token))
    old = leftovers(hub, state, {item.name for item in items})
    if old.foreign:
        console.warn(f"other weights are there, and stay: {', '.join(old.foreign)}")
    card = next(item for item in items if item.name == CARD_NAME).read().decode("utf-8")
    _tell_overruled(card, settings, console)
    proposed = goal.opens_pr or is_pull_request(goal.revision)
    plan = plan_upload(items, state.files, old.removed, pr=proposed)
    whose = "there" if CARD_NAME in state.files else "OUT's"
    revision, diff = goal.revision, _diff(existing.text, card, whose)
    ready, sends = state, bool(plan.sent or plan.removed)
    private = state.private if state.exists else settings.private
    if not settings.dry_run and (sends or not state.has_revision):
        if sends:
            hub.check_card(card)
        ready = _ready(hub, goal, settings, console)
        private = ready.private
    if sends and not settings.dry_run:
        line = CommitLine(hub, revision, ready.head, goal.opens_pr)
        Uploader(
            line, plan, frozenset(state.files), goal.message, _description(folder, hashes), console
        ).run()
        revision = line.revision
    return Published(plan, state, private, hub.endpoint, revision, diff)


def _ready(hub: Hub, goal: _Goal, settings: PublishSettings, console: Console) -> RepoState:
    """The repository and the branch, made where they are not there, and read back."""
    state = goal.state
    if not state.exists:
        hub.create(settings.private)
        state = hub.state(goal.revision)
        if not state.exists:
            raise IncompleteError(
                "publish-failed", f"{hub.repo} was made, and cannot be read yet", where=hub.repo,
                hint=AGAIN,
            )  # fmt: skip
        if others := sorted({*state.files} - _NEW_FILES):
            raise RefusedError(
                "publish-conflict", f"somebody else has put {others[0]} there meanwhile",
                where=hub.repo, hint=AGAIN,
            )  # fmt: skip
        _check_visibility(state, settings)
        if state.private and not settings.private:
            console.note(f"{hub.repo} is private, as its owner's settings have it")
    if not state.has_revision:
        hub.branch(goal.revision, state.head)
    return state


def _tell_names(folder: OutputFolder, console: Console) -> None:
    """The manifest is published as it is: its hash is what was verified."""
    if paths := [v for v in file_options(folder.manifest).values() if "/" in v]:
        console.note(f"{MANIFEST_NAME} will show where files lay: {', '.join(paths)}")
    if folder.left_out:
        console.warn(f"not sent, since no part of a model: {', '.join(folder.left_out)}")


def _tell_overruled(card: str, settings: PublishSettings, console: Console) -> None:
    """The author's front matter counts; options against it do not."""
    base = {"base_model": settings.base_model} if settings.base_model else {}
    front = read_front(split_card(card).front)
    for line in options_overruled(front, {**settings.license, **base}):
        console.warn(line)


def _check_visibility(state: RepoState, settings: PublishSettings) -> None:
    if settings.private and state.exists and not state.private:
        raise RefusedError(
            "publish-not-private", f"{settings.repo} is there already, and public",
            where=settings.repo, hint="make it private on the Hub first, or leave out --private",
        )  # fmt: skip


def _existing_card(
    folder: OutputFolder, hashes: Mapping[str, Fingerprint], hub: Hub, state: RepoState,
    console: Console,
) -> ExistingCard:  # fmt: skip
    """The repository's README; else the folder's, which may be the source's as it was copied."""
    path = folder.root / CARD_NAME
    local = _text(path.read_bytes()) if path.is_file() else ""
    copied = {f.name: f.sha256 for f in folder.files}.get(CARD_NAME)
    edited = bool(local) and (copied is None or hashes[CARD_NAME].sha256 != copied)
    if CARD_NAME not in state.files:
        return ExistingCard(local, bool(local) and not edited, frozenset(state.files))
    if edited:
        console.warn(f"{hub.repo} has a {CARD_NAME} of its own, which is kept: OUT's is not used")
    return ExistingCard(_text(hub.read(CARD_NAME, state.at)), files=frozenset(state.files))


def _text(data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadInputError(
            "card-not-utf8", f"{CARD_NAME} is not UTF-8: {error}", where=CARD_NAME
        ) from None


def _diff(old: str, new: str, whose: str) -> list[str]:
    names = f"{CARD_NAME} ({whose})", f"{CARD_NAME} (to be sent)"
    return list(difflib.unified_diff(old.splitlines(), new.splitlines(), *names, lineterm=""))


def _description(folder: OutputFolder, hashes: Mapping[str, Fingerprint]) -> str:
    """For machines: what the commit rests on."""
    verdict: dict[str, Any] = {"verdict": folder.verify.verdict if folder.verify else None}
    return json.dumps({**verdict, "manifest_sha256": hashes[MANIFEST_NAME].sha256})

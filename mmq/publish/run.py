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
from mmq.convert.checkpoint import INDEX_NAME, open_checkpoint
from mmq.convert.modules import Module, group_modules
from mmq.convert.relayout import MANIFEST_NAME
from mmq.errors import BadInputError, RefusedError, UsageError
from mmq.publish.card import ExistingCard, merged_card
from mmq.publish.card_facts import CardFacts
from mmq.publish.eval_results import EVAL_NAME, EvalDataset, eval_text
from mmq.publish.folder import (
    CARD_NAME,
    CONVERT_NAME,
    VERIFY_NAME,
    OutputFolder,
    bare,
    open_output,
    report_for_the_public,
)
from mmq.publish.front_matter import front_problems, read_front, refuse_card, split_card
from mmq.publish.gate import Fingerprint, hash_folder, refuse, report_problems, stale_files
from mmq.publish.hub import MAIN, Hub, RepoState
from mmq.publish.provenance import provenance
from mmq.publish.recipe import RECIPE_NAME, recipe, recipe_text
from mmq.publish.serve import VLLM_CUDA, servings
from mmq.publish.traits import traits_of
from mmq.publish.upload import Item, Uploader, UploadPlan, made, plan_upload

#: The Hub refuses larger files (huggingface/hub-docs, storage-limits.md).
LARGEST_FILE = 500_000_000_000


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
        if self.create_pr and self.revision:
            raise UsageError(
                "option-conflict", "--create-pr goes to main; --revision names another branch"
            )


class Published(NamedTuple):
    """What came of it.

    Attributes:
        revision: where it is, or would be: a branch, or a pull request's reference.
        card_diff: the README's changes, as a unified diff.
    """

    plan: UploadPlan
    state: RepoState
    endpoint: str
    revision: str
    card_diff: list[str]


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
    _tell_paths(folder, console)
    with hub.session():
        # before the hours of hashing and sending
        state = hub.state(settings.revision or MAIN)
        _check_visibility(state, settings)
        hashes = hash_folder(folder, console)
        stale = stale_files(folder, hashes)
        refuse(stale, settings.allow_unverified, out, console)
        blame = "; ".join(f.message for f in (*found, *stale))
        return _publish(folder, hashes, settings, hub, state, blame, console)


def _publish(
    folder: OutputFolder, hashes: Mapping[str, Fingerprint], settings: PublishSettings, hub: Hub,
    state: RepoState, blame: str, console: Console,
) -> Published:  # fmt: skip
    """Make the card, compare with what is there, send."""
    revision = settings.revision or MAIN
    existing = _existing_card(folder, hashes, hub, state, console)
    items = _items(folder, hashes, settings, existing, blame)
    _check_sizes(items)
    card = next(item for item in items if item.name == CARD_NAME).read().decode("utf-8")
    plan = plan_upload(items, state.files, _old_weights(hub, state), pr=settings.create_pr)
    diff = _diff(existing.text, card)
    if settings.dry_run or not (plan.sent or plan.removed):
        return Published(plan, state, hub.endpoint, revision, diff)
    hub.check_card(card)
    if not state.exists:
        hub.create(settings.private)
    if not state.has_revision and revision != MAIN:
        hub.branch(revision)
    version = (folder.manifest.get("versions") or {}).get("mmq", "")
    landed = Uploader(
        hub, plan, revision, settings.create_pr, f"Model converted by mmq {version}".rstrip(),
        _description(folder, hashes), console,
    ).run()  # fmt: skip
    return Published(plan, state, hub.endpoint, landed, diff)


def _tell_paths(folder: OutputFolder, console: Console) -> None:
    """The manifest is published as it is: its hash is what was verified."""
    options = folder.manifest.get("options")
    values = options.values() if isinstance(options, Mapping) else ()
    if paths := [v for v in values if isinstance(v, str) and v != bare(v)]:
        console.note(f"{MANIFEST_NAME} will show where files lay: {', '.join(paths)}")


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
        return ExistingCard(local, sources=bool(local) and not edited)
    if edited:
        console.warn(f"{hub.repo} has a {CARD_NAME} of its own, which is kept: OUT's is not used")
    return ExistingCard(_text(hub.read(CARD_NAME, state.base)))


def _text(data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadInputError(
            "card-not-utf8", f"{CARD_NAME} is not UTF-8: {error}", where=CARD_NAME
        ) from None


def _items(
    folder: OutputFolder, hashes: Mapping[str, Fingerprint], settings: PublishSettings,
    existing: ExistingCard, blame: str,
) -> list[Item]:  # fmt: skip
    """Everything that will be in the repository, validated."""
    items = [
        Item(name, seen.bytes, seen.sha256, folder.root / name, seen.mtime_ns,
             weights=name in folder.weights)
        for name, seen in hashes.items() if name != CARD_NAME
    ]  # fmt: skip
    for name in (CONVERT_NAME, VERIFY_NAME):
        if (folder.root / name).is_file():
            items.append(made(name, report_for_the_public((folder.root / name).read_bytes())))
    facts = _facts(folder, hashes, settings, blame)
    if any(s.engine == VLLM_CUDA and s.command for s in facts.servings):
        items.append(made(RECIPE_NAME, _recipe(facts).encode("utf-8")))
    if settings.eval_dataset:
        items.append(made(EVAL_NAME, eval_text(folder.verify, settings.eval_dataset).encode()))
    base = {"base_model": settings.base_model} if settings.base_model else {}
    text = merged_card(existing, facts, {**settings.license, **base})
    names = frozenset({item.name for item in items} | {CARD_NAME})
    refuse_card(list(front_problems(read_front(split_card(text).front), names)))
    return [*items, made(CARD_NAME, text.encode("utf-8", "backslashreplace"))]


def _facts(
    folder: OutputFolder, hashes: Mapping[str, Fingerprint], settings: PublishSettings, blame: str
) -> CardFacts:
    traits = traits_of(folder.config, sum(hashes[name].bytes for name in folder.shards))
    origin = provenance(folder, settings.base_model)
    recipes = tuple(servings(settings.repo, traits, settings.images))
    manifest = hashes[MANIFEST_NAME].sha256
    return CardFacts(settings.repo, folder, traits, origin, recipes, manifest, blame)


def _recipe(facts: CardFacts) -> str:
    modules = group_modules(open_checkpoint(facts.folder.root).tensors)
    sizes = [(module, _parameters(module)) for module in modules.values()]
    total = sum(count for _, count in sizes)
    routed = sum(count for module, count in sizes if module.role.expert >= 0)
    text = facts.folder.config.get("text_config") or facts.folder.config
    experts, chosen = text.get("num_local_experts") or 0, text.get("num_experts_per_tok") or 0
    active = total - routed + (routed * chosen // experts if experts else routed)
    value = recipe(facts.repo, facts.traits, total, active, {s.engine: s for s in facts.servings})
    return recipe_text(value)


def _parameters(module: Module) -> int:
    """Values of a module; scales are not among them."""
    if not module.is_quantised:
        return sum(_count(t.shape) for t in module.tensors.values())
    return _count(module.shape)


def _count(shape: tuple[int, ...]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product


def _check_sizes(items: list[Item]) -> None:
    for item in items:
        if item.nbytes > LARGEST_FILE:
            raise UsageError(
                "publish-file-too-large", f"{item.name} is larger than the Hub takes",
                where=item.name, got=f"{item.nbytes:,} bytes", expected=f"{LARGEST_FILE:,} bytes",
                hint="convert again with a smaller --max-shard-size",
            )  # fmt: skip


def _old_weights(hub: Hub, state: RepoState) -> list[str]:
    """Weights that the index in the repository names."""
    if INDEX_NAME not in state.files:
        return []
    try:
        weight_map = json.loads(hub.read(INDEX_NAME, state.base)).get("weight_map")
        return sorted({str(name) for name in weight_map.values()})
    except (ValueError, AttributeError):
        return []


def _diff(old: str, new: str) -> list[str]:
    lines = difflib.unified_diff(
        old.splitlines(),
        new.splitlines(),
        "README.md (there)",
        "README.md (to be sent)",
        lineterm="",
    )
    return list(lines)


def _description(folder: OutputFolder, hashes: Mapping[str, Fingerprint]) -> str:
    """For machines: what the commit rests on."""
    verdict: dict[str, Any] = {"verdict": folder.verify.verdict if folder.verify else None}
    return json.dumps({**verdict, "manifest_sha256": hashes[MANIFEST_NAME].sha256})

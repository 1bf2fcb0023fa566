"""Every file that the repository is to have: the folder's, and those made for the occasion."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from mmq.convert.checkpoint import open_checkpoint
from mmq.convert.modules import Module, group_modules
from mmq.convert.relayout import MANIFEST_NAME
from mmq.errors import BadInputError, UsageError
from mmq.publish.card import ExistingCard, merged_card
from mmq.publish.card_facts import CardFacts
from mmq.publish.eval_results import EVAL_NAME, eval_text
from mmq.publish.folder import CARD_NAME, CONVERT_NAME, VERIFY_NAME, OutputFolder
from mmq.publish.front_matter import front_problems, read_front, refuse_card, split_card
from mmq.publish.gate import Fingerprint
from mmq.publish.provenance import provenance
from mmq.publish.public_report import public_reports
from mmq.publish.recipe import RECIPE_NAME, has_recipe, recipe, recipe_text
from mmq.publish.serve import servings
from mmq.publish.traits import traits_of
from mmq.publish.upload_plan import Item, made

if TYPE_CHECKING:
    from mmq.publish.run import PublishSettings

#: The Hub refuses larger files (huggingface/hub-docs, storage-limits.md).
LARGEST_FILE = 500_000_000_000
#: Written here; a file of that name in the folder is the source's, and speaks of the source.
_MADE = frozenset({CARD_NAME, CONVERT_NAME, VERIFY_NAME, RECIPE_NAME, EVAL_NAME})


def all_items(
    folder: OutputFolder, hashes: Mapping[str, Fingerprint], settings: PublishSettings,
    existing: ExistingCard, blame: str,
) -> list[Item]:  # fmt: skip
    """Everything that will be in the repository, the card last.

    Raises:
        BadInputError: the card would be refused.
    """
    items = [
        Item(name, seen.bytes, seen.sha256, folder.root / name, seen.mtime_ns,
             weights=name in folder.weights)
        for name, seen in hashes.items() if name not in _MADE
    ]  # fmt: skip
    items += [made(name, data) for name, data in public_reports(folder).items()]
    facts = _facts(folder, hashes, settings, blame)
    if has_recipe(facts.traits, facts.servings):
        items.append(made(RECIPE_NAME, _recipe(facts).encode("utf-8")))
    if settings.eval_dataset:
        items.append(made(EVAL_NAME, eval_text(folder.verify, settings.eval_dataset).encode()))
    base = {"base_model": settings.base_model} if settings.base_model else {}
    text = merged_card(existing, facts, {**settings.license, **base})
    names = frozenset({item.name for item in items} | {CARD_NAME} | existing.files)
    refuse_card(list(front_problems(read_front(split_card(text).front), names)))
    return [*items, made(CARD_NAME, text.encode("utf-8", "backslashreplace"))]


def check_items(items: list[Item]) -> None:
    """Refuse what the Hub would.

    Raises:
        UsageError: too large.  BadInputError: a name no repository has.
    """
    from huggingface_hub.utils._paths import FORBIDDEN_FOLDERS

    times = Counter(item.name for item in items)
    for item in items:
        if item.nbytes > LARGEST_FILE:
            raise UsageError(
                "publish-file-too-large", f"{item.name} is larger than the Hub takes",
                where=item.name, got=f"{item.nbytes:,} bytes", expected=f"{LARGEST_FILE:,} bytes",
                hint="convert again with a smaller --max-shard-size",
            )  # fmt: skip
        inside = {*FORBIDDEN_FOLDERS} & {*item.name.split("/")}
        if inside or not item.name.isprintable() or times[item.name] > 1:
            raise BadInputError(
                "publish-manifest-invalid",
                f"{MANIFEST_NAME} names {item.name!r}, which no repository can hold"
                + (" twice" if times[item.name] > 1 else ""),
                where=MANIFEST_NAME, hint="convert again into a new folder",
            )  # fmt: skip


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
        return sum(math.prod(t.shape) for t in module.tensors.values())
    return math.prod(module.shape)

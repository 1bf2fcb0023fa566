"""Which modules a target quantises: one table, and the user's --ignore patterns over it.

A pattern is an fnmatch pattern (`*`, `?`, `[…]`) over the *full* module name, case-sensitive:
`*.block_sparse_moe.experts.7.*` matches, `visual` matches nothing called `vision_tower.…`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import translate

from mmq.errors import BadInputError
from mmq.quantize.architecture import FUSED_LINEARS, Role


@dataclass(frozen=True)
class QuantizationScheme:
    """What a target quantises.

    Attributes:
        target: word of `--to`.
        components: kinds of linear (see `architecture.Role.linear`) that get the target's format.
        reason: why the others stay, as the plan prints it.
    """

    target: str
    components: frozenset[str]
    reason: str


SCHEMES: dict[str, QuantizationScheme] = {
    "nvfp4": QuantizationScheme(
        "nvfp4",
        frozenset({"routed_experts"}),
        "routed experts are 96.7 % of the weights; attention, router and shared experts are what"
        " quality depends on, and the engines expect them as the release has them",
    ),
    "mxfp8": QuantizationScheme(
        "mxfp8",
        frozenset({"routed_experts", "shared_experts", "dense_mlp", "attention", "indexer"}),
        "the linears the MXFP8 release quantises",
    ),
    "bf16": QuantizationScheme("bf16", frozenset(), "everything quantised becomes BF16"),
}


@dataclass(frozen=True)
class IgnoreMatch:
    """What one --ignore pattern did.

    Attributes:
        modules: how many modules it matched.
        quantised: the matched ones that would have been quantised without it.
    """

    pattern: str
    modules: int
    quantised: tuple[str, ...]


def apply_ignore(
    patterns: Iterable[str], names: Iterable[str], candidates: frozenset[str]
) -> tuple[frozenset[str], tuple[IgnoreMatch, ...]]:
    """(modules to leave alone, one report per pattern)."""
    names = list(names)
    ignored: set[str] = set()
    reports = []
    for pattern in patterns:
        match = re.compile(translate(pattern)).match
        hit = [n for n in names if match(n)]
        ignored.update(hit)
        reports.append(IgnoreMatch(pattern, len(hit), tuple(n for n in hit if n in candidates)))
    return frozenset(ignored), tuple(reports)


def check_fused_groups(candidates: Mapping[str, Role], ignored: frozenset[str]) -> None:
    """Refuse ignores that leave one layer's experts in two formats.

    Engines fuse w1 with w3, and all experts of a layer with their w2, into one module with one
    format.

    Raises:
        BadInputError: naming the layer, and the pair when it is w1 and w3 that come apart.
    """
    layers: dict[tuple[bool, int], dict[bool, str]] = {}
    for name, role in candidates.items():
        if role.is_routed_expert:
            layers.setdefault((role.mtp, role.layer), {})[name in ignored] = name
    for (_, layer), states in sorted(layers.items()):
        if len(states) > 1:
            raise BadInputError(
                "ignore-splits-experts",
                f"--ignore leaves some of layer {layer}'s experts unquantised and not the others;"
                " engines fuse w1 with w3 and all experts of a layer, and need one format",
                where=f"layer {layer}",
                got=f"{states[True]} ignored, {states[False]} quantised",
                hint=f"ignore all of them ('*.layers.{layer}.block_sparse_moe.experts.*') or none",
            )


def split_pairs(candidates: Mapping[str, Role], ignored: frozenset[str]) -> list[tuple[str, str]]:
    """(ignored, quantised) modules that engines fuse into one matrix: gate with up, q with k, v."""
    pairs = []
    for name in candidates:
        parent, _, projection = name.rpartition(".")
        group = next((g for g in FUSED_LINEARS if projection in g), ())
        others = [f"{parent}.{p}" for p in group]
        quantised = [n for n in others if n in candidates and n not in ignored]
        if name in ignored and quantised:
            pairs.append((name, quantised[0]))
    return pairs

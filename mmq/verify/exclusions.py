"""Exclusion lists of a quantisation config: what they must cover, and what they must not hit.

A pattern matches a module as an fnmatch pattern over its full name, as its exact name, or as the
name of a parent (`vision_tower` covers `vision_tower.x`); the vendor's own spellings `lm_head` and
`model.embed_tokens`, without `language_model.`, count too.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from fnmatch import translate

from mmq.convert.modules import Module
from mmq.quantize.architecture import TEXT
from mmq.report.findings import Finding

_WILD = re.compile(r"[*?\[]")
#: Modules that no engine builds as a quantisable linear, so a gap in the list harms nobody.
_NEVER_QUANTISED = ("embedding", "norms")


def spellings(name: str) -> tuple[str, ...]:
    """A module's full name, and the one without the language model's prefix."""
    return (name, name.removeprefix(TEXT)) if name.startswith(TEXT) else (name,)


class Exclusions:
    """A list of patterns, compiled once."""

    def __init__(self, patterns: Iterable[str]) -> None:
        self.patterns = tuple(patterns)
        self._plain = {p.removesuffix(".") for p in self.patterns if not _WILD.search(p)}
        self.wild = {p: re.compile(translate(p)).match for p in self.patterns if _WILD.search(p)}

    def match(self, name: str) -> bool:
        """Whether a module is excluded."""
        return any(
            match(spelling) for spelling in spellings(name) for match in self.wild.values()
        ) or any(
            parent in self._plain for spelling in spellings(name) for parent in parents(spelling)
        )

    def hits(self, name: str) -> str:
        """The pattern that excludes a module."""
        wild = (p for p, match in self.wild.items() if any(map(match, spellings(name))))
        plain = (p for s in spellings(name) for p in parents(s) if p in self._plain)
        return next(wild, None) or next(plain, "")


def parents(name: str) -> Iterator[str]:
    """A dotted name and each of its parents."""
    yield name
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def check_exclusions(
    where: str, patterns: list[str], modules: Iterable[Module], *, engine: str
) -> Iterator[Finding]:
    """Every unquantised matrix is excluded, and nothing quantised is.

    Args:
        where: the list, such as "config.json: ignore".
        engine: what goes wrong for a matrix that is not excluded.
    """
    exclusions = Exclusions(patterns)
    quantised: list[str] = []
    for module in modules:
        if module.is_quantised:
            quantised.append(module.name)
            if exclusions.match(module.name):
                yield Finding(
                    "exclusion-hits-quantised", "error",
                    f"{where} excludes {module.name} (by {exclusions.hits(module.name)!r}), which"
                    f" is stored as {module.format}; SGLang would build it unquantised",
                    where=module.name, got=exclusions.hits(module.name), expected="not excluded",
                )  # fmt: skip
        elif _is_matrix(module) and not exclusions.match(module.name):
            assert module.weight is not None
            harmless = module.role.component in _NEVER_QUANTISED
            yield Finding(
                "not-excluded", "warning" if harmless else "error",
                f"{module.name} is {module.weight.dtype} but {where} does not exclude it: {engine}",
                where=module.name, got="not excluded", expected=where,
            )  # fmt: skip
    yield from _ambiguous(where, exclusions, sorted(s for q in quantised for s in spellings(q)))


def _is_matrix(module: Module) -> bool:
    return module.weight is not None and len(module.weight.shape) >= 2


def _ambiguous(where: str, exclusions: Exclusions, quantised: list[str]) -> Iterator[Finding]:
    """`…mlp.gate` is a prefix of `…mlp.gate_proj` to whoever matches without dots."""
    for pattern in exclusions.patterns:
        at = bisect_left(quantised, pattern)
        if at == len(quantised) or not quantised[at].startswith(pattern):
            continue
        if not exclusions.match(quantised[at]):
            yield Finding(
                "exclusion-ambiguous", "warning",
                f"{where}: {pattern!r} is also the beginning of the quantised {quantised[at]}, and"
                " some loaders match beginnings", where=quantised[at], got=pattern,
            )  # fmt: skip

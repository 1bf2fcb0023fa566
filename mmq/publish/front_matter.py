"""A card's front matter: the YAML block that the Hub reads. Merged key by key, the author's kept.

    ---
    license: other              the author's: kept
    license_name: minimax       the author's: kept
    tags:                       the author's, and mmq's after them
    - long-context
    - nvfp4
    base_model: org/name        mmq's: added
    ---

What the author wrote stays as written, comments included: keys are added at the end of the block,
and only the lines of a key whose value is empty, or of a list that grows, are written anew. What
cannot be added to line by line (`{license: mit}`, anchors, `...`) is refused.
Fields: huggingface/hub-docs, modelcard.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import yaml

from mmq.errors import BadInputError
from mmq.publish.folder import CARD_NAME
from mmq.report.escape import shortened
from mmq.report.findings import Finding

#: The block as the Hub finds it (huggingface_hub, repocard.py).
_BLOCK = re.compile(
    r"\A\s*---(?:\r\n|\r|\n)(.*?)(?:\A|(?<=\n)|(?<=\r))---[ \t]*(?:\r\n|\r|\n|\Z)", re.S
)
#: Lists that mmq adds to instead of leaving them as they are.
_GROWING = ("tags",)
#: What PyYAML raises over a text that is no YAML, or over a value that is not of its tag.
_YAML_ERRORS = (
    yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError,
    RecursionError,
)  # fmt: skip
_NAMES = ("base_model", "datasets", "language", "metrics", "tags")
_REPO = re.compile(r"[\w.-]+/[\w.-]+")
_HOW = (
    f"--license, --license-name, --license-link, --base-model, or the front matter of {CARD_NAME}"
)


class Card(NamedTuple):
    """A README in two parts: the YAML text of its front matter ("" without one), and the rest."""

    front: str
    body: str


def split_card(text: str) -> Card:
    """A README's front matter and text."""
    match = _BLOCK.match(text)
    return Card(match[1], text[match.end() :]) if match else Card("", text)


def join_card(card: Card) -> str:
    """The README of two parts."""
    front = card.front if card.front.endswith("\n") or not card.front else f"{card.front}\n"
    return f"---\n{front}---\n{card.body}" if front else card.body


def read_front(front: str) -> dict[str, Any]:
    """The values of a front matter.

    Raises:
        BadInputError: it is no YAML mapping, or has a key twice.
    """
    try:
        _refuse_what_lines_cannot_grow(front)
        node = yaml.compose(front, Loader=yaml.SafeLoader)
        value = yaml.safe_load(front)
    except _YAML_ERRORS as error:
        raise _unreadable(_reason(error)) from None
    if value is None:
        return {}
    if not isinstance(value, dict) or not isinstance(node, yaml.MappingNode):
        raise _unreadable("it is no list of keys and values")
    if node.flow_style:
        raise _unreadable("it is written in braces; write one key per line")
    keys = [key.value for key, _ in node.value]
    if twice := sorted({str(k) for k in keys if keys.count(k) > 1}):
        raise _unreadable(f"{twice[0]} is there twice")
    return value


def _reason(error: Exception) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark:
        return f"line {error.problem_mark.line + 1} of it: {shortened(error.problem, 160)}"
    if isinstance(error, yaml.YAMLError | RecursionError):
        return shortened(error, 160)
    return f"a value is not what its tag says: {shortened(error, 160)}"


def _refuse_what_lines_cannot_grow(front: str) -> None:
    refused = {
        yaml.AnchorToken: "an anchor (&); write the value out",
        yaml.AliasToken: "an alias (*); write the value out",
        yaml.DocumentStartToken: "a second document (---)",
        yaml.DocumentEndToken: "the end of a document (...)",
        yaml.DirectiveToken: "a directive (%)",
    }
    for token in yaml.scan(front, Loader=yaml.SafeLoader):
        if type(token) in refused:
            line = token.start_mark.line + 1
            raise _unreadable(f"line {line} of it has {refused[type(token)]}")


def _unreadable(problem: str) -> BadInputError:
    return BadInputError(
        "card-front-matter", f"the front matter of {CARD_NAME} cannot be read: {problem}",
        where=CARD_NAME,
    )  # fmt: skip


def merge_front(front: str, ours: Mapping[str, Any]) -> str:
    """The author's front matter with what it lacks; empty values count as lacking.

    Raises:
        BadInputError: it cannot be read, or not be added to without changing what else it says.
    """
    have = read_front(front)
    changed: dict[str, Any] = {}
    for key, value in ours.items():
        theirs = have.get(key)
        if theirs is None or theirs == "" or theirs == []:
            changed[key] = value
        elif key in _GROWING:
            old = theirs if isinstance(theirs, list) else [theirs]
            if new := [item for item in value if item not in old]:
                changed[key] = [*old, *new]
    texts = {key: _line(key, value) for key, value in changed.items()}
    return _edited(front, texts, {**have, **changed})


def without_keys(front: str, keys: tuple[str, ...]) -> str:
    """The front matter without these keys' lines.

    Raises:
        BadInputError: it cannot be read, or not lose them without changing what else it says.
    """
    have = read_front(front)
    gone = dict.fromkeys((key for key in keys if key in have), "")
    return _edited(front, gone, {k: v for k, v in have.items() if k not in gone})


def _line(key: str, value: Any) -> str:
    return str(yaml.safe_dump({key: value}, sort_keys=False, allow_unicode=True, width=1000))


def _edited(front: str, texts: Mapping[str, str], wanted: Mapping[str, Any]) -> str:
    """The lines of keys replaced by texts, new ones at the end; it must say `wanted` then."""
    try:
        for key, text in texts.items():
            start, end = _span(front, key)
            if start == end:
                head = front if front.endswith("\n") or not front else f"{front}\n"
                front = head + text
            else:
                front = front[:start] + text + front[end:]
        sound = (yaml.safe_load(front) or {}) == wanted
    except _YAML_ERRORS:
        sound = False
    if not sound:
        raise _unreadable(
            "keys cannot be added or taken out line by line; write one key per line, unindented"
        )
    return front


def _span(front: str, key: str) -> tuple[int, int]:
    """Where the lines of a top-level key begin and end; (0, 0) without it."""
    node = yaml.compose(front, Loader=yaml.SafeLoader)
    pairs = node.value if isinstance(node, yaml.MappingNode) else []
    for at, (name, value) in enumerate(pairs):
        if name.value == key:
            start = name.start_mark.index
            last = value.end_mark.index
            after = pairs[at + 1][0].start_mark.index if at + 1 < len(pairs) else len(front)
            # a block's end mark is at the next token; a comment before that is not the key's
            line = front.find("\n", max(start, min(last, after) - 1))
            end = min(after, len(front) if line < 0 else line + 1)
            return start, _without_comments(front, start, end)
    return 0, 0


def _without_comments(front: str, start: int, end: int) -> int:
    lines = front[start:end].splitlines(keepends=True)
    while len(lines) > 1 and (not lines[-1].strip() or lines[-1].lstrip().startswith("#")):
        end -= len(lines.pop())
    return end


def front_problems(values: Mapping[str, Any], files: frozenset[str]) -> Iterator[Finding]:
    """What the Hub would refuse, or would show wrongly.

    Args:
        files: names of the files that will be in the repository.
    """
    yield from _license(values, files)
    bases = values.get("base_model")
    names = bases if isinstance(bases, list) else [bases]
    if not names or not all(isinstance(n, str) and _REPO.fullmatch(n) for n in names):
        yield _problem("base_model must name the repository it was made from, as ORG/NAME", bases)
    if values.get("base_model_relation") != "quantized":
        relation = values.get("base_model_relation")
        yield _problem("base_model_relation must be quantized", relation)
    for key in _NAMES:
        value = values.get(key)
        items = value if isinstance(value, list) else [value] if key in values else []
        if not all(isinstance(item, str) and item for item in items):
            yield _problem(f"{key} has an entry that is no name", value)


def _license(values: Mapping[str, Any], files: frozenset[str]) -> Iterator[Finding]:
    name = values.get("license")
    if not isinstance(name, str) or not name.strip():
        yield _problem("license is not given", name)
        return
    if name != "other":
        return
    for key in ("license_name", "license_link"):
        if not isinstance(values.get(key), str) or not values[key].strip():
            yield _problem(f"license: other needs a {key}", values.get(key))
    link = values.get("license_link")
    if isinstance(link, str) and link and "://" not in link and link not in files:
        yield _problem(f"license_link leads to {link}, which is not among the files", link)


def license_problems(values: Mapping[str, Any], given: Mapping[str, str]) -> Iterator[Finding]:
    """Options that would make the card contradict itself.

    Args:
        given: what the command line says of the licence.
    """
    name = values.get("license")
    if name is None or name == "other":
        return
    for key in ("license_name", "license_link"):
        if key in given:
            option = "--" + key.replace("_", "-")
            yield _problem(f"{option} belongs to license: other, and the card's is {name}", name)


def options_overruled(values: Mapping[str, Any], given: Mapping[str, str]) -> Iterator[str]:
    """What the command line gives and the card's author has said otherwise."""
    for key, value in given.items():
        theirs = values.get(key)
        names = theirs if isinstance(theirs, list) else [theirs]
        if value not in names:
            option = "--" + key.replace("_", "-")
            has = f"{CARD_NAME} has {key}: {shortened(theirs, 80)}"
            yield f"{has}, which is kept; {option} is not used"


def _problem(message: str, got: object) -> Finding:
    shown = "absent or null" if got is None else shortened(got, 80)
    return Finding("card-invalid", "error", message, where=CARD_NAME, got=shown)


def refuse_card(found: list[Finding]) -> None:
    """Stop when there is anything the Hub would refuse.

    Raises:
        BadInputError: there is.
    """
    if found:
        raise BadInputError(
            "card-invalid", "the card would be refused: " + "; ".join(f.message for f in found),
            where=CARD_NAME, got=found[0].got, hint=_HOW,
        )  # fmt: skip

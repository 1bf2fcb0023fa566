"""The model card: mmq's section between markers, merged into whatever README there is.

    <!-- mmq -->
    … written anew every time …
    <!-- /mmq -->

Text outside the markers is the author's and stays as it is. Figures are those of mmq's reports, and
no others; free text from reports is escaped.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from mmq.errors import BadInputError
from mmq.publish.card_facts import CardFacts, limit_lines, provenance_lines, results, sizes, summary
from mmq.publish.folder import CARD_NAME
from mmq.publish.front_matter import (
    Card,
    join_card,
    license_problems,
    merge_front,
    read_front,
    refuse_card,
    split_card,
    without_keys,
)
from mmq.report.escape import markdown, markdown_code, plain

START, END = "<!-- mmq -->", "<!-- /mmq -->"
_TEMPLATE = "card.md.jinja"
#: Warnings of the verification that are shown; mmq-verify.json has all.
MOST_WARNINGS = 8
#: Code in Markdown, where a marker is only shown: fenced, indented, and within a line.
_CODE = re.compile(
    r"^ {0,3}(?P<fence>`{3,}|~{3,})[^\n]*\n(?:.*\n)*?^ {0,3}(?P=fence)[`~]*[ \t]*$"
    r"|^(?: {4}|\t)[^\n]*$"
    r"|(?<!`)(?P<ticks>`{1,2})(?!`)[^\n]*?(?<!`)(?P=ticks)(?!`)",
    re.MULTILINE,
)
#: What a source's card says of the source alone: wrong of what was made from it.
_SOURCES_OWN = ("base_model", "base_model_relation", "model-index", "new_version", "library_name")


@dataclass(frozen=True)
class ExistingCard:
    """A README that is there already.

    Attributes:
        text: its text, "" for none.
        sources: whether it is the source's card as the conversion copied it.
        files: what the repository has already, which links may lead to.
    """

    text: str
    sources: bool = False
    files: frozenset[str] = frozenset()


def front_values(facts: CardFacts, given: Mapping[str, str]) -> dict[str, Any]:
    """mmq's front matter; keys the author has are left to the author.

    Args:
        given: what the command line says: licence, base_model.
    """
    traits = facts.traits
    library = {"modelopt": "vllm", "minimax": "sglang"}.get(traits.layout, "transformers")
    values: dict[str, Any] = {**given}
    if facts.provenance.repo:
        values.setdefault("base_model", facts.provenance.repo)
    values |= {
        "base_model_relation": "quantized",
        "library_name": library,
        "pipeline_tag": "image-text-to-text" if traits.vision else "text-generation",
        "tags": _tags(facts),
    }
    return values


def _tags(facts: CardFacts) -> list[str]:
    """The formats that are in it (all that the layout may have, where no report tells), and mmq."""
    layout = facts.traits.layout
    of_layout = {"modelopt": ["nvfp4", "mxfp8"], "minimax": ["nvfp4", "mxfp8"]}
    sizes = facts.convert.sizes if facts.convert else []
    held = {s.format.lower() for s in sizes if s.after_bytes}
    formats = [f for f in of_layout.get(layout, [layout]) if f in held or not held]
    return [*formats, *(["modelopt"] if layout == "modelopt" else []), "mmq"]


def merged_card(existing: ExistingCard, facts: CardFacts, given: Mapping[str, str]) -> str:
    """The README to publish.

    Raises:
        BadInputError: the existing one's front matter or markers cannot be read, or its licence is
        not the one that the options speak of.
    """
    card = split_card(existing.text)
    front = without_keys(card.front, _SOURCES_OWN) if existing.sources else card.front
    have = read_front(front)
    licence = have.get("license") or given.get("license")
    refuse_card(list(license_problems({"license": licence}, given)))
    front = merge_front(front, front_values(facts, given))
    body = _with_section(card.body, card_section(facts), facts, top=existing.sources)
    return join_card(Card(front, body))


def _with_section(body: str, section: str, facts: CardFacts, *, top: bool) -> str:
    text = _CODE.sub(lambda code: " " * len(code[0]), body)
    starts, ends = text.count(START), text.count(END)
    if (starts, ends) == (1, 1) and text.index(START) < text.index(END):
        return body[: text.index(START)] + section + body[text.index(END) + len(END) :]
    if starts or ends:
        raise BadInputError(
            "card-markers", f"{CARD_NAME} has {starts} × {START} and {ends} × {END}",
            where=CARD_NAME, expected="one of each, in this order, or neither",
            hint="remove the marker that is left over",
        )  # fmt: skip
    if not body.strip():
        return f"\n# {markdown(facts.repo.partition('/')[2])}\n\n{section}\n"
    if top:
        return f"\n{section}\n\n{body.lstrip()}"
    return f"{body.rstrip()}\n\n{section}\n"


def card_section(facts: CardFacts) -> str:
    """mmq's section, markers included.

    Raises:
        BadInputError: something in it reads as one of the markers.
    """
    from jinja2 import Environment, StrictUndefined

    # Markdown, not HTML: what comes from outside is escaped by `markdown` where it is put in
    environment = Environment(
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, autoescape=False
    )
    template = resources.files("mmq.publish").joinpath("data", _TEMPLATE).read_text("utf-8")
    text = environment.from_string(template).render(
        table=table, title=markdown(facts.title), summary=summary(facts), sizes=sizes(facts),
        blame=markdown(facts.blame), verification=_verification(facts), levels=_levels(facts),
        warnings=_warnings(facts),
        results=results(facts), servings=facts.servings, serving_note=_SERVING_NOTE,
        provenance=provenance_lines(facts), command=_command(facts),
        shards=_shards(facts), limits=limit_lines(facts),
    )  # fmt: skip
    if START in text or END in text:
        raise BadInputError(
            "card-markers", f"what {CARD_NAME} is to say contains {START} or {END}",
            where=CARD_NAME, hint="convert again with other names",
        )  # fmt: skip
    lines = [line.rstrip() for line in text.strip().splitlines()]
    kept = [line for at, line in enumerate(lines) if line or (at and lines[at - 1])]
    return "\n".join((START, *kept, END))


def table(caption: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table of cells that are escaped already; all columns but the first flush right."""
    lines = [f"**{caption}**", ""] if caption else []
    lines.append("| " + " | ".join(columns) + " |")
    lines.append("|---" + "|---:" * (len(columns) - 1) + "|")
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


_SERVING_NOTE = (
    "Options are what the loaders' own code takes; mmq started no server, so nothing here is about"
    " speed."
)  # fmt: skip


def _verification(facts: CardFacts) -> str:
    report = facts.verify
    if report is None:
        return "mmq did not verify these files."
    against = ""
    if report.against is not None:
        name = facts.provenance.repo
        against = f" against {markdown_code(name)}" if name else " against the source"
    counts = {s: sum(f.severity == s for f in report.findings) for s in ("error", "warning")}
    told = ", ".join(f"{n} {s}{'' if n == 1 else 's'}" for s, n in counts.items())
    return f"`mmq verify`{against}: **{report.verdict}** ({told}; `mmq-verify.json` has all of it)."


def _warnings(facts: CardFacts) -> list[str]:
    findings = facts.verify.findings if facts.verify else []
    found = [f for f in findings if f.severity != "note"]
    lines = [
        f"{f.severity} {markdown_code(f.id)}: {markdown(f.message)}" for f in found[:MOST_WARNINGS]
    ]
    return lines + ([f"and {len(found) - len(lines)} more"] if len(found) > len(lines) else [])


def _levels(facts: CardFacts) -> list[tuple[str, ...]]:
    return [
        (v.level, v.status, f"{len(v.checks):,}", f"{sum(v.checks.values()):,}")
        for v in (facts.verify.levels if facts.verify else ())
    ]


def _command(facts: CardFacts) -> str:
    """The command for a code block, where nothing is escaped: a comment's beginning is cut in two.

    `shlex` has put it in single quotes, so the shell joins the halves again.
    """
    return plain(facts.provenance.command).replace("<!--", "<!'\"-\"'-")


def _shards(facts: CardFacts) -> list[tuple[str, ...]]:
    return [
        (markdown_code(s.name), f"{s.bytes:,}", f"`{s.sha256}`", "file" if s.whole else "header")
        for s in facts.provenance.shards
    ]

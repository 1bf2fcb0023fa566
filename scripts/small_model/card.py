"""The words that stand beside the model: its card, where the texts are from, their licences."""

from __future__ import annotations

import hashlib
import tarfile
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from .shape import SIZE
from .texts import SOURCES, Texts, shared_lines
from .train import Recipe

#: Figures go between these lines; `measure_small_model.py` puts them there.
FIGURES = ("<!-- figures -->", "<!-- /figures -->")

_TEMPLATE = Path(__file__).with_name("card.md")


def card(steps: int, planned: int) -> str:
    """README.md of a model that stopped after `steps` of `planned` steps, without its figures."""
    command = "python scripts/train_small_model.py --out DIR"
    if steps < planned:
        command += f" --stop {steps}"
    names = ("torch", "transformers", "tokenizers", "numpy")
    versions = ", ".join(f"{name} {version(name)}" for name in names)
    return _TEMPLATE.read_text("utf-8").format(
        **vars(SIZE), millions=5.06, binds=SIZE.index_topk * SIZE.index_block, versions=versions,
        command=command, steps=f"{steps:,}", planned=f"{planned:,}",
        long=f"{round(Recipe.long_from * planned):,}", begin=FIGURES[0], end=FIGURES[1],
    )  # fmt: skip


def provenance(texts: Texts) -> str:
    """PROVENANCE.md: packages, licences, digests, and every held-out document."""
    return "\n".join([*_source_lines(texts), *_held_out_lines(texts)]) + "\n"


def _source_lines(texts: Texts) -> Iterator[str]:
    yield "# Where the texts are from\n"
    yield "Source distributions on the Python Package Index; their digests pin every file.\n"
    yield "| package | version | licence | archive | SHA-256 |"
    yield "|---|---|---|---|---|"
    for source in SOURCES:
        of = f"{source.package} | {source.version} | {source.licence} | {source.archive}"
        yield f"| {of} | `{source.sha256}` |"
    yield "\nTraining took documents and code of these kinds. The digest is that of the lines"
    yield "`SHA-256  package/path` of all of them, in the order of their paths.\n"
    yield "| kind | documents | bytes | of |"
    yield "|---|---|---|---|"
    for kind, count in sorted(Counter(d.kind for d in texts.training).items()):
        own = [d for d in texts.training if d.kind == kind]
        size = sum(len(d.text.encode()) for d in own)
        packages = ", ".join(sorted({d.source.package for d in own}))
        yield f"| {kind} | {count:,} | {size:,} | {packages} |"
    lines = sorted(f"{d.sha256}  {d.name}\n" for d in texts.training)
    lines.sort(key=lambda line: line.split("  ", 1)[1])
    yield f"\nSHA-256 of the list: `{hashlib.sha256(''.join(lines).encode()).hexdigest()}`\n"


def _held_out_lines(texts: Texts) -> Iterator[str]:
    yield "## Held out\n"
    yield "Never trained on, nor are their translations. A file in `mmq/demo/text` is the documents"
    yield "of its kind, one after another. Lines of 50 characters up that training has as well,"
    yield "imports and boilerplate, by share of the text:"
    yield ", ".join(f"{kind} {share:.1%}" for kind, share in shared_lines(texts).items()) + ".\n"
    yield "| kind | document | licence | bytes | SHA-256 |"
    yield "|---|---|---|---|---|"
    for d in sorted(texts.held_out, key=lambda d: d.kind):
        size = len(d.text.encode())
        yield f"| {d.kind} | {d.name} | {d.source.licence} | {size:,} | `{d.sha256}` |"


def notices(archives: Path) -> str:
    """The packages' own licence texts, as their terms ask."""
    lines = ["# Licences of the texts in this folder", ""]
    for source in SOURCES:
        with tarfile.open(archives / source.archive) as tar:
            file = tar.extractfile(f"{source.root}/LICENSE")
            assert file is not None, "both archives have one"
            licence = file.read().decode("utf-8").strip()
        lines += [f"## {source.package} {source.version} ({source.licence})", ""]
        lines += ["```", licence, "```", ""]
    return "\n".join(lines)

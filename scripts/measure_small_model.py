"""Measure a small model made by train_small_model.py and put the figures into its README.

    python scripts/measure_small_model.py [DIR] [--texts DIR] [--every N]

Perplexity is of all the held-out text, the rest of every N-th window. Without DIR it is the model
that comes with mmq. Some minutes on two cores.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
from collections.abc import Iterator
from pathlib import Path

import small_model.measure as m
import torch
from small_model.card import FIGURES

from mmq.console import Console
from mmq.convert.options import ConvertOptions
from mmq.convert.run import RunSettings, convert
from mmq.demo.bundled import bundled_model, bundled_texts

LONG = 2048


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, nargs="?", default=bundled_model())
    parser.add_argument("--texts", type=Path, help="folder of *.txt; default: those of mmq")
    parser.add_argument("--every", type=int, default=4)
    options = parser.parse_args()
    texts = sorted(options.texts.glob("*.txt")) if options.texts else bundled_texts()
    lines = []
    for line in figures(options.model, texts, options.every):
        print(line, flush=True)
        lines.append(line)
    readme = options.model / "README.md"
    head, _, rest = readme.read_text("utf-8").partition(FIGURES[0])
    tail = rest.partition(FIGURES[1])[2]
    block = "\n".join([FIGURES[0], *lines, FIGURES[1]])
    readme.write_text(head + block + tail, "utf-8")


def figures(folder: Path, texts: list[Path], every: int) -> Iterator[str]:
    yield "`python scripts/measure_small_model.py` (F32; windows of <bos> and 511 scored tokens):\n"
    model = m.load(folder)
    watched = copy.deepcopy(model)
    watch = m.Watch(watched)
    yield "| held-out text | tokens | perplexity |"
    yield "|---|---|---|"
    likelihoods, sample = [], []
    for text in texts:
        ids = m.windows(folder, text)
        scores = m.score(watched, ids)
        likelihoods.append(scores.likelihood_WT)
        sample.append(ids[::every])
        yield f"| {text.stem} | {scores.likelihood_WT.numel():,} | {scores.perplexity:.2f} |"
    whole = torch.cat(likelihoods)
    yield f"| all | {whole.numel():,} | {float((-whole.double().mean()).exp()):.2f} |"
    longer = torch.cat([m.windows(folder, text, LONG)[:2] for text in texts])
    tokens, perplexity = longer[:, 1:].numel(), m.score(model, longer).perplexity
    yield f"| windows of {LONG:,}, two a text | {tokens:,} | {perplexity:.2f} |"
    yield ""
    for layer, load in watch.loads.items():
        share = load / load.sum()
        low, high = share.min(), share.max()
        yield f"- layer {layer}: every expert takes {low:.2%} to {high:.2%} of the routed tokens"
    yield f"- {watch.clamped / watch.activations:.2%} of the experts' activations are clamped"
    apart = ", ".join(f"{kind} {octaves:.2f}" for kind, octaves in m.unevenness(folder).items())
    yield f"- octaves between the scales of neighbouring blocks, mean: {apart}"
    yield ""
    ids = torch.cat(sample)
    right = m.score(model, ids)
    yield f"{right.likelihood_WT.numel():,} of these tokens, with one mistake at a time:\n"
    yield "| mistake | perplexity | mean KLD | same first choice |"
    yield "|---|---|---|---|"
    yield f"| none | {right.perplexity:.2f} | | |"
    for name, change in m.mistakes().items():
        wrong = copy.deepcopy(model)
        change(wrong)
        yield _row(name, m.compare(right, m.score(wrong, ids)))
    with tempfile.TemporaryDirectory() as scratch:
        yield from _other_weights(folder, Path(scratch), right, ids)


def _other_weights(
    folder: Path, scratch: Path, right: m.Scores, ids: torch.Tensor
) -> Iterator[str]:
    for name, part in (("of the experts", ".experts."), ("of w2 alone", ".w2."),
                       ("of one expert's w1", "layers.2.block_sparse_moe.experts.3.w1."),
                       ("of attention", ".self_attn.")):  # fmt: skip
        m.shift_scales(folder, scratch / part, part)
        shifted = m.score(m.load(scratch / part), ids)
        yield _row(f"block scales {name} shifted by one block", m.compare(right, shifted))
    for search in ("max", "mse"):
        nvfp4, bf16 = scratch / search, scratch / f"{search}-bf16"
        quiet, settings = Console("quiet"), RunSettings(jobs=1)
        convert(str(folder), nvfp4, ConvertOptions(scale_search=search), settings, quiet)
        convert(str(nvfp4), bf16, ConvertOptions(to="bf16"), settings, quiet)
        converted = m.score(m.load(bf16), ids)
        yield _row(f"no mistake: NVFP4 experts, `{search}` scales", m.compare(right, converted))


def _row(name: str, found: dict[str, float]) -> str:
    return f"| {name} | {found['perplexity']:.2f} | {found['kld']:.4f} | {found['top1']:.1%} |"


if __name__ == "__main__":
    main()

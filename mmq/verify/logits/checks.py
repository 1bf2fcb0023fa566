"""Before and after a logits run: do configs, tokenizers and tokens fit, and where did NaN arise."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mmq.errors import BadInputError
from mmq.report.findings import Finding
from mmq.verify.expectation import Expectation
from mmq.verify.log import LevelLog
from mmq.verify.logits.arms import Side
from mmq.verify.logits.plan import choose_tokens
from mmq.verify.logits.settings import LogitsSettings
from mmq.verify.logits.stream import NonFiniteError
from mmq.verify.logits.tokens import TokenSet
from mmq.verify.model.config import TextConfig
from mmq.verify.subject import Subject


def comparable(configs: Mapping[Side, TextConfig], log: LevelLog) -> bool:
    """Whether both configs describe the same forward; what differs becomes findings."""
    source, candidate = (asdict(configs[side]) for side in ("source", "candidate"))
    log.run("config keys of the forward", len(source))
    differing = [key for key in source if source[key] != candidate[key]]
    for key in differing:
        # A padded vocabulary is compared over the source's tokens; all else changes the function.
        padded = key == "vocab" and candidate[key] > source[key]
        log.add(
            Finding(
                "config-differs", "warning" if padded else "error",
                f"config.json's {key} is not the source's", where=f"config.json: {key}",
                got=str(candidate[key]), expected=str(source[key]),
            )
        )  # fmt: skip
    return set(differing) <= {"vocab"} and candidate["vocab"] >= source["vocab"]


def checked_tokens(
    settings: LogitsSettings, config: TextConfig, expectation: Expectation, subject: Subject,
    log: LevelLog,
) -> TokenSet:  # fmt: skip
    """The run's tokens; what is odd about them, or about OUT's tokenizer, becomes findings."""
    source = expectation.source
    if settings.tokens is None:
        assert source.root is not None
        log.run("tokenizer compared", 1, _tokenizer_findings(source.root, subject.root))
    tokens = choose_tokens(settings, config, source)
    log.run("tokens scored", tokens.scored, _token_findings(tokens, config))
    return tokens


def _tokenizer_findings(source: Path, out: Path | None) -> Iterator[Finding]:
    """Both folders must turn text into the same ids; the source's tokenizer is used for both."""
    ours = out / "tokenizer.json" if out is not None else None
    if ours is None or not ours.is_file():
        yield Finding("tokenizer-missing", "error", "OUT has no tokenizer.json",
                      where="tokenizer.json")  # fmt: skip
    elif ours.read_bytes() != (source / "tokenizer.json").read_bytes():
        yield Finding(
            "tokenizer-differs", "error",
            "OUT's tokenizer.json is not the source's: an engine would score other tokens",
            where="tokenizer.json",
        )  # fmt: skip


def _token_findings(tokens: TokenSet, config: TextConfig) -> Iterator[Finding]:
    longest = max(w.length for w in tokens.windows)
    if any(config.sparse) and longest <= config.binding_context:
        yield Finding(
            "selection-never-binds", "warning",
            f"no window is longer than {config.binding_context:,} tokens: block selection leaves"
            " nothing out, so the indexer is not tested", where="--context", got=str(longest),
            expected=f"more than {config.binding_context:,}",
        )  # fmt: skip
    if tokens.doubled_bos:
        yield Finding(
            "bos-doubled", "warning",
            f"{tokens.doubled_bos} window(s) begin with BOS twice: perplexity suffers on both"
            " sides", where=tokens.files[0],
        )  # fmt: skip


def nonfinite_finding(
    error: NonFiniteError, expectation: Expectation, tokens: TokenSet, layers: int
) -> Finding:
    """Where the first NaN or Inf arose.

    Raises:
        BadInputError: in the source's own forward.
    """
    number, window = next(
        (i, w) for i, w in enumerate(tokens.windows) if error.token < w.first + w.length
    )
    layer = f"layer {error.layer}" if error.layer < layers else "the logits"
    place = f"{layer}, window {number}, position {error.token - window.first}"
    if error.arm.name == "source":
        raise BadInputError(
            "source-nonfinite", f"the source's forward gives NaN or Inf in {place}",
            where=expectation.source.location,
        )  # fmt: skip
    return Finding(
        "forward-nonfinite", "error",
        f"the forward {error.arm.name!r} gives NaN or Inf in {place}", where=layer,
        got="NaN or Inf", expected="finite hidden states",
    )  # fmt: skip


def widest_step(layers: Sequence[Mapping[str, Any]], arm: str) -> Finding:
    """The layer in which a forward's hidden state leaves the source's most."""
    cosines = [1.0, *(layer["arms"][arm]["cosine"]["mean"] for layer in layers)]
    steps = [before - after for before, after in itertools.pairwise(cosines)]
    worst = max(range(len(steps)), key=steps.__getitem__)
    number = layers[worst]["layer"]
    return Finding(
        "layer-drift", "note",
        f"the hidden states of {arm!r} leave the source's most in layer {number}",
        where=f"layer {number}", got=f"mean cosine {cosines[worst + 1]:.5f}",
        expected=f"{cosines[worst]:.5f}, the layer before",
    )  # fmt: skip

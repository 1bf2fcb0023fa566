"""`mmq calibrate`: the source's forward over text, and what its caches and experts need."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from mmq import __version__
from mmq.calibrate.collect import SOURCE, run_layer
from mmq.calibrate.expert_files import write_importance, write_input_scales
from mmq.calibrate.expert_layers import ExpertLayers, expert_layers, write_experts
from mmq.calibrate.saved_layers import load_experts, load_vectors, save_layer
from mmq.calibrate.scales_file import Calibration, Choice, write_calibration
from mmq.console import Console
from mmq.convert.checkpoint import Checkpoint, open_checkpoint
from mmq.convert.completeness import check_architecture
from mmq.convert.journal import source_identity
from mmq.convert.model_identity import norms_digest
from mmq.convert.modules import Module, group_modules
from mmq.errors import BadInputError, UsageError
from mmq.report.findings import Finding
from mmq.verify.logits.hidden_states import HiddenStates
from mmq.verify.logits.plan import choose_tokens, estimate
from mmq.verify.logits.stream import NonFiniteError, embed_rows
from mmq.verify.logits.tokens import TokenSet
from mmq.verify.model.config import TextConfig, read_text_config
from mmq.verify.model.weights import ModelWeights


@dataclass(frozen=True)
class CalibrateSettings:
    """What was asked for.

    Attributes:
        texts, tokens: one of the two.
        importance_out, input_scales_out: files for `mmq convert --importance`, `--input-scales`.
        experts_out: statistics of the experts, to merge with other runs'.
        work: folder for hidden states and finished layers; by default beside the scales file.
    """

    texts: tuple[Path, ...] = ()
    tokens: Path | None = None
    context: int | None = None
    windows: int | None = None
    choice: Choice = field(default_factory=Choice)
    importance_out: Path | None = None
    input_scales_out: Path | None = None
    experts_out: Path | None = None
    work: Path | None = None


@dataclass(frozen=True)
class Prepared:
    """What a calibration will run on.

    Attributes:
        model: {"location", "norms_sha256", "layers"}.
    """

    source: Checkpoint
    config: TextConfig
    modules: Mapping[str, Module]
    tokens: TokenSet
    model: dict[str, Any]


def prepare(location: str, settings: CalibrateSettings) -> Prepared:
    """Open the source and cut the tokens.

    Raises:
        UsageError: no text, or text that cannot be read.
        BadInputError: the source is damaged, has no weights, or is not MiniMax-M3.
    """
    if bool(settings.texts) == (settings.tokens is not None):
        raise UsageError(
            "text-needed", "calibration needs tokens: give --text FILE… or --tokens FILE",
            hint="mmq calibrate SRC -o scales.json --text train.txt",
        )  # fmt: skip
    source = open_checkpoint(location)
    check_architecture(source)
    config = read_text_config(source.config)
    if source.root is None:
        raise UsageError(
            "source-has-no-weights", f"{location} is a header manifest: it has no weights",
            where=location,
        )  # fmt: skip
    tokens = choose_tokens(settings, config, source)
    modules = group_modules(source.tensors)
    model = {
        "location": location, "norms_sha256": norms_digest(source, modules),
        "layers": config.layers,
    }  # fmt: skip
    return Prepared(source, config, modules, tokens, model)


def calibrate(
    location: str, out: Path, settings: CalibrateSettings, console: Console
) -> dict[str, Any]:
    """Run the source over the tokens, write `out` and the other files; returns what `out` holds.

    Run again after an interruption, it goes on at the first layer that is not done.

    Raises:
        UsageError, BadInputError: see `prepare`; or the source's forward gives NaN.
    """
    prepared = prepare(location, settings)
    tokens, config = prepared.tokens, prepared.config
    work = settings.work or out.with_name(out.name + ".work")
    plan = estimate(config, [prepared.modules], [SOURCE], tokens, config.layers, 4)
    console.note(
        f"calibrating on {tokens.count:,} tokens in {len(tokens.windows)} windows; {plan.text}"
    )
    fingerprint = _fingerprint(prepared)
    states = HiddenStates(work, [SOURCE], tokens.count, config.hidden, fingerprint)
    if states.layer:
        console.note(f"resuming at layer {states.layer}: the others are in {work}")
    with console.progress(plan.read_bytes, "calibrating") as progress:
        _run(prepared, states, work, progress.advance)
    run = {
        "tokens": tokens.count, "tokens_sha256": tokens.sha256,
        "convention": dict(tokens.convention),
    }  # fmt: skip
    layers = [load_vectors(work, number) for number in range(config.layers)]
    calibration = Calibration(prepared.model, [run], layers)
    for finding in bound_findings(calibration):
        console.finding(finding, talk=True)
    sparse = [number for number in range(config.layers) if config.moe[number]]
    experts = expert_layers(prepared.model, [run], sparse, partial(load_experts, work))
    summary = write_expert_files(settings, experts)
    told = write_calibration(out, calibration, settings.choice)
    states.remove()
    return {**told, "experts": summary}


def write_expert_files(
    settings: CalibrateSettings, experts: ExpertLayers | None
) -> dict[str, Any] | None:
    """The files that were asked for; returns how many experts no token reached."""
    files = (settings.importance_out, settings.input_scales_out, settings.experts_out)
    writers: tuple[Callable[[Path, ExpertLayers], None], ...] = (
        write_importance, write_input_scales, write_experts,
    )  # fmt: skip
    if experts is None:
        if any(files):
            raise UsageError("option-conflict", "there are no experts to write files about")
        return None
    for path, write in zip(files, writers, strict=True):
        if path is not None:
            write(path, experts)
    return experts.summary()


def _fingerprint(prepared: Prepared) -> dict[str, Any]:
    """What a resumed run must have in common with the interrupted one."""
    identity = json.dumps(source_identity(prepared.source), sort_keys=True)
    return {
        "mmq": __version__, "tokens": prepared.tokens.sha256,
        "model": prepared.model["norms_sha256"],
        "source": hashlib.sha256(identity.encode()).hexdigest(),
    }  # fmt: skip


def _run(
    prepared: Prepared, states: HiddenStates, work: Path, advance: Callable[[int], None]
) -> None:
    """Every layer that is not done."""
    source, config, tokens = prepared.source, prepared.config, prepared.tokens
    paths = {name: shard.path for name, shard in source.shards.items()}
    weights = ModelWeights(source.location, prepared.modules, paths)
    try:
        if not states.embedded:
            embed_rows(config, weights, tokens, states.inputs("source"))
            states.embedding_written()
            advance(weights.take_bytes_read())
        for number in range(states.layer, config.layers):
            save_layer(work, number, run_layer(config, weights, number, tokens, states, advance))
            states.layer_written({"layer": number})
    except NonFiniteError as error:
        raise BadInputError(
            "source-nonfinite", f"the source's forward gives NaN or Inf in layer {error.layer}",
            where=f"layer {error.layer}, token {error.token}",
        ) from None  # fmt: skip
    finally:
        weights.close()


def bound_findings(calibration: Calibration) -> list[Finding]:
    """Where a magnitude exceeds the bound that nothing can exceed: the forward, or the bound, is
    wrong. F32 arithmetic may reach it to a few roundings."""
    found = []
    for number, layer in enumerate(calibration.layers):
        for kind, seen in layer.items():
            bound = seen.analytic * 448
            if seen.amax > bound * (1 + 1e-5):
                found.append(
                    Finding(
                        "kv-bound-exceeded", "warning",
                        f"{kind} of layer {number} is larger than its analytic bound",
                        where=f"layer {number}", got=f"{seen.amax:.6g}", expected=f"≤ {bound:.6g}",
                    )
                )  # fmt: skip
    return found

"""`mmq calibrate`: the source's forward over text, and what its caches and experts need."""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mmq import __version__
from mmq.calibrate.collect import SOURCE, LayerStatistics, run_layer
from mmq.calibrate.expert_files import write_importance, write_input_scales
from mmq.calibrate.expert_statistics import ExpertStatistics
from mmq.calibrate.kv_statistics import VectorStatistics
from mmq.calibrate.scales_file import KINDS, Calibration, Choice, write_calibration
from mmq.console import Console
from mmq.convert.checkpoint import Checkpoint, open_checkpoint
from mmq.convert.completeness import check_architecture
from mmq.convert.finalize import json_bytes
from mmq.convert.modules import Module, group_modules
from mmq.convert.writer import write_file
from mmq.errors import BadInputError, UsageError
from mmq.report.findings import Finding
from mmq.verify.logits.hidden_states import HiddenStates
from mmq.verify.logits.plan import default_context, estimate
from mmq.verify.logits.settings import DEFAULT_WINDOWS
from mmq.verify.logits.stream import NonFiniteError, embed_rows
from mmq.verify.logits.tokens import TokenSet, check_ids, open_tokenizer, read_texts, read_tokens
from mmq.verify.model.config import TextConfig, read_text_config
from mmq.verify.model.weights import ModelWeights


@dataclass(frozen=True)
class CalibrateSettings:
    """What was asked for.

    Attributes:
        texts, tokens: one of the two.
        importance_out, input_scales_out: files for `mmq convert --importance`, `--input-scales`.
        work: folder for hidden states and finished layers; by default beside the scales file.
    """

    texts: tuple[Path, ...] = ()
    tokens: Path | None = None
    context: int | None = None
    windows: int | None = None
    choice: Choice = field(default_factory=Choice)
    importance_out: Path | None = None
    input_scales_out: Path | None = None
    work: Path | None = None


def calibrate(
    location: str, out: Path, settings: CalibrateSettings, console: Console
) -> dict[str, Any]:
    """Run the source over the tokens, write `out` and the other files; returns what `out` holds.

    Run again after an interruption, it goes on at the first layer that is not done.

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
    tokens = _tokens(settings, config, source)
    modules = group_modules(source.tensors)
    paths = {name: shard.path for name, shard in source.shards.items()}
    weights = ModelWeights(location, modules, paths)
    work = settings.work or out.with_name(out.name + ".work")
    model = {
        "location": location, "norms_sha256": norms_digest(weights, modules),
        "layers": config.layers,
    }  # fmt: skip
    fingerprint = {"mmq": __version__, "tokens": tokens.sha256, "model": model["norms_sha256"]}
    plan = estimate(config, [modules], [SOURCE], tokens, config.layers, 4)
    console.note(
        f"calibrating on {tokens.count:,} tokens in {len(tokens.windows)} windows; {plan.text}"
    )
    states = HiddenStates(work, [SOURCE], tokens.count, config.hidden, fingerprint)
    try:
        with console.progress(plan.read_bytes, "calibrating") as progress:
            layers = _run(config, weights, tokens, states, work, progress.advance)
    finally:
        weights.close()
    run = {
        "tokens": tokens.count, "tokens_sha256": tokens.sha256,
        "convention": dict(tokens.convention),
    }  # fmt: skip
    calibration = Calibration(model, [run], [_by_kind(layer) for layer in layers])
    for finding in bound_findings(calibration):
        console.finding(finding, talk=True)
    experts = {n: layer.experts for n, layer in enumerate(layers) if layer.experts is not None}
    if settings.importance_out is not None:
        write_importance(settings.importance_out, experts)
    if settings.input_scales_out is not None:
        write_input_scales(settings.input_scales_out, experts, [run], model)
    told = write_calibration(out, calibration, settings.choice)
    states.remove()
    return {**told, "experts": _expert_summary(experts)}


def _tokens(settings: CalibrateSettings, config: TextConfig, source: Checkpoint) -> TokenSet:
    if source.root is None:
        raise UsageError(
            "source-has-no-weights", f"{source.location} is a header manifest: it has no weights",
            where=source.location,
        )  # fmt: skip
    context = settings.context or default_context(config, source.config)
    limit = DEFAULT_WINDOWS if settings.windows is None else settings.windows or None
    if settings.tokens is not None:
        tokens = read_tokens(settings.tokens, context, limit)
    else:
        tokens = read_texts(settings.texts, open_tokenizer(source.root), context, limit)
    check_ids(tokens, config.vocab, source.location)
    return tokens


def norms_digest(weights: ModelWeights, modules: Mapping[str, Module]) -> str:
    """SHA-256 over the language model's norm weights: small, and different in every fine-tune."""
    digest = hashlib.sha256()
    for name in sorted(n for n, m in modules.items() if m.role.component == "norms"):
        digest.update(name.encode() + weights.vector(name).numpy().tobytes())
    weights.take_bytes_read()
    return digest.hexdigest()


def _run(
    config: TextConfig, weights: ModelWeights, tokens: TokenSet, states: HiddenStates, work: Path,
    advance: Any,
) -> list[LayerStatistics]:  # fmt: skip
    if not states.embedded:
        embed_rows(config, weights, tokens, states.inputs("source"))
        states.embedding_written()
        advance(weights.take_bytes_read())
    for number in range(states.layer, config.layers):
        try:
            seen = run_layer(config, weights, number, tokens, states, advance)
        except NonFiniteError as error:
            raise BadInputError(
                "source-nonfinite", f"the source's forward gives NaN or Inf in layer {number}",
                where=f"layer {number}, token {error.token}",
            ) from None  # fmt: skip
        _save(work, number, seen)
        states.layer_written({"layer": number})
    return [_load(work, number) for number in range(config.layers)]


def _save(work: Path, number: int, seen: LayerStatistics) -> None:
    """One layer's statistics on disk, before the state says that the layer is done."""
    kinds = {kind: stats.as_json() for kind, stats in _by_kind(seen).items()}
    write_file(work / f"layer-{number}.json", json_bytes(kinds))
    if seen.experts is not None:
        path = work / f"experts-{number}.npz"
        with path.open("wb") as file:
            np.savez(file, allow_pickle=False, **seen.experts.arrays())


def _load(work: Path, number: int) -> LayerStatistics:
    kinds = json.loads((work / f"layer-{number}.json").read_bytes())
    stats = {kind: VectorStatistics.from_json(data) for kind, data in kinds.items()}
    experts = None
    path = work / f"experts-{number}.npz"
    if path.exists() and zipfile.is_zipfile(path):
        with np.load(path) as arrays:
            experts = ExpertStatistics.from_arrays(dict(arrays))
    return LayerStatistics(stats["k"], stats["v"], stats.get("index_k"), experts)


def _by_kind(layer: LayerStatistics) -> dict[str, VectorStatistics]:
    found = {kind: getattr(layer, kind) for kind in KINDS}
    return {kind: stats for kind, stats in found.items() if stats is not None}


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


def _expert_summary(experts: Mapping[int, ExpertStatistics]) -> dict[str, Any]:
    unreached = {n: int((seen.tokens_E == 0).sum()) for n, seen in experts.items()}
    return {
        "layers": len(experts),
        "unreached": sum(unreached.values()),
        "unreached_by_layer": {str(n): count for n, count in unreached.items() if count},
    }

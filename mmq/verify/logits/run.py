"""Level logits: both models over the same tokens, and what the difference means."""

from __future__ import annotations

import io
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mmq import __version__
from mmq.console import Console
from mmq.convert.device import find_place
from mmq.convert.modules import group_modules
from mmq.convert.writer import write_file
from mmq.errors import BadInputError, MmqError
from mmq.report.file_names import VERIFY_FOLDER, VERIFY_TOKENS
from mmq.report.schema import ArmFigures, LogitsReport, Measure
from mmq.verify.expectation import Expectation
from mmq.verify.gates import Gate, gate_findings, judge
from mmq.verify.log import LevelLog
from mmq.verify.logits import metrics
from mmq.verify.logits.arms import Arm, ArmName, Side, choose_arms, judged_arm
from mmq.verify.logits.checks import checked_tokens, comparable, nonfinite_finding, widest_step
from mmq.verify.logits.head import ArmScores, predicted_rows, score
from mmq.verify.logits.hidden_states import HiddenStates
from mmq.verify.logits.plan import cache_mode, estimate
from mmq.verify.logits.settings import LogitsSettings
from mmq.verify.logits.stream import Model, NonFiniteError, Stream
from mmq.verify.logits.tokens import (
    TokenSet,
)
from mmq.verify.model.config import TextConfig, read_text_config
from mmq.verify.model.operations import EXACT_CACHE, Operations, ReferenceOperations
from mmq.verify.model.weights import ModelWeights
from mmq.verify.subject import Subject, as_finding

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
#: Name of the token ids beside the report.


def check_logits(
    subject: Subject, expectation: Expectation, settings: LogitsSettings,
    gates: Mapping[str, Gate], folder: Path, log: LevelLog, console: Console,
) -> LogitsReport | None:  # fmt: skip
    """Run the level; its findings go to `log`. None where OUT cannot be run, or only in part.

    Args:
        folder: for hidden states while the run lasts, and for the token ids.

    Raises:
        BadInputError: the source cannot be read.
        UsageError: options that contradict each other, or tokens that do not fit.
    """
    settings.check()
    source = expectation.source
    configs: dict[Side, TextConfig] = {"source": read_text_config(source.config)}
    try:
        configs["candidate"] = read_text_config(subject.config)
    except BadInputError as error:
        log.add(as_finding(error))
        return None
    if not comparable(configs, log):
        return None
    tokens = checked_tokens(settings, configs["source"], expectation, subject, log)
    mode = cache_mode(settings, subject.quantization)
    arms = choose_arms(mode, replay=settings.replay)
    run = _Run(subject, expectation, settings, configs, tokens, arms, folder, console)
    try:
        return run.report(gates, log)
    except NonFiniteError as error:
        log.add(nonfinite_finding(error, expectation, tokens, configs["source"].layers))
        return None
    finally:
        run.close()


class _Run:
    """One comparison, from the embedding to the report."""

    def __init__(
        self, subject: Subject, expectation: Expectation, settings: LogitsSettings,
        configs: Mapping[Side, TextConfig], tokens: TokenSet, arms: tuple[Arm, ...], folder: Path,
        console: Console,
    ) -> None:  # fmt: skip
        self._settings, self._tokens, self._arms = settings, tokens, arms
        self._console, self._folder = console, folder
        self._config = configs["source"]
        self._subject = subject.location
        source = expectation.source
        modules: dict[Side, Any] = {
            "source": group_modules(source.tensors), "candidate": subject.modules,
        }  # fmt: skip
        paths: dict[Side, dict[str, Path]] = {
            "source": {name: shard.path for name, shard in source.shards.items()},
            "candidate": subject.paths,
        }
        locations: dict[Side, str] = {"source": source.location, "candidate": subject.location}
        self._place = find_place(settings.device)
        self._operations = _operations(settings.device)
        dtype, device = DTYPES[settings.dtype], self._operations.device
        self._models = {
            side: Model(
                configs[side],
                ModelWeights(locations[side], modules[side], paths[side], dtype, device),
            )
            for side in configs
        }
        self._layers = min(settings.layers or self._config.layers, self._config.layers)
        self._estimate = estimate(
            self._config, list(modules.values()), arms, tokens, self._layers, dtype.itemsize
        )
        self._fingerprint = {
            "mmq": __version__, "tokens": tokens.sha256, "dtype": settings.dtype,
            "device": settings.device, "arms": [repr(arm) for arm in arms],
            "source": {n: s.header_sha256 for n, s in source.shards.items()},
            "candidate": {
                n: [s.header_sha256, s.file_bytes, s.mtime_ns] for n, s in subject.shards.items()
            },
        }  # fmt: skip

    def close(self) -> None:
        for model in self._models.values():
            model.weights.close()

    def report(self, gates: Mapping[str, Gate], log: LevelLog) -> LogitsReport | None:
        self._console.note(
            f"level logits: {self._tokens.count:,} tokens in {len(self._tokens.windows)} windows,"
            f" {len(self._arms)} forwards ({', '.join(a.name for a in self._arms)});"
            f" {self._estimate.text}"
        )
        work = self._settings.work or self._folder / VERIFY_FOLDER
        states = HiddenStates(
            work, self._arms, self._tokens.count, self._config.hidden, self._fingerprint
        )
        started = time.monotonic()
        with self._console.progress(self._estimate.read_bytes, "verifying logits") as progress:
            self._stream(states, progress.advance, log)
            layers_done = time.monotonic()
            if self._layers < self._config.layers:
                log.leave_out(
                    f"logits: --layers {self._layers} of {self._config.layers} runs a part of the"
                    " model, which has none"
                )
                states.remove()
                return None
            scores = score(self._models, self._arms, self._tokens, states, progress.advance)
        timing = {
            "layers_seconds": round(layers_done - started, 3),
            "head_seconds": round(time.monotonic() - layers_done, 3),
        }
        bad = metrics.first_nonfinite(scores)
        if bad is not None:
            name, row = bad
            token = int(predicted_rows(self._tokens)[0][row])
            arm = next(a for a in self._arms if a.name == name)
            raise NonFiniteError(arm, self._layers, token)
        report = self._assemble(scores, states.record, gates, timing)
        log.run("gates", len(report.gates), gate_findings(report.gates, self._subject))
        if any(gate.status != "pass" for gate in report.gates):
            log.add(widest_step(report.layers, report.judged))
        states.remove()
        return report

    def _stream(self, states: HiddenStates, advance: Any, log: LevelLog) -> None:
        stream = Stream(self._models, self._arms, self._tokens, states, self._operations, advance)
        if states.layer:
            self._console.note(
                f"resuming at layer {states.layer}: the others are in {states.folder}"
            )
        if not states.embedded:
            stream.embed()
        for number in range(states.layer, self._layers):
            stream.run_layer(number)
        log.run("layers run", self._layers * len(self._arms))

    def _assemble(
        self, scores: Mapping[ArmName, ArmScores], layers: list[dict[str, Any]],
        gates: Mapping[str, Gate], timing: dict[str, float],
    ) -> LogitsReport:  # fmt: skip
        tokens, source = self._tokens, scores["source"]
        clusters = metrics.window_clusters(tokens)
        others: dict[ArmName, ArmScores] = {
            a.name: scores[a.name] for a in self._arms if a.name != "source"
        }
        arms: dict[ArmName, ArmFigures] = {
            name: metrics.figures(arm, source, clusters) for name, arm in others.items()
        }
        texts: dict[str, dict[str, ArmFigures]] = defaultdict(dict)
        for name, arm in others.items():
            for text, figures in metrics.by_file(arm, source, tokens, clusters).items():
                texts[text][name] = figures
        judged = judged_arm(self._arms)
        return LogitsReport(
            settings=self._described(),
            convention=dict(tokens.convention),
            tokens=tokens.count,
            scored=tokens.scored,
            windows=len(tokens.windows),
            tokens_sha256=tokens.sha256,
            tokens_file=self._write_tokens(),
            source_perplexity=metrics.perplexity(source.nll_R, clusters),
            arms={str(name): figures for name, figures in arms.items()},
            judged=judged,
            by_file=dict(texts),
            by_position=metrics.by_position(scores[judged], source, tokens),
            kld_curve=metrics.kld_curve(scores[judged]),
            layers=layers,
            gates=judge(gates, _gated(arms, judged), len(tokens.windows)),
            timing=timing,
        )

    def _described(self) -> dict[str, Any]:
        """The settings as the report tells them."""
        mode = next((a.mode for a in self._arms if a.mode != EXACT_CACHE), EXACT_CACHE)
        return {
            "dtype": self._settings.dtype, "device": self._settings.device,
            "place": self._place.device, "backend": self._operations.name,
            "kv": mode.kv, "kv_staged": mode.staged, "index_k": mode.index_k,
            "arms": [a.name for a in self._arms],
            "threads": torch.get_num_threads(),
        }  # fmt: skip

    def _write_tokens(self) -> str | None:
        """The ids beside the report; None where the folder cannot be written."""
        buffer = io.BytesIO()
        np.save(buffer, self._tokens.rows(), allow_pickle=False)
        try:
            write_file(self._folder / VERIFY_TOKENS, buffer.getvalue())
        except (OSError, MmqError) as error:
            self._console.note(f"{VERIFY_TOKENS} was not written: {error}")
            return None
        return VERIFY_TOKENS


def _operations(device: str) -> Operations:
    """The backend of the forward on a device that is there."""
    if device == "cpu":
        return ReferenceOperations()
    from mmq.verify.model.on_triton import TritonOperations

    return TritonOperations()


def _gated(arms: Mapping[ArmName, ArmFigures], judged: ArmName) -> dict[str, Measure]:
    """Figures by the names that gates have for them."""
    found = {
        "delta_ppl_percent": arms[judged].delta_ppl_percent,
        "kld_mean": arms[judged].kld_mean,
        "top1": arms[judged].top1,
    }
    if "kv" in arms:
        found["kv_delta_ppl_percent"] = arms["kv"].delta_ppl_percent
    return found

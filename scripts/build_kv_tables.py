"""Measure what KV-cache formats and scales cost on the bundled model, and fill docs/kv-cache.md.

    python scripts/build_kv_tables.py [--calibrate 32] [--windows 48] [-o docs/kv-cache.md]

The first half of every bundled text is for calibration, the second half is scored; both are text
that the model was not trained on. Every forward is compared with the one that keeps K, V and index
keys as they were computed, on the same tokens. Minutes on one core.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from mmq.calibrate.run import CalibrateSettings, calibrate
from mmq.calibrate.scales_file import Calibration, Choice, read_calibrations
from mmq.console import Console
from mmq.convert.checkpoint import open_checkpoint
from mmq.convert.modules import group_modules
from mmq.convert.options import ConvertOptions
from mmq.convert.run import RunSettings
from mmq.convert.run import convert as run_convert
from mmq.demo.bundled import bundled_model, bundled_texts
from mmq.report.schema import Measure
from mmq.verify.logits import metrics
from mmq.verify.logits.arms import KV_MODES, Arm
from mmq.verify.logits.head import ArmScores, score
from mmq.verify.logits.hidden_states import HiddenStates
from mmq.verify.logits.stream import Model, Stream
from mmq.verify.logits.tokens import TokenSet, Window, open_tokenizer, read_texts
from mmq.verify.model.config import read_text_config
from mmq.verify.model.operations import CacheMode, ReferenceOperations
from mmq.verify.model.weights import ModelWeights

START, END = "<!-- kv_tables -->", "<!-- /kv_tables -->"
CONTEXT = 512
#: Arms that are run at once, beside the source's.
TOGETHER = 5
Scales = Sequence[tuple[float, float]]


def halves(first: int, second: int) -> tuple[TokenSet, TokenSet]:
    """At most so many windows of the texts' first and second halves, in turn from every text."""
    whole = read_texts(bundled_texts(), open_tokenizer(bundled_model()), CONTEXT, None)
    rows, files = whole.rows(), np.array([w.file for w in whole.windows])
    parts: tuple[list[tuple[int, int, int]], ...] = ([], [])
    for file in range(len(whole.files)):
        own = np.flatnonzero(files == file)
        for part, places in zip(parts, (own[: len(own) // 2], own[len(own) // 2 :]), strict=True):
            part += [(turn, file, int(place)) for turn, place in enumerate(places)]
    return tuple(
        _tokens(rows, sorted(part)[:count], whole)
        for part, count in zip(parts, (first, second), strict=True)
    )


def _tokens(rows_WL: np.ndarray, chosen: list[tuple[int, int, int]], whole: TokenSet) -> TokenSet:
    picked = sorted((file, place) for _, file, place in chosen)
    windows = tuple(Window(f, i * CONTEXT, CONTEXT) for i, (f, _) in enumerate(picked))
    ids = rows_WL[[place for _, place in picked]].ravel()
    return TokenSet(ids, windows, whole.files, dict(whole.convention))


def open_model(folder: Path) -> Model:
    checkpoint = open_checkpoint(folder)
    paths = {name: shard.path for name, shard in checkpoint.shards.items()}
    weights = ModelWeights(str(folder), group_modules(checkpoint.tensors), paths)
    return Model(read_text_config(checkpoint.config), weights)


class KeepingOperations(ReferenceOperations):
    """The reference, with the blocks of every window kept in order."""

    def __init__(self) -> None:
        self.selections: list[torch.Tensor] = []

    def select(self, *arguments):
        self.selections.append(super().select(*arguments))
        return self.selections[-1]


@dataclass
class Runner:
    """Runs arms over the tokens to be scored."""

    tokens: TokenSet
    work: Path

    def scores(
        self, arms: Sequence[Arm], scales: dict[str, Scales], candidate: Model | None = None,
        operations: ReferenceOperations | None = None,
    ) -> dict[str, ArmScores]:  # fmt: skip
        """Scores of every arm and of "source", in batches."""
        found: dict[str, ArmScores] = {}
        for start in range(0, len(arms), TOGETHER):
            batch = [Arm("source", "source"), *arms[start : start + TOGETHER]]
            source = open_model(bundled_model())
            models = {"source": source, "candidate": candidate or source}
            states = HiddenStates(self.work, batch, self.tokens.count, source.config.hidden, {})
            stream = Stream(
                models, batch, self.tokens, states, operations or ReferenceOperations(),
                lambda nbytes: None, scales,
            )  # fmt: skip
            stream.embed()
            for number in range(source.config.layers):
                stream.run_layer(number)
            found |= score(models, batch, self.tokens, states, lambda nbytes: None)
            states.remove()
            source.weights.close()
        return found


def told(measure: Measure, digits: int = 3, factor: float = 1.0) -> str:
    return f"{factor * measure.value:.{digits}f} ± {factor * (measure.se or 0):.{digits}f}"


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    return [*lines, *(f"| {' | '.join(map(str, row))} |" for row in rows), ""]


class Row(NamedTuple):
    """One line of the table of formats."""

    format: str
    scales: str
    arm: Arm
    values: Scales


def cache_rows(calibration: Calibration) -> list[Row]:
    """Every format with every kind of scales."""
    bounds = [(layer["k"].analytic, layer["v"].analytic) for layer in calibration.layers]
    layers = len(bounds)

    def calibrated(observer: str, format: str) -> Scales:
        choice = Choice(observer, 0.9999, "fp8" if format == "fp8" else "nvfp4")
        values = list(calibration.scales(choice).values())
        return [(values[2 * n], values[2 * n + 1]) for n in range(layers)]

    rows = []
    for name in ("bf16", "fp8", "nvfp4", "nvfp4-fp8-staged"):
        format, staged = KV_MODES[name]
        kinds: dict[str, Scales] = {"–": bounds}
        if name != "bf16":
            kinds = {
                "analytic": bounds,
                "calibrated, max": calibrated("max", name),
                "calibrated, percentile 99.99": calibrated("percentile", name),
                "calibrated, mse": calibrated("mse", name),
                "unit": [(1.0, 1.0)] * layers,
                "analytic ÷ 10": [(k / 10, v / 10) for k, v in bounds],
                "analytic × 10": [(10 * k, 10 * v) for k, v in bounds],
                "analytic × 100": [(100 * k, 100 * v) for k, v in bounds],
            }
        for kind, values in kinds.items():
            arm = Arm(f"{name}-{len(rows)}", "source", CacheMode(format, staged))
            rows.append(Row(name, kind, arm, values))
    return rows


def cost_table(runner: Runner, calibration: Calibration) -> list[str]:
    rows = cache_rows(calibration)
    scores = runner.scores([r.arm for r in rows], {r.arm.name: r.values for r in rows})
    clusters = metrics.window_clusters(runner.tokens)
    source = scores["source"]
    lines = [f"Perplexity with an exact cache: {told(metrics.perplexity(source.nll_R, clusters))}."]
    body = []
    for row in rows:
        arm = scores[row.arm.name]
        found = metrics.figures(arm, source, clusters)
        beside = ""
        if row.scales not in ("–", "analytic"):
            analytic = next(r for r in rows if (r.format, r.scales) == (row.format, "analytic"))
            beside = told(clusters.mean(arm.kld_R - scores[analytic.arm.name].kld_R), 3, 1e3)
        body.append((
            row.format, row.scales, f"{found.perplexity.value:.4f}",
            told(found.delta_ppl_percent), told(found.kld_mean, 3, 1e3), beside,
            told(found.top1, 2, 100),
        ))  # fmt: skip
    head = ("cache", "scales", "perplexity", "ΔPPL %", "mean KLD, 10⁻³ nats",
            "beside analytic, 10⁻³", "same top-1 %")  # fmt: skip
    return [*lines, "", *table(head, body)]


def selection_table(runner: Runner) -> list[str]:
    arms = [Arm(f"index-{f}", "source", CacheMode(index_k=f)) for f in ("bf16", "fp8", "nvfp4")]
    operations = KeepingOperations()
    scores = runner.scores(arms, {}, operations=operations)
    config = read_text_config(open_checkpoint(bundled_model()).config)
    windows, sparse = len(runner.tokens.windows), sum(config.sparse)
    kept = torch.stack(operations.selections).unflatten(0, (sparse, len(arms) + 1, windows))
    binds_T = torch.arange(CONTEXT) // config.block + 1 > config.top_k
    theirs = kept[:, 0, :, :, binds_T]
    clusters = metrics.window_clusters(runner.tokens)
    body = []
    for number, arm in enumerate(arms, 1):
        ours = kept[:, number, :, :, binds_T]
        common = (ours[..., :, None] == theirs[..., None, :]).any(-1).double().mean(-1)
        by_window = common.transpose(0, 1).flatten(1)
        window_R = torch.arange(windows).repeat_interleave(by_window.shape[1])
        rows = metrics.Clusters(window_R)
        share_R = by_window.flatten()
        found = metrics.figures(scores[arm.name], scores["source"], clusters)
        body.append((
            arm.mode.index_k, told(rows.mean(share_R), 3, 100),
            f"{100 * torch.quantile(share_R, 0.01).item():.0f}",
            told(rows.mean((share_R == 1).double()), 2, 100), told(found.kld_mean, 3, 1e3),
            told(found.delta_ppl_percent),
        ))  # fmt: skip
    head = ("index keys", "blocks in common, mean %", "1st percentile %", "exact sets %",
            "mean KLD, 10⁻³ nats", "ΔPPL %")  # fmt: skip
    return table(head, body)


def slack_table(calibration: Calibration) -> list[str]:
    body = []
    for entry, layer in zip(
        calibration.table(Choice("percentile", 0.9999)), calibration.layers, strict=True
    ):
        for kind, statistics in layer.items():
            seen = entry[kind]
            errors = [statistics.relative_errors(f)[0] for f in ("fp8", "nvfp4")]
            body.append((
                entry["layer"], kind, f"{seen['amax']:.3f}", f"{seen['bound']:.3f}",
                f"{seen['slack']:.2f}", f"{seen['p9999'] / seen['amax']:.2f}",
                f"{100 * seen['clip_rate']['fp8']:.4f}", *(f"{100 * e**0.5:.2f}" for e in errors),
            ))  # fmt: skip
    head = ("layer", "", "amax", "bound", "bound / amax", "p99.99 / amax",
            "clipped by p99.99, %", "FP8 error %", "NVFP4 error %")  # fmt: skip
    return table(head, body)


def importance_table(runner: Runner, importance: Path, folder: Path) -> list[str]:
    searches: dict[str, dict[str, str]] = {
        "max": {"scale_search": "max"}, "mse": {"scale_search": "mse"},
        "mse --importance": {"scale_search": "mse", "importance": str(importance)},
    }  # fmt: skip
    clusters = metrics.window_clusters(runner.tokens)
    found: dict[str, tuple[ArmScores, ArmScores, float]] = {}
    for number, (name, words) in enumerate(searches.items()):
        out = folder / f"out-{number}"
        report = run_convert(
            str(bundled_model()), out, ConvertOptions(**words), RunSettings(jobs=1), quiet()
        )
        scores = runner.scores([Arm("weights", "candidate")], {}, open_model(out))
        found[name] = scores["weights"], scores["source"], report.quality.sqnr_db
    body = []
    for name, (arm, source, sqnr) in found.items():
        figures = metrics.figures(arm, source, clusters)
        beside = "" if name == "mse" else told(
            clusters.mean(arm.kld_R - found["mse"][0].kld_R), 3, 1e3
        )  # fmt: skip
        body.append((
            f"`--scale-search {name}`", f"{sqnr:.2f}", told(figures.kld_mean, 3, 1e3), beside,
            told(figures.delta_ppl_percent), told(figures.top1, 2, 100),
        ))  # fmt: skip
    head = ("experts in NVFP4", "SQNR dB", "mean KLD, 10⁻³ nats", "beside mse, 10⁻³", "ΔPPL %",
            "same top-1 %")  # fmt: skip
    return table(head, body)


def quiet() -> Console:
    console = Console()
    console.mode = "quiet"
    return console


def measure(first: int, second: int) -> str:
    """The tables."""
    seen, scored = halves(first, second)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        np.save(folder / "ids.npy", seen.rows())
        settings = CalibrateSettings(
            tokens=folder / "ids.npy", windows=0, importance_out=folder / "importance.safetensors"
        )
        calibrate(str(bundled_model()), folder / "scales.json", settings, quiet())
        calibration = read_calibrations([folder / "scales.json"])
        runner = Runner(scored, folder / "work")
        lines = [
            f"Calibrated on {seen.count:,} tokens, scored on {scored.scored:,} others in"
            f" {len(scored.windows)} windows of {CONTEXT}, from"
            f" {len(scored.files)} texts. ± is one standard error, by windows.", "",
            *cost_table(runner, calibration),
            "Blocks chosen with quantised index keys, of tokens that have more than are chosen,"
            " all sparse layers together:", "",
            *selection_table(runner),
            "Slack of the analytic bounds on the calibration's tokens, what a percentile of 99.99"
            " would clip, and the error of a round trip under analytic scales, ‖q − x‖/‖x‖:", "",
            *slack_table(calibration),
            "Channel importance from the same calibration:", "",
            *importance_table(runner, folder / "importance.safetensors", folder),
        ]  # fmt: skip
    return "\n".join(lines).rstrip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calibrate", type=int, default=32, help="windows")
    parser.add_argument("--windows", type=int, default=48, help="to score")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    text = measure(options.calibrate, options.windows)
    print(text)
    if options.output:
        page = options.output.read_text("utf-8")
        head, found, rest = page.partition(START)
        if not found or END not in rest:
            raise SystemExit(f"{options.output} has no {START} … {END}")
        tail = rest.partition(END)[2]
        options.output.write_text(f"{head}{START}\n{text}\n{END}{tail}", "utf-8")


if __name__ == "__main__":
    main()

"""The sections of level logits: figures by forward and text, tokens, layers, experts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import islice

from mmq.report import document as doc
from mmq.report.charts import Chart, HeatMap, Line, LineChart
from mmq.report.document import Cell, Column, Section, Table
from mmq.report.figures import fixed, measure, percent, quantile, significant, with_error
from mmq.report.layers import LayerFigures, layer_figures, mean_and_least
from mmq.report.logits_text import FIGURE_TITLES, figure_texts, gate_status
from mmq.report.schema import ArmFigures, GateResult, LogitsReport, PositionBin
from mmq.report.settings import flat

#: Texts shown by themselves, and forwards that have a column of their own.
MOST_FILES, MOST_ARMS = 60, 8

_FIGURES = tuple(map(Column, FIGURE_TITLES))


def logits_sections(logits: LogitsReport) -> list[Section]:
    """Everything level logits measured."""
    layers = layer_figures(logits, logits.judged)
    sections = [_figures(logits), _tokens(logits), _layers(logits, layers), _experts(layers)]
    return [s for s in sections if s.tables or s.charts]


def gate_rows(gates: Iterable[GateResult]) -> list[list[Cell]]:
    """Gates as rows: name, status, value, target, limit."""
    return [
        [doc.words(g.gate), doc.status(gate_status(g), g.status),
         doc.figure(with_error(g.value, g.se), g.value), doc.figure(f"{g.target:g}", g.target),
         doc.figure(f"{g.fail:g}", g.fail)]
        for g in gates
    ]  # fmt: skip


def _figures(logits: LogitsReport) -> Section:
    settings = ", ".join(f"{k} {v}" for k, v in flat(logits.settings))
    # the texts' hashes are in the JSON; here they would bury the rest
    words = {k: v for k, v in logits.convention.items() if not isinstance(v, dict)}
    convention = ", ".join(f"{k} {v}" for k, v in flat(words))
    lines = [
        f"{logits.scored:,} of {logits.tokens:,} tokens scored in {logits.windows:,} windows;"
        f" the source's perplexity is {measure(logits.source_perplexity)}."
        f" The gates judge the forward “{logits.judged}”.",
        f"Settings: {settings}.",
        f"Tokens: {convention}; SHA-256 {logits.tokens_sha256}.",
        "± is one standard error, from the spread between windows; KLD is in nats.",
    ]
    arms = [
        (doc.words(f"{name} (judged)" if name == logits.judged else name), figures)
        for name, figures in logits.arms.items()
    ]
    tables = [_table("Each forward against the source's", "forward", arms)]
    files = [
        (name, figures[logits.judged])
        for name, figures in logits.by_file.items()
        if logits.judged in figures
    ]
    if files:
        rows = [(doc.name(name), figures) for name, figures in files]
        tables.append(_table(f"By text ({logits.judged})", "text", rows[:MOST_FILES], len(rows)))
    return Section("logits", "Perplexity and parity", lines, tables)


def _table(
    caption: str, head: str, rows: Sequence[tuple[Cell, ArmFigures]], total: int | None = None
) -> Table:
    cells = []
    for first, f in rows:
        orders = (f.perplexity, f.delta_ppl_percent, f.kld_mean, f.kld_p99, f.top1, f.top5)
        texts = zip(figure_texts(f), orders, strict=True)
        cells.append([first, *(doc.figure(text, m.value) for text, m in texts)])
    return Table(caption, [Column(head, False), *_FIGURES], cells, total)


def _tokens(logits: LogitsReport) -> Section:
    """Which tokens differ: the sorted curve of the KLD, and figures by position."""
    charts: list[Chart] = []
    tables: list[Table] = []
    figures = logits.arms.get(logits.judged)
    if len(logits.kld_curve) > 1:
        charts.append(_curve(logits, figures))
    if figures is not None:
        names = ("kld_median", "kld_p90", "kld_p99", "kld_p999", "kld_max", "delta_p_mean",
                 "delta_p_rms")  # fmt: skip
        arms = dict(islice(logits.arms.items(), MOST_ARMS))
        columns = [Column("figure", False), *(Column(n) for n in arms)]
        rows = [[doc.words(n), *(_measure_cell(a, n) for a in arms.values())] for n in names]
        tables.append(Table("KLD quantiles and Δp of each forward", columns, rows))
    if logits.by_position:
        charts += _position_charts(logits.by_position)
        columns = [Column("positions"), Column("tokens"), Column("mean KLD"), Column("top-1 %")]
        rows = [
            [doc.figure(f"{b.first}–{b.last}", b.first), doc.figure(f"{b.tokens:,}", b.tokens),
             doc.figure(significant(b.kld_mean), b.kld_mean),
             doc.figure(percent(b.top1), b.top1)]
            for b in logits.by_position
        ]  # fmt: skip
        tables.append(Table("By position in the window", columns, rows))
    return Section("tokens", "Tokens", [], tables, charts, detail=True)


def _curve(logits: LogitsReport, figures: ArmFigures | None) -> LineChart:
    last = len(logits.kld_curve) - 1
    says = "From the least to the most different token, on a logarithmic scale."
    marks = [("50 %", 50.0), ("90 %", 90.0), ("99 %", 99.0)]
    if figures is not None:
        known = (figures.kld_median, figures.kld_p90, figures.kld_p99)
        marks = [(f"{label}: {significant(figure.value, 3)}", x)
                 for (label, x), figure in zip(marks, known, strict=True)]  # fmt: skip
        says += (
            f" Median {significant(figures.kld_median.value, 3)},"
            f" 99 % {significant(figures.kld_p99.value, 3)},"
            f" largest {significant(figures.kld_max.value, 3)}."
        )
    return LineChart(
        f"KLD of every token, sorted ({logits.judged})", "% of tokens", "KLD, nats",
        [Line("KLD", [(100 * n / last, value) for n, value in enumerate(logits.kld_curve)])],
        says, logarithmic=True, marks=marks,
    )  # fmt: skip


def _position_charts(bins: Sequence[PositionBin]) -> list[Chart]:
    middles = [(b.first + b.last) / 2 for b in bins]
    kld = Line("KLD", list(zip(middles, (b.kld_mean for b in bins), strict=True)))
    top1 = Line("top-1", list(zip(middles, (100 * b.top1 for b in bins), strict=True)))
    return [
        LineChart(
            "KLD by position in the window", "position", "mean KLD, nats", [kld],
            "Mean KLD of the tokens at each range of positions.", from_zero=True,
        ),
        LineChart(
            f"Top-1 agreement by position in the window{_chance(bins)}", "position", "top-1, %",
            [top1], "Share of tokens with the source's most likely token, by position.",
        ),
    ]  # fmt: skip


def _chance(bins: Sequence[PositionBin]) -> str:
    """What chance alone does to the top-1 of a range, at most: √(p·(1 − p)/n)."""
    errors = [math.sqrt(b.top1 * (1 - b.top1) / b.tokens) for b in bins
              if b.tokens and 0 < b.top1 < 1]  # fmt: skip
    return f" (chance alone: ±{fixed(100 * max(errors), 1)})" if errors else ""


def _measure_cell(figures: ArmFigures, name: str) -> Cell:
    found = getattr(figures, name)
    text = quantile(found) if name.startswith("kld_") else measure(found)
    return doc.figure(text, found.value)


def _layers(logits: LogitsReport, layers: Sequence[LayerFigures]) -> Section:
    charts: list[Chart] = []
    lines = [
        Line(arm, [(float(f.layer), 1 - f.cosine) for f in layer_figures(logits, arm)
                   if f.cosine is not None])
        for arm in logits.arms
    ]  # fmt: skip
    if any(line.points for line in lines):
        charts.append(
            LineChart(
                "Distance of hidden states by layer", "layer", "1 − cosine, mean", lines,
                "1 − mean cosine between each forward's hidden states and the source's after each"
                " layer, on a logarithmic scale; layers that are equal are left out.",
                logarithmic=True,
            )
        )  # fmt: skip
    agreement = [
        Line("same experts", [(float(f.layer), 100 * f.routing) for f in layers
                              if f.routing is not None]),
        Line("same KV blocks", [(float(f.layer), 100 * f.overlap) for f in layers
                                            if f.overlap is not None]),
    ]  # fmt: skip
    if any(line.points for line in agreement):
        charts.append(
            LineChart(
                f"Routing and block selection like the source's ({logits.judged})", "layer", "%",
                [line for line in agreement if line.points],
                "Share of tokens with the same set of experts, and of the source's chosen KV"
                " blocks that are chosen too, by layer.",
            )
        )  # fmt: skip
    titles = ("layer", "cosine", "worst token", "same experts %", "flips", "near ties",
              "blocks %", "blocks, 1 % of rows below")  # fmt: skip
    table = Table(f"Layers ({logits.judged})", list(map(Column, titles)), list(map(_row, layers)))
    return Section("layers", "Layers", _layer_lines(layers), [table] if layers else [], charts,
                   detail=True)  # fmt: skip


def _layer_lines(layers: Sequence[LayerFigures]) -> list[str]:
    lines = []
    if routing := mean_and_least(f.routing for f in layers):
        lines.append(f"Same experts for {percent(routing[0])} % of tokens on average,"
                     f" {percent(routing[1])} % in the worst layer.")  # fmt: skip
    if overlap := mean_and_least(f.overlap for f in layers):
        lines.append(f"{percent(overlap[0])} % of the source's chosen KV blocks on average,"
                     f" {percent(overlap[1])} % in the worst layer.")  # fmt: skip
    return lines


def _row(f: LayerFigures) -> list[Cell]:
    def cell(value: float | None, text: str) -> Cell:
        return doc.figure("–", None) if value is None else doc.figure(text, value)

    return [
        doc.figure(str(f.layer), f.layer),
        cell(f.cosine, fixed(f.cosine or 0.0, 6)),
        cell(f.least_cosine, fixed(f.least_cosine or 0.0, 4)),
        cell(f.routing, percent(f.routing)),
        cell(f.flips, f"{f.flips or 0:,}"),
        cell(f.near_ties, f"{f.near_ties or 0:,}"),
        cell(f.overlap, percent(f.overlap)),
        cell(f.overlap_p1, percent(f.overlap_p1)),
    ]


def _experts(layers: Sequence[LayerFigures]) -> Section:
    routed = [f for f in layers if f.expert_tokens]
    if not routed:
        return Section("experts", "Experts")
    most = max(len(f.expert_tokens) for f in routed)
    values: list[list[float | None]] = [
        [*map(float, f.expert_tokens), *([None] * (most - len(f.expert_tokens)))] for f in routed
    ]
    unused = sum(f.expert_tokens.count(0) for f in routed)
    pairs = sum(len(f.expert_tokens) for f in routed)
    told = f"{unused:,} of {pairs:,} experts of all layers had no token."
    chart = HeatMap(
        "Tokens of each expert", "layer", "expert", [str(f.layer) for f in routed],
        [str(n) for n in range(most)], values, "tokens", 0, told, _cut(routed),
        "no token",
    )  # fmt: skip
    titles = ("layer", "experts", "without a token", "fewest tokens", "mean", "most tokens",
              "busiest expert")  # fmt: skip
    table = Table("Experts by layer", list(map(Column, titles)), list(map(_expert_row, routed)))
    line = f"Tokens that the source's router sent to each expert. {told}"
    return Section("experts", "Experts", [line], [table], [chart], detail=True)


def _cut(layers: Sequence[LayerFigures]) -> float | None:
    """What 98 % of all experts that had tokens do not exceed."""
    counts = sorted(n for f in layers for n in f.expert_tokens if n)
    if not counts:
        return None
    cut = counts[(len(counts) - 1) * 98 // 100]
    return float(cut) if counts[0] < cut < counts[-1] else None


def _expert_row(f: LayerFigures) -> list[Cell]:
    tokens = f.expert_tokens
    mean = sum(tokens) / len(tokens)
    counts = (len(tokens), tokens.count(0), min(tokens))
    return [
        doc.figure(str(f.layer), f.layer), *(doc.figure(f"{n:,}", n) for n in counts),
        doc.figure(fixed(mean, 1), mean), doc.figure(f"{max(tokens):,}", max(tokens)),
        doc.figure(str(tokens.index(max(tokens))), tokens.index(max(tokens))),
    ]  # fmt: skip

"""The level logits as lines for a terminal, at most 100 columns wide."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mmq.report.escape import plain, shortened
from mmq.report.figures import fixed, measure, percent, plural, quantile, with_error
from mmq.report.layers import LayerFigures, layer_figures, mean_and_least, worst_layers
from mmq.report.schema import ArmFigures, GateResult, LogitsReport
from mmq.report.tables import columns

#: The figures of a forward, in the order of `figure_texts`.
FIGURE_TITLES = ("PPL", "ΔPPL %", "mean KLD", "99 % KLD", "top-1 %", "top-5 %")
#: Longest name of a forward or text that leaves room for its figures.
_NAME, _LEAST_NAME = 24, 12
WIDTH = 100
#: Texts listed one by one.
MOST_FILES = 12


def logits_lines(logits: LogitsReport) -> list[str]:
    """Source perplexity, each forward, each text, the worst layers, and the gates."""
    window = "" if logits.windows == 1 else "s"
    lines = [
        f"logits   {logits.scored:,} of {logits.tokens:,} tokens scored, {logits.windows:,}"
        f" window{window}; source PPL {measure(logits.source_perplexity)}",
        *_settings_line(logits),
    ]
    arms = [
        (f"{name} (judged)" if name == logits.judged else name, figures)
        for name, figures in logits.arms.items()
    ]
    lines += ["", *_figure_table("forward", arms)]
    files = [
        (name, arms[logits.judged])
        for name, arms in logits.by_file.items()
        if logits.judged in arms
    ]
    if len(files) > 1:
        lines += ["", *_figure_table(f"text ({plain(logits.judged)})", files[:MOST_FILES])]
        if len(files) > MOST_FILES:
            lines.append(f"… and {len(files) - MOST_FILES} more texts in the report")
    lines += ["", *_layer_lines(logits)]
    if logits.gates:
        lines += ["", *_gate_table(logits.gates)]
    return [*lines, ""]


def _settings_line(logits: LogitsReport) -> list[str]:
    """How the forwards ran; nothing where the report does not say."""
    told = [("KV", "kv"), ("index keys", "index_k"), ("", "dtype"), ("on", "device")]
    parts = [f"{head} {plain(logits.settings[key])}".strip() for head, key in told
             if key in logits.settings]  # fmt: skip
    return [f"         {', '.join(parts)}"[:WIDTH]] if parts else []


def _figure_table(head: str, rows: Iterable[tuple[str, ArmFigures]]) -> list[str]:
    """Names shortened until the figures beside them fit; very long figures in two tables.

    Six figures with their errors fit because ± stands without spaces here.
    """
    table = [
        (head, *FIGURE_TITLES),
        *((name, *(text.replace(" ± ", "±") for text in figure_texts(f))) for name, f in rows),
    ]
    for limit in range(_NAME, _LEAST_NAME - 1, -4):
        lines = columns([(shortened(name, limit), *rest) for name, *rest in table], left=1)
        if max(map(len, lines)) <= WIDTH:
            return lines
    half = 1 + len(FIGURE_TITLES) // 2
    parts = [row[:half] for row in table], [(row[0], *row[half:]) for row in table]
    first, second = (
        columns([(shortened(name, _LEAST_NAME), *rest) for name, *rest in part], left=1)
        for part in parts
    )
    return [*first, "", *second]


def figure_texts(figures: ArmFigures) -> tuple[str, ...]:
    """One forward's figures, in the order of the columns of every rendering."""
    return (
        measure(figures.perplexity),
        measure(figures.delta_ppl_percent, signed=True),
        measure(figures.kld_mean),
        quantile(figures.kld_p99),
        measure(figures.top1, 100),
        measure(figures.top5, 100),
    )


def _layer_lines(logits: LogitsReport) -> list[str]:
    layers = layer_figures(logits, logits.judged)
    lines = []
    if worst := worst_layers(layers):
        lines.append(f"layers   least cosine (worst token): {', '.join(map(_layer_text, worst))}")
    if routing := mean_and_least(f.routing for f in layers):
        lines.append(
            f"routing  same experts for {percent(routing[0])} % of tokens,"
            f" {percent(routing[1])} % in the worst layer"
        )
    if overlap := mean_and_least(f.overlap for f in layers):
        lines.append(
            f"blocks   {percent(overlap[0])} % of the source's chosen KV blocks,"
            f" {percent(overlap[1])} % in the worst layer"
        )
    return lines


def _layer_text(figures: LayerFigures) -> str:
    least = figures.least_cosine
    worst = "" if least is None else f" ({fixed(least, 2)})"
    return f"{fixed(figures.cosine or 0.0, 4)}{worst} in {figures.layer}"


def _gate_table(gates: Sequence[GateResult]) -> list[str]:
    head = ("gate", "value", "target", "limit")
    body = [
        (shortened(g.gate, _NAME), with_error(g.value, g.se), f"{g.target:g}", f"{g.fail:g}")
        for g in gates
    ]
    texts = ("status", *map(gate_status, gates))
    return [f"{row}  {text}" for row, text in zip(columns([head, *body], 1), texts, strict=True)]


def gate_status(gate: GateResult) -> str:
    """The status, and for an undecided gate how many windows would decide it."""
    more = f" (needs {plural(gate.more_windows, 'more window')})" if gate.more_windows else ""
    return gate.status + more

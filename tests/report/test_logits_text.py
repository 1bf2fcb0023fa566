"""The level logits on a terminal: what it shows, and that it fits."""

from __future__ import annotations

import pytest
from report_samples import HOSTILE, hostile_reports, kernels_report, logits, measure, verify_report

from mmq.report.figures import number, significant, with_error
from mmq.report.logits_text import MOST_FILES, logits_lines
from mmq.report.text import finding_lines, report_text
from mmq.report.verdict import verify_lines


def text_of(report) -> str:
    return "\n".join(logits_lines(report))


def test_every_figure_is_there():
    lines = logits_lines(logits())
    assert lines[0] == "logits   2,040 of 2,048 tokens scored, 8 windows; source PPL 8.10 ± 0.20"
    assert lines[1] == "         KV fp8, index keys exact, float32, on cpu"
    rows = [line.split("  ") for line in lines[3:8]]
    assert [row[0] for row in rows] == ["forward", "weights", "kv", "both (judged)", "replay"]
    assert " ".join(lines[4].split()) == (
        "weights 8.13±0.21 +0.40±0.12 0.01370±0.00087 0.1110±0.0070 95.30±0.40 96.40±0.20"
    )
    assert [line.split()[0] for line in lines[9:12]] == ["text", "a.txt", "b.txt"]
    assert lines[13] == (
        "layers   least cosine (worst token): 0.9994 (0.99) in 3, 0.9995 (0.99) in 2,"
        " 0.9996 (0.99) in 1"
    )
    assert lines[14] == "routing  same experts for 98.00 % of tokens, 97.60 % in the worst layer"
    assert lines[15] == (
        "blocks   99.50 % of the source's chosen KV blocks, 99.40 % in the worst layer"
    )
    assert [line.split()[-1] for line in lines[17:20]] == ["status", "pass", "fail"]
    assert lines[20].endswith("inconclusive (needs 6 more windows)")


def test_it_fits_100_columns():
    names = ("x" * 200, "y" * 200)
    wide = logits(60, 128, names).model_copy(
        update={"settings": {"kv": "k" * 90, "dtype": "d" * 90},
                "source_perplexity": measure(1e12, 1e11)}
    )  # fmt: skip
    assert max(map(len, logits_lines(wide))) <= 100
    assert max(map(len, logits_lines(logits()))) <= 100


def test_a_quantile_of_few_windows_is_not_exact():
    """Its error is 0 where two windows have as many tokens beyond it."""
    from mmq.report.logits_text import figure_texts

    one = logits().arms["both"]
    exact = one.model_copy(update={"kld_p99": measure(0.1037, 0.0), "top1": measure(1.0, 0.0)})
    assert figure_texts(exact)[3:5] == ("0.1037", "100.0 ± 0")


@pytest.mark.parametrize("scale", [1e-7, 1e-3, 1.0, 999.0])
def test_figures_of_all_sizes_fit_100_columns(scale):
    """Very long ones stand in two tables; each figure keeps its error."""
    found = logits(texts=("a" * 60, "b" * 60))
    names = ("perplexity", "delta_ppl_percent", "kld_mean", "kld_p99", "top1", "top5")
    wide = {n: measure(-1.2345678 * scale, 1e-4 * scale) for n in names}
    arms = {name: arm.model_copy(update=wide) for name, arm in found.arms.items()}
    lines = logits_lines(found.model_copy(update={"arms": arms}))
    assert max(map(len, lines)) <= 100
    rows = [line for line in lines if line.startswith("both (judged)") or "…" in line[:14]]
    figures = "".join(line for line in lines if line.startswith("both"))
    assert figures.count("±") == 6, rows


def test_every_rendering_has_the_errors_of_all_six_figures():
    """Terminal, Markdown and HTML, and the model card, take their words from one place."""
    from mmq.report.html import html_text
    from mmq.report.load import reports_of
    from mmq.report.logits_text import FIGURE_TITLES, figure_texts
    from mmq.report.markdown import markdown_text
    from mmq.report.sections import build_document

    texts = figure_texts(logits().arms["both"])
    assert len(texts) == len(FIGURE_TITLES) == 6 and all(" ± " in text for text in texts)
    document = build_document(reports_of(verify_report()))
    for rendered in (markdown_text(document), html_text(document)):
        assert all(text in rendered for text in texts)


def test_many_texts_are_summed_up():
    lines = logits_lines(logits(texts=tuple(f"t{n}" for n in range(MOST_FILES + 3))))
    assert "… and 3 more texts in the report" in lines


def test_without_layers_gates_or_texts():
    bare = logits().model_copy(
        update={"layers": [], "gates": [], "by_file": {}, "settings": {}, "by_position": []}
    )
    text = text_of(bare)
    assert "layers" not in text and "gate" not in text and "weights" in text


@pytest.mark.parametrize(
    "layers",
    [[{}], [{"layer": "x", "arms": 3}], [{"arms": {"both": {"cosine": {"mean": "1"}}}}],
     [{"arms": {"both": {"cosine": {"mean": float("nan")}, "selection": None}}}],
     [{"arms": {"both": {"cosine": {"mean": 10**400}, "routing": {"same": True}}}}]],
)  # fmt: skip
def test_layers_of_another_form_are_left_out(layers):
    assert "least cosine" not in text_of(logits().model_copy(update={"layers": layers}))


def test_verify_prints_it_before_the_verdict():
    lines = verify_lines(verify_report().model_dump())
    assert any(line.startswith("logits   ") for line in lines)
    assert lines[-1] == "verdict  FAIL: 1 error, 0 warnings, 1 note"
    assert "skipped  input scales: calibrated elsewhere" in lines


def test_hostile_text_stays_in_its_line():
    from mmq.report.load import Reports

    text = report_text(Reports(*hostile_reports()))
    assert "\x1b" not in text and "\r" not in text and "\u202e" not in text
    assert not any(line.startswith("::error") for line in text.splitlines())
    assert HOSTILE.splitlines()[0] in text


def test_findings_come_errors_first():
    lines = finding_lines(verify_report().findings)
    assert [x.partition("[")[0] for x in lines if "[" in x] == ["error", "note"]
    assert "  expected: target 0.95, limit 0.9" in lines
    assert finding_lines([]) == []


def test_kernels_are_printed_too():
    assert any("router" in line for line in verify_lines(kernels_report().model_dump()))


@pytest.mark.parametrize(
    ("value", "se", "text"),
    [
        (13.4827, 0.0713, "13.483 ± 0.071"),
        (810.07, 30.6, "810 ± 31"),
        (0.5, 0.0996, "0.50 ± 0.10"),
        (-0.04, 0.236, "−0.04 ± 0.24"),
        (1.0, 0.0, "1.000 ± 0"),
        (0.14319, None, "0.1432"),
        (float("nan"), 1.0, "nan"),
        (1.0, float("inf"), "1.000"),
        (2.0, 1e-14, "2.000 ± 1.0e−14"),
        (12_345_678.0, 2.0, "12,345,678 ± 2.0"),
    ],
)
def test_digits_follow_the_error(value, se, text):
    assert with_error(value, se) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (1e-7, "1.000e−07"), (123_456.0, "123,456"), (1e300, "1.000e+300"),
     (-0.5, "−0.5000")],
)  # fmt: skip
def test_significant_digits(value, text):
    assert significant(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(1234567.0, "1,234,567"), (0.25, "0.250"), (1e300, "1.000e+300"), (float("inf"), "inf")],
)
def test_metrics_are_counts_or_measurements(value, text):
    assert number(value) == text

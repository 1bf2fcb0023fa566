"""Charts show the report's figures: what is drawn, read back by the axes, is what was measured."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pytest
from report_samples import convert_report, logits, quality, verify_report
from svg_reader import cells, number, points, read, scales, words

from mmq.report.charts import BarChart, Chart, HeatMap, HistogramChart, Line, LineChart
from mmq.report.convert_sections import quality_section, sizes_section
from mmq.report.load import Reports
from mmq.report.logits_sections import logits_sections
from mmq.report.schema import ComponentSize, FormatSize, Histogram, ModuleQuality
from mmq.report.sections import build_document
from mmq.report.svg import SHADES

LOGITS = logits()


def charts(kind: type[Chart], title: str, of: Iterable[Chart] = ()) -> Chart:
    of = of or [c for s in logits_sections(LOGITS) for c in s.charts]
    (found,) = [c for c in of if isinstance(c, kind) and c.title.startswith(title)]
    return found


def assert_drawn(chart: Chart, line: int, figures: list[tuple[float, float]], log: bool = False):
    """The line has these points, as its axes say."""
    root = read(chart)
    across, up = scales(root, log)
    drawn = points(root, line)
    assert len(drawn) == len(figures)
    for (x, y), (first, second) in zip(drawn, figures, strict=True):
        assert across.figure(x) == pytest.approx(first, abs=across.slack(x))
        assert up.figure(y) == pytest.approx(second, abs=up.slack(y))


def test_the_sorted_kld_of_all_tokens():
    curve = LOGITS.kld_curve
    figures = [(100 * n / (len(curve) - 1), value) for n, value in enumerate(curve)]
    assert figures[0][0] == 0 and figures[-1][0] == 100
    assert_drawn(charts(LineChart, "KLD of every token"), 0, figures, log=True)


def test_percentiles_stand_where_they_are_with_their_values():
    root = read(charts(LineChart, "KLD of every token"))
    across, _ = scales(root, logarithmic=True)
    places = [
        across.figure(float(p.get("d", "")[1:].split()[0]))
        for p in root.iter("path") if p.get("class") == "mark"
    ]  # fmt: skip
    assert places == pytest.approx([50, 90, 99], abs=0.1)
    labels = [w for w in words(root) if "%:" in w]
    assert labels == ["50 %: 0.00570", "90 %: 0.0330", "99 %: 0.111"]


def test_figures_by_position():
    bins = LOGITS.by_position
    middles = [(b.first + b.last) / 2 for b in bins]
    kld = [(x, b.kld_mean) for x, b in zip(middles, bins, strict=True)]
    top1 = [(x, 100 * b.top1) for x, b in zip(middles, bins, strict=True)]
    assert_drawn(charts(LineChart, "KLD by position"), 0, kld)
    chart = charts(LineChart, "Top-1 agreement")
    assert_drawn(chart, 0, top1)
    # √(0.92·0.08/128) = 0.024
    assert chart.title.endswith("(chance alone: ±2.4)")


def test_cosine_routing_and_selection_by_layer():
    distance = charts(LineChart, "Distance of hidden states")
    for number_, name in enumerate(LOGITS.arms):
        figures = [(float(e["layer"]), 1 - e["arms"][name]["cosine"]["mean"])
                   for e in LOGITS.layers]  # fmt: skip
        assert_drawn(distance, number_, figures, log=True)
    agreement = charts(LineChart, "Routing and block selection")
    arms = [(float(e["layer"]), e["arms"]["both"]) for e in LOGITS.layers[1:]]
    assert_drawn(agreement, 0, [(x, 100 * a["routing"]["same"]) for x, a in arms])
    assert_drawn(agreement, 1, [(x, 100 * a["selection"]["overlap"]) for x, a in arms])


def test_sizes_before_and_after():
    sizes = [FormatSize(component="a", format="MXFP8", before_bytes=8000, after_bytes=5000),
             FormatSize(component="b", format="NVFP4", before_bytes=0, after_bytes=2000),
             FormatSize(component="c", format="F32", before_bytes=3, after_bytes=3)]  # fmt: skip
    (chart,) = sizes_section(convert_report(sizes=sizes)).charts
    root = read(chart)
    bars = {kind: [float(r.get("width", "")) for r in root.iter("rect")
                   if r.get("class") == f"bar b{kind}"] for kind in (0, 1)}  # fmt: skip
    # the last of each is the legend's
    before, after = bars[0][:-1], bars[1][:-1]
    assert before == pytest.approx([before[0], 0, before[0] * 3 / 8000], abs=0.11)
    assert after == pytest.approx([before[0] * 5 / 8, before[0] / 4, before[0] * 3 / 8000],
                                  abs=0.11)  # fmt: skip
    assert words(root)[-2:] == ["before", "after"]
    assert "0.008 MB" in words(root) and words(root).count("3 B") == 2, "not 0.000 MB"


def test_components_that_change_are_named():
    components = [ComponentSize(component="e", before_bytes=4000, after_bytes=1000),
                  ComponentSize(component="same", before_bytes=5, after_bytes=5)]  # fmt: skip
    lines = sizes_section(convert_report(components=components)).lines
    assert "e: 4.000 kB → 1.000 kB (−75.0 %)." in lines
    assert not any(line.startswith("same") for line in lines)


def modules(values: dict[tuple[int, str], float]) -> list[ModuleQuality]:
    return [ModuleQuality(layer=layer, module=m, tensors=1, sqnr_db=v, worst_tensor_sqnr_db=v)
            for (layer, m), v in values.items()]  # fmt: skip


def assert_shades(chart: HeatMap, values: list[list[float | None]], high: float):
    """Each cell has the shade of its value between the least and `high`."""
    low = min(v for row in values for v in row if v is not None)
    found = cells(read(chart))
    for y, row in enumerate(values):
        for x, value in enumerate(row):
            if value is None:
                assert (x, y) not in found
            else:
                share = SHADES * (min(value, high) - low) / (high - low)
                assert found[x, y] == min(SHADES - 1, math.floor(share)), (x, y)


def test_sqnr_by_layer_and_module():
    values = {(1, "e w1"): 20.0, (1, "e w2"): 21.0, (2, "e w1"): 22.0, (2, "e w3"): 29.0}
    chart = charts(HeatMap, "SQNR", quality_section(
        quality().model_copy(update={"by_module": modules(values)})).charts)  # fmt: skip
    root = read(chart)
    assert [w for w in words(root) if w in ("w1", "w2", "w3")] == ["w1", "w2", "w3"]
    assert [w for w in words(root) if w in ("1", "2")] == ["1", "2"]
    assert_shades(chart, [[20.0, 21.0, None], [22.0, None, 29.0]], 29.0)
    shuffled = modules(dict(reversed(values.items())))
    section = quality_section(quality().model_copy(update={"by_module": shuffled}))
    shown = [(int(row[0].text), row[1].text) for row in section.tables[0].rows]
    assert shown == [(1, "e w1"), (1, "e w2"), (2, "e w1"), (2, "e w3")], "as the cells are"
    assert "20.00 dB" in words(root) and "29.00 dB" in words(root)
    names = [e for e in root.iter("text") if e.text in ("w1", "w2", "w3")]
    places = [float(e.get("x", "")) for e in names]
    assert places == sorted(places)


def test_the_lowest_sqnr_is_of_those_that_are_known():
    found = modules({(1, "e w1"): float("nan"), (2, "e w1"): 20.0, (3, "e w1"): 21.0})
    (chart, _) = quality_section(quality().model_copy(update={"by_module": found})).charts
    assert chart.says == "Lowest in e w1 of layer 2: 20.00 dB."


def test_tokens_of_experts_above_98_percent_share_a_shade():
    counts = [*range(1, 101), 5000]
    found = LOGITS.model_copy(update={"layers": [{"layer": 3, "expert_tokens": counts}]})
    chart = charts(HeatMap, "Tokens of each", [c for s in logits_sections(found) for c in s.charts])
    assert "99 tokens or more" in words(read(chart))
    assert_shades(chart, [list(map(float, counts))], 99.0)


def test_experts_without_a_token_stand_out():
    """In a colour of their own, which the legend names; the others keep all shades."""
    rows = [[0, 5, 14], [10, 0, 9], [0, 14, 14]]
    layers = [{"layer": n, "expert_tokens": row} for n, row in enumerate(rows)]
    found = LOGITS.model_copy(update={"layers": layers})
    chart = charts(HeatMap, "Tokens of each", [c for s in logits_sections(found) for c in s.charts])
    root = read(chart)
    shades = cells(root)
    assert {at for at, shade in shades.items() if shade == SHADES} == {(0, 0), (1, 1), (0, 2)}
    assert (shades[1, 0], shades[2, 0], shades[0, 1], shades[2, 1]) == (0, 8, 5, 4)
    assert words(root)[-1] == "no token" and "5 tokens" in words(root)
    (legend,) = [r for r in root.iter("rect") if r.get("class") == f"s{SHADES}"]
    assert float(legend.get("y", "")) < float(root.get("viewBox", "").split()[3])
    used = LOGITS.model_copy(update={"layers": [{"layer": 1, "expert_tokens": [1, 2]}]})
    chart = charts(HeatMap, "Tokens of each", [c for s in logits_sections(used) for c in s.charts])
    assert "no token" not in words(read(chart)), "no legend for what is not there"


def test_sqnr_histogram():
    counts, edges = [3, 0, 100, 41], [21.6, 21.7, 21.8, 21.9, 22.0]
    section = quality_section(quality().model_copy(
        update={"histogram": Histogram(edges=edges, counts=counts)}))  # fmt: skip
    root = read(charts(HistogramChart, "SQNR of each", section.charts))
    across, up = scales(root)
    drawn = {}
    for bar in root.iter("rect"):
        x, y = float(bar.get("x", "")), float(bar.get("y", ""))
        drawn[round(across.figure(x), 2)] = up.figure(y)
        bottom = y + float(bar.get("height", ""))
        assert up.figure(bottom) == pytest.approx(0, abs=up.slack(bottom))
        title = bar.findtext("title") or ""
        assert number(title.split(": ")[1]) == pytest.approx(up.figure(y), abs=up.slack(y))
    assert drawn == pytest.approx({21.6: 3, 21.8: 100, 21.9: 41}, abs=0.5)


def test_names_that_do_not_fit_beside_each_other_have_a_line_each():
    lines = [Line("x" * 24, [(0.0, 1.0), (1.0, 2.0)])] * 5
    root = read(LineChart("", "x", "y", lines, ""))
    width, height = map(float, root.get("viewBox", "").split()[2:])
    names = [e for e in root.iter("text") if e.text == "x" * 24]
    assert len(names) == 5
    assert all(float(e.get("x", "")) + 24 * 7.2 <= width for e in names)
    assert max(float(e.get("y", "")) for e in names) < height


def test_bars_of_any_unit():
    root = read(BarChart("", ("a", "b"), [("g", (2.5e9, 480.0))], "GB", 1e9, ""))
    assert "2.500 GB" in words(root) and "480 B" in words(root)


def test_files_that_are_not_what_the_conversion_wrote_are_named():
    def told(verify, convert) -> dict[str, str]:
        return dict(build_document(Reports(verify, convert)).facts)

    assert "careful" not in told(verify_report(), convert_report())
    other = [f.model_copy(update={"sha256": "0" * 64}) for f in verify_report().files[1:]]
    changed = verify_report(files=[verify_report().files[0], *other])
    assert told(changed, convert_report())["careful"] == (
        "not the bytes that the conversion wrote: model-00001.safetensors and 1 more file"
    )

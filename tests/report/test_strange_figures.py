"""Figures no conversion or verification gives: refused as `report-invalid`, or rendered by all."""

from __future__ import annotations

import json
import random
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from report_samples import convert_report, kernels_report, verify_report
from test_schema import SCHEMA

from mmq.errors import BadInputError
from mmq.report.compare import compare_documents
from mmq.report.html import html_text
from mmq.report.junit import junit_text
from mmq.report.load import Report, as_json, parse_report, reports_of
from mmq.report.markdown import markdown_text
from mmq.report.schema import MOST_NESTED
from mmq.report.sections import build_document
from mmq.report.text import document_text, report_text

GOOD = {"verify": verify_report(), "convert": convert_report(), "kernels": kernels_report()}
DATA = {name: json.loads(as_json(report)) for name, report in GOOD.items()}
STRANGE = {
    "0": 0, "-1": -1, "10^400": 10**400, "2^63-1": 2**63 - 1, "nan": float("nan"),
    "inf": float("inf"), "1e308": 1e308, "-1e308": -1e308, "5e-324": 5e-324, "null": None,
}  # fmt: skip
Path = tuple[Any, ...]


def leaves(value: Any, path: Path = ()) -> Iterator[Path]:
    """Paths of figures and of what may be absent."""
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(item, (*path, key))
    elif value is None or isinstance(value, int | float):
        yield path


def put(value: Any, path: Path, new: Any) -> Any:
    """The value with another one at a path."""
    key, *rest = path
    copy = value.copy()
    copy[key] = put(value[key], tuple(rest), new) if rest else new
    return copy


def accepted(data: Any, strange: Any) -> dict[Path, bool]:
    """Which leaves may be this; leaves of a list's items are alike."""
    known: dict[Path, bool] = {}
    found = {}
    for path in leaves(data):
        shape = tuple("*" if isinstance(key, int) else key for key in path)
        if shape not in known:
            try:
                parse_report(put(data, path, strange), "f")
                known[shape] = True
            except BadInputError as error:
                assert error.id in ("report-invalid", "report-version", "report-foreign")
                known[shape] = False
        found[path] = known[shape]
    return found


def render(report: Report) -> None:
    """Every format, and beside a good report."""
    found = reports_of(report)
    document = build_document(found)
    page = html_text(document)
    for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        drawn = "".join(re.findall(r'\b(?:d|x|y|width|height|viewBox|transform)="([^"]*)"', svg))
        assert not re.search("nan|inf|e[+-]", drawn), drawn[:200]
    for text in (page, markdown_text(document), report_text(found)):
        text.encode("utf-8")
    for element in ET.fromstring(junit_text(found).encode()).iter():
        assert 0 <= float(element.get("time", "0")) < 1e12
    json.loads(as_json(report), parse_constant=pytest.fail)
    good = GOOD["convert" if report.kind == "convert" else "verify"]
    document_text(compare_documents(found, reports_of(good)))


@pytest.mark.parametrize("name", STRANGE)
@pytest.mark.parametrize("kind", DATA)
def test_no_figure_ends_a_rendering(kind, name):
    """Everywhere at once, in the first of each list, and in halves drawn by chance."""
    strange = STRANGE[name]
    allowed = [path for path, fits in accepted(DATA[kind], strange).items() if fits]
    draws = [set(random.Random(n).sample(allowed, len(allowed) // 2)) for n in range(3)]
    first = {path for path in allowed if all(key == 0 for key in path if isinstance(key, int))}
    for chosen in (set(allowed), first, *draws):
        data = DATA[kind]
        for path in chosen:
            data = put(data, path, strange)
        try:
            report = parse_report(data, "f")
        except BadInputError:
            continue
        render(report)


@pytest.mark.parametrize(
    "count", [-1, 1 << 63, 10**400, 1.5, "many"], ids=["-1", "2^63", "10^400", "1.5", "many"]
)
@pytest.mark.parametrize(
    ("kind", "path"),
    [
        ("convert", ("source", "payload_bytes")), ("convert", ("kv_scale_bytes",)),
        ("convert", ("components", 0, "after_bytes")), ("convert", ("dropped", "MTP")),
        ("convert", ("timing", "peak_pss_bytes")),
        ("convert", ("quality", "histogram", "counts", 0)),
        ("verify", ("checkpoint", "payload_bytes")), ("verify", ("files", 0, "bytes")),
        ("verify", ("levels", 0, "checks", "opened")),
        ("verify", ("logits", "by_position", 0, "first")),
    ],
)  # fmt: skip
def test_counts_are_counts(kind, path, count):
    """In the model and in the JSON Schema."""
    data = put(DATA[kind], path, count)
    with pytest.raises(BadInputError) as caught:
        parse_report(data, "f")
    assert caught.value.id == "report-invalid" and ".".join(map(str, path)) in caught.value.message
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(data, SCHEMA)


@pytest.mark.parametrize(
    ("edges", "counts"), [([], []), ([], [1]), ([1.0], [1]), ([1.0, 2.0, 3.0], [1])]
)
def test_a_histogram_has_one_edge_more_than_counts(edges, counts):
    histogram = {"edges": edges, "counts": counts}
    with pytest.raises(BadInputError, match="one edge more"):
        parse_report(put(DATA["convert"], ("quality", "histogram"), histogram), "f")


@pytest.mark.parametrize(
    "edges",
    [[2.0, 1.0], [1.0, 1.0], [float("nan"), 1.0], [0.0, 1e300], [1.0, float("nan"), 3.0],
     [1.0, float("inf"), 3.0]],
)  # fmt: skip
def test_edges_that_do_not_rise_draw_nothing(edges):
    histogram = {"edges": edges, "counts": [1] * (len(edges) - 1)}
    report = parse_report(put(DATA["convert"], ("quality", "histogram"), histogram), "f")
    render(report)
    assert "no figures" in html_text(build_document(reports_of(report)))


def nested(depth: int) -> Any:
    value: Any = 1
    for n in range(depth):
        value = [value] if n % 2 else {"a": value}
    return value


@pytest.mark.parametrize(
    "path",
    [("options", "to"), ("calibration", "x"), ("logits", "settings", "dtype"),
     ("logits", "layers", 0, "arms")],
)  # fmt: skip
def test_settings_nested_deep_are_refused(path):
    kind = "verify" if path[0] == "logits" else "convert"
    base = put(DATA["convert"], ("calibration",), {"x": 1}) if kind == "convert" else DATA[kind]
    render(parse_report(put(base, path, nested(MOST_NESTED - 1)), "f"))
    for depth in (MOST_NESTED, 480):
        with pytest.raises(BadInputError, match="nested deeper"):
            parse_report(put(base, path, nested(depth)), "f")


def test_half_a_surrogate_pair_is_written_as_its_escape():
    report = parse_report(put(DATA["convert"], ("options", "to"), "a\ud800b"), "f")
    text = as_json(report)
    text.encode("utf-8")
    assert json.loads(text)["options"]["to"] == "a\ud800b"
    render(report)

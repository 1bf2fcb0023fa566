"""Hostile text is harmless in every format, whatever it is made of."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_samples import HOSTILE

from mmq.report import escape
from mmq.report.escape import (
    markdown,
    markdown_code,
    plain,
    shortened,
    workflow_data,
    workflow_property,
    xml,
)

ANY = st.text(st.characters(codec=None), max_size=60)  # lone surrogates too


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\nb\r\x1b[31m\x00", r"a\x0ab\x0d\x1b[31m\x00"),
        ("\u202egnp.exe\u2069", r"\u202egnp.exe\u2069"),
        ("\x85\u2028\ud800\ufffe\ufeff", r"\x85\u2028\ud800\ufffe\ufeff"),
        ("Größe × 2 − 1 … ≥ 日本", "Größe × 2 − 1 … ≥ 日本"),
    ],
)
def test_what_hides_is_shown(text, shown):
    assert plain(text) == shown


@given(ANY)
def test_plain_text_is_one_printable_line(text):
    line = plain(text)
    assert len(line.splitlines()) <= 1
    assert not any(ord(c) < 32 or 127 <= ord(c) < 160 or 0xD800 <= ord(c) < 0xE000 for c in line)
    assert plain(line) == line


@given(ANY, st.integers(3, 40))
def test_shortened_text_keeps_both_ends(text, limit):
    line, full = shortened(text, limit), plain(text)
    assert len(line) <= limit
    if len(full) <= limit:
        assert line == full
    else:
        head, tail = line.split("…", 1) if line.count("…") == 1 else (line[:1], line[-1:])
        assert full.startswith(head) and full.endswith(tail)


@given(ANY)
def test_any_text_is_valid_xml(text):
    element = ET.fromstring(f'<a b="{xml(text)}">{xml(text)}</a>')
    assert (element.text or "") == plain(text)
    assert element.get("b") == plain(text)


@given(ANY)
def test_markdown_stays_text(text):
    line = markdown(text)
    assert not re.search(r'[<>|"\n\r]|://|www\.|@\w', line)
    # every character that could begin markup has a backslash before it
    assert not re.search(r"(?<!\\)(?:\\\\)*[`*\[\]#~$]", line.replace("&#", ""))


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("kv_scales", "kv_scales"),
        ("_a_ *b* `c`", r"\_a\_ \*b\* \`c\`"),
        ("a|b <i>", "a&#124;b &lt;i&gt;"),
        (r"\|", r"\\&#124;"),
        ("&lt;", "&amp;lt;"),
        ("- item", "&#8203;- item"),
        ("see #123, GH-7", "see \\#\u2060123, GH-\u20607"),
        ("1. item", "&#8203;1. item"),
        ("see http://x.test, www.x.test", "see http&#58;//x.test, www&#46;x.test"),
    ],
)
def test_markdown_source(text, source):
    assert markdown(text) == source


def test_names_in_code_style():
    assert markdown_code("model.layers.3/w1") == "`model.layers.3/w1`"
    assert markdown_code("") == ""
    shown = markdown_code(HOSTILE)
    assert shown.startswith("<code>") and shown.endswith("</code>")
    assert "<" not in shown[6:-7] and "|" not in shown


@given(ANY)
def test_a_workflow_command_stays_one_command(text):
    assert "\n" not in workflow_data(text) and "\r" not in workflow_data(text)
    assert not re.search(r"%(?!25)", workflow_data(text))
    assert not re.search(r"[:,]", workflow_property(text))


def test_workflow_text():
    assert workflow_data("50 %, a: b\n") == "50 %25, a: b\\x0a"
    assert workflow_property("50 %, a: b") == "50 %25%2C a%3A b"


@pytest.mark.parametrize("broken", ["\\|", "[", "<"])
def test_the_checks_see_an_escape_that_is_missing(broken, monkeypatch):
    """Mutants: entities or backslashes left out."""
    monkeypatch.setattr(escape, "_ENTITIES", dict.fromkeys('&<>|"', "|"))
    monkeypatch.setattr(escape, "_MARKDOWN", re.compile("(?!)"))
    with pytest.raises(AssertionError):
        test_markdown_stays_text.hypothesis.inner_test(f"a{broken}b")

"""A card's front matter: its rules, and how it is merged."""

from __future__ import annotations

import pytest
import yaml

from mmq.errors import BadInputError
from mmq.publish.front_matter import (
    front_problems,
    join_card,
    merge_front,
    read_front,
    split_card,
    without_keys,
)

LICENSE = {"license": "other", "license_name": "minimax", "license_link": "LICENSE"}
FILES = frozenset({"LICENSE", "README.md"})
GOOD = {**LICENSE, "base_model": "a/b", "base_model_relation": "quantized", "tags": ["nvfp4"]}


def test_all_problems_are_told_at_once():
    found = [f.message for f in front_problems({"license": "other"}, FILES)]
    assert len(found) == 4
    for word in ("license_name", "license_link", "base_model ", "base_model_relation"):
        assert any(word in message for message in found), word


@pytest.mark.parametrize(
    "change",
    [
        {"license": None}, {"license": ""}, {"license": 3}, {"license_name": None},
        {"license_link": None}, {"license_link": "absent.txt"}, {"base_model": "b"},
        {"base_model": ["a/b", None]}, {"base_model": []}, {"base_model_relation": None},
        {"tags": [None]}, {"tags": [1]}, {"language": None}, {"datasets": [None]},
    ],
    ids=str,
)  # fmt: skip
def test_each_rule_of_the_front_matter_bites(change):
    assert not list(front_problems(GOOD, FILES))
    assert list(front_problems({**GOOD, **change}, FILES))


@pytest.mark.parametrize("value", ["https://x.org/licence", "LICENSE"])
def test_links_that_lead_somewhere(value):
    assert not list(front_problems({**GOOD, "license_link": value}, FILES))


@pytest.mark.parametrize(
    ("front", "ours", "merged"),
    [
        ("", {"a": 1}, "a: 1\n"),
        ("a: 1", {"b": 2}, "a: 1\nb: 2\n"),
        ("a: null\nb: 2\n", {"a": 1}, "a: 1\nb: 2\n"),
        ("a:\n# c\nb: 2\n", {"a": 1}, "a: 1\n# c\nb: 2\n"),
        ("a: [1]\n", {"a": [2]}, "a: [1]\n"),
        ("tags: [x]\nz: 1\n", {"tags": ["x", "y"]}, "tags:\n- x\n- y\nz: 1\n"),
        ("tags: x\n", {"tags": ["y"]}, "tags:\n- x\n- y\n"),
        ("text: |\n  a\n\n  b\nz: 1\n", {"y": 2}, "text: |\n  a\n\n  b\nz: 1\ny: 2\n"),
        ("名: 模型\n", {"a": "é"}, "名: 模型\na: é\n"),
    ],
)
def test_front_matter_merges(front, ours, merged):
    assert merge_front(front, ours) == merged
    expected = {**(yaml.safe_load(merged) or {})}
    assert read_front(merge_front(front, ours)) == expected


@pytest.mark.parametrize(
    ("front", "key", "rest"),
    [
        ("a: 1\nb: 2\n", "a", "b: 2\n"),
        ("a: 1\nb:\n- x\n- y\n# c\nc: 3\n", "b", "a: 1\n# c\nc: 3\n"),
        ("a: 1\n", "absent", "a: 1\n"),
        ("a: 1", "a", ""),
        ("a: |\n  x\n  y\nb: 1\n", "a", "b: 1\n"),
    ],
)
def test_keys_are_taken_out_with_their_lines_only(front, key, rest):
    assert without_keys(front, (key,)) == rest


@pytest.mark.parametrize(
    "text",
    ["", "# Only text\n", "---\na: 1\n---\n# Text\n", "---\na: 1\n---\n", "text\n---\nno: 1\n---\n",
     "---\r\na: 1\r\n---\r\ntext\r\n"],
)  # fmt: skip
def test_cards_split_and_join(text):
    card = split_card(text)
    assert join_card(card).replace("\r\n", "\n") == text.replace("\r\n", "\n")
    assert ("a: 1" in card.front) == (text.startswith("---"))


# what mmq cannot add to is refused with its reason; anything else keeps all that it says

REFUSED = {
    "date: 2024-13-45\n": "month",
    "a: !!int x\n": "a value is not what its tag says",
    "a: !!timestamp x\n": "a value is not what its tag says",
    "a: !!bool x\n": "a value is not what its tag says",
    "a: !!int ''\n": "a value is not what its tag says",
    "a: !!python/object:os.system x\n": "could not determine a constructor",
    "a: " + "[" * 600 + "]" * 600 + "\n": "recursion",
    "{license: mit}\n": "braces",
    "license: mit\n...\n": "line 2 of it has the end of a document",
    "license: mit\n--- x\n": "second document",
    "%YAML 1.1\n": "directive",
    "license: mit\ntags: &t [a]\nother: *t\n": "line 2 of it has an anchor",
    "license: mit\nother: *t\n": "alias",
    "? [a]\n: 1\n": "unhashable",
    "  a: 1\n  b: 2\n": "unindented",
    "a: 'x\n": "unexpected end",
    "license:mit\n": "no list of keys and values",
}


@pytest.mark.parametrize("front", REFUSED, ids=lambda text: text[:20])
def test_front_matter_that_cannot_be_added_to_says_why(front):
    with pytest.raises(BadInputError) as error:
        merge_front(front, {"tags": ["mmq"], "base_model": "a/b"})
    assert error.value.id == "card-front-matter"
    assert REFUSED[front] in error.value.message


@pytest.mark.parametrize(
    "front",
    [
        "a: .nan\n", "a: 2024-02-29\n", "? a\n: 1\n", "# only\n", "a: 1\r\ntags:\r\n- x\r\n",
        "tags:\n  - a\n  # c\n  - b\n", 'a: "x\n  y"\n', "a: |+\n  x\n\n", "tags: null\ntags2: 1",
        "tags: []\nb: {c: [1, 2]}\n", "1: x\nyes: y\n", "a: x # tags: no\n",
        "tags:\n\n\nb: >-\n  x\n",        "a:\n- tags: inner\n", "a: ---x\n",
    ],
    ids=repr,
)  # fmt: skip
def test_whatever_else_it_says_is_kept(front):
    merged = yaml.safe_load(merge_front(front, {"tags": ["mmq"], "base_model": "a/b"}))
    old = yaml.safe_load(front) or {}
    tags = old.pop("tags", None) or []
    assert merged.pop("tags") == [*tags, "mmq"]
    assert merged.pop("base_model") == "a/b"
    assert repr(merged) == repr(old)


@pytest.mark.parametrize("front", ["a: &x [1]\nb: 2\n", "{a: 1, b: 2}\n"])
def test_keys_that_cannot_be_taken_out_alone_stop_it(front):
    with pytest.raises(BadInputError) as error:
        without_keys(front, ("a",))
    assert error.value.id == "card-front-matter"


def test_such_a_card_stops_before_anything_is_sent(publish, output, hub):
    text = "---\nlicense: mit\ndate: 2024-13-45\n---\n"
    (output / "README.md").write_text(text, encoding="utf-8")
    outcome = publish("--base-model", "a/b", card=False)
    assert (outcome.code, outcome.error["id"]) == (4, "card-front-matter")
    assert not hub.log.of("^(POST|PUT)")

"""The card: what must be in it before anything is sent, what it says, and whose words it keeps."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import yaml
from card_example import COMMIT, REPO, facts, manifest

from mmq.errors import BadInputError
from mmq.publish.card import END, START, ExistingCard, card_section, merged_card
from mmq.publish.front_matter import (
    front_problems,
    join_card,
    merge_front,
    read_front,
    split_card,
    without_keys,
)

GOLDEN = Path(__file__).parents[1] / "data" / "publish-card.md"
LICENSE = {"license": "other", "license_name": "minimax", "license_link": "LICENSE"}
FILES = frozenset({"LICENSE", "README.md"})
GOOD = {**LICENSE, "base_model": "a/b", "base_model_relation": "quantized", "tags": ["nvfp4"]}


def new_card(**values):
    return merged_card(ExistingCard(""), facts(**values), LICENSE)


def test_golden_card():
    """UPDATE_GOLDEN=1 pytest … writes it anew; look at it as a reader would."""
    card = new_card()
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.write_text(card, encoding="utf-8")
    assert card == GOLDEN.read_text("utf-8")


# P1: what the Hub would refuse after hours of upload is refused here, before anything is sent


@pytest.mark.parametrize(
    ("readme", "options"),
    [
        ("---\nlicense: null\nbase_model: a/b\n---\n", ()),
        ("---\nlicense: null\n---\n# Text\n", ("--base-model", "a/b")),
        ("---\nlicense: mit\n---\n", ()),
        ("---\nlicense: mit\nbase_model: null\n---\n", ()),
        ("---\nlicense: other\nbase_model: a/b\n---\n", ()),
        ("---\nlicense: other\nlicense_name: x\nlicense_link: NO\nbase_model: a/b\n---\n", ()),
        ("---\nlicense: mit\nbase_model: a/b\nbase_model_relation: finetune\n---\n", ()),
        ("---\nlicense: mit\nbase_model: a/b\ndatasets:\n- null\n---\n", ()),
        ("---\nlicense: [mit]\nbase_model: a/b\n---\n", ()),
        ("---\nlicense: mit\nlicense: mit\nbase_model: a/b\n---\n", ()),
        ("---\n- a\n---\n", ("--base-model", "a/b", "--license", "mit")),
        ("---\na: [\n---\n", ("--base-model", "a/b", "--license", "mit")),
        (None, ()),
        (None, ("--license", "mit")),
        (None, ("--base-model", "a/b")),
    ],
)  # fmt: skip
def test_a_card_the_hub_would_refuse_stops_before_anything_is_sent(
    publish, output, hub, readme, options
):
    if readme is None:
        drop_readme(output)
    else:
        (output / "README.md").write_text(readme, encoding="utf-8")
    outcome = publish(*options, card=False)
    assert outcome.code == 4
    assert outcome.error["id"] in ("card-invalid", "card-front-matter")
    assert not hub.store.repos
    assert not hub.log.of("^(POST|PUT)")


def drop_readme(output):
    """As if the source had never had a card."""
    (output / "README.md").unlink()
    path = output / "mmq-manifest.json"
    text = re.sub(r'\{\s*"name": "README.md",.*?\},\s*', "", path.read_text("utf-8"), flags=re.S)
    path.write_text(text, encoding="utf-8")
    report = output / "mmq-verify.json"
    pattern = r'(\{\s*"name": "mmq-manifest.json",.*?"sha256": ")\w+'
    import hashlib

    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    report.write_text(
        re.sub(pattern, rf"\g<1>{digest}", report.read_text("utf-8"), flags=re.S), encoding="utf-8"
    )


def test_no_card_at_all_and_options_that_give_what_is_needed(publish, output, hub):
    drop_readme(output)
    outcome = publish("--base-model", "a/b", "--license", "mit", card=False)
    assert outcome.code == 0, outcome.events
    card = hub.files("org/model-NVFP4")["README.md"].decode()
    front = read_front(split_card(card).front)
    assert front["license"] == "mit"
    assert front["base_model"] == "a/b"
    assert front["base_model_relation"] == "quantized"
    assert "# model-NVFP4" in card


def test_the_hub_is_asked_before_the_shards_go(publish, hub):
    hub.fault("validate-yaml", status=400, message="no such licence")
    outcome = publish()
    assert (outcome.code, outcome.error["id"]) == (4, "publish-rejected")
    assert not hub.store.repos


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


# merging

AUTHOR = """---
# kept: the author's comment
license: mit   # for now
tags:
- mine
pipeline_tag: text-generation
unknown_key: {a: 1}
---
# My model

I wrote *this* <!-- by hand -->.
"""


def test_the_authors_values_and_words_stay():
    card = merged_card(ExistingCard(AUTHOR), facts(), LICENSE)
    front = read_front(split_card(card).front)
    assert front["license"] == "mit"
    assert front["pipeline_tag"] == "text-generation"
    assert front["unknown_key"] == {"a": 1}
    assert front["tags"] == ["mine", "nvfp4", "mxfp8", "modelopt", "mmq"]
    assert front["base_model"] == "MiniMaxAI/MiniMax-M3-MXFP8"
    assert "# kept: the author's comment\nlicense: mit   # for now\n" in card
    assert "# My model\n\nI wrote *this* <!-- by hand -->.\n" in card
    assert card.index("by hand") < card.index(START)


def test_merging_again_changes_nothing():
    once = merged_card(ExistingCard(AUTHOR), facts(), LICENSE)
    assert merged_card(ExistingCard(once), facts(), LICENSE) == once
    assert merged_card(ExistingCard(new_card()), facts(), LICENSE) == new_card()


def test_only_what_is_between_the_markers_is_replaced():
    old = AUTHOR + f"\nbefore\n{START}\nstale figures\n{END}\nafter\n"
    card = merged_card(ExistingCard(old), facts(), LICENSE)
    assert "stale figures" not in card
    head, tail = card.split(START)[0], card.split(END)[1]
    assert head.endswith("before\n")
    assert tail == "\nafter\n"


@pytest.mark.parametrize(
    "body", [START, END, f"{END}\n{START}", f"{START}{START}{END}", f"{START}{END}{START}{END}"]
)
def test_markers_that_do_not_pair_up_are_refused(body):
    with pytest.raises(BadInputError) as error:
        merged_card(ExistingCard(f"# Text\n{body}\n"), facts(), LICENSE)
    assert error.value.id == "card-markers"


def test_the_sources_card_is_not_taken_for_ours():
    source = (
        "---\nlicense: mit\nbase_model: MiniMaxAI/MiniMax-M3\nlibrary_name: transformers\n"
        "model-index:\n- name: x\n  results: []\nlanguage:\n- en\n---\n# MiniMax-M3-MXFP8\n"
    )
    card = merged_card(ExistingCard(source, sources=True), facts(), LICENSE)
    front = read_front(split_card(card).front)
    assert front["base_model"] == "MiniMaxAI/MiniMax-M3-MXFP8"
    assert front["library_name"] == "vllm"
    assert "model-index" not in front
    assert front["language"] == ["en"]
    assert card.index(END) < card.index("# MiniMax-M3-MXFP8\n")
    kept = merged_card(ExistingCard(source), facts(), LICENSE)
    assert read_front(split_card(kept).front)["base_model"] == "MiniMaxAI/MiniMax-M3"


def test_the_repositorys_card_wins_over_the_folders(publish, hub):
    hub.add("org/model-NVFP4", {"README.md": AUTHOR.encode()})
    assert publish().code == 0
    card = hub.files("org/model-NVFP4")["README.md"].decode()
    assert "I wrote *this*" in card
    assert START in card


def test_a_card_that_is_not_utf8(publish, output, hub):
    (output / "README.md").write_bytes(b"---\nlicense: mit\n---\ncaf\xe9\n")
    outcome = publish()
    assert (outcome.code, outcome.error["id"]) == (4, "card-not-utf8")


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


# what it says


def test_figures_come_with_their_errors_and_convention():
    section = card_section(facts())
    assert "| both (judged) | 13.483 ± 0.071 |" in section
    assert "0.0431 ± 0.0011" in section
    assert "KL(source ‖ this)" in section
    assert "one standard error" in section
    assert "12" * 32 in section
    assert "32 windows" in section


def test_no_figures_where_none_were_measured():
    section = card_section(facts(with_logits=False))
    assert "No perplexity or parity was measured." in section
    assert "KLD" not in section


def test_it_claims_nothing_that_was_not_measured():
    section = card_section(facts())
    for word in ("418.9", "724.9", "1.7×", "44.6", "451.5", "tok/s", "lossless"):
        assert word not in section


def test_free_text_cannot_break_out():
    evil = f"</details> {END} | `x` [link](http://x) <script>"
    value = manifest()
    value["versions"]["mmq"] = evil
    value["source"]["shards"][0]["name"] = evil
    section = card_section(facts(manifest_value=value, blame=evil))
    assert section.count(END) == 1
    assert section.endswith(END)
    assert "<script>" not in section
    assert "](http:" not in section.replace("\\]", "")
    row = next(line for line in section.splitlines() if "details" in line and line.startswith("|"))
    assert row.count("|") == 5


def test_an_ignore_pattern_cannot_break_out_of_the_command():
    section = card_section(facts(manifest_value=manifest(ignore=["a\n```\n# x"])))
    assert "--ignore 'a\\x0a```\\x0a# x'\n```\n" in section


def test_origin_is_a_commit_or_the_hashes():
    section = card_section(facts())
    assert f"at commit `{COMMIT}`" in section
    assert f"mmq convert MiniMaxAI/MiniMax-M3-MXFP8@{COMMIT} OUT --to nvfp4" in section
    value = manifest()
    value["source"] |= {"repo": "", "commit": ""}
    plain = card_section(facts(manifest_value=value))
    assert "commit unknown" in plain
    for digest in ("ab" * 32, "ef" * 32):
        assert digest in plain
    assert "cd" * 32 not in plain, "the file's hash says more than its header's"


def test_numbers_that_came_from_data_are_told():
    value = manifest() | {
        "calibration": {
            "kv_scales": {"sha256": "9a" * 32, "tokens": 65_536, "observer": "percentile"},
            "importance": {"sha256": "8b" * 32},
        }
    }
    section = card_section(facts(manifest_value=value))
    assert "`--kv-scales`: measured on 65,536 tokens, observer percentile; file SHA-256" in section
    assert f"`--importance`: from a file; file SHA-256 `{'8b' * 32}`." in section


def test_folders_of_the_machine_stay_out():
    value = manifest(kv_scales="/home/someone/kv.json", experts_from="/data/M3-BF16")
    section = card_section(facts(manifest_value=value))
    assert "/home" not in section
    assert "--kv-scales kv.json --experts-from M3-BF16" in section


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "OUT --to nvfp4\n"),
        ({"layout": "minimax", "kv_scales": "none"}, "--to nvfp4 --layout minimax\n"),
        ({"kv_format": "nvfp4", "scale_search": "max"}, "--kv-format nvfp4 --scale-search max\n"),
        ({"ignore": ["*.w1", "lm_head"]}, "--ignore '*.w1' --ignore lm_head\n"),
        ({"max_shard_bytes": 1_000}, "--max-shard-size 1000\n"),
        ({"mtp": "keep", "allow_nonfinite": True}, "--mtp keep --allow-nonfinite-passthrough\n"),
        ({"to": "bf16", "kv_scales": "none", "input_scales": "none"}, "OUT --to bf16\n"),
    ],
)
def test_the_command_is_the_one_that_made_it(options, words):
    assert words in card_section(facts(manifest_value=manifest(**options)))


def test_warnings_are_shown():
    assert "- warning `x`: &lt;b&gt;evil&lt;/b&gt;" in card_section(facts())


def test_unverified():
    section = card_section(facts(verified=False, blame="nobody looked"))
    assert "mmq did not verify these files." in section
    assert "nobody looked" in section


def test_the_page_is_sound_markdown():
    card = new_card()
    assert "\n\n\n" not in card
    assert card.count("```") % 2 == 0
    for line in card.splitlines():
        assert line == line.rstrip()
    assert REPO in card

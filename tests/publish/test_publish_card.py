"""The card: what must be in it before anything is sent, and whose words it keeps."""

from __future__ import annotations

import hashlib
import re

import pytest
from card_example import facts

from mmq.errors import BadInputError
from mmq.publish.card import END, START, ExistingCard, merged_card
from mmq.publish.front_matter import read_front, split_card

LICENSE = {"license": "other", "license_name": "minimax", "license_link": "LICENSE"}

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
    card = merged_card(ExistingCard(AUTHOR), facts(), {})
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
    new = merged_card(ExistingCard(""), facts(), LICENSE)
    once = merged_card(ExistingCard(AUTHOR), facts(), {})
    assert merged_card(ExistingCard(once), facts(), {}) == once
    assert merged_card(ExistingCard(new), facts(), {}) == new


def test_only_what_is_between_the_markers_is_replaced():
    old = AUTHOR + f"\nbefore\n{START}\nstale figures\n{END}\nafter\n"
    card = merged_card(ExistingCard(old), facts(), {})
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
    card = merged_card(ExistingCard(source, sources=True), facts(), {})
    front = read_front(split_card(card).front)
    assert front["base_model"] == "MiniMaxAI/MiniMax-M3-MXFP8"
    assert front["library_name"] == "vllm"
    assert "model-index" not in front
    assert front["language"] == ["en"]
    assert card.index(END) < card.index("# MiniMax-M3-MXFP8\n")
    kept = merged_card(ExistingCard(source), facts(), {})
    assert read_front(split_card(kept).front)["base_model"] == "MiniMaxAI/MiniMax-M3"


def test_the_repositorys_card_wins_over_the_folders(publish, hub):
    hub.add("org/model-NVFP4", {"README.md": AUTHOR.encode()})
    assert publish("--base-model", "a/b", card=False).code == 0
    card = hub.files("org/model-NVFP4")["README.md"].decode()
    assert "I wrote *this*" in card
    assert START in card


def test_a_card_that_is_not_utf8(publish, output, hub):
    (output / "README.md").write_bytes(b"---\nlicense: mit\n---\ncaf\xe9\n")
    outcome = publish()
    assert (outcome.code, outcome.error["id"]) == (4, "card-not-utf8")


@pytest.mark.parametrize(
    "shown",
    [
        f"```html\n{START}\n…\n{END}\n```", f"~~~\n{START}\n~~~\n\n~~~\n{END}\n~~~",
        f"    {START}\n    {END}", f"mmq writes between `{START}` and `{END}`.",
        f"````\n```\n{START}\n```\n````", f"``` \n{START}\n```",
    ],
    ids=["fence", "tildes", "indented", "in a line", "fence in a fence", "one alone"],
)  # fmt: skip
def test_markers_in_code_are_only_shown(shown):
    text = f"# Text\n\n{shown}\n\nafter\n"
    card = merged_card(ExistingCard(text), facts(), LICENSE)
    assert f"{text.rstrip()}\n\n{START}\n## " in card
    again = merged_card(ExistingCard(card), facts(), LICENSE)
    assert again == card
    stale = card.replace("## Verification", "## Stale")
    assert merged_card(ExistingCard(stale), facts(), LICENSE) == card


@pytest.mark.parametrize("options", [("--license-name", "x"), ("--license-link", "LICENSE")])
def test_a_name_of_another_licence_beside_mit_is_refused(publish, output, hub, options):
    (output / "README.md").write_text("---\nlicense: mit\n---\n# x\n", encoding="utf-8")
    outcome = publish("--base-model", "a/b", *options, card=False)
    assert (outcome.code, outcome.error["id"]) == (4, "card-invalid")
    assert options[0] in outcome.error["message"]
    assert "mit" in outcome.error["message"]
    assert not hub.log.of("^(POST|PUT)")


def test_an_authors_own_name_of_a_licence_stays():
    text = "---\nlicense: mit\nlicense_name: x\n---\n"
    card = merged_card(ExistingCard(text), facts(), {})
    assert read_front(split_card(card).front)["license_name"] == "x"


def test_options_that_the_author_overrules_are_told(publish, output, hub):
    text = "---\nlicense: mit\nbase_model: x/other\n---\n# x\n"
    hub.add("org/model-NVFP4", {"README.md": text.encode()})
    outcome = publish("--base-model", "a/b", "--license", "mit", "--dry-run", card=False)
    (told,) = outcome.of("warning")
    assert "base_model: x/other" in told["message"]
    assert "--base-model is not used" in told["message"]
    both = publish("--base-model", "a/b", "--license", "apache-2.0", "--dry-run", card=False)
    assert len(both.of("warning")) == 2


def test_one_of_several_base_models_is_not_overruled(publish, hub):
    text = "---\nlicense: mit\nbase_model: [x/other, a/b]\n---\n# x\n"
    hub.add("org/model-NVFP4", {"README.md": text.encode()})
    assert not publish("--base-model", "a/b", "--dry-run", card=False).of("warning")


def test_a_licence_that_only_the_repository_has(publish, hub):
    hub.add("org/model-NVFP4", {"LICENSE.md": b"the author's"})
    words = ("--base-model", "a/b", "--license-name", "x", "--license-link")
    assert publish(*words, "LICENSE.md", "--dry-run", card=False).code == 0
    outcome = publish(*words, "LICENCE.txt", "--dry-run", card=False)
    assert (outcome.code, outcome.error["id"]) == (4, "card-invalid")

"""What the card says, and that nothing it is told can break out of it."""

from __future__ import annotations

import os
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from card_example import COMMIT, REPO, facts, manifest
from in_process import run_mmq

from mmq.errors import BadInputError
from mmq.publish.card import END, START, ExistingCard, card_section, merged_card
from mmq.publish.front_matter import read_front, split_card
from mmq.report.schema import FormatSize

GOLDEN = Path(__file__).parents[1] / "data" / "publish-card.md"
LICENSE = {"license": "other", "license_name": "minimax", "license_link": "LICENSE"}
BASE = ("--base-model", "org/base", "--license-name", "minimax", "--license-link", "LICENSE")


def new_card(**values):
    return merged_card(ExistingCard(""), facts(**values), LICENSE)


def test_golden_card():
    """UPDATE_GOLDEN=1 pytest … writes it anew; look at it as a reader would."""
    card = new_card()
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.write_text(card, encoding="utf-8")
    assert card == GOLDEN.read_text("utf-8")


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
        ({"max_shard_bytes": 1_000}, "--max-shard-size 1000B\n"),
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


# what was done to the experts


def converted(*formats: tuple[str, int, int], tensors: int = 9, **changes):
    """Facts whose routed experts had and have these formats."""
    base = facts(**changes)
    sizes = [
        FormatSize(component="routed_experts", before_bytes=old, after_bytes=new, format=name)
        for name, old, new in formats
    ]
    report = base.folder.convert.model_copy(update={"sizes": sizes})
    return replace(base, folder=replace(base.folder, convert=report))


def test_experts_that_were_nvfp4_already_were_not_quantised():
    section = card_section(converted(("NVFP4", 10, 10)))
    assert "NVFP4 (blocks of 16), with the source's own codes and block scales;" in section
    for word in ("quantised from", "least squared", "Quantised twice", "Rounded after training"):
        assert word not in section
    assert "is not measured here" in section


def test_experts_from_mxfp8_are_quantised_twice():
    section = card_section(converted(("MXFP8", 20, 0), ("NVFP4", 0, 10)))
    assert "scales of least squared error), quantised from their MXFP8 values;" in section
    assert "Quantised twice" in section
    assert "Rounded after training" in section


def test_experts_from_bf16_are_quantised_once():
    section = card_section(converted(("BF16", 40, 0), ("NVFP4", 0, 10)))
    assert "quantised from their BF16 values;" in section
    assert "Quantised twice" not in section
    assert "Rounded after training" in section


def test_experts_from_another_checkpoint():
    value = manifest(experts_from="/data/M3-BF16")
    section = card_section(converted(("MXFP8", 20, 0), ("NVFP4", 0, 10), manifest_value=value))
    assert "quantised from the BF16 values of `--experts-from`;" in section
    assert "Quantised twice" not in section


def test_without_formats_nothing_is_claimed_of_the_source():
    section = card_section(converted())
    for word in ("quantised from", "least squared", "Quantised twice"):
        assert word not in section


def test_a_real_relayout(hub, output, tmp_path):
    out = tmp_path / "minimax"
    words = ("--to", "nvfp4", "--layout", "minimax", "--kv-scales", "none", "--jobs", "1")
    assert run_mmq("convert", output, out, *words)[0] == 0
    assert run_mmq("verify", out, "--against", output)[0] == 0
    code, events, _ = run_mmq("publish", out, "org/mm", *BASE, "--dry-run")
    assert code == 0, events
    text = "\n".join(events[-1]["card_diff"])
    assert "with the source's own codes and block scales" in text
    assert "Quantised twice" not in text
    assert "SQNR of" not in text


def test_ignored_modules_are_named():
    value = manifest(ignore=["*.layers.7.*", "a|b"])
    section = card_section(facts(manifest_value=value))
    assert "but for the modules that `--ignore` names, which stay as they were" in section
    assert "<code>\\*.layers.7.\\*</code>" in section or "`*.layers.7.*`" in section
    assert "a&#124;b" in section
    assert "--ignore" not in card_section(facts())


def test_tags_are_the_formats_that_are_in_it():
    def tags(found):
        return read_front(split_card(merged_card(ExistingCard(""), found, {})).front)["tags"]

    assert tags(converted(("BF16", 40, 0), ("NVFP4", 0, 10))) == ["nvfp4", "modelopt", "mmq"]
    assert tags(facts()) == ["nvfp4", "mxfp8", "modelopt", "mmq"]


# no fact can break out, or be made up


@pytest.mark.parametrize("marker", [START, END])
def test_markers_in_an_ignore_pattern_do_not_end_the_section(marker):
    section = card_section(facts(manifest_value=manifest(ignore=[f"x{marker}y"])))
    assert section.count(START) == section.count(END) == 1
    command = section.split("```bash\n")[-1].split("\n```")[0]
    assert shlex.split(command)[-1] == f"x{marker}y", "a shell reads the very pattern"


def test_a_hash_of_tokens_is_text_like_any_other():
    base = facts()
    logits = base.folder.verify.logits.model_copy(
        update={"tokens_sha256": f"x`\n\n{END}\n<script>"}
    )
    verify = base.folder.verify.model_copy(update={"logits": logits})
    section = card_section(replace(base, folder=replace(base.folder, verify=verify)))
    assert section.count(END) == 1
    assert "<script>" not in section


@pytest.mark.parametrize(
    "change",
    [
        {"commit": f"`</x>{END}"}, {"commit": "main"}, {"commit": 3}, {"shards": ["x"]},
        {"shards": [{"name": "a"}]}, {"shards": [{"name": "a", "bytes": "x"}]},
        {"shards": [{"name": "a", "bytes": -1}]},
        {"shards": [{"name": "a", "bytes": 1, "sha256": f"`|{END}"}]},
        {"shards": [{"name": "a", "bytes": 1, "header_sha256": "AB" * 32}]},
        {"shards": [{"name": "a", "bytes": 1, "sha256": ["ab" * 32]}]},
    ],
    ids=str,
)  # fmt: skip
def test_hashes_and_commits_are_hashes_and_commits(change):
    value = manifest()
    value["source"] |= change
    with pytest.raises(BadInputError) as error:
        facts(manifest_value=value)
    assert error.value.id == "publish-manifest-invalid"


@pytest.mark.parametrize("change", [{"versions": "x"}, {"versions": None}, {"options": ["x"]},
                                    {"source": []}, {"calibration": "x"}], ids=str)  # fmt: skip
def test_other_damage_to_a_manifest_leaves_a_card(change):
    section = card_section(facts(manifest_value=manifest() | change))
    assert section.count(END) == 1


def test_a_section_that_would_hold_a_marker_is_refused(monkeypatch):
    monkeypatch.setattr("mmq.publish.card.summary", lambda _: f"so {END}")
    with pytest.raises(BadInputError) as error:
        card_section(facts())
    assert error.value.id == "card-markers"


def test_an_unknown_worst_tensor_is_not_told_as_zero():
    base = facts()
    quality = base.folder.convert.quality.model_copy(update={"worst_tensor_sqnr_db": None})
    report = base.folder.convert.model_copy(update={"quality": quality})
    section = card_section(replace(base, folder=replace(base.folder, convert=report)))
    assert "of 21,888 tensors.\n" in section
    assert "worst tensor" not in section
    assert "worst tensor 20.90 dB." in card_section(base)


def test_the_manifest_is_not_said_to_hold_what_is_made_after_it():
    section = card_section(facts())
    assert "Every file here" not in section
    assert "Reports, recipe and card were made after it." in section


def test_relative_folders_stay_out_and_repositories_do_not():
    value = manifest(experts_from="client/secret/M3-BF16")
    assert "--experts-from M3-BF16\n" in card_section(facts(manifest_value=value))
    value = manifest(experts_from="MiniMaxAI/MiniMax-M3@main")
    value["hub"] = {"experts_from": {"repo": "MiniMaxAI/MiniMax-M3", "commit": COMMIT}}
    section = card_section(facts(manifest_value=value))
    assert "--experts-from MiniMaxAI/MiniMax-M3@main\n" in section


def test_the_page_is_sound_markdown():
    card = new_card()
    assert "\n\n\n" not in card
    assert card.count("```") % 2 == 0
    for line in card.splitlines():
        assert line == line.rstrip()
    assert REPO in card

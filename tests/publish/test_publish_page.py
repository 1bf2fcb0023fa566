"""docs/publish.md speaks of ids and options that exist, and its shown output is there."""

from __future__ import annotations

import re
from pathlib import Path

from mmq.commands.publish import publish

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "publish.md").read_text("utf-8")


def test_every_id_is_one_of_the_codes():
    known = set(
        re.findall(r'<a id="([a-z0-9-]+)"', (ROOT / "docs" / "errors.md").read_text("utf-8"))
    )
    named = set(re.findall(r"`((?:publish|card|output)-[a-z-]+)`", PAGE))
    assert len(named) > 10
    assert named <= known


def test_every_option_is_explained_and_exists():
    options = {name for o in publish.params for name in o.opts if name.startswith("--")}
    common = {"--json", "--quiet", "--debug"}
    told = set(re.findall(r"^\| (`--.*?)\|", PAGE, re.M))
    words = set(re.findall(r"--[a-z-]+", " ".join(told)))
    assert words == options - common


def test_every_block_is_filled():
    for marker in ("dry-run", "publish", "refused"):
        block = PAGE.partition(f"<!-- {marker} -->")[2].partition(f"<!-- /{marker} -->")[0]
        assert "$ mmq publish OUT" in block, marker
        assert "127.0.0.1" not in block

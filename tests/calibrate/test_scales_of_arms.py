"""Forwards with scales of their own, and the script that fills docs/kv-cache.md with them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
from in_process import run_mmq
from streamed import open_model, token_rows

from mmq.demo.bundled import bundled_model
from mmq.verify.logits.arms import Arm
from mmq.verify.logits.hidden_states import HiddenStates, flat
from mmq.verify.logits.stream import Stream
from mmq.verify.model.layer import kv_scales
from mmq.verify.model.operations import CacheMode, ReferenceOperations

SCRIPT = Path(__file__).parents[2] / "scripts" / "build_kv_tables.py"


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    out = tmp_path_factory.mktemp("converted") / "out"
    assert run_mmq("convert", bundled_model(), out, "--jobs", "1")[0] == 0
    return out


def hidden(ids_WT, work, candidate, scales):
    """What an FP8 cache on the source's weights makes of one window, after all layers."""
    tokens = token_rows(ids_WT[:1])
    arms = (Arm("source", "source"), Arm("kv", "source", CacheMode("fp8")))
    source = open_model(bundled_model())
    states = HiddenStates(work, arms, tokens.count, source.config.hidden, {})
    models = {"source": source, "candidate": candidate or source}
    stream = Stream(
        models, arms, tokens, states, ReferenceOperations(), lambda nbytes: None, scales
    )
    stream.embed()
    for number in range(source.config.layers):
        stream.run_layer(number)
    return np.array(flat(states.inputs("kv")))


def test_an_arms_scales_count_as_stored_ones(ids_WT, converted, tmp_path):
    candidate = open_model(converted)
    stored = [kv_scales(candidate.weights, number) for number in range(4)]
    assert len(set(stored)) == 4
    own = hidden(ids_WT, tmp_path / "own", None, {"kv": stored})
    assert np.array_equal(own, hidden(ids_WT, tmp_path / "stored", candidate, {}))
    assert np.array_equal(own, hidden(ids_WT, tmp_path / "before", candidate, {"kv": stored}))
    for other in (stored[::-1], [(v, k) for k, v in stored], [(1.0, 1.0)] * 4):
        assert not np.array_equal(own, hidden(ids_WT, tmp_path / "other", None, {"kv": other}))


def load_script():
    spec = importlib.util.spec_from_file_location("build_kv_tables", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["build_kv_tables"] = module
    spec.loader.exec_module(module)
    return module


def test_no_window_is_calibrated_on_and_scored():
    seen, scored = load_script().halves(7, 9)
    assert (len(seen.windows), len(scored.windows)) == (7, 9)
    theirs = {row.tobytes() for row in seen.rows()}
    assert not theirs & {row.tobytes() for row in scored.rows()}
    assert len({w.file for w in seen.windows}) == len({w.file for w in scored.windows}) == 5


@pytest.mark.slow
def test_the_page_has_the_tables_that_the_script_makes():
    script = load_script()
    made = script.measure(2, 2)
    page = (SCRIPT.parents[1] / "docs" / "kv-cache.md").read_text("utf-8")
    shown = page.partition(script.START)[2].partition(script.END)[0]

    def labels(text):
        rows = [line.split(" | ")[:2] for line in text.splitlines() if line.startswith("| ")]
        return [r if r[0].strip("| ")[:2] in ("bf", "fp", "nv") else r[:1] for r in rows]

    def stable(text):
        return [row for row in labels(text) if "index" not in row[0]]

    assert [r[0] for r in stable(made)] == [r[0] for r in stable(shown)]

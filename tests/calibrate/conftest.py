"""Calibrations of the bundled model on a few windows of its texts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from calibrating import LENGTH, WINDOWS, run_calibrate

from mmq.demo.bundled import bundled_model, bundled_texts
from mmq.verify.logits.tokens import open_tokenizer, read_texts

# the oracle of the forward's tests is an oracle here too
sys.path.append(str(Path(__file__).parents[1] / "verify" / "logits"))


@pytest.fixture(scope="session")
def ids_WT():
    texts, tokenizer = bundled_texts()[:2], open_tokenizer(bundled_model())
    return read_texts(texts, tokenizer, LENGTH, WINDOWS).rows()


@pytest.fixture(scope="session")
def calibrated(tmp_path_factory, ids_WT):
    """A calibration on all windows; not to be changed."""
    folder = tmp_path_factory.mktemp("calibrated")
    code, events = run_calibrate(folder, ids_WT)
    assert code == 0, events
    return folder

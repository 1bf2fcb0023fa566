"""The minimax block's ignored_layers: the vendor's list, and whatever else stays unquantised."""

from __future__ import annotations

import pytest
from hostile import add_mtp, good
from in_process import run_mmq


@pytest.mark.parametrize("case", ["mtp", "bf16"])
def test_every_unquantised_matrix_is_ignored(tmp_path, case):
    source = good().copy()
    if case == "mtp":
        add_mtp(source)
    folder, out = source.write(tmp_path / "src"), tmp_path / "out"
    if case == "bf16":  # a checkpoint of mmq's own, whose manifest keeps the vendor's block
        decoded = tmp_path / "bf16"
        assert run_mmq("convert", folder, decoded, "--to", "bf16", "--jobs", "1")[0] == 0
        folder = decoded
    options = ("--layout", "minimax", "--mtp", "keep", "--jobs", "1")
    assert run_mmq("convert", folder, out, *options)[0] == 0
    code, events, _ = run_mmq("verify", out, "--against", folder)
    assert code == 0, [e for e in events if e.get("severity") == "error"]


def test_an_empty_path_is_no_folder(tmp_path):
    folder = good().write(tmp_path / "src")
    for arguments in ((folder, ""), ("", tmp_path / "out")):
        code, events, _ = run_mmq("convert", *arguments)
        assert code == 2 and events[0]["id"] == "option-value"


def test_an_absent_out_is_no_verdict(tmp_path):
    folder = good().write(tmp_path / "src")
    code, events, _ = run_mmq("verify", tmp_path / "nowhere", "--against", folder)
    said = [(e["event"], e.get("id")) for e in events]
    assert (code, said) == (4, [("error", "out-not-found"), ("result", None)])

"""Files that do not fit: truncated, of another model, with NaN, layers missing: what and where."""

from __future__ import annotations

import json
import math
import shutil

import numpy as np
import pytest
from calibrating import FILES, run_calibrate
from in_process import run_mmq

from mmq.convert.safetensors_header import header_bytes
from mmq.demo.bundled import bundled_model
from mmq.demo.small_model import build_small_model

EXPERTS = FILES["experts"]


@pytest.fixture(scope="module")
def another(tmp_path_factory, ids_WT):
    """A calibration of a model with random weights."""
    root = tmp_path_factory.mktemp("another")
    source = build_small_model(root / "source")
    code, events = run_calibrate(root / "files", np.clip(ids_WT, 0, 500), source=source)
    assert code == 0, events
    return root


@pytest.fixture
def copy(calibrated, tmp_path):
    """The files of a sound calibration, to be damaged."""
    folder = tmp_path / "files"
    shutil.copytree(calibrated, folder)
    return folder


def error_of(events):
    (error,) = [e for e in events if e["event"] == "error"]
    return error


def refused(outcome, id, code=4, *words):
    got, events = outcome[:2]
    error = error_of(events)
    assert (got, error["id"]) == (code, id), error
    text = json.dumps(error, ensure_ascii=False)
    assert error["where"] and all(word in text for word in words), error
    return error


def convert(folder, *options, source=None):
    out = folder / "out"
    outcome = run_mmq("convert", source or bundled_model(), out, "--jobs", "1", *options)
    assert outcome[0] == 0 or not (out / "model.safetensors.index.json").exists()
    return outcome


def edit(path, change):
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def change_norm(model, name, bf16):
    """Overwrite the first weight of a norm."""
    name = f"language_model.{name}.weight"
    index = json.loads((model / "model.safetensors.index.json").read_text())
    shard = model / index["weight_map"][name]
    raw = bytearray(shard.read_bytes())
    length = 8 + int.from_bytes(raw[:8], "little")
    at = length + json.loads(raw[8:length])[name]["data_offsets"][0]
    assert raw[at : at + 2] != bf16
    raw[at : at + 2] = bf16
    shard.write_bytes(raw)


LAYER = "language_model.model.layers.2"
K = f"{LAYER}.self_attn.k_proj.k_scale"
W1 = f"{LAYER}.block_sparse_moe.experts.5.w1"


@pytest.mark.parametrize("option, name", [
    ("--kv-scales", "s.json"), ("--input-scales", FILES["input-scales"]),
    ("--importance", FILES["importance"]),
])  # fmt: skip
def test_convert_refuses_another_models_files(another, tmp_path, option, name):
    files = another / "files"
    small = build_small_model(tmp_path / "small")  # the model they were made from
    assert convert(tmp_path, option, files / name, source=small)[0] == 0
    # another fine-tune of the same shapes
    tuned = build_small_model(tmp_path / "tuned")
    change_norm(tuned, "model.norm", b"\x80\x3c")
    (tmp_path / "again").mkdir()
    outcome = convert(tmp_path / "again", option, files / name, source=tuned)
    error = refused(outcome, "calibration-other-model", 4, name)
    assert error["got"] != error["expected"]


@pytest.mark.parametrize("keep", [0, 1, 200, 0.5, -2])
@pytest.mark.parametrize("option, name", [
    ("--kv-scales", "s.json"), ("--input-scales", FILES["input-scales"]),
    ("--importance", FILES["importance"]),
])  # fmt: skip
def test_truncated_files(copy, option, name, keep):
    raw = (copy / name).read_bytes()
    (copy / name).write_bytes(raw[: int(keep * len(raw)) if isinstance(keep, float) else keep])
    code, events = convert(copy, option, copy / name)[:2]
    assert code == 4 and name in json.dumps(error_of(events))


@pytest.mark.parametrize("change, id, word", [
    (lambda d: d["scales"].pop(K), "kv-scales-layers", K),
    (lambda d: d["scales"].update({K: math.nan}), "kv-scales-value", K),
    (lambda d: d["scales"].update({K: -0.1}), "kv-scales-value", K),
    (lambda d: d["scales"].update({K.replace("2", "7"): 0.1}), "kv-scales-layers", "layers.7"),
    (lambda d: d["calibration"]["model"].update(norms_sha256="0" * 64),
     "calibration-other-model", "0" * 64),
])  # fmt: skip
def test_kv_scales(copy, change, id, word):
    edit(copy / "s.json", change)
    refused(convert(copy, "--kv-scales", copy / "s.json"), id, 4, word)


@pytest.mark.parametrize("change, id, word", [
    (lambda d: d["scales"].pop(W1), "input-scales-modules", W1),
    (lambda d: d["scales"].update({W1: math.nan}), "input-scales-value", W1),
    (lambda d: d["scales"].update({W1: 1e-42}), "input-scales-value", W1),
    (lambda d: d["scales"].update({W1: 0.5}), "input-scales-value", W1.replace("w1", "w3")),
    (lambda d: d["scales"].update({W1.replace("5", "99"): 0.5}), "input-scales-modules", "99"),
    (lambda d: d.update(format="mmq-kv-scales/1"), "input-scales-format", "mmq-kv-scales/1"),
])  # fmt: skip
def test_input_scales(copy, change, id, word):
    path = copy / FILES["input-scales"]
    edit(path, change)
    refused(convert(copy, "--input-scales", path), id, 4, word)


def test_importance_of_other_metadata_passes(copy):
    """Anybody's file, without mmq's metadata."""
    path = copy / FILES["importance"]
    raw = path.read_bytes()
    length = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:length])
    header.pop("__metadata__")
    specs = [(n, e["dtype"], tuple(e["shape"]), e["data_offsets"][1] - e["data_offsets"][0])
             for n, e in header.items()]  # fmt: skip
    path.write_bytes(header_bytes(specs, {"mmq_calibration": "no json"}) + raw[length:])
    assert convert(copy, "--importance", path)[0] == 0


def merge(folder, *files, experts=()):
    words = [w for f in files for w in ("--merge", f)]
    words += [w for f in experts for w in ("--merge-experts", f)]
    return run_mmq("calibrate", "-o", folder / "m.json", *words)


@pytest.mark.parametrize("change, word", [
    (lambda d: d["calibration"].pop("statistics"), "statistics"),
    (lambda d: d["calibration"]["statistics"].pop(), "3 of 4 layers"),
    (lambda d: d["calibration"]["statistics"][2].pop("v"), "layer 2"),
    (lambda d: d["calibration"]["statistics"][1]["k"].update(analytic=math.nan), "nan"),
    (lambda d: d["calibration"]["statistics"][1]["k"]["amax"].__setitem__(0, math.nan), "amax"),
    (lambda d: d["calibration"].update(runs=[{}]), "tokens"),
    (lambda d: d["calibration"]["model"].pop("norms_sha256"), "norms_sha256"),
    (lambda d: d["calibration"].update(statistics=[[]] * 4), "items"),
])  # fmt: skip
def test_damaged_statistics_do_not_merge(copy, change, word):
    edit(copy / "s.json", change)
    refused(merge(copy, copy / "s.json"), "calibration-damaged", 4, "s.json", word)


def test_files_that_do_not_belong_together(copy, another):
    for files, experts, id in (
        ([copy / "s.json", another / "files" / "s.json"], [], "calibrations-differ"),
        ([copy / "s.json"] * 2, [], "calibration-twice"),
        ([copy / "s.json"], [copy / EXPERTS, another / "files" / EXPERTS], "calibrations-differ"),
        ([copy / "s.json"], [copy / EXPERTS] * 2, "calibration-twice"),
    ):
        refused(merge(copy, *files, experts=experts), id, 2)
    edit(copy / "s.json", lambda d: d.pop("calibration"))
    refused(merge(copy, copy / "s.json"), "calibration-format", 4, "s.json")


def damaged_sums(raw, length):
    """A negative sum of squares."""
    header = json.loads(raw[8:length])
    at = length + header["layers.2.input_whole"]["data_offsets"][0]
    return raw[:at] + (-1).to_bytes(8, "little", signed=True) + raw[at + 8 :]


def nan_amax(raw, length):
    header = json.loads(raw[8:length])
    at = length + header["layers.1.act_amax"]["data_offsets"][0]
    return raw[:at] + np.float32(np.nan).tobytes() + raw[at + 4 :]


@pytest.mark.parametrize("damage, word", [
    (damaged_sums, "layer 2"), (nan_amax, "layer 1"),
    (lambda raw, length: raw.replace(b"layers.2.tokens", b"layers.9.tokens"), "layer 2"),
    (lambda raw, length: raw.replace(b"mmq_experts", b"mmq_nothing"), "mmq_experts"),
])  # fmt: skip
def test_damaged_experts_do_not_merge(copy, damage, word):
    raw = (copy / EXPERTS).read_bytes()
    length = 8 + int.from_bytes(raw[:8], "little")
    (copy / EXPERTS).write_bytes(damage(raw, length))
    outcome = merge(copy, copy / "s.json", experts=[copy / EXPERTS])
    refused(outcome, "calibration-damaged", 4, EXPERTS, word)


@pytest.mark.parametrize("words, code, id", [
    (["--text", "no such file"], 2, "text-unreadable"),
    ([], 2, "text-needed"),
    (["--merge-experts", "x"], 2, "option-value"),
])  # fmt: skip
def test_words_that_make_no_sense(tmp_path, words, code, id):
    outcome = run_mmq("calibrate", bundled_model(), "-o", tmp_path / "s.json", *words)
    assert (outcome[0], error_of(outcome[1])["id"]) == (code, id)
    assert not (tmp_path / "s.json").exists()


def test_a_damaged_work_folder_is_said_so(ids_WT, tmp_path, monkeypatch):
    from mmq.calibrate import run

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "write_expert_files", stop)
    assert run_calibrate(tmp_path, ids_WT[:1])[0] == 130
    monkeypatch.undo()
    work = tmp_path / "s.json.work"
    raw = (work / "experts-2.npz").read_bytes()
    (work / "experts-2.npz").write_bytes(raw[:100])
    refused(run_calibrate(tmp_path, ids_WT[:1]), "calibration-damaged", 4, "experts-2.npz")
    shutil.rmtree(work)
    assert run_calibrate(tmp_path, ids_WT[:1])[0] == 0


def test_nan_in_the_forward(ids_WT, tmp_path):
    """An index key that is NaN is invisible to the selection, and still found."""
    model = build_small_model(tmp_path / "model")
    change_norm(model, "model.layers.2.self_attn.index_k_norm", b"\xc0\x7f")
    outcome = run_calibrate(tmp_path / "files", np.clip(ids_WT[:1], 0, 500), source=model)
    refused(outcome, "source-nonfinite", 4, "layer 2, token 0")

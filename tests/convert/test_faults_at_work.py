"""Faults that show only at work: in a worker, between pieces, behind links, in odd dimensions."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from hostile import NORM, W1, add_mtp, as_bf16, bf16, expert, f32, good, layer, poke, tensor
from in_process import run_mmq
from m3_source import INDEX, Source, hashes, read_folder, sha256
from test_reading_shards import refused

from mmq.convert import stream
from mmq.convert.writer import AtomicFile

MANY = ("--max-shard-size", "100KB")


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_worker_that_fails_stops_the_others(convert, tmp_path, jobs):
    source = good()
    poke(source, f"{expert(2, 3, 'w2')}.weight", ((5, 6), 0x7F))
    outcome = convert(source, *MANY, "--jobs", jobs)
    assert (outcome.code, outcome.error["id"]) == (4, "nonfinite")
    assert expert(2, 3, "w2") in outcome.error["message"] and "[5, 6]" in outcome.error["message"]
    assert not outcome.finished
    assert not list(outcome.out.rglob("*.partial"))
    again = convert(tmp_path / "src", *MANY, "--jobs", jobs)
    assert (again.code, again.error["id"]) == (4, "nonfinite")


@pytest.fixture
def in_pieces(monkeypatch):
    """Sets the size of the pieces that weights are read in."""
    return lambda nbytes: monkeypatch.setattr(stream, "CHUNK_BYTES", nbytes)


@pytest.mark.parametrize("options", [(), ("--layout", "minimax"), ("--to", "bf16"),
                                     ("--scale-search", "mse")], ids=str)  # fmt: skip
@pytest.mark.parametrize("nbytes", [256, 4096, 24_576])
def test_pieces_do_not_change_bytes(tmp_path, in_pieces, nbytes, options):
    folder = good().write(tmp_path / "src")
    assert run_mmq("convert", folder, tmp_path / "whole", *options, "--jobs", "1")[0] == 0
    in_pieces(nbytes)
    assert run_mmq("convert", folder, tmp_path / "pieces", *options, "--jobs", "1")[0] == 0
    assert hashes(tmp_path / "pieces") == hashes(tmp_path / "whole")


def test_pieces_do_not_change_mxfp8(tmp_path, in_pieces):
    folder = as_bf16(good()).write(tmp_path / "src")
    options = ("--to", "mxfp8", "--jobs", "1")
    assert run_mmq("convert", folder, tmp_path / "whole", *options)[0] == 0
    in_pieces(512)
    assert run_mmq("convert", folder, tmp_path / "pieces", *options)[0] == 0
    assert hashes(tmp_path / "pieces") == hashes(tmp_path / "whole")


@pytest.mark.parametrize("name, place", [
    (f"{W1}.weight", (63, 127)), (f"{W1}.weight_scale_inv", (63, 3)),
    (f"{layer(0)}self_attn.q_proj.weight", (100, 1)),
])  # fmt: skip
def test_nan_in_the_last_piece_is_placed_right(convert, in_pieces, name, place):
    source = good()
    poke(source, name, (place, 255))
    in_pieces(256)
    outcome = convert(source)
    assert (outcome.code, outcome.error["id"]) == (4, "nonfinite")
    assert str(list(place)) in outcome.error["message"]


@pytest.mark.parametrize("flag", [(), ("--overwrite",)], ids=str)
def test_a_source_of_links_into_the_output(tmp_path, flag):
    """--overwrite would remove the very files that the source's links lead to."""
    real = good().write(tmp_path / "real")
    linked = tmp_path / "src"
    linked.mkdir()
    for path in real.iterdir():
        (linked / path.name).symlink_to(path)
    before = {p: sha256(p) for p in real.rglob("*") if p.is_file()}
    code, events, _ = run_mmq("convert", linked, real, *flag)
    (error,) = [e for e in events if e["event"] == "error"]
    assert (code, error["id"]) == (7, "output-overlaps-source")
    assert {p: sha256(p) for p in real.rglob("*") if p.is_file()} == before


@pytest.mark.parametrize("error, id", [(errno.ENOSPC, "disk-full"), (errno.EDQUOT, "disk-full"),
                                       (errno.EIO, "write-failed")])  # fmt: skip
@pytest.mark.parametrize("name", ["model-00003-of-00009.safetensors", "tensors.csv", INDEX])
def test_W4_a_full_disk_at_any_file(convert, tmp_path, monkeypatch, error, id, name):
    real = AtomicFile.write

    def write(self, data):
        if self.path.name == name and self._size == 0:
            with monkeypatch.context() as patch:
                patch.setattr(os, "write", lambda fd, view: _raise(OSError(error, "as told")))
                return real(self, data)
        return real(self, data)

    monkeypatch.setattr(AtomicFile, "write", write)
    outcome = convert(good(), *MANY)
    assert (outcome.code, outcome.error["id"]) == (6, id)
    assert name in outcome.error["message"]
    if id == "write-failed":  # any other error of the system: free space would mislead
        assert outcome.error["got"] is None and "written" in outcome.error["hint"]
    else:
        assert "free" in outcome.error["got"]
    assert not outcome.finished and not list(outcome.out.rglob("*.partial"))
    monkeypatch.undo()
    assert convert(tmp_path / "src", *MANY).code == 0


def _raise(error):
    raise error


def test_a_link_to_a_folder_above_is_not_followed(convert, tmp_path, good_output):
    folder = good().write(tmp_path / "src")
    (tmp_path / "neighbour.txt").write_bytes(b"not the model's")
    (folder / "up").symlink_to("..")
    (folder / "figures" / "self").symlink_to("..")
    assert convert(folder).hashes == good_output.hashes


def test_hash_source_fills_the_manifest(convert, good_folder, tmp_path):
    outcome = convert(good_folder, "--hash-source")
    shards = outcome.json("mmq-manifest.json")["source"]["shards"]
    assert {s["name"]: s["sha256"] for s in shards} == {
        p.name: sha256(p) for p in good_folder.glob("*.safetensors")
    }


def test_hash_source_finds_a_blob_that_is_not_what_its_name_says(convert, tmp_path):
    source = good()
    folder = source.write(tmp_path / "src")
    name = source.shard_of(NORM)
    blob = tmp_path / ("ab" * 32)
    (folder / name).rename(blob)
    (folder / name).symlink_to(blob)
    outcome = convert(folder, "--hash-source")
    assert (outcome.code, outcome.error["id"]) == (4, "shard-hash")
    assert name in outcome.error["message"] and not outcome.finished


def test_one_input_scale_absent_among_many(convert, tmp_path):
    made = convert(good(), out=tmp_path / "made")
    tensors = made.tensors
    del tensors[f"{expert(2, 3, 'w2')}.input_scale"]
    bare = Source(good().size, {"model.safetensors": tensors}, made.json("config.json"), {})
    outcome = convert(bare.write(tmp_path / "bare"), "--layout", "minimax")
    refused(outcome, "input-scale-missing", expert(2, 3, "w2"))


@pytest.mark.parametrize("counts", [
    {"num_hidden_layers": 10**12}, {"num_local_experts": 10**15},
    {"num_hidden_layers": 10**6, "num_local_experts": 10**6},
])  # fmt: skip
def test_counts_nobody_could_list(convert, counts):
    source = good()
    source.config["text_config"].update(counts)
    del source.config["text_config"]["moe_layer_freq"]
    start = time.monotonic()
    refused(convert(source), "config-inconsistent")
    assert time.monotonic() - start < 5


V_PROJ, K_NORM = f"{layer(1)}self_attn.v_proj", f"{layer(1)}self_attn.k_norm.weight"


@pytest.mark.parametrize("name, value", [
    (f"{V_PROJ}.weight", bf16(np.zeros(128))), (f"{V_PROJ}.weight", bf16(np.zeros((0, 128)))),
    (f"{V_PROJ}.weight", bf16(np.zeros((2, 64, 128)))), (K_NORM, bf16(np.zeros(31))),
    (K_NORM, bf16(np.zeros((32, 1)))), (K_NORM, tensor("I16", np.zeros(32), "<i2")),
    (f"{layer(1)}input_layernorm.weight", bf16(np.zeros(64))),
])  # fmt: skip
def test_bounds_of_odd_tensors(convert, name, value):
    source = as_bf16(good())
    source[name] = value
    refused(convert(source), "kv-scale-no-bound", layer(1))


@pytest.mark.parametrize("shape", [(0, 128), (64, 0), (0, 0)])
def test_quantised_weights_without_elements(convert, shape):
    source = good()
    module = f"{layer(0)}mlp.up_proj"
    source[f"{module}.weight"] = tensor("F8_E4M3", np.zeros(shape))
    source[f"{module}.weight_scale_inv"] = tensor("U8", np.zeros((shape[0], shape[1] // 32)))
    refused(convert(source), "weight-shape", module, list(shape))


@pytest.mark.parametrize("dtype", ["I16", "F64", "I64"])
def test_linears_of_other_dtypes(convert, dtype):
    source = good()
    width = {"I16": "<i2", "F64": "<f8", "I64": "<i8"}[dtype]
    for suffix in ("weight", "weight_scale_inv"):
        source.pop(f"{W1}.{suffix}")
    shard = source.shard_of(f"{W1.replace('w1', 'w2')}.weight")
    source.shards[shard][f"{W1}.weight"] = tensor(dtype, np.zeros((64, 128)), width)
    refused(convert(source), "weight-dtype", W1, dtype)


@pytest.mark.parametrize("dtype, storage", [("F32", "<f4"), ("F16", "<f2")])
def test_float_experts_of_other_widths(convert, dtype, storage):
    """F16 and F32 experts are quantised as BF16 ones are."""
    values = good().values(W1)
    source = as_bf16(good())
    want = convert(source).tensors
    source[f"{W1}.weight"] = tensor(dtype, values, storage)
    out = convert(source, "--overwrite").tensors
    assert {n: out[n] for n in want if n.startswith(W1)} == {
        n: want[n] for n in want if n.startswith(W1)
    }


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_stopped_twice_is_stopped_once(tmp_path, number, code):
    source = good()
    add_mtp(source)
    folder, out = source.write(tmp_path / "src"), tmp_path / "out"
    run = subprocess.Popen(
        [sys.executable, "-m", "mmq", "convert", folder, out, "--max-shard-size", "1KB",
         "--jobs", "2"], stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    while not list(out.glob("model-*.safetensors")) and run.poll() is None:
        time.sleep(0.002)
    for _ in range(3):
        os.killpg(run.pid, number)
        time.sleep(0.01)
    _, stderr = run.communicate(timeout=20)
    # after our own exit has begun, Python lets another signal end the process: 128 + n either way
    assert run.returncode in (code, -number), stderr
    assert not (out / INDEX).exists()
    options = ("--max-shard-size", "1KB", "--jobs", "1")
    assert run_mmq("convert", folder, out, *options)[0] == 0
    assert len(read_folder(out)) == len(json.loads((out / INDEX).read_bytes())["weight_map"])


def test_norms_as_f32_are_read_as_such(convert):
    source = good()
    values = source[K_NORM].f64()
    source[K_NORM] = f32(values)
    assert (
        convert(source).tensors[f"{layer(1)}self_attn.k_proj.k_scale"]
        == (convert(good(), "--overwrite").tensors[f"{layer(1)}self_attn.k_proj.k_scale"])
    )


@pytest.mark.parametrize("closes", ["commit", "discard"])
def test_a_signal_as_a_file_is_closed_closes_it_once(tmp_path, monkeypatch, closes):
    """Raised after the descriptor is gone: a second close would hit somebody else's, or fail."""
    real, closed = os.close, []

    def close(fd):
        real(fd)
        closed.append(fd)
        if len(closed) == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), AtomicFile(tmp_path / "x") as file:
        file.write(b"1")
        monkeypatch.setattr(os, "close", close)
        if closes == "commit":
            file.commit()
    monkeypatch.undo()
    assert len(closed) == 1 and not (tmp_path / "x.partial").exists()
    assert (tmp_path / "x").exists() == (closes == "commit")

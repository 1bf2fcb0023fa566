"""`mmq calibrate` on the bundled model: what it sees, and that how it was run does not matter."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap

import m3_transformers
import numpy as np
import pytest
import torch
from calibrating import FILES, run_calibrate
from in_process import run_mmq
from m3_source import read_folder
from safetensors.numpy import load_file

from mmq.calibrate import collect
from mmq.calibrate.kv_statistics import VectorStatistics
from mmq.demo.bundled import bundled_model

#: Both forwards run in F32; each mistake below moves some amax by more than 100 times this.
AGREEMENT = 1e-5


class Capture:
    """What transformers' forward puts into its caches and experts, by layer and kind."""

    def __init__(self, monkeypatch):
        from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl as modeling

        self.rotated: list[torch.Tensor] = []
        right = modeling.apply_rotary_pos_emb

        def rotary(q, k, *arguments, **named):
            q, k = right(q, k, *arguments, **named)
            self.rotated.append(k[0].transpose(0, 1))
            return q, k

        monkeypatch.setattr(modeling, "apply_rotary_pos_emb", rotary)
        self.values: dict[int, list[torch.Tensor]] = {}
        self.inputs: dict[int, list[torch.Tensor]] = {}
        self.chosen: dict[int, list[torch.Tensor]] = {}

    def watch(self, model):
        for number, layer in enumerate(model.model.language_model.layers):
            layer.self_attn.v_proj.register_forward_hook(_keep(self.values, number))
            if hasattr(layer.mlp, "gate"):
                layer.mlp.register_forward_hook(_keep_input(self.inputs, number))
                layer.mlp.gate.register_forward_hook(
                    lambda m, i, o, n=number: self.chosen.setdefault(n, []).append(o[2])
                )

    def keys(self, sparse):
        """Kind and layer of everything rotated, in the order of the forward."""
        order = []
        for number, selects in enumerate(sparse):
            order += [("k", number)] + [("index_k", number)] * selects
        found: dict[tuple[str, int], list[torch.Tensor]] = {}
        for place, tensor in enumerate(self.rotated):
            found.setdefault(order[place % len(order)], []).append(tensor)
        return {key: torch.cat(parts) for key, parts in found.items()}


def _keep(into, number):
    return lambda _m, _i, output: into.setdefault(number, []).append(output[0])


def _keep_input(into, number):
    return lambda _m, inputs, _o: into.setdefault(number, []).append(inputs[0].flatten(0, -2))


@pytest.fixture(scope="module")
def theirs(ids_WT):
    with pytest.MonkeyPatch.context() as patch:
        capture = Capture(patch)
        model = m3_transformers.load(bundled_model())
        capture.watch(model)
        with torch.no_grad():
            for row in ids_WT:
                model(input_ids=torch.from_numpy(row[None]).long())
    return capture


def table(folder):
    return json.loads((folder / "s.json").read_text())["calibration"]["layers"]


def seen_by_transformers(theirs):
    """(kind, layer) → amax of each head."""
    keys = theirs.keys([False, True, True, True])
    found = {key: x.abs().amax((0, 2)).tolist() for key, x in keys.items()}
    for number, parts in theirs.values.items():
        heads = torch.cat(parts).unflatten(1, (2, -1))
        found["v", number] = heads.abs().amax((0, 2)).tolist()
    return found


def agrees_with_transformers(folder, theirs):
    expected = seen_by_transformers(theirs)
    got = {
        (kind, layer["layer"]): layer[kind]["amax_by_head"]
        for layer in table(folder) for kind in ("k", "v", "index_k") if kind in layer
    }  # fmt: skip
    assert got.keys() == expected.keys() and len(got) == 11
    for key, amax in expected.items():
        assert got[key] == pytest.approx(amax, rel=AGREEMENT), key


def test_amax_of_every_head_is_what_transformers_caches(calibrated, theirs):
    agrees_with_transformers(calibrated, theirs)


def test_experts_see_what_transformers_routes_to_them(calibrated, theirs):
    importance = load_file(calibrated / FILES["importance"])
    scales = json.loads((calibrated / FILES["input-scales"]).read_text())["scales"]
    for number, parts in theirs.inputs.items():
        x_TM = torch.cat(parts).double()
        chosen_TK = torch.cat(theirs.chosen[number])
        prefix = f"language_model.model.layers.{number}.block_sparse_moe.experts."
        for expert in range(16):
            mine = (chosen_TK == expert).any(1)
            got = importance[f"{prefix}{expert}.w1.importance"]
            if mine.any():
                assert got == pytest.approx(x_TM[mine].square().mean(0).numpy(), rel=1e-4)
            assert np.array_equal(got, importance[f"{prefix}{expert}.w3.importance"])
            amax = x_TM.abs().max().item()
            assert scales[f"{prefix}{expert}.w1"] * 2688 == pytest.approx(amax, rel=AGREEMENT)


def test_bounds_hold_on_every_token(calibrated):
    slack = [layer[kind]["slack"] for layer in table(calibrated) for kind in layer
             if kind != "layer"]  # fmt: skip
    assert len(slack) == 11 and min(slack) >= 1 and max(slack) < 50


def test_analytic_scales_are_the_ones_that_convert_writes(calibrated, tmp_path):
    assert run_mmq("convert", bundled_model(), tmp_path / "out", "--jobs", "1")[0] == 0
    stored = read_folder(tmp_path / "out")
    data = json.loads((calibrated / "s.json").read_text())
    for number, layer in enumerate(data["calibration"]["statistics"]):
        for side in "kv":
            name = f"language_model.model.layers.{number}.self_attn.{side}_proj.{side}_scale"
            assert np.float32(layer[side]["analytic"]) == stored[name].bytes_as("<f4")


def lasting(folder):
    """All that a calibration found, without the list of runs it came from."""
    data = json.loads((folder / "s.json").read_text())
    kept = {k: data["calibration"][k] for k in ("layers", "statistics", "tokens", "observer")}
    importance = load_file(folder / FILES["importance"])
    experts = load_file(folder / FILES["experts"])
    scales = json.loads((folder / FILES["input-scales"]).read_text())["scales"]
    arrays = {name: a.tobytes() for name, a in (importance | experts).items()}
    return json.dumps([data["scales"], kept, scales]), arrays


def merged(folder, parts, *options):
    folder.mkdir(exist_ok=True)
    words = [w for p in parts for w in ("--merge", p / "s.json", "--merge-experts",
                                        p / FILES["experts"])]  # fmt: skip
    outs = [w for kind, name in FILES.items() for w in (f"--{kind}-out", folder / name)]
    return run_mmq("calibrate", "-o", folder / "s.json", *outs, *words, *options)


@pytest.fixture(scope="module")
def parts(tmp_path_factory, ids_WT):
    """The same windows in two runs, the second in another order."""
    root = tmp_path_factory.mktemp("parts")
    for name, rows in (("a", ids_WT[:1]), ("b", ids_WT[[3, 1, 2]])):
        assert run_calibrate(root / name, rows)[0] == 0
    return [root / "a", root / "b"]


@pytest.mark.parametrize("observer", ["max", "percentile", "mse"])
def test_two_runs_merged_are_one(calibrated, parts, tmp_path, observer):
    options = ("--observer", observer, "--percentile", "0.999", "--kv-format", "nvfp4")
    whole = tmp_path / "whole"
    assert merged(whole, [calibrated], *options)[0] == 0
    for name, order in (("ab", parts), ("ba", parts[::-1])):
        assert merged(tmp_path / name, order, *options)[0] == 0
        assert lasting(tmp_path / name) == lasting(whole)
    assert (tmp_path / "ab" / "s.json").read_bytes() == (tmp_path / "ba" / "s.json").read_bytes()
    if observer == "max":
        assert (
            json.loads((whole / "s.json").read_text())["scales"]
            == json.loads((calibrated / "s.json").read_text())["scales"]
        )


KILLED = """
    import os, signal, sys
    from pathlib import Path
    from mmq.calibrate import run
    from mmq.cli import main

    def kill_after(name, when):
        right, calls = getattr(run, name), []
        def dying(*arguments):
            result = right(*arguments)
            calls.append(1)
            if len(calls) == when:
                os.kill(os.getpid(), signal.SIGKILL)
            return result
        setattr(run, name, dying)

    kill_after({name!r}, {when})
    main({arguments!r})
"""


@pytest.mark.parametrize("name, when", [("save_layer", 2), ("write_input_scales", 1)])
def test_a_killed_run_goes_on_where_it_was(calibrated, ids_WT, tmp_path, name, when):
    folder = tmp_path / "run"
    folder.mkdir()
    np.save(folder / "ids.npy", ids_WT)
    outs = [str(w) for kind, n in FILES.items() for w in (f"--{kind}-out", folder / n)]
    arguments = ["calibrate", str(bundled_model()), "-o", str(folder / "s.json"), "--tokens",
                 str(folder / "ids.npy"), *outs, "--json"]  # fmt: skip
    script = textwrap.dedent(KILLED).format(name=name, when=when, arguments=arguments)
    died = subprocess.run([sys.executable, "-c", script], capture_output=True)
    assert died.returncode == -signal.SIGKILL, died.stderr.decode()
    assert not (folder / "s.json").exists() and (folder / "s.json.work").is_dir()
    code, events = run_calibrate(folder, ids_WT)
    assert code == 0
    done = when - 1 if name == "save_layer" else 4
    notes = [e["message"] for e in events if e["event"] == "note"]
    assert any(f"resuming at layer {done}" in note for note in notes)
    assert lasting(folder) == lasting(calibrated)
    for file in ("s.json", *FILES.values()):
        assert (folder / file).read_bytes() == (calibrated / file).read_bytes(), file
    assert not (folder / "s.json.work").exists()


def k_before_rope(patch):
    right = collect.ReferenceOperations.heads

    def heads(self, row, layout, norms, positions, rope):
        return right(self, row, layout, norms, torch.zeros_like(positions), rope)

    patch.setattr(collect.ReferenceOperations, "heads", heads)


def k_for_v(patch):
    right = collect.ReferenceOperations.heads

    def heads(self, *arguments):
        found = right(self, *arguments)
        return found._replace(v_TGD=found.k_TGD)

    patch.setattr(collect.ReferenceOperations, "heads", heads)


def heads_exchanged(patch):
    right = VectorStatistics.observe
    patch.setattr(VectorStatistics, "observe", lambda self, x: right(self, x.flip(1)))


def last_token_forgotten(patch):
    right = VectorStatistics.observe
    patch.setattr(VectorStatistics, "observe", lambda self, x: right(self, x[: len(x) // 2]))


def experts_left_out(patch):
    patch.setattr(collect, "_run_experts", lambda layer, tokens, outputs, seen: None)


MISTAKES = [k_before_rope, k_for_v, heads_exchanged, last_token_forgotten, experts_left_out]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_statistic_is_seen(ids_WT, theirs, tmp_path, monkeypatch, mistake):
    mistake(monkeypatch)
    assert run_calibrate(tmp_path, ids_WT)[0] == 0
    with pytest.raises(AssertionError):
        agrees_with_transformers(tmp_path, theirs)

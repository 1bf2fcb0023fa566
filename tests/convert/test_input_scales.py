"""Activation scales from a file: values in both layouts, there and back, verified, and told."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hostile import good, layer
from in_process import run_mmq

from mmq.convert import plan_tasks, tasks
from mmq.quantize.global_scale import reciprocal_scale

SOURCE = good()
EXPERTS = [
    (number, expert, projection)
    for number in range(1, SOURCE.size.layers)
    for expert in range(SOURCE.size.experts)
    for projection in ("w1", "w2", "w3")
]


def module(number, expert, projection):
    return f"{layer(number)}block_sparse_moe.experts.{expert}.{projection}"


def values() -> dict[str, float]:
    """A scale for each projection; w1 and w3 share theirs."""
    rng = np.random.default_rng(3)
    shared = {(n, e): rng.uniform(1e-4, 1e-2) for n, e, _ in EXPERTS}
    return {
        module(n, e, p): float(np.float32(shared[n, e] * (7 if p == "w2" else 1)))
        for n, e, p in EXPERTS
    }


@pytest.fixture
def scales(tmp_path):
    """(path, values)."""
    path = tmp_path / "in 刻度.json"
    runs = [{"tokens": 9, "tokens_sha256": "t", "convention": {"text_sha256": {"a": "h"}}}]
    data = {
        "format": "mmq-input-scales/1", "scales": values(),
        "calibration": {"runs": runs, "unreached_experts": 2},
    }  # fmt: skip
    path.write_text(json.dumps(data), "utf-8")
    return path


def stored(tensors, suffix):
    return {name: tensors[f"{name}.{suffix}"].bytes_as("<f4") for name in values()}


def test_modelopt_stores_the_multipliers(convert, scales):
    tensors = convert(good(), "--input-scales", scales).tensors
    assert stored(tensors, "input_scale") == {n: np.float32(v) for n, v in values().items()}
    assert all(tensors[f"{n}.input_scale"].shape == () for n in values())


def test_minimax_stores_their_reciprocals(convert, scales):
    tensors = convert(good(), "--layout", "minimax", "--input-scales", scales).tensors
    expected = {n: reciprocal_scale(np.float32(v)) for n, v in values().items()}
    assert stored(tensors, "input_global_scale") == expected
    assert all(tensors[f"{n}.input_global_scale"].shape == (1,) for n in values())


def reciprocal_forgotten(patch):
    patch.setattr(tasks, "_given_input", lambda value, module, divisor: (np.float32(value), ()))


def file_ignored(patch):
    patch.setattr(plan_tasks.TaskBuilder, "_input_value", lambda self, module: 1.0)


def other_projections_value(patch):
    right = plan_tasks.TaskBuilder._input_value

    def shifted(self, module):
        other = self.modules[module.name[:-1] + {"1": "2", "2": "3", "3": "1"}[module.name[-1]]]
        return right(self, other)

    patch.setattr(plan_tasks.TaskBuilder, "_input_value", shifted)


def double_rounding(patch):
    """1/(1/s) written where s is meant."""
    right = tasks._given_input
    patch.setattr(
        tasks, "_given_input",
        lambda value, module, divisor: right(float(reciprocal_scale(reciprocal_scale(
            np.float32(value)))), module, divisor),
    )  # fmt: skip


@pytest.mark.parametrize(
    "mistake", [reciprocal_forgotten, file_ignored, other_projections_value, double_rounding]
)
def test_a_mistake_is_seen(convert, scales, tmp_path, monkeypatch, mistake):
    mistake(monkeypatch)
    found = {
        name: convert(good(), "--layout", name, "--input-scales", scales, out=tmp_path / name)
        for name in ("modelopt", "minimax")
    }
    sound = {n: np.float32(v) for n, v in values().items()}
    inverse = {n: reciprocal_scale(v) for n, v in sound.items()}
    assert (
        stored(found["modelopt"].tensors, "input_scale"),
        stored(found["minimax"].tensors, "input_global_scale"),
    ) != (sound, inverse)


def test_nothing_else_changes(convert, scales, good_output, tmp_path):
    outcome = convert(good(), "--input-scales", scales)
    others = {n: t for n, t in outcome.tensors.items() if not n.endswith(".input_scale")}
    assert others == {n: t for n, t in good_output.tensors.items() if n in others}


def test_there_and_back_in_both_orders(convert, scales, tmp_path):
    first = {
        name: convert(good(), "--layout", name, "--input-scales", scales, out=tmp_path / name)
        for name in ("modelopt", "minimax")
    }
    for name, other in (("modelopt", "minimax"), ("minimax", "modelopt")):
        there = convert(first[name].out, "--layout", other, out=tmp_path / f"{name}-{other}")
        suffix = "input_scale" if other == "modelopt" else "input_global_scale"
        assert stored(there.tensors, suffix) == stored(first[other].tensors, suffix)
        back = convert(there.out, "--layout", name, out=tmp_path / f"{name}-back")
        assert back.tensors == first[name].tensors


@pytest.mark.parametrize("layout, other", [("modelopt", "minimax"), ("minimax", "modelopt")])
def test_a_change_of_layout_takes_new_ones(convert, scales, tmp_path, layout, other):
    first = convert(good(), "--layout", layout, out=tmp_path / "first")
    direct = convert(good(), "--layout", other, "--input-scales", scales, out=tmp_path / "direct")
    then = convert(first.out, "--layout", other, "--input-scales", scales, out=tmp_path / "then")
    suffix = "input_scale" if other == "modelopt" else "input_global_scale"
    assert stored(then.tensors, suffix) == stored(direct.tensors, suffix)
    again = convert(then.out, "--layout", layout, out=tmp_path / "again")
    suffix = "input_scale" if layout == "modelopt" else "input_global_scale"
    expected = {n: np.float32(v) for n, v in values().items()}
    if layout == "minimax":
        expected = {n: reciprocal_scale(v) for n, v in expected.items()}
    assert stored(again.tensors, suffix) == expected
    assert verify(then.out, first.out)[0] == 0


def test_manifest_and_report_tell_where_they_come_from(convert, scales):
    outcome = convert(good(), "--input-scales", scales)
    for file in ("mmq-manifest.json", "mmq-convert.json"):
        told = outcome.json(file)["calibration"]
        assert set(told) == {"input_scales"}
        assert told["input_scales"]["text_sha256"] == {"a": "h"}
        assert told["input_scales"]["tokens"] == 9
        assert told["input_scales"]["unreached_experts"] == 2
        assert len(told["input_scales"]["sha256"]) == 64
    assert (
        convert(good(), out=outcome.out.with_name("plain")).json("mmq-convert.json")["calibration"]
        == {}
    )


def verify(out, source, *options):
    code, events = run_mmq("verify", out, "--against", source, *options)[:2]
    return code, events


def result(events) -> dict:
    return next(e for e in events if e["event"] == "result")


@pytest.mark.parametrize("layout", ["modelopt", "minimax"])
def test_verify_recomputes_them(convert, scales, tmp_path, layout):
    outcome = convert(good(), "--layout", layout, "--input-scales", scales)
    code, events = verify(outcome.out, tmp_path / "src")
    assert code == 0, events
    whole = result(events)["metrics"]["compared_tensors"]
    one = module(2, 1, "w2")
    change_scalar(outcome.out, one, layout)
    code, events = verify(outcome.out, tmp_path / "src")
    assert code == 3
    ids = {f["id"]: f["where"] for f in result(events)["findings"] if f["severity"] == "error"}
    assert ids["conversion-differs"].startswith(one)
    scales.unlink()
    code, events = verify(outcome.out, tmp_path / "src")
    findings = {f["id"] for f in result(events)["findings"] if f["severity"] == "error"}
    assert findings == {"file-hash"}, "the changed value itself may be right"
    skipped = [s for level in result(events)["levels"] for s in level["skipped"]]
    assert any("input scales" in s and scales.name in s for s in skipped)
    assert result(events)["metrics"]["compared_tensors"] == whole - len(values())


def test_verify_still_sees_the_weights_without_the_file(convert, scales, tmp_path):
    outcome = convert(good(), "--input-scales", scales)
    scales.unlink()
    change_byte(outcome.out, f"{module(2, 1, 'w2')}.weight")
    code, events = verify(outcome.out, tmp_path / "src")
    assert code == 3 and "conversion-differs" in {f["id"] for f in result(events)["findings"]}


def test_zero_and_negative_ones_are_found_by_structure(convert, scales, tmp_path):
    outcome = convert(good(), "--input-scales", scales)
    change_byte(outcome.out, f"{module(2, 1, 'w2')}.input_scale", np.float32(-1).tobytes())
    code, events = run_mmq("verify", outcome.out)[:2]
    ids = {f["id"] for f in result(events)["findings"]}
    assert code == 3 and "scalar-invalid" in ids


def change_scalar(out, name, layout):
    suffix = "input_scale" if layout == "modelopt" else "input_global_scale"
    change_byte(out, f"{name}.{suffix}", np.float32(0.3).tobytes())


def change_byte(out: Path, name: str, data: bytes = b"\x5a") -> None:
    index = json.loads((out / "model.safetensors.index.json").read_text())
    shard = out / index["weight_map"][name]
    raw = bytearray(shard.read_bytes())
    length = 8 + int.from_bytes(raw[:8], "little")
    at = length + json.loads(raw[8:length])[name]["data_offsets"][0]
    assert raw[at : at + len(data)] != data
    raw[at : at + len(data)] = data
    shard.write_bytes(raw)


def test_a_resumed_run_notices_other_scales(convert, scales, tmp_path):
    """The fingerprint holds the values, not only that there is a file."""
    from mmq.convert.checkpoint import open_checkpoint
    from mmq.convert.journal import fingerprint
    from mmq.convert.options import ConvertOptions
    from mmq.convert.plan import build_plan

    source = open_checkpoint(good().write(tmp_path / "src"))

    def print_of(**options):
        return fingerprint(build_plan(source, ConvertOptions(**options)))["plan_sha256"]

    first = print_of(input_scales=str(scales))
    moved = scales.with_name("moved.json")
    moved.write_bytes(scales.read_bytes())
    assert print_of(input_scales=str(moved)) == first != print_of()
    data = json.loads(scales.read_text())
    data["scales"][module(2, 0, "w2")] *= 2
    scales.write_text(json.dumps(data))
    assert print_of(input_scales=str(scales)) != first


@pytest.mark.parametrize("options, id", [
    (("--input-scales", "no such file"), "option-value"),
    (("--to", "bf16", "--input-scales", "some.json"), "option-conflict"),
    (("--to", "mxfp8", "--input-scales", "some.json"), "option-conflict"),
])  # fmt: skip
def test_words_that_make_no_sense(convert, options, id):
    outcome = convert(good(), *options)
    assert (outcome.code, outcome.error["id"]) == (2, id)

"""There and back: between the NVFP4 layouts, to BF16, to MXFP8, and experts from another source."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hostile import INDEX, W1, add_mtp, as_bf16, bf16, expert, f32, good, poke, tensor
from in_process import Outcome, run_mmq
from m3_source import Source, hashes, nvfp4_values, read_folder, shard_bytes

#: These speak of the run or of its source, so a round trip cannot give them back.
REPORTS = ("mmq-convert.json", "mmq-manifest.json", "tensors.csv")
EXPERTS = [expert(n, e, w) for n in (1, 2) for e in range(4) for w in ("w1", "w2", "w3")]
SCALARS = {"modelopt": ("weight_scale_2", "input_scale"),
           "minimax": ("weight_global_scale", "input_global_scale")}  # fmt: skip
CODES = {"modelopt": "weight", "minimax": "weight_packed"}
OTHER = {"modelopt": "minimax", "minimax": "modelopt"}


def source():
    """The good source with globals whose double reciprocal is inexact in a seventh of all cases."""
    made, rng = good(), np.random.default_rng(3)
    for module in EXPERTS:
        made.set_values(module, made.values(module) * rng.uniform(1, 2))
    return made


def to(layout, src, out, *options):
    # globals of max scaling: amax / 2688 has an exact double reciprocal only mostly
    options = ("--scale-search", "max", "--layout", layout, "--jobs", "1", *options)
    outcome = Outcome(*run_mmq("convert", src, out, *options), out)
    assert outcome.code == 0, outcome.events
    return outcome


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(MXFP8 folder, outcomes by layout)."""
    root = tmp_path_factory.mktemp("layouts")
    folder = source().write(root / "src")
    return folder, {layout: to(layout, folder, root / layout) for layout in OTHER}


def inexact(scalars):
    """How many F32 values their double reciprocal does not give back."""
    one = np.float32(1)
    return sum(int(one / (one / s) != s) for s in scalars)


@pytest.mark.parametrize("layout", OTHER)
def test_a_round_trip_restores_every_byte(made, tmp_path, layout):
    start = made[1][layout]
    there = to(OTHER[layout], start.out, tmp_path / "there", "--max-shard-size", "100KB")
    back = to(layout, there.out, tmp_path / "back")
    assert hashes(back.out, REPORTS) == hashes(start.out, REPORTS)
    assert there.tensors == made[1][OTHER[layout]].tensors
    # a divisor may be inexact; a multiplier that a manifest gives back is not
    assert layout == "minimax" or "relayout-inexact" not in back.findings


@pytest.mark.parametrize("layout", OTHER)
def test_codes_and_block_scales_are_not_touched(made, tmp_path, layout):
    there = to(OTHER[layout], made[1][layout].out, tmp_path / "there").tensors
    start = made[1][layout].tensors
    for module in EXPERTS:
        packed = start[f"{module}.{CODES[layout]}"]
        assert there[f"{module}.{CODES[OTHER[layout]]}"] == packed
        assert there[f"{module}.weight_scale"] == start[f"{module}.weight_scale"]
    rest = [n for n in start if ".experts." not in n and not n.endswith(("k_scale", "v_scale"))]
    assert {n: there[n] for n in rest} == {n: start[n] for n in rest}


def test_files_with_mtp_too(tmp_path):
    made = source()
    add_mtp(made)
    start = to("modelopt", made.write(tmp_path / "src"), tmp_path / "1", "--mtp", "keep")
    there = to("minimax", start.out, tmp_path / "2", "--mtp", "keep")
    back = to("modelopt", there.out, tmp_path / "3", "--mtp", "keep")
    assert hashes(back.out, REPORTS) == hashes(start.out, REPORTS)


def without_manifest(outcome, folder, change=lambda tensors: None):
    """A copy of a checkpoint as another tool might have written it."""
    tensors = outcome.tensors
    change(tensors)
    config = outcome.json("config.json")
    return Source(good().size, {"model.safetensors": tensors}, config, {}).write(folder)


@pytest.mark.parametrize("layout", OTHER)
def test_without_a_manifest_inexact_scales_are_counted(made, tmp_path, layout):
    rng = np.random.default_rng(8)

    def rescale(tensors):
        for module in EXPERTS:
            shape = tensors[f"{module}.{SCALARS[layout][0]}"].shape
            tensors[f"{module}.{SCALARS[layout][0]}"] = f32(np.full(shape, rng.uniform(1, 9)))

    folder = without_manifest(made[1][layout], tmp_path / "bare", rescale)
    stored = {n: t.bytes_as("<f4").item() for n, t in read_folder(folder).items()
              if n.endswith(SCALARS[layout][0])}  # fmt: skip
    expected = inexact(np.float32(v) for v in stored.values())
    assert 0 < expected < len(stored)
    there = to(OTHER[layout], folder, tmp_path / "there")
    finding = there.findings["relayout-inexact"]
    assert (finding["got"], finding["severity"]) == (str(expected), "note")
    told = {key: value for key, value in finding.items() if key != "event"}
    assert any(told.items() <= f.items() for f in there.json("mmq-convert.json")["findings"])
    back = to(layout, there.out, tmp_path / "back")
    assert back.tensors == read_folder(folder) | {
        n: t for n, t in back.tensors.items() if n.endswith(("k_scale", "v_scale"))
    }
    (there.out / "mmq-manifest.json").unlink()
    off = to(layout, there.out, tmp_path / "off").tensors
    differ = [n for n in stored if off[n].bytes_as("<f4").item() != stored[n]]
    assert len(differ) == expected
    for name in differ:
        ours, theirs = off[name].bytes_as("<f4"), np.float32(stored[name])
        assert ours in (np.nextafter(theirs, np.float32(0)), np.nextafter(theirs, np.float32(9e9)))


def test_calibrated_input_scales_come_back(made, tmp_path):
    rng = np.random.default_rng(0)

    def calibrate(tensors):
        for module in EXPERTS:
            tensors[f"{module}.input_scale"] = f32(rng.uniform(1e-3, 2))

    folder = without_manifest(made[1]["modelopt"], tmp_path / "bare", calibrate)
    there = to("minimax", folder, tmp_path / "there")
    back = to("modelopt", there.out, tmp_path / "back")
    assert back.tensors == read_folder(folder)
    assert len(there.json("mmq-manifest.json")["other_layout_scalars"]) == inexact(
        t.bytes_as("<f4") for n, t in read_folder(folder).items() if n.endswith(SCALARS["modelopt"])
    )


def test_a_stale_manifest_does_not_decide(made, tmp_path):
    """Scalars in the manifest are used only where they belong to the scalars in the file."""
    folder = tmp_path / "edited"
    to("minimax", made[0], folder)
    shard = next(folder.glob("model-*.safetensors"))
    tensors = read_folder(folder)
    for module in EXPERTS:
        tensors[f"{module}.weight_global_scale"] = f32([3.0])
    shard.write_bytes(shard_bytes(tensors, {"format": "pt"}))
    out = to("modelopt", folder, tmp_path / "out").tensors
    third = np.float32(1) / np.float32(3)
    assert {float(out[f"{m}.weight_scale_2"].f64()) for m in EXPERTS} == {float(third)}


@pytest.mark.parametrize("value", [0.0, -1.0, np.nan, np.inf, 1e-40, 3e38])
@pytest.mark.parametrize("target", [("--layout", "minimax"), ("--to", "bf16")], ids=" ".join)
def test_scalars_no_layout_can_express(made, tmp_path, value, target):
    name = f"{W1}.weight_scale_2"
    folder = without_manifest(
        made[1]["modelopt"], tmp_path / "bare", lambda ts: ts.update({name: f32(value)})
    )
    code, events, _ = run_mmq("convert", folder, tmp_path / "out", *target, "--jobs", "1")
    (error,) = [e for e in events if e["event"] == "error"]
    assert (code, error["id"]) == (4, "scalar-invalid")
    assert name in error["message"]
    assert not (tmp_path / "out" / INDEX).exists()


def test_the_same_layout_again_is_a_usage_error(made, tmp_path):
    code, events, _ = run_mmq("convert", made[1]["modelopt"].out, tmp_path / "out")
    assert (code, events[0]["id"] if events[0]["event"] == "error" else events[-2]["id"]) == (
        2, "already-converted",
    )  # fmt: skip


def test_bf16_from_mxfp8_is_the_definition(convert):
    out, src = convert(source(), "--to", "bf16").tensors, source()
    for name, t in src.all().items():
        if t.dtype == "F8_E4M3":
            module = name.removesuffix(".weight")
            assert (out[name].dtype, out[name].shape) == ("BF16", t.shape)
            assert (out[name].f64() == src.values(module)).all()
        elif not name.endswith("_inv"):
            assert out[name] == t
    assert not [n for n in out if n.endswith("_inv")]


def rounded_to_bf16(values):
    """Float64 that is exact in F32, to BF16 to nearest even."""
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    return tensor("BF16", (bits + 0x7FFF + (bits >> 16 & 1)) >> 16, "<u2")


def test_bf16_from_either_nvfp4_layout_is_the_same(made, tmp_path):
    outs = {}
    for layout, outcome in made[1].items():
        out = tmp_path / layout
        assert run_mmq("convert", outcome.out, out, "--to", "bf16", "--jobs", "1")[0] == 0
        outs[layout] = read_folder(out)
        assert "quantization_config" not in json.loads((out / "config.json").read_bytes())
    assert outs["modelopt"] == outs["minimax"]
    start = made[1]["modelopt"].tensors
    for module in EXPERTS:
        s2 = start[f"{module}.weight_scale_2"].bytes_as("<f4")
        # e4m3 · s2 is rounded to F32 once, times e2m1 once more, as the decoder is defined
        step = nvfp4_values(
            tensor("U8", np.full(start[f"{module}.weight"].shape, 0x22)),
            start[f"{module}.weight_scale"], 1.0,
        ).astype(np.float32) * s2  # fmt: skip
        codes = nvfp4_values(
            start[f"{module}.weight"],
            tensor("F8_E4M3", np.full(start[f"{module}.weight_scale"].shape, 0x38)), 1.0,
        ).astype(np.float32)  # fmt: skip
        assert outs["modelopt"][f"{module}.weight"] == rounded_to_bf16(codes * step)


def test_bf16_beyond_its_range_is_refused(convert):
    made = good()
    poke(made, f"{W1}.weight", ((0, 0), 0x7E))
    poke(made, f"{W1}.weight_scale_inv", ((0, 0), 254))
    outcome = convert(made, "--to", "bf16")
    assert (outcome.code, outcome.error["id"]) == (4, "value-overflow")
    assert not outcome.finished


def test_mxfp8_and_back_is_idempotent(convert, tmp_path):
    rng = np.random.default_rng(9)
    made = as_bf16(good())
    for name, t in made.all().items():
        if len(t.shape) == 2 and t.dtype == "BF16" and "proj" in name:
            made[name] = bf16(rng.standard_t(3, t.shape) * 0.03)
    first = convert(made, "--to", "mxfp8", out=tmp_path / "1")
    decoded = convert(first.out, "--to", "bf16", out=tmp_path / "2")
    again = convert(decoded.out, "--to", "mxfp8", out=tmp_path / "3")
    assert again.tensors == first.tensors
    twice = convert(again.out, "--to", "bf16", out=tmp_path / "4")
    assert twice.tensors == decoded.tensors


def test_mxfp8_codes_survive_bf16(convert, tmp_path):
    """Decoded and quantised again, every code and scale byte is the one it was."""
    decoded = convert(source(), "--to", "bf16", out=tmp_path / "1")
    again = convert(decoded.out, "--to", "mxfp8", out=tmp_path / "2")
    assert again.tensors == source().all()
    block = again.json("config.json")["quantization_config"]
    assert block["quant_method"] == "mxfp8"
    assert "lm_head" in block["ignored_layers"]


def test_nvfp4_from_bf16_equals_nvfp4_from_mxfp8(convert, made, tmp_path):
    decoded = convert(source(), "--to", "bf16", out=tmp_path / "1")
    direct = to("modelopt", decoded.out, tmp_path / "2").tensors
    for module in EXPERTS:
        for suffix in ("weight", "weight_scale", "weight_scale_2", "input_scale"):
            name = f"{module}.{suffix}"
            assert direct[name] == made[1]["modelopt"].tensors[name]


def test_experts_from_another_source(convert, tmp_path):
    original = as_bf16(good())
    rng = np.random.default_rng(4)
    for module in EXPERTS:  # what the MXFP8 release was made from, before it lost precision
        shape = original[f"{module}.weight"].shape
        original[f"{module}.weight"] = bf16(rng.standard_normal(shape) * 0.02)
    folder = original.write(tmp_path / "bf16")
    from_bf16 = to("modelopt", folder, tmp_path / "a").tensors
    mixed = convert(good(), "--experts-from", folder, "--scale-search", "max")
    out, mx = mixed.tensors, good().all()
    for name, t in out.items():
        if ".experts." in name:
            assert t == from_bf16[name], name
        elif name in mx:
            assert t == mx[name], name
    dropped = {d["name"] for d in mixed.json("mmq-manifest.json")["dropped"]}
    assert dropped == {n for n in mx if n.rpartition(".")[0] in EXPERTS}


@pytest.mark.parametrize("change, word", [
    (lambda s: s.pop(f"{W1}.weight"), "absent"),
    (lambda s: s.__setitem__(f"{W1}.weight", bf16(np.zeros((64, 64)))), "[64, 64]"),
])  # fmt: skip
def test_experts_from_a_source_that_does_not_fit(convert, tmp_path, change, word):
    other = as_bf16(good())
    change(other)
    outcome = convert(good(), "--experts-from", other.write(tmp_path / "bf16"))
    assert (outcome.code, outcome.error["id"]) == (4, "experts-from-mismatch")
    assert W1 in outcome.error["message"] and word in outcome.error["got"]
    assert not outcome.out.exists()


def test_experts_from_for_experts_that_are_nvfp4(made, tmp_path):
    code, events, _ = run_mmq("convert", made[1]["modelopt"].out, tmp_path / "out", "--layout",
                              "minimax", "--experts-from", made[0])  # fmt: skip
    assert (code, [e["id"] for e in events if e["event"] == "error"]) == (2, ["option-conflict"])

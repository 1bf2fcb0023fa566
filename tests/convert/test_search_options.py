"""--scale-search and --importance: from the command line to the bytes, and back through verify."""

from __future__ import annotations

import numpy as np
import pytest
from hostile import expert, good
from in_process import Outcome, run_mmq
from m3_source import read_folder

from mmq.convert.safetensors_header import header_bytes
from mmq.kernels import ops
from mmq.quantize.global_scale import nvfp4_global_scale

EXPERTS = [expert(n, e, w) for n in (1, 2) for e in range(4) for w in ("w1", "w2", "w3")]
SEARCHES = ("max", "mse", "four-over-six")


def convert(src, out, *options):
    return Outcome(*run_mmq("convert", src, out, "--jobs", "1", *options), out)


def write_importance(path, weights):
    """A file of `<module>.importance` F32 [K] tensors."""
    tensors = {f"{m}.importance": np.asarray(w, "<f4") for m, w in weights.items()}
    specs = [(n, "F32", w.shape, w.nbytes) for n, w in tensors.items()]
    path.write_bytes(header_bytes(specs, {}) + b"".join(w.tobytes() for w in tensors.values()))
    return path


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    made = good()
    widths = {m: made.values(m).shape[1] for m in EXPERTS}
    return made.write(tmp_path_factory.mktemp("search") / "src"), widths


@pytest.fixture(scope="module")
def outputs(source, tmp_path_factory):
    root = tmp_path_factory.mktemp("outputs")
    return {s: convert(source[0], root / s, "--scale-search", s) for s in SEARCHES}


@pytest.mark.parametrize("search", SEARCHES)
def test_bytes_are_those_of_the_operation(source, outputs, search):
    tensors, made = read_folder(source[0]), outputs[search].tensors
    for module in EXPERTS:
        codes, scale = (raw(tensors[f"{module}.{s}"]) for s in ("weight", "weight_scale_inv"))
        pair = [module.replace(".w3", ".w1"), module.replace(".w1", ".w3")]
        amax = max(
            ops.mxfp8_amax(raw(tensors[f"{m}.weight"]), raw(tensors[f"{m}.weight_scale_inv"]))
            for m in pair
        )
        s2 = nvfp4_global_scale(amax, search)
        expected = ops.quantize_nvfp4_from_mxfp8(
            codes, scale, s2, search=search, backend="reference"
        )
        assert np.array_equal(raw(made[f"{module}.weight"]), expected.packed)
        assert np.array_equal(raw(made[f"{module}.weight_scale"]), expected.scale)


def test_a_search_has_the_smaller_error(outputs):
    sqnr = {s: o.json("mmq-convert.json")["quality"]["sqnr_db"] for s, o in outputs.items()}
    assert sqnr["mse"] > sqnr["four-over-six"] > sqnr["max"]


@pytest.mark.parametrize("search", SEARCHES)
def test_verify_recomputes_the_search(source, outputs, search):
    code, events, _ = run_mmq("verify", outputs[search].out, "--against", source[0])
    assert code == 0, events


def test_unit_importance_changes_no_byte(source, outputs, tmp_path):
    ones = write_importance(tmp_path / "ones", {m: np.ones(k) for m, k in source[1].items()})
    weighed = convert(
        source[0], tmp_path / "out", "--scale-search", "mse", "--importance",
        ones.rename(tmp_path / "ones.safetensors"),
    )  # fmt: skip
    assert weighed.tensors == outputs["mse"].tensors


def test_importance_moves_the_error_where_it_costs_less(source, outputs, tmp_path):
    rng = np.random.default_rng(0)
    weights = {m: rng.lognormal(0, 3, k).astype(np.float32) for m, k in source[1].items()}
    path = write_importance(tmp_path / "weights.safetensors", weights)
    weighed = convert(
        source[0], tmp_path / "out", "--scale-search", "mse", "--importance", path
    ).tensors
    plain, exact = outputs["mse"].tensors, read_folder(source[0])
    for module, weight in weights.items():
        x = ops.dequantize_mxfp8_f32(
            raw(exact[f"{module}.weight"]), raw(exact[f"{module}.weight_scale_inv"])
        )
        errors = [
            float((weight * np.square(x - decoded(made, module))).sum(dtype=np.float64))
            for made in (weighed, plain)
        ]
        assert errors[0] < errors[1], module


def raw(stored):
    return stored.bytes_as("u1")


def decoded(tensors, module):
    s2 = np.frombuffer(tensors[f"{module}.weight_scale_2"].data, "<f4")[0]
    return ops.dequantize_nvfp4_f32(
        raw(tensors[f"{module}.weight"]), raw(tensors[f"{module}.weight_scale"]), s2
    )


def test_another_importance_file_is_another_run(source, tmp_path):
    first = write_importance(tmp_path / "a.safetensors", {m: np.ones(k) for m, k in
                             source[1].items()})  # fmt: skip
    options = ("--scale-search", "mse", "--importance", first)
    assert convert(source[0], tmp_path / "out", *options).code == 0
    write_importance(first, {m: np.full(k, 2) for m, k in source[1].items()})
    (tmp_path / "out" / "model.safetensors.index.json").unlink()
    assert convert(source[0], tmp_path / "out", *options).code == 7


@pytest.mark.parametrize(
    ("damage", "id"),
    [
        (lambda w: w.pop(EXPERTS[0]), "importance-mismatch"),
        (lambda w: w.update({EXPERTS[0]: np.ones(3)}), "importance-mismatch"),
        (lambda w: w[EXPERTS[0]].__setitem__(5, -1), "importance-value"),
        (lambda w: w[EXPERTS[0]].__setitem__(5, np.nan), "importance-value"),
        (lambda w: w[EXPERTS[0]].__setitem__(5, np.inf), "importance-value"),
    ],
    ids=["absent", "shape", "negative", "nan", "inf"],
)
def test_a_bad_importance_file_is_refused(source, tmp_path, damage, id):
    weights = {m: np.ones(k, np.float32) for m, k in source[1].items()}
    damage(weights)
    path = write_importance(tmp_path / "w.safetensors", weights)
    made = convert(source[0], tmp_path / "out", "--scale-search", "mse", "--importance", path)
    assert (made.code, made.error["id"], made.finished) == (4, id, False)
    assert EXPERTS[0] in made.error["message"]


def test_importance_needs_a_search(source, tmp_path):
    made = convert(
        source[0], tmp_path / "out", "--scale-search", "max", "--importance", tmp_path / "w"
    )
    assert (made.code, made.error["id"]) == (2, "option-conflict")

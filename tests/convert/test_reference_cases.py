"""The shared reference cases (`casegen.py`), wherever they lie beside the repository: each ends as
its expect.json says."""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from in_process import Outcome, run_mmq
from m3_source import E4M3, INDEX, hashes, mxfp8_values, nvfp4_values, read_folder, snapshot

CASEGEN = Path(__file__).parents[2].parent / "shared" / "cases" / "casegen.py"

#: The cases expect amax / 2688.
OPTIONS = ("--scale-search", "max", "--jobs", "1")

pytestmark = pytest.mark.skipif(not CASEGEN.is_file(), reason="the shared cases are not here")


def _casegen():
    spec = importlib.util.spec_from_file_location("casegen", CASEGEN)
    module = importlib.util.module_from_spec(spec)
    bytecode, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    spec.loader.exec_module(module)
    sys.dont_write_bytecode = bytecode
    return module


def _names(module):
    return ["good", *(n for n, c in module.CASES.items() if c["kind"] in ("src", "scenario"))]


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    """The folder of casegen's `--all`, but for the kinds that are no source."""
    folder, module = tmp_path_factory.mktemp("cases"), _casegen()
    base = module.good()
    module.good = lambda cfg=None: copy.deepcopy(base)  # made once: it takes 0.1 s
    for name in _names(module):
        module.make(name, folder / name)
    yield folder
    module.wipe(folder)


@pytest.fixture(scope="module")
def good_case(cases):
    out = cases / "good.out"
    return Outcome(*run_mmq("convert", cases / "good", out, *OPTIONS), out)


def _run(cases, name):
    """(source, expectation, outcome) of one case, with the arguments it asks for."""
    expect = json.loads((cases / f"{name}.expect.json").read_bytes())
    source, out = cases / name, cases / f"{name}.out"
    if expect["kind"] == "scenario":
        source, out = source / "src", source / "out"
    arguments = [a.replace("{src}", str(source)) for a in expect["args"]]
    if len(arguments) == 2 and arguments[0] == str(source):
        out = Path(arguments[1])
    else:
        arguments = [str(source), str(out), *arguments]
    before = snapshot(source)
    outcome = Outcome(*run_mmq("convert", *arguments, *OPTIONS), out)
    assert snapshot(source) == before, "the source was touched"
    return source, expect, outcome


@pytest.mark.parametrize("name", _names(_casegen()) if CASEGEN.is_file() else [])
def test_case_ends_as_expected(cases, good_case, name):
    umask = os.umask(0o022)
    try:
        source, expect, outcome = _run(cases, name)
    finally:
        os.umask(umask)
    if expect["verdict"] == "reject":
        assert outcome.code not in (0, 1)
        assert outcome.error["message"]
        assert name in ("out-stale-shards", "out-is-src") or not outcome.finished
    else:
        assert outcome.code == 0, outcome.events
        assert outcome.finished
        _check_accounts(outcome.out)
    if expect["verdict"] == "warn":
        assert [f for f in outcome.of("finding") if f["severity"] == "warning"]
    CHECKS.get(name, lambda *_: None)(source, outcome, good_case)


def _check_accounts(out):
    report = json.loads((out / "mmq-convert.json").read_bytes())
    assert report["output"]["tensors"] == len(read_folder(out))


def _error_names(*words):
    def check(source, outcome, good):
        text = " ".join(str(v) for v in outcome.error.values())
        for word in words:
            assert word in text, f"{word} is not in: {text}"

    return check


def _same_as_good(source, outcome, good):
    weights = {n: h for n, h in outcome.hashes.items() if n.endswith((".safetensors", INDEX))}
    assert weights == {n: h for n, h in good.hashes.items() if n.endswith((".safetensors", INDEX))}


def _stray(source, outcome, good):
    _same_as_good(source, outcome, good)
    assert not (outcome.out / "model.safetensors").exists()


def _decodes(source, outcome, good):
    """The good case: a dequantised expert is 2^(b−127)·e4m3 within NVFP4's error."""
    src, out = read_folder(source), outcome.tensors
    name = "language_model.model.layers.1.block_sparse_moe.experts.0.w1"
    want = mxfp8_values(src[f"{name}.weight"], src[f"{name}.weight_scale_inv"])
    got = _decoded(out, name)
    assert np.square(got - want).sum() / np.square(want).sum() < 0.012


def _decoded(out, name):
    return nvfp4_values(
        out[f"{name}.weight"],
        out[f"{name}.weight_scale"],
        float(out[f"{name}.weight_scale_2"].f64()),
    )


def _router_kept(source, outcome, good):
    src, out = read_folder(source), outcome.tensors
    config = outcome.json("config.json")["quantization_config"]
    for name, t in src.items():
        if ".gate." in name or "norm" in name or "bias" in name or "index" in name:
            assert out[name] == t
        if ".block_sparse_moe.gate." in name:
            assert name.removesuffix(".weight") in config["ignore"]


def _zero_expert(source, outcome, good):
    out = outcome.tensors
    for w in ("w1", "w2", "w3"):
        name = f"language_model.model.layers.1.block_sparse_moe.experts.1.{w}"
        assert np.isfinite(out[f"{name}.weight_scale_2"].f64())
        assert out[f"{name}.weight_scale_2"].f64() > 0
        assert not _decoded(out, name).any()
    _finite_scales(source, outcome, good)


def _finite_scales(source, outcome, good):
    for name, t in outcome.tensors.items():
        if name.endswith(".weight_scale"):
            assert np.isfinite(E4M3[t.bytes_as("u1")]).all()


def _shared_scale(source, outcome, good):
    src, out = read_folder(source), outcome.tensors
    base = "language_model.model.layers.1.block_sparse_moe.experts.0."
    amax = max(
        np.abs(mxfp8_values(src[f"{base}{w}.weight"], src[f"{base}{w}.weight_scale_inv"])).max()
        for w in ("w1", "w3")
    )
    got = [out[f"{base}{w}.weight_scale_2"].f64() for w in ("w1", "w3")]
    assert got[0] == got[1] == np.float32(np.float32(amax) / np.float32(2688))


def _mtp(source, outcome, good):
    manifest = outcome.json("mmq-manifest.json")
    dropped = {d["name"] for d in manifest["dropped"] if d["reason"]}
    assert dropped == {n for n in read_folder(source) if ".mtp." in n}
    assert not any(".mtp." in n for n in outcome.tensors)
    assert outcome.json("config.json")["text_config"]["num_mtp_modules"] == 0


def _sidecars(source, outcome, good):
    kept = ["chat_template.jinja", "preprocessor_config.json", "LICENSE", "figures/bench.txt",
            "configuration_minimax_m3_vl.py", "tokenizer.json"]  # fmt: skip
    for name in kept:
        assert (outcome.out / name).read_bytes() == (source / name).read_bytes()


def _quant_config_is_new(source, outcome, good):
    assert outcome.json("hf_quant_config.json") == good.json("hf_quant_config.json")


def _unicode_names(source, outcome, good):
    name = next(n for n in read_folder(source) if "权重" in n)
    assert outcome.tensors[name] == read_folder(source)[name]


def _zero_size(source, outcome, good):
    assert outcome.tensors["language_model.model.marker"] == ("BF16", (0, 128), b"")


def _total_size(source, outcome, good):
    assert outcome.json("mmq-convert.json")["source"] | {"location": ""} == good.json(
        "mmq-convert.json"
    )["source"] | {"location": ""}


def _ignore_report(source, outcome, good):
    (finding,) = [f for f in outcome.of("finding") if f["where"] == "*gate*"]
    assert "0 of which" in finding["message"]
    _same_as_good(source, outcome, good)


def _single_file(source, outcome, good):
    assert outcome.tensors == good.tensors


def _permissions(source, outcome, good):
    modes = {p.name: p.stat().st_mode & 0o777 for p in outcome.out.rglob("*") if p.is_file()}
    assert set(modes.values()) == {0o644}, modes


def _partial_redone(source, outcome, good):
    code, _, _ = run_mmq("convert", source, outcome.out, "--overwrite", *OPTIONS)
    assert code == 0
    shards = {n: h for n, h in hashes(outcome.out).items() if n.endswith(".safetensors")}
    assert shards == {n: h for n, h in good.hashes.items() if n.endswith(".safetensors")}


_EXPERTS = "language_model.model.layers.{}.block_sparse_moe.experts.{}"
CHECKS = {
    "good": _decodes,
    "index-missing-shard": _error_names("model-00002-of-00003.safetensors"),
    "index-names-absent-tensor": _error_names(_EXPERTS.format(1, "1.w2.weight"), ".safetensors"),
    "stray-consolidated": _stray,
    "scale-in-other-shard": _same_as_good,
    "scale-dtype-e8m0": _same_as_good,
    "scale-f32-128x128": _error_names(_EXPERTS.format(1, "0.w1.weight_scale_inv"), "F32"),
    "scale-wrong-shape": _error_names(
        _EXPERTS.format(1, "0.w2.weight"), "[128, 8]", "[128, 128]", "[128, 4]"
    ),
    "lfs-pointer": _error_names("Git LFS pointer", "model-00001-of-00003.safetensors"),
    "shard-truncated": _error_names("model-00003-of-00003.safetensors", "bytes"),
    "header-length-huge": _error_names("model-00001-of-00003.safetensors", str(1 << 60)),
    "header-not-json": _error_names("model-00001-of-00003.safetensors"),
    "unknown-dtype": _error_names("language_model.model.norm.weight", "X7_MADEUP"),
    "single-file-no-index": _single_file,
    "total-size-wrong": _total_size,
    "zero-size-tensor": _zero_size,
    "untied-lm-head-missing": _error_names("lm_head", "tie_word_embeddings"),
    "symlink-dangling": _error_names("model-00002-of-00003.safetensors", "blobs/" + "0" * 64),
    "mtp-layer-present": _mtp,
    "sidecars": _sidecars,
    "conflicting-hf-quant-config": _quant_config_is_new,
    "no-quantization-config": _same_as_good,
    "long-and-unicode-names": _unicode_names,
    "fused-3d-experts": _error_names(_EXPERTS.format(1, "gate_up_proj")),
    "expert-missing": _error_names(_EXPERTS.format(2, "2.w3")),
    "w1-w3-scale-mismatch": _shared_scale,
    "all-zero-expert": _zero_expert,
    "all-zero-block": _finite_scales,
    "weight-nan": _error_names(_EXPERTS.format(1, "0.w1.weight"), "2 NaN"),
    "scale-nan-255": _error_names(_EXPERTS.format(1, "0.w1.weight_scale_inv"), "[0, 1]"),
    "dim-not-multiple-of-16": _error_names(_EXPERTS.format(1, ""), "152"),
    "router-kept": _router_kept,
    "router-bf16-name-gate_proj": _router_kept,
    "ignore-gate-too-broad": _ignore_report,
    "out-partial-shard": _partial_redone,
    "out-stale-shards": _partial_redone,
    "out-perms-umask": _permissions,
}

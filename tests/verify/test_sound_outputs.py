"""What is right passes: every kind of conversion, mmq's own and as a foreign one."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from hostile import W1, as_bf16, good
from planted import judge

from mmq.errors import BadInputError, UsageError
from mmq.report.schema import VerifyReport

LAYOUTS = ["modelopt", "minimax"]


def assert_pass(judged):
    assert judged.verdict == "pass", [f for f in judged.report.findings if f.severity != "note"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_own_conversion_byte_for_byte(layout, conversions):
    judged = conversions[layout].judge()
    assert_pass(judged)
    metrics, source = judged.report.metrics, judged.report.against
    assert metrics["compared_tensors"] == judged.report.checkpoint.tensors
    assert metrics["compared_bytes"] == judged.report.checkpoint.payload_bytes
    assert metrics["quantised_tensors"] == 24
    assert 20 < metrics["sqnr_db_min"] <= metrics["sqnr_db_mean"] < 22
    assert source is not None and source.tensors == 130 + 18
    assert judged.skipped == ""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_foreign_conversion_by_value(layout, request):
    out = request.getfixturevalue(layout).foreign()
    judged = out.judge()
    assert_pass(judged)
    assert judged.report.metrics["quantised_tensors"] == 24
    assert "manifest" in judged.skipped


@pytest.mark.parametrize("layout", LAYOUTS)
def test_alone_says_what_was_skipped(layout, conversions):
    judged = conversions[layout].alone()
    assert_pass(judged)
    assert [level.level for level in judged.report.levels] == ["structure"]
    assert "--against" in judged.skipped and "SHA-256 of the shards" in judged.skipped
    assert judged.report.levels[0].checks["block scales scanned"] == 49


def test_structure_against_the_source(modelopt):
    judged = modelopt.judge("structure")
    assert_pass(judged)
    assert "pass-through bytes" in judged.skipped
    assert judged.report.metrics == {}


OPTIONS = [
    {"kv_scales": "unit"}, {"kv_scales": "none"}, {"input_scales": "none"}, {"to": "bf16"},
    {"ignore": ("*.layers.2.block_sparse_moe.experts.*",)}, {"kv_format": "none"},
    {"layout": "minimax", "kv_scales": "unit"},
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(map(str, o.values())))
def test_every_option(options, good_folder, make):
    out = make(good_folder, **options)
    assert_pass(out.judge())
    if options.get("to") != "bf16":
        assert_pass(out.foreign().judge())


def test_bf16_source(make, tmp_path):
    source = as_bf16(good()).write(tmp_path / "bf16")
    assert_pass(make(source, "nvfp4").judge())
    mxfp8 = make(source, "mxfp8", to="mxfp8")
    assert_pass(mxfp8.judge())
    judged = mxfp8.foreign().judge()
    assert judged.verdict == "pass" and "MXFP8 weights" in judged.skipped


def test_foreign_bf16_is_skipped_not_passed(good_folder, make):
    judged = make(good_folder, to="bf16").foreign().judge()
    assert "BF16 weights" in judged.skipped
    assert judged.report.metrics["quantised_tensors"] == 0


@pytest.mark.parametrize(("first", "second"), [LAYOUTS, LAYOUTS[::-1]])
def test_change_of_layout(first, second, conversions, make):
    out = make(conversions[first].folder, layout=second)
    assert_pass(out.judge())
    assert_pass(out.foreign().judge())


def test_experts_from_bf16(good_folder, make, tmp_path):
    bf16 = as_bf16(good()).write(tmp_path / "bf16")
    out = make(good_folder, experts_from=str(bf16))
    assert_pass(out.judge())
    bf16.rename(tmp_path / "moved")
    judged = out.judge()
    assert_pass(judged)
    assert "byte comparison of experts" in judged.skipped


def test_kv_scales_from_a_file(good_folder, make, tmp_path):
    names = [
        f"language_model.model.layers.{n}.self_attn.{s}_proj.{s}_scale"
        for n in range(3)
        for s in "kv"
    ]
    file = tmp_path / "kv.json"
    file.write_text(json.dumps({"format": "mmq-kv-scales/1", "scales": dict.fromkeys(names, 0.5)}))
    out = make(good_folder, kv_scales=str(file))
    assert_pass(out.judge())
    file.unlink()
    judged = out.judge()
    assert_pass(judged)
    assert "values of the KV scales" in judged.skipped


def test_same_tensors_in_other_source_shards(modelopt, tmp_path):
    source = good(shards=5).write(tmp_path / "other")
    judged = judge(modelopt.folder, source)
    assert_pass(judged)
    assert judged.one("source-identity", "model-00001-of-00003.safetensors", "note")


def test_report_lists_every_file(modelopt):
    judged = modelopt.judge()
    names = {p.relative_to(modelopt.folder).as_posix() for p in modelopt.folder.rglob("*")
             if p.is_file()}  # fmt: skip
    assert {f.name for f in judged.report.files} == names - {"mmq-convert.json", "mmq-verify.json"}
    stored = VerifyReport.model_validate_json((modelopt.folder / "mmq-verify.json").read_bytes())
    assert stored == judged.report


def test_read_only_output_is_no_failure(modelopt):
    modelopt.folder.chmod(0o555)
    try:
        assert_pass(modelopt.judge())
        written = (modelopt.folder / "mmq-verify.json").exists()
        assert written == (os.geteuid() == 0)
    finally:
        modelopt.folder.chmod(0o755)


def test_header_manifests(conversions):
    judged = judge("minimax-m3-mxfp8", None)
    assert "no folder of weights" in judged.skipped
    with pytest.raises(UsageError, match="header manifest"):
        judge(conversions["modelopt"].folder, "minimax-m3-mxfp8", "weights")
    judged = judge(conversions["modelopt"].folder, "minimax-m3-mxfp8")
    assert judged.verdict == "fail" and "tensor values" in judged.skipped


def test_weights_level_needs_a_source(conversions):
    with pytest.raises(UsageError, match="--level weights"):
        judge(conversions["modelopt"].folder, None, "weights")
    with pytest.raises(UsageError, match="unknown"):
        judge(conversions["modelopt"].folder, None, "guesses")


def test_unreadable_source_is_bad_input(conversions, tmp_path):
    source = good()
    source.pop(f"{W1}.weight_scale_inv")
    with pytest.raises(BadInputError):
        judge(conversions["modelopt"].folder, source.write(tmp_path / "bad"))


def test_structure_imports_neither_torch_nor_numba(conversions):
    code = (
        "import sys, io\nfrom mmq.console import Console\nfrom mmq.verify.run import verify\n"
        "console = Console('quiet', stdout=io.StringIO(), stderr=io.StringIO())\n"
        "verify(sys.argv[1], sys.argv[2], 'structure', strict=False, report_path=None,"
        " console=console)\n"
        "assert not {'torch', 'numba'} & set(sys.modules)\n"
    )
    folder, source = conversions["modelopt"].folder, conversions["modelopt"].source
    subprocess.run([sys.executable, "-c", code, folder, source], check=True)

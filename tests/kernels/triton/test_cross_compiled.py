"""Every kernel compiled for every target: the code may do no arithmetic but what is written."""

from __future__ import annotations

import importlib
import inspect
import re

import pytest

triton = pytest.importorskip("triton", reason="needs triton, which has wheels for Linux only")

import build_gpu_doc  # noqa: E402
import faulty_kernels  # noqa: E402

from mmq.kernels.triton import (  # noqa: E402
    amax,
    backend,
    blocks,
    mxfp8,
    nvfp4,
    scale_search,
    small_floats,
)
from mmq.kernels.triton.cross_compile import (  # noqa: E402
    TARGETS,
    VARIANTS,
    Variant,
    compile_variant,
    faults,
)

by_name = {variant.name: variant for variant in VARIANTS}


#: Left to the full table: what differs from another variant by its source's type alone.
FAST = [variant for variant in VARIANTS if "F32" not in variant.name]


def test_every_target_and_variant_is_judged_somewhere():
    assert {v.kernel for v in FAST} == {v.kernel for v in VARIANTS}


@pytest.mark.parametrize("target", ["sm_100", "gfx950"])
@pytest.mark.parametrize("variant", FAST, ids=lambda v: v.name)
def test_code_on_two_targets(variant, target):
    assert faults(compile_variant(variant, target), variant) == []


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
def test_code_on_every_target(variant, target):
    assert faults(compile_variant(variant, target), variant) == []


@pytest.mark.parametrize(
    ("target", "architecture"),
    [
        ("sm_90", ".target sm_90a"),
        ("sm_100", ".target sm_100a"),
        ("sm_103", ".target sm_103a"),
        ("sm_107", ".target sm_107a"),
        ("sm_120", ".target sm_120a"),
        ("gfx950", "-gfx950"),
    ],
)
def test_every_target_is_reached(target, architecture):
    """The compiler made code for the very target, not for a relative it knows better."""
    variant = by_name["amax of BF16"]
    compiled = compile_variant(variant, target)
    assert re.search(rf"{re.escape(architecture)}\b", compiled.assembly)
    assert faults(compiled, variant) == []


def test_where_machine_code_cannot_be_read():
    """Triton 3.9's nvdisasm (CUDA 13.1) does not know sm_107: there PTX alone is judged."""
    variant = by_name["amax of BF16"]
    unread = {t for t in TARGETS if compile_variant(variant, t).machine is None}
    assert unread <= {"sm_107"}
    if unread:
        message = compile_variant(variant, "sm_107").unread
        assert "Cannot decode architecture 'SM107a'" in message


def test_no_kernel_is_left_out():
    written = {
        value
        for module in (amax, blocks, mxfp8, nvfp4, scale_search, small_floats)
        for name, value in inspect.getmembers(module)
        if name.endswith("_kernel")
    }
    assert written == {variant.kernel for variant in VARIANTS}


@pytest.mark.parametrize(
    "variant",
    {variant.kernel.__name__: variant for variant in VARIANTS}.values(),
    ids=lambda v: v.kernel.__name__,
)
def test_counts_of_one(variant):
    """Triton makes an argument that is 1 a constant, which has no methods of a tensor."""
    counts = {"blocks", "groups", "count", "rows", "row_blocks"} & set(variant.kernel.arg_names)
    assert compile_variant(variant, "gfx950", ones=frozenset(counts)).spilled == 0


@pytest.mark.slow
def test_table_in_the_docs_is_current():
    page = build_gpu_doc.TARGET.read_text("utf-8")
    assert build_gpu_doc.with_table(page) == page


def test_a_triton_that_fuses_is_refused(monkeypatch):
    monkeypatch.setattr(triton, "__version__", "3.6.0")
    with pytest.raises(ImportError, match=r"3\.6\.0 may fuse"):
        importlib.reload(backend)


def faulty(kernel, target, **options):
    types = {"values": "*fp32", "out": "*fp32"}
    variant = Variant("faulty", kernel, frozenset({16}), types, {"TILE": 4096}, 256)
    options = {"num_warps": 4, "enable_fp_fusion": False} | options
    return "; ".join(faults(compile_variant(variant, target, options=options), variant))


@pytest.mark.parametrize(
    ("kernel", "options", "nvidia", "amd"),
    [
        ("fast_division", {}, "div.full", None),  # LLVM has no fast division unless asked for
        ("product_and_sum", {"enable_fp_fusion": True}, "fma.rn.f32", "fused"),
        ("product_and_sum_f64", {"enable_fp_fusion": True}, "DFMA", "fused operations on F64"),
        ("flushing", {}, ".ftz", None),
        ("strided_loads", {}, "loads of [4] bytes", "loads of [4] bytes"),
        ("many_registers", {"num_warps": 1, "maxnreg": 64}, "spills", None),
    ],
)
def test_planted_faults_are_found(kernel, options, nvidia, amd):
    kernel = getattr(faulty_kernels, kernel)
    assert nvidia in faulty(kernel, "sm_100", **options)
    if amd:
        assert amd in faulty(kernel, "gfx950", **options)


def test_sound_twins_have_no_faults():
    """The same kernels under our settings: the checks do not cry at everything."""
    for kernel in (faulty_kernels.product_and_sum, faulty_kernels.product_and_sum_f64):
        assert faulty(kernel, "sm_100") == "" == faulty(kernel, "gfx950")

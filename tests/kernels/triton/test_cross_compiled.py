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
    blocks,
    cross_compile,
    launch,
    mxfp8,
    nvfp4,
    scale_search,
    small_floats,
)
from mmq.kernels.triton.cross_compile import (  # noqa: E402
    SHARED_LIMIT,
    ForwardVariant,
    check,
)
from mmq.kernels.triton.launch import TARGETS, launch_options, target_name  # noqa: E402
from mmq.kernels.triton.weight_variants import (  # noqa: E402
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
        importlib.reload(launch)


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
        ("fast_root", {}, "sqrt.approx", "0 divisions, 16 roots"),
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
    sound = "product_and_sum", "product_and_sum_f64", "rounded_root"
    for kernel in (getattr(faulty_kernels, name) for name in sound):
        assert faulty(kernel, "sm_100") == "" == faulty(kernel, "gfx950")
    assert {faulty(faulty_kernels.rounded_root, target) for target in TARGETS} == {""}


def forward(kernel, target, **more):
    """What `check` says of a faulty kernel as one of the forward."""
    types = {"values": "*fp32", "out": "*fp32"}
    options = more.pop("options", {})

    def launch_with(name):
        return launch_options(4 * TARGETS[name].warp_size, TARGETS[name], **options)

    kernel = getattr(faulty_kernels, kernel)
    variant = ForwardVariant("faulty", kernel, types, {"TILE": 4096}, launch_with, **more)
    return "; ".join(check(variant.compile(target), variant))


def test_forward_kernels_are_judged():
    """Each of the checks of a forward kernel says something, and a sound kernel nothing."""
    assert set(SHARED_LIMIT) == set(TARGETS)
    for target, product in (("sm_100", r"mul\.f32|mul\.rn\.f32"), ("gfx950", "v_(pk_)?mul_f32")):
        want, sound = {target: product}, "product_and_sum"
        assert forward(sound, target, expect=want, exact=True) == ""
        assert forward(sound, target, forbid=want).startswith("has ")
        assert forward("strided_loads", target, expect=want) == f"no {product}"
        fused = {"options": {"enable_fp_fusion": True}}
        assert re.search(r"fma\.rn|fused", forward(sound, target, exact=True, **fused))
        assert forward(sound, target, **fused) == ""
    spilling = {"options": {"num_warps": 1, "maxnreg": 64}}
    spilled = forward("many_registers", "sm_100", **spilling)
    assert spilled.startswith("spills ")
    bound = {"sm_100": int(spilled.removeprefix("spills "))}
    assert forward("many_registers", "sm_100", spill_bound=bound, **spilling) == ""
    bound["sm_100"] -= 1
    assert forward("many_registers", "sm_100", spill_bound=bound, **spilling) == spilled


def test_loads_by_their_names():
    """AMD's names of loads, in registers or straight to LDS, and their bytes."""
    names = {
        "buffer_load_dwordx4": 16, "global_load_ushort": 2, "buffer_load_sbyte": 1,
        "global_load_short_d16_hi": 2, "global_load_ubyte_d16": 1, "buffer_load_lds_dwordx4": 16,
        "global_load_lds_dword": 4,
    }  # fmt: skip
    for name, size in names.items():
        assert cross_compile._AMD_BYTES[cross_compile._AMD_LOAD.fullmatch(name)[1]] == size
    assert not cross_compile._AMD_LOAD.fullmatch("s_load_dwordx4")


def test_targets_have_names():
    assert [target_name(target) for target in TARGETS.values()] == list(TARGETS)


def test_shared_memory_is_limited(monkeypatch):
    """A sum over a program's threads goes through shared memory."""
    monkeypatch.setitem(SHARED_LIMIT, "sm_120", 4)
    assert "of 4 bytes of shared memory" in forward("many_registers", "sm_120")

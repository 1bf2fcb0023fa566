"""Router and expert kernels compiled for every target, and what Triton does where we refuse."""

from __future__ import annotations

import re

import pytest

triton = pytest.importorskip("triton", reason="needs triton, which has wheels for Linux only")

import triton.language as tl  # noqa: E402

from mmq.kernels.triton import expert_gemm, moe, moe_variants, router  # noqa: E402
from mmq.kernels.triton.cross_compile import ForwardVariant, check, compile_kernel  # noqa: E402
from mmq.kernels.triton.launch import TARGETS, launch_options  # noqa: E402

by_name = {variant.name: variant for variant in moe_variants.VARIANTS}
#: What a quick run compiles: each kernel, each kind of dot, the smallest and cheapest to compile.
QUICK = [
    ("gate and up, nvfp4 activations, 16 slots, none shared", "sm_100"),
    ("down, nvfp4 activations, 16 slots, none shared", "sm_120"),
    ("down, bf16 activations, 16 slots", "gfx950"),
    ("combine", "gfx950"),
    ("router of BF16", "sm_100"),
]


@pytest.mark.parametrize(("name", "target"), QUICK)
def test_code_of_some(name, target):
    assert check(by_name[name].compile(target), by_name[name]) == []


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("variant", moe_variants.VARIANTS, ids=lambda v: v.name)
def test_code_on_every_target(variant, target):
    assert check(variant.compile(target), variant) == []


def test_every_kernel_is_compiled_somewhere():
    written = {
        value
        for module in (expert_gemm, router)
        for name, value in vars(module).items()
        if name.endswith("_kernel")
    }
    assert written == {variant.kernel for variant in moe_variants.VARIANTS}
    assert written == {by_name[name].kernel for name, _ in QUICK}


@pytest.mark.parametrize("target", TARGETS)
def test_supports_says_what_is_expected_of_the_code(target):
    """The instruction that `supports` promises is the one that the code is searched for."""
    for activations in ("bf16", "nvfp4"):
        support = moe.supports(target, activations=activations)
        name = f"down, {activations} activations, 16 slots"
        wanted = by_name[name].expect[target]
        assert support.ok
        assert (support.path == "native") == ("mxf4nvf4" in wanted)
        assert by_name[name].target_constants[target]["NATIVE"] == (support.path == "native")
    assert moe.supports("sm_100", activations="nvfp4").path == "native"
    assert moe.supports("gfx950", activations="nvfp4").path == "fallback"
    assert router.supports(target).ok


@triton.jit
def dot_scaled_kernel(
    a, a_scale, b, b_scale, out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    A: tl.constexpr, B: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """One tile of a block-scaled dot with elements A and B, scales of one type, per GROUP."""
    PA: tl.constexpr = 2 if A == "e2m1" else 1
    PB: tl.constexpr = 2 if B == "e2m1" else 1
    m, n, g = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K // GROUP)
    a_MP = tl.load(a + m[:, None] * (K // PA) + tl.arange(0, K // PA)[None, :])
    b_PN = tl.load(b + n[None, :] * (K // PB) + tl.arange(0, K // PB)[:, None])
    a_scale_MG = tl.load(a_scale + m[:, None] * (K // GROUP) + g[None, :])
    b_scale_NG = tl.load(b_scale + n[:, None] * (K // GROUP) + g[None, :])
    acc = tl.dot_scaled(a_MP, a_scale_MG, A, b_PN, b_scale_NG, B)
    tl.store(out + m[:, None] * N + n[None, :], acc)


def compile_dot(a, b, target, rows=128, columns=16, warps=4):
    """Code of a dot with E4M3 scales of 16."""
    pointer = {"e2m1": "*u8", "e4m3": "*fp8e4nv"}
    types = {"a": pointer[a], "b": pointer[b], "a_scale": "*fp8e4nv", "b_scale": "*fp8e4nv"}
    constants = {"M": rows, "N": columns, "K": 128, "A": a, "B": b, "GROUP": 16}
    options = launch_options(32 * warps, TARGETS[target], num_warps=warps)
    return compile_kernel(
        dot_scaled_kernel, types | {"out": "*fp32"}, constants, target, options
    ).assembly


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("e2m1", "e4m3"),
        pytest.param("e4m3", "e2m1", marks=pytest.mark.slow),
        pytest.param("e4m3", "e4m3", marks=pytest.mark.slow),
    ],
)
def test_what_is_refused_compiles_to_other_scales(a, b):
    """E4M3 scales of 16 beside an E4M3 operand: Triton takes the instruction for E8M0 of 32."""
    assert not moe.supports("sm_100", activations="fp8").ok
    code = compile_dot(a, b, "sm_100")
    assert re.search(r"tcgen05\.mma\S*kind::mxf8f6f4\.block_scale\.block32", code)
    assert "mxf4nvf4" not in code
    assert "block16" not in code


def test_what_is_allowed_compiles_to_its_scales():
    code = compile_dot("e2m1", "e2m1", "sm_100")
    assert re.search(r"tcgen05\.mma\S*kind::mxf4nvf4\.block_scale\.block16", code)
    assert "mxf8f6f4" not in code


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "columns"), [(64, 16), (128, 8)])
def test_smaller_tiles_lose_the_native_dot(rows, columns):
    """In silence, which is why the code is searched for the instruction."""
    assert "mxf4nvf4" not in compile_dot("e2m1", "e2m1", "sm_100", rows, columns)


def test_cdna4_has_no_nvfp4_dot():
    """So that gfx950 decodes: Triton finds no instruction, and fails loudly."""
    with pytest.raises(Exception, match=r"(?s)."):
        compile_dot("e2m1", "e2m1", "gfx950")


@triton.jit
def tf32_kernel(hidden, gate, scores, N: tl.constexpr):
    n = tl.arange(0, N)
    x_NN = tl.load(hidden + n[:, None] * N + n[None, :])
    gate_NN = tl.load(gate + n[:, None] * N + n[None, :])
    tl.store(scores + n[:, None] * N + n[None, :], tl.dot(x_NN, gate_NN, input_precision="tf32"))


def test_a_router_with_rounded_operands_would_be_found():
    variant = by_name["router of F32"]
    wrong = ForwardVariant(
        "rounded", tf32_kernel, variant.types, {"N": 32}, variant.options,
        expect=variant.expect, forbid=variant.forbid,
    )  # fmt: skip
    assert any("tf32" in fault or "mma" in fault for fault in check(wrong.compile("sm_90"), wrong))

"""QKV kernels compiled for every target: the multiply they are written for, exact arithmetic."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

pytest.importorskip("triton", reason="needs triton, which has wheels for Linux only")

from mmq.kernels.triton.cross_compile import check
from mmq.kernels.triton.launch import TARGETS
from mmq.kernels.triton.qkv_rope import TALL, VARIANTS, supports

by_name = {variant.name: variant for variant in VARIANTS}
CASES = [(variant, target) for variant in VARIANTS for target in variant.targets]
NVFP4 = by_name["norm, RoPE, KV write: NVFP4"]
#: Those of the normal suite: each kernel, both vendors, and each kind of multiply.
FAST = [
    (NVFP4, "sm_100"),
    (NVFP4, "gfx950"),
    (by_name["QKV BF16 × MXFP8, 64 tokens"], "sm_90"),
    (by_name["QKV MXFP8 × MXFP8, 128 tokens"], "sm_103"),
    (by_name["QKV BF16 × MXFP8 to pages, 16 tokens"], "sm_120"),
]
_MULTIPLY = re.compile(r"(?:tcgen05\.mma|wgmma\.mma_async|mma\.sync|v_mfma)[\w.:]*")

named = {"argvalues": FAST, "ids": lambda x: getattr(x, "name", x)}


def test_names_differ():
    assert len(by_name) == len(VARIANTS)


@pytest.mark.parametrize(("variant", "target"), **named)
def test_code(variant, target):
    assert check(variant.compile(target), variant) == []


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "target"), **(named | {"argvalues": CASES}))
def test_code_on_every_target(variant, target):
    assert check(variant.compile(target), variant) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "target"),
    [(v, t) for v, t in CASES if "to pages" in v.name],
    ids=lambda x: getattr(x, "name", x),
)
def test_fused_and_unfused_multiply_alike(variant, target):
    """Same tiles, same launch, same instruction, same number of them: so the row has the same bits.

    That is what makes pages equal on a GPU too, as far as it can be seen without one.
    """
    rows = by_name[variant.name.replace(" to pages", "")]
    assert rows.options(target) == variant.options(target)
    same = ("T", "D", "K", "NATIVE")
    assert [rows.constants[n] for n in same] == [variant.constants[n] for n in same]
    found = [_MULTIPLY.findall(v.compile(target).assembly) for v in (rows, variant)]
    assert found[0]
    assert sorted(found[0]) == sorted(found[1])


def test_fused_arithmetic_is_found():
    bf16 = by_name["norm, RoPE, KV write: BF16"]
    fusing = replace(bf16, options=lambda target: {"num_warps": 4, "enable_fp_fusion": True})
    assert any("fma" in fault for fault in check(fusing.compile("sm_90"), fusing))


def test_a_tile_too_low_is_found():
    """Block scales want 128 rows of `tcgen05.mma`; with fewer it is decoded and says nothing."""
    variant = by_name["QKV MXFP8 × MXFP8, 128 tokens"]
    low = replace(variant, constants=variant.constants | {"T": 64})
    assert TALL.tokens == 128
    assert any("block_scale" in fault for fault in check(low.compile("sm_100"), low))


@pytest.mark.parametrize("target", TARGETS)
def test_what_is_said_is_what_is_compiled(target):
    native = {v.name for v, t in CASES if t == target and v.constants.get("NATIVE")}
    both = supports(target, "mxfp8", "mxfp8")
    assert (both.path == "native") == bool(native) == (target != "sm_90")
    assert supports(target) == supports(target, "bf16", "mxfp8")
    assert supports(target).path == "fallback"
    assert supports(target, "bf16", "bf16").path == "native"


def test_what_there_is_none_of():
    assert not supports("sm_80").ok
    assert not supports("sm_100", "nvfp4", "mxfp8").ok

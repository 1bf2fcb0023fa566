"""Attention kernels compiled for every target: matrix instructions, no spills, shared memory."""

from __future__ import annotations

import dataclasses
import inspect

import pytest

pytest.importorskip("triton", reason="needs triton, which has wheels for Linux only")

from mmq.kernels.kv_pages import PageLayout
from mmq.kernels.triton import block_attention
from mmq.kernels.triton.block_attention import DOTS, supports
from mmq.kernels.triton.block_attention_variants import ODD, VARIANTS
from mmq.kernels.triton.cross_compile import check
from mmq.kernels.triton.fp8_staging import INSTRUCTIONS, PATHS
from mmq.kernels.triton.launch import TARGETS

by_name = {variant.name: variant for variant in VARIANTS}
#: One of each kind for the normal suite.
FAST = [
    ("chosen blocks, bf16", "sm_90"),
    ("chosen blocks, nvfp4 staged", "sm_100"),
    ("all keys, tiles of 8, fp8", "sm_107"),
    ("all keys, tiles of 8, nvfp4", "gfx950"),
    ("merge of 3 parts", "gfx950"),
]


def found(variant, target):
    return check(variant.compile(target), variant)


@pytest.mark.parametrize(("name", "target"), FAST)
def test_a_few(name, target):
    assert found(by_name[name], target) == []


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
def test_every_variant_on_every_target(variant, target):
    assert found(variant, target) == []


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_counts_of_one(target):
    """Triton makes an argument that is 1 a constant, which has no methods of a tensor."""
    for name in ("chosen blocks in 16 parts, fp8", "all keys, tiles of 8, fp8", "merge of 3 parts"):
        variant = by_name[name]
        ones = dict.fromkeys(set(ODD) & set(variant.kernel.arg_names), 1)
        assert not found(dataclasses.replace(variant, constants=ones | variant.constants), target)


def test_no_kernel_is_left_out():
    written = {v for n, v in inspect.getmembers(block_attention) if n.endswith("_kernel")}
    assert written == {variant.kernel for variant in VARIANTS}
    assert written == {by_name[name].kernel for name, _ in FAST}


@pytest.mark.parametrize("target", TARGETS)
def test_support_says_what_compiles(target):
    """BF16 pages are native by the instruction that the compiled tiles are checked for."""
    native = supports(target, PageLayout("bf16"), heads=64)
    assert native == ("native", DOTS[target])
    wanted = by_name["all keys, tiles of 8, bf16"].expect[target]
    assert wanted.replace("\\", "").startswith(DOTS[target])
    staged = supports(target, PageLayout("nvfp4"), heads=64, staged=True)
    assert staged.path == "fallback" and f"({PATHS[target]})" in staged.reason
    assert INSTRUCTIONS[PATHS[target]] in by_name["chosen blocks, nvfp4 staged"].expect[target]


def test_planted_faults_are_found():
    """A tile of too few rows for tcgen05; registers withheld."""
    variant = by_name["all keys, tiles of 8, fp8"]
    few = dataclasses.replace(variant, constants={**variant.constants, "M": 16, "TOKENS": 1})
    assert any("tcgen05" in fault for fault in found(few, "sm_100"))
    variant = by_name["chosen blocks, bf16"]
    starved = dataclasses.replace(
        variant, options=lambda target: {**variant.options(target), "maxnreg": 40}
    )
    assert any("spills" in fault for fault in found(starved, "sm_90"))

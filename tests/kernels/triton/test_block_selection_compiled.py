"""Selection kernels compiled for every target: matrix instructions, no spills, shared memory."""

from __future__ import annotations

import dataclasses
import inspect

import pytest

pytest.importorskip("triton", reason="needs triton, which has wheels for Linux only")

import selection_launches as launches

from mmq.kernels.triton import block_selection, selection_ranks
from mmq.kernels.triton.cross_compile import check
from mmq.kernels.triton.launch import TARGETS, launch_options

VARIANTS = [*block_selection.VARIANTS, *selection_ranks.VARIANTS]
by_name = {variant.name: variant for variant in VARIANTS}
#: A few of each kind for the normal suite.
FAST = [
    ("index scores, bf16 keys, tiles of 32", "sm_100"),
    ("index scores, fp8 keys, tiles of 1", "sm_120"),
    ("index scores, nvfp4 keys, tiles of 16", "gfx950"),
    ("selection from 4096 blocks", "sm_90"),
    ("candidates from 512 of a rank's blocks", "gfx950"),
    ("merge of 8 ranks' candidates", "sm_103"),
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
@pytest.mark.parametrize("target", ["sm_100", "gfx950"])
def test_counts_of_one(target):
    """Triton makes an argument that is 1 a constant, which has no methods of a tensor."""
    for variant in VARIANTS:
        ones = dict.fromkeys(set(block_selection.ODD) & set(variant.kernel.arg_names), 1)
        constants = ones | dict(variant.constants)
        assert dataclasses.replace(variant, constants=constants).compile(target).assembly


def test_no_kernel_is_left_out():
    written = {
        value
        for module in (block_selection, selection_ranks)
        for name, value in inspect.getmembers(module)
        if name.endswith("_kernel")
    }
    assert written == {variant.kernel for variant in VARIANTS}
    assert {name for name, _ in FAST} <= set(by_name)


def test_support_says_what_is_compiled():
    for target in TARGETS:
        for key_format in block_selection.MANY_TOKENS:
            assert block_selection.supports(target, key_format=key_format).ok
            assert any(f"{key_format} keys" in name for name in by_name)
        assert target in block_selection.PRODUCTS


def _with(name, constants=(), **options):
    variant = by_name[name]
    return dataclasses.replace(
        variant,
        constants={**variant.constants, **dict(constants)},
        options=lambda target: {**variant.options(target), **options},
    )


SPREADING_NAN = [
    (
        "@triton.jit\ndef _largest_products",
        "@triton.jit\ndef _spread(a, b):\n"
        "    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)\n\n\n"
        "@triton.jit\ndef _largest_products",
    ),
    (
        'tl.max(tl.where(seen_MB, dot_MB, float("-inf")), 1)',
        'tl.reduce(tl.where(seen_MB, dot_MB, float("-inf")), 1, _spread)',
    ),
]
FUSED_KEYS = [
    ("bits_RN = bits_of(score_RN)\n", "bits_RN = bits_of(tl.fma(score_RN, score_RN, score_RN))\n")
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "target", "message"),
    [
        (_with("index scores, bf16 keys, tiles of 32", num_warps=16), "sm_100", "no tcgen05"),
        (
            _with("index scores, fp8 keys, tiles of 16", {"TOKENS": 32, "M": 128}),
            "sm_120",
            "spills",
        ),
        (_with("index scores, bf16 keys, tiles of 32", num_stages=8), "sm_120", "shared memory"),
    ],
)
def test_bad_settings_are_found(variant, target, message):
    assert message in "; ".join(found(variant, target))


@pytest.mark.parametrize(
    ("edits", "name", "target", "message"),
    [
        (SPREADING_NAN, "index scores, bf16 keys, tiles of 32", "sm_90", "has max.NaN"),
        (FUSED_KEYS, "selection from 128 blocks", "sm_90", "fma"),
    ],
)
def test_mutants_are_found(edits, name, target, message):
    mutant = launches.mutate(block_selection, edits)
    variant = next(variant for variant in mutant.VARIANTS if variant.name == name)
    assert message in "; ".join(found(variant, target))


def test_options_follow_the_target():
    assert block_selection.selection_options(4096, "gfx950") == launch_options(
        256, TARGETS["gfx950"]
    )
    assert block_selection.score_options(128, "sm_100")["num_warps"] == 8

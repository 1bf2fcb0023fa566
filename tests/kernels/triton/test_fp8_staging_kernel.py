"""Staging kernels: each instruction's twin on its whole domain, each path against the table, and
what each path compiles to."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("triton", reason="needs triton, which has wheels for Linux only")

import staging_runs
import torch
from triton.runtime.errors import PTXASError

from mmq.kernels.reference.e4m3 import decode_e2m1, decode_e4m3, encode_e4m3
from mmq.kernels.reference.fp8_staging import stage_rows
from mmq.kernels.triton import staging_asm
from mmq.kernels.triton.cross_compile import check
from mmq.kernels.triton.fp8_staging import (
    INSTRUCTIONS,
    PATHS,
    VARIANTS,
    staging_path,
    supports,
)
from mmq.kernels.triton.interpreter import twin
from mmq.kernels.triton.launch import TARGETS

TABLE = Path(__file__).parents[2] / "data" / "fp8_staging.json"
FOUR_AT_A_TIME = {
    "qmul4": staging_asm.QMUL4,
    "f16": staging_asm.F16,
    "f16-bits": staging_asm.F16_BITS,
}
EVERY_PATH = [*INSTRUCTIONS, "portable"]
EVERY_16 = np.arange(65536, dtype=np.uint32)


@pytest.fixture(scope="module")
def table():
    """U8 [16, 256]: the result of each code under each scale."""
    rows = json.loads(TABLE.read_text())["staged"]
    return np.array([list(bytes.fromhex(row)) for row in rows], np.uint8)


def every_pair():
    """All 16 × 256 pairs: packed U8 [512, 8] of the 16 codes twice, scales U8 [512, 1]."""
    packed = np.array([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE], np.uint8)
    scale = np.repeat(np.arange(256, dtype=np.uint8), 2)[:, None]
    return np.concatenate([np.tile(packed, (256, 1)), np.tile(packed[::-1], (256, 1))]), scale


def random_rows(rows, columns, seed=2):
    rng = np.random.default_rng(seed)
    packed = rng.integers(0, 256, (rows, columns // 2), np.uint8)
    return packed, rng.integers(0, 256, (rows, columns // 16), np.uint8)


def by_reference(packed, scale):
    return stage_rows(torch.from_numpy(packed), torch.from_numpy(scale)).numpy()


@pytest.mark.parametrize("path", FOUR_AT_A_TIME)
def test_twins_of_four_codes(table, path):
    """Every pair in every lane, beside random others in the other lanes."""
    run = twin(FOUR_AT_A_TIME[path])
    rng = np.random.default_rng(1)
    codes, scales = (a.ravel() for a in np.meshgrid(np.arange(16), np.arange(256), indexing="ij"))
    for lane in range(4):
        lanes = rng.integers(0, 16, (4, 4096))
        lanes[lane] = codes
        words = sum(lanes[i].astype(np.uint32) << (4 * i) for i in range(4)).astype(np.uint16)
        repeated = scales.astype(np.uint32) * np.uint32(0x01010101)
        result = run(words, repeated)
        assert result.dtype == np.uint32
        for i in range(4):
            np.testing.assert_array_equal((result >> (8 * i)) & 0xFF, table[lanes[i], scales])


def test_lanes_of_qmul4_have_scales_of_their_own(table):
    rng = np.random.default_rng(3)
    codes, scales = rng.integers(0, 16, (4, 4096)), rng.integers(0, 256, (4, 4096))
    words = sum(codes[i].astype(np.uint32) << (4 * i) for i in range(4)).astype(np.uint16)
    result = twin(staging_asm.QMUL4)(
        words, sum(scales[i].astype(np.uint32) << (8 * i) for i in range(4))
    )
    for i in range(4):
        np.testing.assert_array_equal((result >> (8 * i)) & 0xFF, table[codes[i], scales[i]])


def f16(words):
    """F32 numbers of both halves of each word, [2, N]."""
    halves = np.stack([words & 0xFFFF, words >> 16]).astype(np.uint16)
    return halves.view(np.float16).astype(np.float32)


def test_twins_of_amd_conversions():
    """E2M1 and E4M3 pairs to F16, all of them; F16 to E4M3, all 65,536."""
    byte = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    pair = f16(twin(staging_asm.F16_OF_FP4)(EVERY_16[:256]))
    np.testing.assert_array_equal(pair[0], decode_e2m1(byte & 15).numpy())
    np.testing.assert_array_equal(pair[1], decode_e2m1(byte >> 4).numpy())
    assert np.signbit(pair[0][8]) and np.signbit(pair[1][0x80])
    e4m3 = decode_e4m3(byte).numpy()
    pair = f16(twin(staging_asm.F16_OF_FP8)(EVERY_16 | 0xABCD0000))
    np.testing.assert_array_equal(pair[0], e4m3[EVERY_16 & 0xFF])
    np.testing.assert_array_equal(pair[1], e4m3[EVERY_16 >> 8])
    numbers = torch.from_numpy(f16(EVERY_16)[0])
    wanted = encode_e4m3(numbers).masked_fill(numbers.isnan(), 0x7F).numpy()
    for words, half in ((EVERY_16, 0), (EVERY_16 << 16, 1)):
        result = twin(staging_asm.FP8_OF_F16)(words)
        np.testing.assert_array_equal((result >> (8 * half)) & 0xFF, wanted)
        assert (result >> 16).any()  # not promised to be zero


def test_twins_of_amd_arithmetic():
    """Pairs of F16: the product is one of F16, minimum and maximum drop a NaN."""
    rng = np.random.default_rng(4)
    left, right = rng.integers(0, 2**32, (2, 4096), np.uint32)
    with np.errstate(over="ignore", invalid="ignore"):
        product = twin(staging_asm.F16_PRODUCT)(left, right)
        wanted = (f16(left) * f16(right)).astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(f16(product), wanted)
    smaller = f16(twin(staging_asm.F16_MINIMUM)(left, right))
    larger = f16(twin(staging_asm.F16_MAXIMUM)(left, right))
    np.testing.assert_array_equal(smaller, np.fmin(f16(left), f16(right)))
    np.testing.assert_array_equal(larger, np.fmax(f16(left), f16(right)))
    limit, nan = np.array([0x5F005F00], np.uint32), np.array([0x7E007E00], np.uint32)
    assert f16(limit).tolist() == [[448], [448]]
    assert f16(twin(staging_asm.F16_MINIMUM)(nan, limit)).tolist() == [[448], [448]]


def test_f16_conversion_of_twins_rounds_to_even():
    numbers = torch.from_numpy(f16(EVERY_16)[0])
    wanted = encode_e4m3(numbers).masked_fill(numbers.isnan(), 0x7F).numpy()
    halves = EVERY_16.astype(np.uint16).view(np.float16)
    np.testing.assert_array_equal(staging_asm.round_to_e4m3(halves), wanted)


@pytest.mark.parametrize("path", EVERY_PATH)
def test_every_pair_by_every_path(interpreted, table, path):
    packed, scale = every_pair()
    staged = interpreted(staging_runs.staged, packed, scale, path)
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(512, 16)
    np.testing.assert_array_equal(staged, table[codes, scale])


@pytest.mark.parametrize("path", EVERY_PATH)
@pytest.mark.parametrize("shape", [(1, 16), (3, 48), (0, 128), (37, 128)], ids=str)
def test_odd_shapes(interpreted, path, shape):
    packed, scale = random_rows(*shape)
    staged = interpreted(staging_runs.staged, packed, scale, path)
    assert staged.shape == shape
    np.testing.assert_array_equal(staged, by_reference(packed, scale))


@pytest.mark.parametrize("path", EVERY_PATH)
def test_tiles_of_rows(interpreted, path):
    """The numbers that attention gets: rows of 8 blocks, NaN where a scale is NaN."""
    packed, scale = random_rows(32, 128, seed=5)
    values = interpreted(staging_runs.tile_values, packed, scale, path)
    wanted = decode_e4m3(torch.from_numpy(by_reference(packed, scale))).numpy()
    np.testing.assert_array_equal(values, wanted)
    assert np.isnan(wanted).any()


EXPECTED_PATHS = {
    "sm_90": "f16-bits",
    "sm_100": "qmul4",
    "sm_103": "qmul4",
    "sm_107": "f16",
    "sm_120": "f16",
    "gfx950": "cdna4",
}


@pytest.mark.parametrize("target", TARGETS)
def test_launches_take_the_path_of_the_target(interpreted, target):
    packed, scale = random_rows(2, 32)
    staged, texts = interpreted(staging_runs.staged_as, packed, scale, target)
    path = EXPECTED_PATHS[target]
    assert PATHS[target] == path == staging_path(target)
    if path == "cdna4":
        assert {staging_asm.F16_OF_FP4.value, staging_asm.FP8_OF_F16.value} < texts
    else:
        assert texts == {FOUR_AT_A_TIME[path].value}
    np.testing.assert_array_equal(staged, by_reference(packed, scale))


def test_targets_without_a_path_take_the_portable_one():
    assert staging_path("sm_89") == "portable" == staging_path("gfx942")
    assert supports("sm_89") == ("fallback", "integer arithmetic")


@pytest.mark.parametrize("mistake", staging_runs.MISTAKES)
def test_planted_mistakes_are_caught(interpreted, mistake):
    packed, scale = every_pair()
    wrong = interpreted(staging_runs.staged_wrongly, packed, scale, mistake)
    assert (wrong != by_reference(packed, scale)).any()
    path = staging_runs.MISTAKES[mistake][2]
    right = interpreted(staging_runs.staged, packed, scale, path)
    np.testing.assert_array_equal(right, by_reference(packed, scale))


def on(path):
    """The variant of the kernel that takes one path on every target."""
    own, portable = VARIANTS
    return portable if path == "portable" else own


@pytest.mark.parametrize("target", TARGETS)
def test_own_path_compiles_to_its_instruction(target):
    variant = on("own")
    compiled = variant.compile(target)
    assert check(compiled, variant) == []
    assert set(compiled.loads) == {16, 2}
    assert supports(target).path == ("native" if target in ("sm_100", "sm_103") else "fallback")
    if target in ("sm_100", "sm_103"):
        assert compiled.machine["QMUL4.E4M3x4.E2M1x4.E4M3x4.SATFINITE"] == 8  # of 32 elements
    elif compiled.machine:
        assert not any("QMUL" in opcode for opcode in compiled.machine)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_portable_path_compiles(target):
    variant = on("portable")
    assert check(variant.compile(target), variant) == []


@pytest.mark.parametrize(
    ("target", "path"),
    [("sm_90", "qmul4"), ("sm_107", "qmul4"), ("sm_120", "qmul4"), ("sm_90", "f16")],
)
def test_fallbacks_are_for_want_of_an_instruction(target, path, capfd):
    """The faster path does not assemble there."""
    variant = replace(on("own"), target_constants={target: {"PATH": path}})
    with pytest.raises(PTXASError, match=r"not supported on \.target"):
        variant.compile(target)
    capfd.readouterr()  # Triton prints the whole PTX

"""Scanning for NaN and infinity, and largest magnitudes of float arrays."""

from __future__ import annotations

import numpy as np
import pytest

from mmq.kernels import ops, scan

BYTES = np.arange(256, dtype=np.uint8)
NONFINITE_BYTES = {
    "F8_E4M3": {0x7F, 0xFF},
    "F8_E5M2": {*range(0x7C, 0x80), *range(0xFC, 0x100)},
    "F8_E8M0": {0xFF},
}
WIDE = {"F64": np.float64, "F32": np.float32, "F16": np.float16}
BAD_BF16 = np.array([0x7F80, 0xFF80, 0x7FC0, 0xFFC1, 0x7F81], np.uint16)


@pytest.mark.parametrize("dtype", NONFINITE_BYTES)
def test_every_byte(dtype):
    for byte in range(256):
        bad = byte in NONFINITE_BYTES[dtype]
        raw = np.array([byte], np.uint8)
        assert ops.count_nonfinite(raw, dtype) == ((1, 0) if bad else (0, -1))
    first = min(NONFINITE_BYTES[dtype])
    assert ops.count_nonfinite(BYTES, dtype) == (len(NONFINITE_BYTES[dtype]), first)


def test_every_sixteen_bit_number():
    bits = np.arange(65536, dtype=np.uint16)
    halves = ~np.isfinite(bits.view(np.float16))
    brains = ~np.isfinite((bits.astype(np.uint32) << 16).view(np.float32))
    for dtype, bad in (("F16", halves), ("BF16", brains)):
        found = ops.count_nonfinite(bits.view(np.uint8), dtype)
        assert found == (int(bad.sum()), int(bad.argmax()))


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_wide_numbers(dtype, bad):
    limits = np.finfo(WIDE[dtype])
    fine = [0, -0.0, limits.max, limits.min, limits.smallest_subnormal]
    values = np.array([*fine, bad, *fine, bad], WIDE[dtype])
    assert ops.count_nonfinite(values.view(np.uint8), dtype) == (2, len(fine))
    assert ops.count_nonfinite(values[: len(fine)].view(np.uint8), dtype) == (0, -1)


@pytest.mark.parametrize("at", [0, 1, -1, "edge", "after edge"])
@pytest.mark.parametrize("offset", [0, 1], ids=["aligned", "unaligned"])
def test_step_edges(at, offset):
    """The scan goes in steps: nothing may be lost or counted twice where two meet."""
    step = scan._STEP // 2
    bits = np.full(2 * step + 7, 0x3F80, np.uint16)
    index = {"edge": step - 1, "after edge": step, -1: bits.size - 1}.get(at, at)
    bits[index] = 0x7F80
    raw = np.concatenate([np.zeros(offset, np.uint8), bits.view(np.uint8)])[offset:]
    assert ops.count_nonfinite(raw, "BF16") == (1, index)
    bits[-1] = 0xFFFF
    raw = np.concatenate([np.zeros(offset, np.uint8), bits.view(np.uint8)])[offset:]
    assert ops.count_nonfinite(raw, "BF16") == (1 if at == -1 else 2, index)


def test_read_only_and_strided_bytes():
    bits = np.array([0x3F80, 0x7F80], np.uint16)
    assert ops.count_nonfinite(np.frombuffer(bits.tobytes(), np.uint8), "BF16") == (1, 1)
    every_second = np.stack([bits.view(np.uint8), np.zeros(4, np.uint8)], axis=1)[:, 0]
    assert ops.count_nonfinite(every_second, "BF16") == (1, 1)
    assert ops.count_nonfinite(np.zeros(0, np.uint8), "F32") == (0, -1)


@pytest.mark.parametrize(
    ("raw", "dtype"),
    [(np.zeros(3, np.uint8), "BF16"), (np.zeros(4, np.uint8), "U8"), (BAD_BF16, "BF16")],
    ids=["torn element", "no float", "not bytes"],
)
def test_refusals(raw, dtype):
    with pytest.raises(ValueError, match=dtype):
        ops.count_nonfinite(raw, dtype)


def test_amax_of_every_magnitude():
    """Each finite BF16 and F16 number is its own amax, whatever its sign."""
    bits = np.arange(65536, dtype=np.uint16)
    brains = (bits.astype(np.uint32) << 16).view(np.float32)
    for dtype, values in (("F16", bits.view(np.float16)), ("BF16", brains)):
        finite = bits[np.isfinite(values)]
        expected = np.abs(values[np.isfinite(values)].astype(np.float32))
        found = [ops.float_amax(finite[i : i + 1], dtype) for i in range(0, finite.size, 7)]
        np.testing.assert_array_equal(found, expected[::7])
        assert ops.float_amax(finite, dtype) == expected.max()


@pytest.mark.parametrize("at", [0, scan._STEP // 4 - 1, scan._STEP // 4, -1])
def test_amax_at_step_edges(at):
    values = np.linspace(-1, 1, scan._STEP // 4 + 32, dtype=np.float32)
    values[at] = -3.5
    assert ops.float_amax(values, "F32") == 3.5
    assert ops.float_amax(values.reshape(3, -1)[:, ::-1], "F32") == 3.5


def test_amax_of_nonfinite_is_not_finite():
    assert not np.isfinite(ops.float_amax(np.array([0x3F80, 0xFF80], np.uint16), "BF16"))
    assert not np.isfinite(ops.float_amax(np.array([1, np.nan], np.float32), "F32"))
    assert ops.float_amax(np.zeros((0, 16), np.float32), "F32") == 0


def test_amax_refuses_a_wrong_width():
    with pytest.raises(ValueError, match="BF16"):
        ops.float_amax(np.zeros(4, np.float32), "BF16")
    with pytest.raises(ValueError, match="F64"):
        ops.float_amax(np.zeros(4, np.float64), "F64")

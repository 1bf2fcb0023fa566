"""Triton's interpreter is wrong as shipped, and right when repaired: against torch, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("triton", reason="needs triton, which has wheels for Linux only")

import interpreter_kernels as kernels
import torch
import triton
from triton.runtime.errors import InterpreterError

from mmq.kernels.reference.e4m3 import decode_e2m1, decode_e4m3
from mmq.kernels.reference.nvfp4 import unpack_nibbles

EVERY_16 = np.arange(65536, dtype=np.uint16)
EVERY_8 = np.arange(256, dtype=np.uint8)
FLOAT8 = ["float8_e4m3fn", "float8_e5m2"]


def between_bf16():
    """Every BF16 number, and F32 numbers just under, at and just over each midpoint: bits."""
    tails = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    return ((EVERY_16[:, None].astype(np.uint32) << 16) | tails).ravel()[: 65536 * 4]


def grid(form):
    """Every number of a 16-bit format as F32, bits."""
    values = torch.from_numpy(EVERY_16.view(np.int16)).view(getattr(torch, form))
    return values.float().numpy().view(np.uint32)


CASTS = [
    *((form, EVERY_16, to) for form in ("float16", "bfloat16") for to in FLOAT8),
    *(("float32", grid(form), to) for form in ("float16", "bfloat16") for to in FLOAT8),
    *((form, EVERY_8, to) for form in FLOAT8 for to in ("float32", "float16", "bfloat16")),
    ("bfloat16", EVERY_16, "float32"),
    ("float32", between_bf16(), "bfloat16"),
    ("float16", EVERY_16, "bfloat16"),
    ("bfloat16", EVERY_16[:0x7F80], "float64"),
]
#: Casts that Triton ships right, and that the repair handles too.
SOUND_CASTS = [
    ("bfloat16", EVERY_16, "float16"),
    ("bfloat16", EVERY_16[0x3F00:0x4E00][:2048], "int32"),
    ("float32", grid("float16"), "float16"),
    ("float16", EVERY_16, "float32"),
]


def power_of_two(bits):
    """As many numbers as `tl.arange` takes, the first repeated."""
    size = triton.next_power_of_2(len(bits))
    return np.concatenate([bits, np.full(size - len(bits), bits[0], bits.dtype)])


def cast_by_torch(bits, source, target):
    values = torch.from_numpy(bits).view(getattr(torch, source))
    wanted = getattr(torch, target)
    if target in FLOAT8:
        values = values.float().clamp(-torch.finfo(wanted).max, torch.finfo(wanted).max)
    return values.to(wanted)


def same_numbers(got, wanted):
    """Equal to the bit, except that any NaN is as good as another."""
    numbers = torch.from_numpy(got).view(wanted.dtype).ravel()
    if not wanted.is_floating_point():
        return torch.equal(numbers, wanted)
    nan = wanted.isnan()
    bits = torch.from_numpy(got).ravel(), wanted.view(torch.uint8).ravel()
    ignored = nan.repeat_interleave(wanted.itemsize)
    return torch.equal(numbers.isnan(), nan) and torch.equal(
        *(part.masked_fill(ignored, 0) for part in bits)
    )


def numbers(seed, form, size=32):
    """A square of small numbers, as bits, and as F32."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(size, size, generator=generator).to(getattr(torch, form))
    integer = torch.uint8 if values.itemsize == 1 else torch.int16
    return values.view(integer).numpy(), values.float()


def nvfp4(seed, rows=16, columns=64):
    """Random codes under scales 2^−9 … 448, and their numbers."""
    rng = np.random.default_rng(seed)
    packed = rng.integers(0, 256, (rows, columns // 2), np.uint8)
    scale = rng.integers(1, 0x7F, (rows, columns // 16), np.uint8)
    codes = decode_e2m1(unpack_nibbles(torch.from_numpy(packed)))
    values = codes * decode_e4m3(torch.from_numpy(scale)).repeat_interleave(16, 1)
    return packed, scale, values


def dots():
    """name → function, its arguments, and the product by torch, in F64."""
    (a, x), (b, y) = numbers(1, "bfloat16"), numbers(2, "bfloat16")
    yield "dot of BF16", (kernels.dot, a, b, "bfloat16"), x.double() @ y.double()
    (a, x), (b, y) = numbers(3, "float8_e4m3fn"), numbers(4, "float8_e4m3fn")
    a[3, 5], x[3, 5] = 0x7F, torch.nan
    yield "dot of E4M3", (kernels.dot, a, b, "float8_e4m3fn"), x.double() @ y.double()
    a, a_scale, x = nvfp4(5)
    b, b_scale, y = nvfp4(6)
    arguments = kernels.dot_scaled, a, a_scale, b, b_scale
    yield "dot of NVFP4", arguments, x.double() @ y.double().T
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(7)).mul(1e9).bfloat16()
    arguments = kernels.dot_scaled, x.view(torch.int16).numpy(), None, b, b_scale
    yield "dot of BF16 and NVFP4", arguments, x.double() @ y.double().T


DOTS = {name: rest for name, *rest in dots()}


def close(got, wanted, terms):
    """Within the rounding of an F32 sum: terms · 2^−24 of the sum of magnitudes, here bounded."""
    bound = terms * 2.0**-24 * terms * float(wanted.nan_to_num().abs().max())
    difference = (torch.from_numpy(got).double() - wanted).abs()
    nan = wanted.isnan()
    return torch.equal(torch.from_numpy(got).isnan(), nan) and bool(
        (difference[~nan] <= bound).all()
    )


def shipped_is_wrong(what, right):
    version = triton.__version__
    assert not right, f"Triton {version} gets {what} right: the repair may go from interpreter.py"


def named(case):
    source, bits, target = case
    return f"{source}-{len(bits)}-{target}"


@pytest.mark.parametrize("case", CASTS + SOUND_CASTS, ids=named)
def test_casts_repaired(interpreted, case):
    source, bits, target = case
    bits = power_of_two(bits)
    got = interpreted(kernels.cast, bits, source, target)
    assert same_numbers(got, cast_by_torch(bits, source, target))


@pytest.mark.parametrize("case", CASTS, ids=named)
def test_casts_as_shipped(interpreted, case):
    source, bits, target = case
    bits = power_of_two(bits)
    try:
        got = interpreted(kernels.unrepaired, kernels.cast, bits, source, target)
    except InterpreterError:
        return
    shipped_is_wrong(named(case), same_numbers(got, cast_by_torch(bits, source, target)))


def test_nan_becomes_the_canonical_float8_nan(interpreted):
    bits = np.array([0x7FC00000, 0xFFC00001, 0x7F800000, 0xFF800000], np.uint32)
    codes = interpreted(kernels.cast, bits, "float32", "float8_e4m3fn").ravel()
    assert codes.tolist() == [0x7F, 0x7F, 0x7E, 0xFE]
    codes = interpreted(kernels.cast, bits, "float32", "float8_e5m2").ravel()
    assert codes.tolist() == [0x7F, 0x7F, 0x7B, 0xFB]


@pytest.mark.parametrize("name", DOTS)
def test_dots_repaired(interpreted, name):
    arguments, wanted = DOTS[name]
    assert close(interpreted(*arguments), wanted, 64)


@pytest.mark.parametrize("name", DOTS)
def test_dots_as_shipped(interpreted, name):
    arguments, wanted = DOTS[name]
    shipped_is_wrong(name, close(interpreted(kernels.unrepaired, *arguments), wanted, 64))


def test_inline_assembly_by_twins(interpreted):
    x = np.arange(32, dtype=np.int32).reshape(2, 16)
    second, first, total, byte = interpreted(kernels.inline_asm, x)
    assert (second == x[1]).all() and (first == x[0]).all()
    assert (total == x.sum(0)).all() and (byte == 2 * x[0]).all()
    with pytest.raises(InterpreterError, match="inline_asm not supported"):
        interpreted(kernels.unrepaired, kernels.inline_asm, x)


def test_twins_that_cannot_be_right_are_refused(interpreted):
    x = np.zeros((2, 16), np.int32)
    with pytest.raises(InterpreterError, match="no Python twin is registered for: a stranger"):
        interpreted(kernels.unknown_asm, x)
    with pytest.raises(InterpreterError, match=r"int32.* for .*fp32.* twin of wrong dtype"):
        interpreted(kernels.wrong_twin, "dtype")
    with pytest.raises(InterpreterError, match=r"int32\[1\] for .* twin of wrong shape"):
        interpreted(kernels.wrong_twin, "shape")
    with pytest.raises(ValueError, match="there is a twin already of: a text"):
        interpreted(kernels.second_twin)


@pytest.mark.parametrize("form", ["bfloat16", "float8_e4m3fn"])
def test_arithmetic_on_patterns_is_refused(interpreted, form):
    one = {"bfloat16": 0x3F80, "float8_e4m3fn": 0x38}[form]
    bits = np.full(4, one, np.int16 if form == "bfloat16" else np.uint8)
    for operation in ("add", "negate", "larger", "compare"):
        with pytest.raises(InterpreterError, match="convert to F32 first"):
            interpreted(kernels.arithmetic, bits, form, operation)
    assert interpreted(kernels.arithmetic, bits, form, "select").tolist() == [one] * 3 + [0]
    assert interpreted(kernels.arithmetic, bits, form, "abs").tolist() == [one] * 4
    doubled = {"bfloat16": 0x4000, "float8_e4m3fn": 0x40}[form]
    shipped = interpreted(kernels.unrepaired, kernels.arithmetic, bits, form, "add")
    shipped_is_wrong(f"a sum of {form}", shipped.tolist() == [doubled] * 4)


@pytest.mark.parametrize(
    ("source", "target"),
    [("int32", "bfloat16"), ("int64", "bfloat16"), ("float64", "bfloat16"), ("float64", FLOAT8[0])],
)
def test_casts_of_two_roundings_are_refused(interpreted, source, target):
    bits = torch.tensor([1, 2, 3, 2**24 + 1], dtype=getattr(torch, source)).numpy()
    with pytest.raises(InterpreterError, match="convert to F32 first"):
        interpreted(kernels.cast, bits, source, target)


def test_repair_is_idempotent(interpreted):
    bits = np.array([0x3F80FFFF, 0x3F808001], np.uint32)  # nearly 1 + 2^−7
    repaired, shipped = interpreted(kernels.twice_repaired, bits)
    assert repaired.view(np.uint16).ravel().tolist() == [0x3F81, 0x3F81]
    assert shipped.view(np.uint16).ravel().tolist() == [0x3F80, 0x3F80]

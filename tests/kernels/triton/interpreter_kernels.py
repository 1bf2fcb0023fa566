"""One kernel for everything that Triton's interpreter gets wrong. Functions take and give NumPy
arrays of bits: they run in another process."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mmq.kernels.triton import interpreter

SWAP_AND_ADD = "swap $0, $1 and add; a text that no assembler knows"
TWICE = "twice $0"


def unrepaired(function, *arguments):
    """Call with the interpreter that Triton ships."""
    interpreter.undo()
    try:
        return function(*arguments)
    finally:
        interpreter.repair()


@triton.jit
def _cast_kernel(x, out, N: tl.constexpr):
    offset = tl.arange(0, N)
    tl.store(out + offset, tl.load(x + offset).to(out.dtype.element_ty))


def cast(bits, source, target):
    """Numbers of torch dtype `source`, as integers of its width, to `target`, likewise."""
    x = torch.from_numpy(bits).view(getattr(torch, source))
    out = torch.full((len(bits),), -1, dtype=torch.int64).to(torch.uint8)
    wanted = getattr(torch, target)
    out = out.repeat_interleave(wanted.itemsize).view(wanted)
    _cast_kernel[(1,)](x, out, len(bits))
    return out.view(torch.uint8).numpy().reshape(len(bits), -1)


@triton.jit
def _dot_kernel(a, b, out, N: tl.constexpr):
    row, column = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    x, y = tl.load(a + row * N + column), tl.load(b + row * N + column)
    tl.store(out + row * N + column, tl.dot(x, y))


def dot(a, b, form):
    """A square product of matrices given as bits: F32."""
    x, y = (torch.from_numpy(side).view(getattr(torch, form)) for side in (a, b))
    out = torch.full(x.shape, torch.nan)
    _dot_kernel[(1,)](x, y, out, len(a))
    return out.numpy()


@triton.jit
def _dot_scaled_kernel(
    a, a_scale, b, b_scale, out, N: tl.constexpr, K: tl.constexpr, A: tl.constexpr
):
    n, k = tl.arange(0, N), tl.arange(0, K)
    packed, block = tl.arange(0, K // 2), tl.arange(0, K // 16)
    y = tl.load(b + n[None, :] * (K // 2) + packed[:, None])
    y_scale = tl.load(b_scale + n[:, None] * (K // 16) + block[None, :])
    if A == "bf16":
        x = tl.load(a + n[:, None] * K + k[None, :])
        product = tl.dot_scaled(x, None, "bf16", y, y_scale, "e2m1")
    else:
        x = tl.load(a + n[:, None] * (K // 2) + packed[None, :])
        x_scale = tl.load(a_scale + n[:, None] * (K // 16) + block[None, :])
        product = tl.dot_scaled(x, x_scale, "e2m1", y, y_scale, "e2m1")
    tl.store(out + n[:, None] * N + n[None, :], product)


def dot_scaled(a, a_scale, b, b_scale):
    """NVFP4 (or BF16 bits, where `a_scale` is None) × NVFP4: F32 [N, N] of [N, K] and [N, K]."""
    n, k = b.shape[0], 2 * b.shape[1]
    y_scale = torch.from_numpy(b_scale).view(torch.float8_e4m3fn)
    x, x_scale, form = torch.from_numpy(a), y_scale, "e2m1"
    if a_scale is None:
        x, form = x.view(torch.bfloat16), "bf16"
    else:
        x_scale = torch.from_numpy(a_scale).view(torch.float8_e4m3fn)
    out = torch.full((n, n), torch.nan)
    _dot_scaled_kernel[(1,)](x, x_scale, torch.from_numpy(b), y_scale, out, n, k, form)
    return out.numpy()


@triton.jit
def _asm_kernel(x, out, N: tl.constexpr, SWAP: tl.constexpr, TWICE: tl.constexpr):
    offset = tl.arange(0, N)
    a, b = tl.load(x + offset), tl.load(x + N + offset)
    second, first, total = tl.inline_asm_elementwise(
        SWAP, "=r,=r,=r,r,r", [a, b], dtype=(tl.int32, tl.int32, tl.float32), is_pure=True, pack=1
    )
    byte = tl.inline_asm_elementwise(
        TWICE, "=r,r", [a.to(tl.uint8)], dtype=tl.uint8, is_pure=True, pack=4
    )
    tl.store(out + offset, second)
    tl.store(out + N + offset, first)
    tl.store(out + 2 * N + offset, total.to(tl.int32))
    tl.store(out + 3 * N + offset, byte.to(tl.int32))


def _swap_and_add(a, b):
    return b, a, (a + b).astype("float32")


def _twice(a):
    return a * 2


def inline_asm(x_2N):
    """Three outputs of one assembly, and one that takes four bytes at a time: I32 [4, N]."""
    interpreter.register_twin(SWAP_AND_ADD, _swap_and_add)
    interpreter.register_twin(TWICE, _twice)
    out = torch.full((4, x_2N.shape[1]), -1, dtype=torch.int32)
    _asm_kernel[(1,)](torch.from_numpy(x_2N), out, x_2N.shape[1], SWAP_AND_ADD, TWICE)
    return out.numpy()


def unknown_asm(x_2N):
    """As `inline_asm`, of a text without a twin."""
    out = torch.zeros((4, x_2N.shape[1]), dtype=torch.int32)
    _asm_kernel[(1,)](torch.from_numpy(x_2N), out, x_2N.shape[1], "a stranger", TWICE)


def wrong_twin(kind):
    """As `inline_asm`, with a twin that gives the wrong dtype or shape."""
    text = f"wrong {kind}"
    interpreter.register_twin(text, _WRONG[kind])
    out, x = torch.zeros((4, 16), dtype=torch.int32), torch.zeros((2, 16), dtype=torch.int32)
    _asm_kernel[(1,)](x, out, 16, text, TWICE)


def _wrong_dtype(a, b):
    return b, a, a + b


def _wrong_shape(a, b):
    return b, a[:1], (a + b).astype("float32")


_WRONG = {"dtype": _wrong_dtype, "shape": _wrong_shape}


def second_twin():
    """Two functions for one text."""
    interpreter.register_twin("a text", _twice)
    interpreter.register_twin("a text", _twice)
    interpreter.register_twin("a text", _swap_and_add)


@triton.jit
def _arithmetic_kernel(x, out, N: tl.constexpr, OPERATION: tl.constexpr):
    offset = tl.arange(0, N)
    a = tl.load(x + offset)
    if OPERATION == "add":
        a = a + a
    elif OPERATION == "negate":
        a = -a
    elif OPERATION == "larger":
        a = tl.maximum(a, a)
    elif OPERATION == "compare":
        a = tl.where(a < a, a, a)
    elif OPERATION == "select":
        a = tl.where(offset < 3, a, tl.zeros_like(a))
    elif OPERATION == "abs":
        a = tl.abs(a)
    tl.store(out + offset, a)


def arithmetic(bits, form, operation):
    """An operation on numbers of torch dtype `form`, as bits."""
    x = torch.from_numpy(bits).view(getattr(torch, form))
    out = torch.zeros_like(x)
    _arithmetic_kernel[(1,)](x, out, len(bits), operation)
    return out.view(torch.uint8 if x.itemsize == 1 else torch.int16).numpy()


def twice_repaired(bits):
    """Repair over a repair, and what Triton shipped is still known."""
    interpreter.repair()
    interpreter.repair()
    return cast(bits, "float32", "bfloat16"), unrepaired(cast, bits, "float32", "bfloat16")

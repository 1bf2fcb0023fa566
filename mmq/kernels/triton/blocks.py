"""Tiles of blocks, and the errors of a row summed in the order of the reference.

Reference: `mmq.kernels.reference.blocks`.

    signal = Σx²      noise = Σ(x − q)²      max_error = max |x − q|        all in F64

Four numbers [1, −0.3, 0.01, 0] stored as [1, −0.3125, 0.01, 0]: signal 1.0901, noise 1.5625e−4,
max_error 0.0125. Kernels take a tensor as one run of blocks, since rows are whole blocks. A tile's
program writes three numbers a block; `row_sums_kernel` adds the blocks of a row from left to right,
one thread a row. No sum is left to a reduction, so the order is the same on every device.
"""

import triton
import triton.language as tl

from .small_floats import bf16_bits, widen_bf16


@triton.jit
def wide(count):
    """A count as I64: the elements of a tensor can be more than 2^31 where its blocks are not."""
    return tl.cast(count, tl.int64)


@triton.jit
def load_run(pointer, count, TILE: tl.constexpr):
    """This program's TILE numbers out of `count` in a run, 0 past the end."""
    start = tl.program_id(0).to(tl.int64) * TILE
    offset = tl.arange(0, TILE)
    return tl.load(pointer + start + offset, mask=offset < count - start, other=0)


@triton.jit
def store_run(pointer, values, count):
    """Store this program's `values` in a run of `count`, dropping what lies past the end."""
    TILE: tl.constexpr = values.shape[0]
    start = tl.program_id(0).to(tl.int64) * TILE
    offset = tl.arange(0, TILE)
    tl.store(pointer + start + offset, values, mask=offset < count - start)


@triton.jit
def store_numbers(pointer, values, count):
    """`store_run` of F32 numbers, as BF16 bits where `pointer` is to U16."""
    if pointer.dtype.element_ty == tl.uint16:
        store_run(pointer, bf16_bits(values), count)
    else:
        store_run(pointer, values, count)


@triton.jit
def load_numbers(pointer, count, TILE: tl.constexpr):
    """`load_run` of F32 numbers, or of BF16 bits (U16), as F32."""
    numbers = load_run(pointer, count, TILE)
    if pointer.dtype.element_ty == tl.uint16:
        numbers = widen_bf16(numbers)
    return numbers


@triton.jit
def _load_columns(pointer, block_B, inside_B, WIDTH: tl.constexpr):
    """WIDTH columns of blocks of 16, [B, WIDTH]: those that `pointer` and `block_B` start at."""
    offset_BW = block_B[:, None] * 16 + tl.arange(0, WIDTH)[None, :]
    return tl.load(pointer + offset_BW, mask=inside_B[:, None], other=0)


@triton.jit
def _beside(left, right):
    """[B, W] and [B, W] as [B, 2 · W]."""
    both = tl.join(left, right).permute(0, 2, 1)
    return both.reshape(left.shape[0], 2 * left.shape[1])


@triton.jit
def gather_blocks(pointer, block_B, inside_B):
    """Blocks of 16 F32 numbers, or of BF16 bits (U16), as F32 [B, 16]; 0 where not `inside_B`.

    Loaded 16 bytes at a time such that a thread has whole blocks, as it has when a block's codes
    are 16 bytes: what follows moves nothing between threads.
    """
    if pointer.dtype.element_ty == tl.uint16:
        left = _load_columns(pointer, block_B, inside_B, 8)
        numbers = widen_bf16(_beside(left, _load_columns(pointer + 8, block_B, inside_B, 8)))
    else:
        first = _load_columns(pointer, block_B, inside_B, 4)
        left = _beside(first, _load_columns(pointer + 4, block_B, inside_B, 4))
        third = _load_columns(pointer + 8, block_B, inside_B, 4)
        right = _beside(third, _load_columns(pointer + 12, block_B, inside_B, 4))
        numbers = _beside(left, right)
    return numbers


@triton.jit
def load_blocks(pointer, blocks, B: tl.constexpr):
    """This program's B blocks of 16 out of `blocks`, as `gather_blocks` gives them."""
    start = tl.program_id(0).to(tl.int64) * B
    block_B = tl.arange(0, B)
    return gather_blocks(pointer + start * 16, block_B, block_B < blocks - start)


@triton.jit
def _add_eight(sum_B, x_B8):
    """`sum_B` and then eight columns, added from left to right."""
    x02461357 = x_B8.reshape(x_B8.shape[0], 2, 2, 2)
    x0246, x1357 = tl.split(x02461357)
    x04, x26 = tl.split(x0246)
    x15, x37 = tl.split(x1357)
    x0, x4 = tl.split(x04)
    x2, x6 = tl.split(x26)
    x1, x5 = tl.split(x15)
    x3, x7 = tl.split(x37)
    return sum_B + x0 + x1 + x2 + x3 + x4 + x5 + x6 + x7


@triton.jit
def _add_columns(sum_B, x_BC):
    """`sum_B` and then 8 or 16 columns, added from left to right."""
    B: tl.constexpr = x_BC.shape[0]
    if x_BC.shape[1] == 8:
        total = _add_eight(sum_B, x_BC)
    else:
        left, right = tl.split(x_BC.reshape(B, 2, 8).permute(0, 2, 1))
        total = _add_eight(_add_eight(sum_B, left), right)
    return total


@triton.jit
def _block_sum(x_BJ):
    """Σ of each block of 16 or 32: even columns left to right, odd columns, then both."""
    B: tl.constexpr = x_BJ.shape[0]
    even, odd = tl.split(x_BJ.reshape(B, x_BJ.shape[1] // 2, 2))
    zero = tl.full((B,), 0.0, tl.float64)
    return _add_columns(zero, even) + _add_columns(zero, odd)


@triton.jit
def store_block_errors(errors_3B, x_BJ, q_BJ, blocks):
    """Each block's signal, noise and max_error, from F64 values: three runs of `blocks` numbers."""
    error_BJ = tl.abs(x_BJ - q_BJ)
    store_run(errors_3B, _block_sum(x_BJ * x_BJ), blocks)
    store_run(errors_3B + blocks, _block_sum(error_BJ * error_BJ), blocks)
    store_run(errors_3B + 2 * blocks, tl.max(error_BJ, 1), blocks)


@triton.jit
def row_sums_kernel(errors_3OB, rows_O3, rows, row_blocks, R: tl.constexpr):
    """F64 [O, 3] from F64 [3, O, B] of `store_block_errors`: blocks added from left to right."""
    row = tl.program_id(0) * R + tl.arange(0, R)
    inside = row < rows
    blocks = wide(rows) * row_blocks
    first = errors_3OB + row.to(tl.int64) * row_blocks
    signal = tl.full((R,), 0.0, tl.float64)
    noise = tl.full((R,), 0.0, tl.float64)
    worst = tl.full((R,), 0.0, tl.float64)
    for b in range(row_blocks):
        signal += tl.load(first + b, mask=inside, other=0.0)
        noise += tl.load(first + blocks + b, mask=inside, other=0.0)
        worst = tl.maximum(worst, tl.load(first + 2 * blocks + b, mask=inside, other=0.0))
    tl.store(rows_O3 + row * 3, signal, mask=inside)
    tl.store(rows_O3 + row * 3 + 1, noise, mask=inside)
    tl.store(rows_O3 + row * 3 + 2, worst, mask=inside)

"""Kernels that each break a rule of `mmq.kernels.triton.cross_compile`."""

import triton
import triton.language as tl


@triton.jit
def _load_two(values, TILE: tl.constexpr):
    offset = tl.arange(0, TILE)
    return tl.load(values + offset), tl.load(values + TILE + offset)


@triton.jit
def fast_division(values, out, TILE: tl.constexpr):
    x, y = _load_two(values, TILE)
    tl.store(out + tl.arange(0, TILE), x / y)


@triton.jit
def product_and_sum(values, out, TILE: tl.constexpr):
    x, y = _load_two(values, TILE)
    tl.store(out + tl.arange(0, TILE), x * y + x)


@triton.jit
def product_and_sum_f64(values, out, TILE: tl.constexpr):
    x, y = _load_two(values, TILE)
    exact = x.to(tl.float64) * y.to(tl.float64) + x.to(tl.float64)
    tl.store(out + tl.arange(0, TILE), exact.to(tl.float32))


@triton.jit
def flushing(values, out, TILE: tl.constexpr):
    x, y = _load_two(values, TILE)
    tl.store(out + tl.arange(0, TILE), tl.exp2(x) + y)


@triton.jit
def strided_loads(values, out, TILE: tl.constexpr):
    x = tl.load(values + tl.arange(0, TILE) * 3)
    tl.store(out + tl.arange(0, TILE), x)


@triton.jit
def many_registers(values, out, TILE: tl.constexpr):
    x = tl.load(values + tl.arange(0, TILE))
    tl.store(out + tl.arange(0, TILE), x * tl.sum(x))


@triton.jit
def fast_root(values, out, TILE: tl.constexpr):
    x, y = _load_two(values, TILE)
    tl.store(out + tl.arange(0, TILE), tl.sqrt(x) + y)


@triton.jit
def rounded_root(values, out, TILE: tl.constexpr):
    """Sound: an IEEE division and an IEEE root."""
    x, y = _load_two(values, TILE)
    tl.store(out + tl.arange(0, TILE), tl.div_rn(y, tl.sqrt_rn(x)))

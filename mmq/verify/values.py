"""Values of a foreign quantiser's NVFP4 weights against the source's: SQNR, and every block.

    q = v · S · s2        stored: E2M1 value v, block scale S, tensor scale s2
    t = x / (S · s2)      where the source's value lies on the E2M1 grid of its block

Whatever scales a quantiser chose, rounding to nearest puts t between the midpoints around v. So a
block in which it does not is damaged: a scale byte from elsewhere, swapped nibbles, another
expert's codes. Derivation, and what holds for weights not rounded to nearest: docs/verify.md.

Everything runs on x / s2, in F32: there v · S is exact, and no tensor is too small to be squared.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mmq.convert.safetensors_header import TensorInfo
from mmq.convert.stream import Bytes, SourceReader, WeightRows
from mmq.convert.work import WeightSource
from mmq.kernels import ops
from mmq.quantize.floats import to_float32

F32 = npt.NDArray[np.float32]
Indices = npt.NDArray[np.intp]

#: Least signal to quantisation noise of one tensor, in dB.
MIN_SQNR_DB = 19.5
#: Share of blocks from which on a tensor counts as not rounded to nearest.
ADAPTIVE_SHARE = 0.25

_BLOCK = 16
#: Rounding in bf16 arithmetic moves a quotient by up to 2^-8 of it.
_TOLERANCE = 1.01
#: A source that was itself rounded to MXFP8 may lie 1/16 away from what was quantised.
_STEP_TOLERANCE = 1.07
#: Largest t a scale search leaves to saturate: amax / (S · s2) two codes below max scaling's.
_MAX_T = 8.0
#: The smallest scale, 2^-9, stands for quotients up to 1.5 · 2^-9, so for t up to 9.
_MAX_T_SMALLEST = 9.0
_SMALLEST_SCALE = 2.0**-9
#: |x / s2| that rounds to a scale of zero, and below which a scale is a subnormal E4M3.
_UNDERFLOW, _SUBNORMAL = 6 * 2.0**-10, 6 * 2.0**-6
#: Elements worked on at a time: their F32 arrays stay in a core's cache.
_SLAB_ELEMENTS = 1 << 18

_LEVELS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
_MIDS = (_LEVELS[1:] + _LEVELS[:-1]) / 2
#: Distance from its level at which every t is nearest, whatever the level.
_ALWAYS_NEAREST = np.float32(0.25)


class Bounds(NamedTuple):
    """Lowest and highest t of each E2M1 level."""

    low: npt.NDArray[np.float64]
    high: npt.NDArray[np.float64]


#: Rounded to nearest: between the midpoints around the level.
NEAREST = Bounds(
    np.array([-_MIDS[0] * _TOLERANCE, *(_MIDS / _TOLERANCE)]),
    np.array([*(_MIDS * _TOLERANCE), _MAX_T_SMALLEST * _TOLERANCE]),
)
#: Rounded up or down: between the neighbouring levels.
STEP = Bounds(
    np.array([-_LEVELS[1] * _STEP_TOLERANCE, -1e-3, *(_LEVELS[1:-1] / _STEP_TOLERANCE)]),
    np.array([*(_LEVELS[1:] * _STEP_TOLERANCE), _MAX_T_SMALLEST * _TOLERANCE]),
)


class StoredNvfp4(NamedTuple):
    """An NVFP4 weight of OUT: its tensors and its multiplier."""

    packed: TensorInfo
    scale: TensorInfo
    s2: np.float32


class Block(NamedTuple):
    """Where a block is wrong, and by how much: x and what is stored for it."""

    row: int
    block: int
    value: float
    stored: float


@dataclass
class Violations:
    """Blocks outside one bound."""

    count: int = 0
    first: Block | None = None


@dataclass
class ValueCheck:
    """What one weight's comparison gave.

    Attributes:
        signal / noise: Σx² and Σ(x − q)², in units of s2².
        faint: blocks that are not nearest but too small to matter (see `_without_faint`).
        nearest / step: blocks beyond either bound.
    """

    signal: float = 0.0
    noise: float = 0.0
    blocks: int = 0
    faint: int = 0
    nearest: Violations = field(default_factory=Violations)
    step: Violations = field(default_factory=Violations)

    @property
    def sqnr_db(self) -> float:
        """inf without noise, −inf for weights that are no approximation at all."""
        if self.noise == 0:
            return math.inf
        return 10 * math.log10(self.signal / self.noise) if self.signal > 0 else -math.inf

    @property
    def adaptive(self) -> bool:
        """Whether so many blocks are not nearest that the quantiser did not round to nearest."""
        return self.nearest.count > ADAPTIVE_SHARE * self.blocks

    @property
    def violations(self) -> Violations:
        """The bound that applies."""
        return self.step if self.adaptive else self.nearest


def check_values(
    weight: WeightSource, stored: StoredNvfp4, reader: SourceReader, origin: str
) -> ValueCheck:
    """Compare one weight with the source's values.

    Args:
        origin: which of the reader's checkpoints holds `stored`.
    """
    result = ValueCheck()
    first = 0
    columns = weight.shape[1]
    step = max(1, _SLAB_ELEMENTS // columns)
    for codes, scale in WeightRows(reader, weight):
        count = len(codes)
        packed = _read(reader, stored.packed, first, count, columns // 2, origin)
        blocks = _read(reader, stored.scale, first, count, columns // _BLOCK, origin)
        for at in range(0, count, step):
            rows = slice(at, at + step)
            values = _values(weight, codes[rows], None if scale is None else scale[rows])
            check_slab(values, packed[rows], blocks[rows], stored.s2, first + at, result)
        first += count
    return result


def _read(
    reader: SourceReader, tensor: TensorInfo, first: int, count: int, width: int, origin: str
) -> Bytes:
    return reader.read(tensor, first * width, count * width, origin).reshape(count, width)


def _values(weight: WeightSource, codes: Bytes, scale: Bytes | None) -> F32:
    if scale is not None:
        return ops.dequantize_mxfp8_f32(codes, scale)
    return to_float32(codes.reshape(-1), weight.weight.dtype).reshape(len(codes), -1)


@functools.cache
def _tables() -> tuple[npt.NDArray[np.float64], F32]:
    """By mmq's own decoder: both v of each byte (two F32 in one word), and S of each byte."""
    byte, one = np.arange(256, dtype=np.uint8), np.float32(1)
    codes = byte.repeat(_BLOCK // 2).reshape(256, -1)
    unit = np.full((256, 1), 0x38, np.uint8)  # E4M3 for 1
    pairs = ops.dequantize_nvfp4_f32(codes, unit, one)[:, :2]
    twos = np.full((256, _BLOCK // 2), 0x22, np.uint8)  # E2M1 for 1, twice
    scales = ops.dequantize_nvfp4_f32(twos, byte.reshape(256, 1), one)[:, 0]
    return np.ascontiguousarray(pairs).view(np.float64)[:, 0], np.ascontiguousarray(scales)


def check_slab(
    values: F32, packed: Bytes, scale: Bytes, s2: np.float32, row: int, result: ValueCheck
) -> None:
    """Compare some rows, of which `row` is the first, and add what they give to `result`."""
    pairs, scales = _tables()
    with np.errstate(all="ignore"):  # a damaged scale may give anything
        x = (values / s2).reshape(-1, _BLOCK)
        v = pairs[packed].view(np.float32).reshape(-1, _BLOCK)
        step = scales[scale].reshape(-1, 1)
        error = x - v * step
        result.signal += float(np.vdot(x, x))
        result.noise += float(np.vdot(error, error))
        result.blocks += len(x)
        distance = np.abs(error * (1 / step))
        # one comparison clears most elements; written so that NaN stays in doubt
        doubtful = np.flatnonzero(~(distance <= _ALWAYS_NEAREST))
        bad = _outside(x, v, step, doubtful, NEAREST)
        if not bad.size:
            return
        kept = _without_faint(bad, x, v * step, result)
        width = scale.shape[1]
        _note(result.nearest, kept, x, v * step, s2, row, width)
        # whatever is further than a step is further than the nearest value too
        beyond = _outside(x, v, step, kept, STEP)
        _note(result.step, beyond, x, v * step, s2, row, width)


def _outside(x: F32, v: F32, step: F32, at: Indices, bounds: Bounds) -> Indices:
    """Those of the elements `at` whose t their level does not stand for."""
    level, scale = v.reshape(-1)[at], step.reshape(-1)[at // _BLOCK].astype(np.float64)
    value = x.reshape(-1)[at].astype(np.float64)
    t = value / scale * np.where(np.signbit(level), -1, 1)
    nothing = np.abs(value) <= _UNDERFLOW * _TOLERANCE
    t = np.where(scale == 0, np.where(nothing, 0, np.inf), t)
    rank = np.searchsorted(_LEVELS, np.abs(level))
    limit = np.where(scale == _SMALLEST_SCALE, _MAX_T_SMALLEST, _MAX_T) * _TOLERANCE
    # −0 has no side
    t = np.where(rank == 0, np.abs(t), t)
    return at[~((t >= bounds.low[rank]) & (t <= bounds.high[rank]) & (t <= limit))]


def _without_faint(bad: Indices, x: F32, q: F32, result: ValueCheck) -> Indices:
    """`bad` without blocks so small that their scale is a subnormal E4M3.

    Several quantisers flush or misround those; x and q are then below 1/28,672 of what the tensor
    scale reaches, so no error there can be large.
    """
    blocks = np.unique(bad // _BLOCK)
    largest = np.maximum(np.abs(x[blocks]), np.abs(q[blocks])).max(-1)
    faint = blocks[largest < _SUBNORMAL]
    result.faint += len(faint)
    return bad[~np.isin(bad // _BLOCK, faint)]


def _note(
    violations: Violations, bad: Indices, x: F32, q: F32, s2: np.float32, row: int, width: int
) -> None:
    if bad.size and violations.first is None:
        at = int(bad[0])
        rows, block = divmod(at // _BLOCK, width)
        violations.first = Block(
            row + rows, block, float(x.reshape(-1)[at] * s2), float(q.reshape(-1)[at] * s2)
        )
    violations.count += len(np.unique(bad // _BLOCK))

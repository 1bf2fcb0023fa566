"""Values of a foreign quantiser's NVFP4 weights against the source's: SQNR, and every block.

With u = block scale · s2 and t = x / u, a code for magnitude m is *nearest* when t lies between the
E2M1 midpoints around m. Whatever scale a quantiser chose, rounding to nearest satisfies that in
every block, so a block that does not is damaged: a scale byte from elsewhere, swapped nibbles,
another expert's codes. The derivation, and what holds for weights that were not rounded to nearest,
are in docs/verify.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mmq.convert.safetensors_header import TensorInfo
from mmq.convert.stream import Bytes, SourceReader, WeightRows
from mmq.convert.work import WeightSource
from mmq.kernels import ops
from mmq.quantize.floats import to_float32

F32 = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]

#: Least signal to quantisation noise of one tensor, in dB.
MIN_SQNR_DB = 19.5
#: Share of blocks from which on a tensor counts as not rounded to nearest.
ADAPTIVE_SHARE = 0.25
#: Rounding in bf16 arithmetic moves a quotient by up to 2^-8 of it.
_TOLERANCE = 0.01
#: A source that was itself rounded to MXFP8 may lie 1/16 away from what was quantised.
_STEP_TOLERANCE = 0.07
#: Largest t a scale search leaves to saturate: amax / u of a scale two codes below the maximum's.
_MAX_T = 8.0
#: The smallest subnormal scale stands for quotients up to 1.5 · 2^-9, so for t up to 9.
_MAX_T_SMALLEST = 9.0
_SMALLEST_SCALE = 1
#: A byte of two codes for 1.0, and the magnitude bits of both nibbles.
_CODES_OF_ONE, _MAGNITUDES = 0x22, np.uint8(0x77)
_BLOCK = 16
#: Elements worked on at a time: a few MB of F32 each.
_SLAB_ELEMENTS = 1 << 20

_LEVELS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float64)
_MIDS = (_LEVELS[1:] + _LEVELS[:-1]) / 2


def _bounds(lower: Any, upper: Any, tolerance: float) -> F32:
    """(lowest, highest) t for each byte's two nibbles: F32 [256, 2, 2]."""
    low = np.concatenate([[-upper[0]], np.asarray(lower)]) * (1 - tolerance)
    low[0] = -upper[0] * (1 + tolerance)
    high = np.concatenate([np.asarray(upper), [np.inf]]) * (1 + tolerance)
    by_level = np.stack([low, high], -1).astype(np.float32)
    codes = np.arange(256)
    return by_level[np.stack([codes & 7, (codes >> 4) & 7], -1)]


#: Rounded to nearest: t between the midpoints around the level.
_NEAREST = _bounds(_MIDS, _MIDS, _TOLERANCE)
#: Rounded up or down: t between the neighbouring levels.
_STEP = _bounds(np.concatenate([[-1e-3], _LEVELS[1:-1]]), _LEVELS[1:], _STEP_TOLERANCE)
_SIGNS = np.where(np.stack([np.arange(256) & 8, np.arange(256) >> 4 & 8], -1), -1, 1).astype(
    np.float32
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
        signal / noise: Σx² and Σ(x − q)².
        flushed: blocks stored as zeros although they hold (tiny) data.
        nearest / step: blocks beyond either bound.
    """

    signal: float = 0.0
    noise: float = 0.0
    blocks: int = 0
    flushed: int = 0
    nearest: Violations = field(default_factory=Violations)
    step: Violations = field(default_factory=Violations)

    @property
    def sqnr_db(self) -> float:
        """inf without noise, −inf or NaN for weights that are no approximation at all."""
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
    for codes, scale in WeightRows(reader, weight):
        count = len(codes)
        packed = _read(reader, stored.packed, first, count, columns // 2, origin)
        blocks = _read(reader, stored.scale, first, count, columns // _BLOCK, origin)
        step = max(1, _SLAB_ELEMENTS // columns)
        for at in range(0, count, step):
            rows = slice(at, at + step)
            values = _values(weight, codes[rows], None if scale is None else scale[rows])
            _check_slab(values, packed[rows], blocks[rows], stored.s2, first + at, result)
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


def _check_slab(
    values: F32, packed: Bytes, scale: Bytes, s2: np.float32, row: int, result: ValueCheck
) -> None:
    restored = ops.dequantize_nvfp4_f32(packed, scale, s2)
    exact = values.astype(np.float64)
    error = exact - restored
    result.signal += float(np.vdot(exact, exact))
    result.noise += float(np.vdot(error, error))
    result.blocks += scale.size
    t = _quotients(values, packed, scale, s2)
    bad = _outside(t, packed, scale, _NEAREST)
    if not bad.any():
        return
    flushed = _flushed(values, packed, s2)
    result.flushed += int(np.count_nonzero(_in_blocks(bad).any(-1) & flushed))
    kept = ~flushed.repeat(_BLOCK, -1)
    _note(result.nearest, bad & kept, values, restored, row)
    # whatever is further than a step is further than the nearest value too
    _note(result.step, _outside(t, packed, scale, _STEP) & kept, values, restored, row)


def _quotients(values: F32, packed: Bytes, scale: Bytes, s2: np.float32) -> F32:
    """t = x / u, positive where x has the sign of its code: F32 [O, K]."""
    ones = np.full((len(packed), scale.shape[1] * _BLOCK // 2), _CODES_OF_ONE, np.uint8)
    unit = ops.dequantize_nvfp4_f32(ones, scale, s2)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        t = values / unit
    if not unit.all():
        # under a scale of zero only what rounds to it may lie
        nothing = np.abs(values) <= np.float32(6 * 2.0**-10 * (1 + _TOLERANCE)) * s2
        t = np.where(unit == 0, np.where(nothing, np.float32(0), np.float32(np.inf)), t)
    return t * _SIGNS[packed].reshape(t.shape)


def _outside(t: F32, packed: Bytes, scale: Bytes, bounds: F32) -> Mask:
    """Elements whose t their code does not stand for: bool [O, K]."""
    allowed = bounds[packed].reshape(*t.shape, 2)
    smallest = scale == _SMALLEST_SCALE
    limit = np.where(smallest, _MAX_T_SMALLEST, _MAX_T).astype(np.float32) * (1 + _TOLERANCE)
    within = (t >= allowed[..., 0]) & (t <= allowed[..., 1]) & (t <= limit.repeat(_BLOCK, -1))
    return ~within  # so that NaN is outside


def _flushed(values: F32, packed: Bytes, s2: np.float32) -> Mask:
    """Blocks stored as zeros because their scale would be a subnormal E4M3: bool [O, blocks]."""
    empty = ~((packed & _MAGNITUDES).reshape(len(packed), -1, _BLOCK // 2).any(-1))
    tiny = _in_blocks(np.abs(values)).max(-1) < np.float32(6 * 2.0**-6) * s2
    return np.asarray(empty & tiny)


def _in_blocks(array: Any) -> Any:
    return array.reshape(len(array), -1, _BLOCK)


def _note(violations: Violations, bad: Mask, values: F32, restored: F32, row: int) -> None:
    blocks = _in_blocks(bad).any(-1)
    count = int(np.count_nonzero(blocks))
    if count and violations.first is None:
        at, block = (int(i) for i in np.argwhere(blocks)[0])
        column = block * _BLOCK + int(_in_blocks(bad)[at, block].argmax())
        violations.first = Block(
            row + at, block, float(values[at, column]), float(restored[at, column])
        )
    violations.count += count

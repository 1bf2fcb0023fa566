"""Carrying tasks out: read, compute through `kernels.ops`, append to the shard in file order."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from mmq.convert.modules import NVFP4_LAYOUT_OF
from mmq.convert.safetensors_header import TensorInfo
from mmq.convert.scan import Scan, scan_dtype
from mmq.convert.stream import Bytes, SourceReader, WeightRows, read_importance
from mmq.convert.work import (
    AnalyticKScale,
    AnalyticVScale,
    CopyTensor,
    DequantizeBf16,
    QuantizeMxfp8,
    QuantizeNvfp4,
    RelayoutNvfp4,
    Task,
    WeightSource,
    WriteScalar,
)
from mmq.errors import BadInputError
from mmq.kernels import ops
from mmq.quantize.floats import as_storage, to_float32
from mmq.quantize.global_scale import MIN_GLOBAL_SCALE, nvfp4_global_scale, reciprocal_scale
from mmq.quantize.kv_scales import k_bound, scale_from_bound, v_bound

Emit = Callable[[Any], None]


class TensorRow(NamedTuple):
    """One line of tensors.csv: what became of a weight, and with which error.

    Attributes:
        global_scale: s2 as a multiplier, F32; NaN when there is none.
        signal / noise: Σx² and Σ(x − q)² against the source's values.
        nonfinite: NaN/Inf elements let through by --allow-nonfinite-passthrough.
        other_scalars: (name, hex) of each scalar of the other NVFP4 layout that 1/x does not give.
    """

    name: str
    action: str
    dtype_in: str
    dtype_out: str
    shape: tuple[int, ...]
    bytes_in: int
    bytes_out: int
    global_scale: float = math.nan
    signal: float = 0.0
    noise: float = 0.0
    max_error: float = 0.0
    nonfinite: int = 0
    other_scalars: tuple[tuple[str, str], ...] = ()


@dataclass
class TaskContext:
    """What tasks need besides themselves."""

    reader: SourceReader
    allow_nonfinite: bool
    gemma_norm: bool
    emit: Emit
    rows: list[TensorRow] = field(default_factory=list)


def run_task(task: Task, context: TaskContext) -> None:
    """Write a task's outputs in order and record their rows.

    Raises:
        BadInputError: NaN/Inf in the source, or values no F32 holds.
    """
    _RUN[type(task)](task, context)


def _copy(task: CopyTensor, context: TaskContext) -> None:
    tensor, out = task.source, task.output
    dtype = scan_dtype(tensor)
    scan = Scan(tensor, dtype) if dtype else None
    for chunk in context.reader.chunks(tensor):
        if scan:
            scan.add(chunk)
        context.emit(chunk)
    if scan and not context.allow_nonfinite:
        scan.check()
    context.rows.append(
        TensorRow(
            out.name, "copy", tensor.dtype, out.dtype, out.shape, tensor.nbytes, out.nbytes,
            nonfinite=scan.count if scan else 0,
        )
    )  # fmt: skip


def _checked_amax(weight: WeightSource, rows: WeightRows) -> np.float32:
    """Largest |value| of a weight; refuses NaN, Inf and what F32 cannot hold."""
    amax = np.float32(0)
    scans = [Scan(weight.weight, weight.weight.dtype)]
    if weight.scale is not None:
        scans.append(Scan(weight.scale, "F8_E8M0"))
    for codes, scale in rows:
        for scan, raw in zip(scans, (codes, scale), strict=False):
            scan.add(raw)  # type: ignore[arg-type]
        if not any(scan.count for scan in scans):
            amax = max(amax, _piece_amax(weight, codes, scale))
    for scan in scans:
        scan.check()
    if not np.isfinite(amax):
        raise _overflow(weight, "F32")
    return amax


def _overflow(weight: WeightSource, dtype: str) -> BadInputError:
    return BadInputError(
        "value-overflow",
        f"{weight.weight.name} holds values beyond {dtype}",
        where=f"{weight.weight.shard}: {weight.weight.name}",
        hint="the scales are damaged: compare the shard's SHA-256 with the Hub's",
    )


def _piece_amax(weight: WeightSource, codes: Bytes, scale: Bytes | None) -> np.float32:
    if scale is not None:
        return ops.mxfp8_amax(codes, scale)
    dtype = weight.weight.dtype
    return ops.float_amax(as_storage(codes, dtype), dtype)


def _quantize_nvfp4(task: QuantizeNvfp4, context: TaskContext) -> None:
    sources = [WeightRows(context.reader, w) for w in task.weights]
    amax = max(_checked_amax(w, r) for w, r in zip(task.weights, sources, strict=True))
    s2 = nvfp4_global_scale(amax, task.search)
    written = reciprocal_scale(s2) if task.divisor else s2
    for i, (weight, rows, result) in enumerate(
        zip(task.weights, sources, task.results, strict=True)
    ):
        weigh = read_importance(context.reader, task.importance[i]) if task.importance else None
        error = ops.ErrorSums()
        scales: list[Bytes] = []
        for codes, scale in rows:
            block = _nvfp4_piece(weight, codes, scale, s2, task.search, weigh, error)
            context.emit(block.packed)
            scales.append(block.scale)
            error = block.error
        for piece in scales:
            context.emit(piece)
        context.emit(_scalar(written))
        if result.input_scale is not None:
            context.emit(_scalar(1.0))
        context.rows.append(
            TensorRow(
                result.packed.name, "quantize", weight.format, "NVFP4", weight.shape,
                sum(t.nbytes for t in weight.tensors), sum(o.nbytes for o in result.present),
                float(s2), error.signal, error.noise, error.max_error,
                other_scalars=_unless_exact(f"{weight.module}.weight_scale_2", written, s2),
            )
        )  # fmt: skip


def _nvfp4_piece(
    weight: WeightSource, codes: Bytes, scale: Bytes | None, s2: np.float32, search: str,
    importance: np.ndarray[Any, np.dtype[np.float32]] | None, running: ops.ErrorSums,
) -> ops.Nvfp4:  # fmt: skip
    if scale is not None:
        return ops.quantize_nvfp4_from_mxfp8(
            codes, scale, s2, search=search, importance=importance, running=running
        )
    dtype = weight.weight.dtype
    return ops.quantize_nvfp4_from_float(
        as_storage(codes, dtype), dtype, s2, search=search, importance=importance, running=running
    )


def _unless_exact(name: str, written: np.float32, other: np.float32) -> tuple[tuple[str, str], ...]:
    """((name, hex),) of the other layout's scalar, unless `written` or its reciprocal is it."""
    if other in (written, reciprocal_scale(written)):
        return ()
    return ((name, float(other).hex()),)


def _relayout(task: RelayoutNvfp4, context: TaskContext) -> None:
    weight, result = task.weight, task.result
    assert weight.scale is not None and weight.global_scale is not None
    for chunk in context.reader.chunks(weight.weight):
        context.emit(chunk)
    scan = Scan(weight.scale, "F8_E4M3")
    for chunk in context.reader.chunks(weight.scale):
        scan.add(chunk)
        context.emit(chunk)
    scan.check()
    stored = _read_scalar(context.reader, weight.global_scale)
    written = _reexpressed(stored, task.stored_global)
    context.emit(_scalar(written))
    inexact = _unless_exact(weight.global_scale.name, written, stored)
    if result.input_scale is not None:
        value = written_input = np.float32(1.0)
        if task.input_scale is not None:
            value = _read_scalar(context.reader, task.input_scale)
            written_input = _reexpressed(value, task.stored_input)
            inexact += _unless_exact(task.input_scale.name, written_input, value)
        context.emit(_scalar(written_input))
    divisor = NVFP4_LAYOUT_OF[weight.format].divisor
    context.rows.append(
        TensorRow(
            result.packed.name, "relayout", "NVFP4", "NVFP4", weight.shape,
            sum(t.nbytes for t in task.consumes), sum(o.nbytes for o in result.present),
            float(reciprocal_scale(stored) if divisor else stored), other_scalars=inexact,
        )
    )  # fmt: skip


def _reexpressed(value: np.float32, stored: float | None) -> np.float32:
    """The other convention's scalar: 1/value, or the stored one that value was made from."""
    if stored is not None and reciprocal_scale(np.float32(stored)) == value:
        return np.float32(stored)
    return reciprocal_scale(value)


def _read_scalar(reader: SourceReader, tensor: TensorInfo) -> np.float32:
    value: np.float32 | None = None
    if tensor.dtype == "F32" and tensor.nbytes == 4:
        value = np.float32(reader.whole(tensor).view("<f4")[0])
    # normal, and so is its reciprocal: what both layouts can express
    if value is None or not MIN_GLOBAL_SCALE <= value <= 1 / MIN_GLOBAL_SCALE:
        raise BadInputError(
            "scalar-invalid",
            f"{tensor.name} must be one normal F32 above zero",
            where=f"{tensor.shard}: {tensor.name}",
            got=f"{tensor.dtype} {list(tensor.shape)}" if value is None else value,
            expected="F32 [] from 2^-126 to 2^126",
        )
    return value


def _quantize_mxfp8(task: QuantizeMxfp8, context: TaskContext) -> None:
    weight = task.weight
    rows = WeightRows(context.reader, weight)
    _checked_amax(weight, rows)
    error = ops.ErrorSums()
    scales = []
    for values, _ in rows:
        dtype = weight.weight.dtype
        codes, scale, error = ops.quantize_mxfp8(as_storage(values, dtype), dtype, running=error)
        context.emit(codes)
        scales.append(scale)
    for piece in scales:
        context.emit(piece)
    context.rows.append(
        TensorRow(
            task.codes.name, "quantize", weight.weight.dtype, "MXFP8", weight.shape,
            weight.weight.nbytes, task.codes.nbytes + task.scale.nbytes, math.nan,
            error.signal, error.noise, error.max_error,
        )
    )  # fmt: skip


def _dequantize(task: DequantizeBf16, context: TaskContext) -> None:
    weight = task.weight
    s2 = np.float32(1.0)
    if weight.global_scale is not None:
        s2 = _read_scalar(context.reader, weight.global_scale)
        if NVFP4_LAYOUT_OF[weight.format].divisor:
            s2 = _reexpressed(s2, task.stored_global)
    assert weight.scale is not None
    nvfp4 = weight.format in NVFP4_LAYOUT_OF
    scans = [Scan(weight.scale, "F8_E4M3" if nvfp4 else "F8_E8M0")]
    if not nvfp4:
        scans.append(Scan(weight.weight, "F8_E4M3"))
    overflow = 0
    for codes, scale in WeightRows(context.reader, weight):
        assert scale is not None
        for scan, raw in zip(scans, (scale, codes), strict=False):
            scan.add(raw)
        values = (
            ops.dequantize_nvfp4(codes, scale, s2) if nvfp4 else ops.dequantize_mxfp8(codes, scale)
        )
        overflow += ops.count_nonfinite(values.view(np.uint8).reshape(-1), "BF16")[0]
        context.emit(values)
    for scan in scans:
        scan.check()
    if overflow:
        raise _overflow(weight, "BF16")
    context.rows.append(
        TensorRow(
            task.output.name, "dequantize", "NVFP4" if nvfp4 else "MXFP8", "BF16", weight.shape,
            sum(t.nbytes for t in weight.tensors), task.output.nbytes,
        )
    )  # fmt: skip


def _write_scalar(task: WriteScalar, context: TaskContext) -> None:
    _emit_kv_scale(task.output.name, np.float32(task.value), context)


def _analytic_k(task: AnalyticKScale, context: TaskContext) -> None:
    norm = to_float32(context.reader.whole(task.norm), task.norm.dtype).astype(np.float64)
    bound = k_bound(norm, task.head_dim, gemma=context.gemma_norm)
    _emit_kv_scale(task.output.name, _finite_scale(bound, task.norm), context)


def _analytic_v(task: AnalyticVScale, context: TaskContext) -> None:
    values = np.concatenate(list(weight_values(task.weight, context.reader)))
    gamma = to_float32(context.reader.whole(task.norm), task.norm.dtype).astype(np.float64)
    bound = v_bound(values, gamma, gemma=context.gemma_norm)
    _emit_kv_scale(task.output.name, _finite_scale(bound, task.weight.weight), context)


def _finite_scale(bound: float, tensor: TensorInfo) -> np.float32:
    if not bound < float(np.finfo(np.float32).max):
        raise BadInputError(
            "kv-scale-no-bound",
            f"{tensor.name} or its norm gives no finite bound for a KV scale",
            where=tensor.name,
            got=bound,
            hint="--kv-scales unit, or --kv-scales none",
        )
    return scale_from_bound(bound)


def weight_values(
    weight: WeightSource, reader: SourceReader
) -> Iterator[np.ndarray[Any, np.dtype[np.float32]]]:
    """A weight's values as float32, piece by piece; NVFP4 needs its scalar and is not read here."""
    for codes, scale in WeightRows(reader, weight):
        if scale is None:
            yield to_float32(codes.reshape(-1), weight.weight.dtype).reshape(len(codes), -1)
        else:
            yield ops.dequantize_mxfp8_f32(codes, scale)


def _emit_kv_scale(name: str, value: np.float32, context: TaskContext) -> None:
    context.emit(_scalar(value))
    context.rows.append(TensorRow(name, "kv-scale", "", "F32", (), 0, 4, float(value)))


def _scalar(value: float | np.float32) -> bytes:
    return np.array([value], "<f4").tobytes()


_RUN: dict[type[Any], Callable[[Any, TaskContext], None]] = {
    CopyTensor: _copy,
    QuantizeNvfp4: _quantize_nvfp4,
    RelayoutNvfp4: _relayout,
    QuantizeMxfp8: _quantize_mxfp8,
    DequantizeBf16: _dequantize,
    WriteScalar: _write_scalar,
    AnalyticKScale: _analytic_k,
    AnalyticVScale: _analytic_v,
}

"""Carrying tasks out: read, compute through `kernels.ops`, append to the shard in file order."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from mmq.convert.kv_tasks import analytic_k, analytic_v, write_scalar
from mmq.convert.modules import NVFP4_LAYOUT_OF
from mmq.convert.safetensors_header import TensorInfo
from mmq.convert.scan import Scan, scan_dtype
from mmq.convert.stream import Bytes, SourceReader, WeightRows, read_importance
from mmq.convert.task_context import TaskContext, TensorRow, scalar_bytes
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
from mmq.quantize.floats import as_storage
from mmq.quantize.global_scale import MIN_GLOBAL_SCALE, nvfp4_global_scale, reciprocal_scale
from mmq.quantize.layouts import MODELOPT

__all__ = ["TaskContext", "TensorRow", "run_task"]


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


def _checked_amax(weight: WeightSource, rows: WeightRows, backend: str) -> np.float32:
    """Largest |value| of a weight; refuses NaN, Inf and what F32 cannot hold."""
    amax = np.float32(0)
    scans = [Scan(weight.weight, weight.weight.dtype)]
    if weight.scale is not None:
        scans.append(Scan(weight.scale, "F8_E8M0"))
    for codes, scale in rows:
        for scan, raw in zip(scans, (codes, scale), strict=False):
            scan.add(raw)  # type: ignore[arg-type]
        if not any(scan.count for scan in scans):
            amax = max(amax, _piece_amax(weight, codes, scale, backend))
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


def _piece_amax(
    weight: WeightSource, codes: Bytes, scale: Bytes | None, backend: str
) -> np.float32:
    if scale is not None:
        return ops.mxfp8_amax(codes, scale, backend=backend)
    dtype = weight.weight.dtype
    return ops.float_amax(as_storage(codes, dtype), dtype)


def _quantize_nvfp4(task: QuantizeNvfp4, context: TaskContext) -> None:
    sources = [WeightRows(context.reader, w) for w in task.weights]
    backend = context.backend
    amax = max(_checked_amax(w, r, backend) for w, r in zip(task.weights, sources, strict=True))
    s2 = nvfp4_global_scale(amax, task.search)
    written = reciprocal_scale(s2) if task.divisor else s2
    for i, (weight, rows, result) in enumerate(
        zip(task.weights, sources, task.results, strict=True)
    ):
        weigh = read_importance(context.reader, task.importance[i]) if task.importance else None
        error = ops.ErrorSums()
        scales: list[Bytes] = []
        for codes, scale in rows:
            block = _nvfp4_piece(
                weight, codes, scale, s2, search=task.search, importance=weigh, running=error,
                backend=backend,
            )  # fmt: skip
            context.emit(block.packed)
            scales.append(block.scale)
            error = block.error
        for piece in scales:
            context.emit(piece)
        context.emit(scalar_bytes(written))
        others = _unless_exact(f"{weight.module}.{MODELOPT.global_scale}", written, s2)
        if result.input_scale is not None:
            value, other = _given_input(task.inputs[i], weight.module, task.divisor)
            context.emit(scalar_bytes(value))
            others += other
        context.rows.append(
            TensorRow(
                result.packed.name, "quantize", weight.format, "NVFP4", weight.shape,
                sum(t.nbytes for t in weight.tensors), sum(o.nbytes for o in result.present),
                float(s2), error.signal, error.noise, error.max_error,
                other_scalars=others,
            )
        )  # fmt: skip


def _given_input(
    multiplier: float, module: str, divisor: bool
) -> tuple[np.float32, tuple[tuple[str, str], ...]]:
    """An activation scale as the layout stores it, and the multiplier where 1/x is not it."""
    given = np.float32(multiplier)
    written = reciprocal_scale(given) if divisor else given
    return written, _unless_exact(f"{module}.{MODELOPT.input_scale}", written, given)


def _nvfp4_piece(
    weight: WeightSource, codes: Bytes, scale: Bytes | None, s2: np.float32, **how: Any
) -> ops.Nvfp4:
    if scale is not None:
        return ops.quantize_nvfp4_from_mxfp8(codes, scale, s2, **how)
    dtype = weight.weight.dtype
    return ops.quantize_nvfp4_from_float(as_storage(codes, dtype), dtype, s2, **how)


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
    context.emit(scalar_bytes(written))
    inexact = _unless_exact(weight.global_scale.name, written, stored)
    divisor = NVFP4_LAYOUT_OF[weight.format].divisor
    if result.input_scale is not None:
        if task.input_scale is not None:
            value = _read_scalar(context.reader, task.input_scale)
            written = _reexpressed(value, task.stored_input)
            inexact += _unless_exact(task.input_scale.name, written, value)
        else:
            written, other = _given_input(task.input, weight.module, not divisor)
            inexact += other
        context.emit(scalar_bytes(written))
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
    _checked_amax(weight, rows, context.backend)
    error = ops.ErrorSums()
    scales = []
    for values, _ in rows:
        dtype = weight.weight.dtype
        codes, scale, error = ops.quantize_mxfp8(
            as_storage(values, dtype), dtype, running=error, backend=context.backend
        )
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
            ops.dequantize_nvfp4(codes, scale, s2, backend=context.backend)
            if nvfp4
            else ops.dequantize_mxfp8(codes, scale, backend=context.backend)
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


_RUN: dict[type[Any], Callable[[Any, TaskContext], None]] = {
    CopyTensor: _copy,
    QuantizeNvfp4: _quantize_nvfp4,
    RelayoutNvfp4: _relayout,
    QuantizeMxfp8: _quantize_mxfp8,
    DequantizeBf16: _dequantize,
    WriteScalar: write_scalar,
    AnalyticKScale: analytic_k,
    AnalyticVScale: analytic_v,
}

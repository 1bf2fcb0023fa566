"""KV scales as tasks: known beforehand, or bounds derived from the weights that make K and V."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from mmq.convert.safetensors_header import TensorInfo
from mmq.convert.stream import SourceReader, WeightRows
from mmq.convert.task_context import TaskContext, TensorRow, scalar_bytes
from mmq.convert.work import AnalyticKScale, AnalyticVScale, WeightSource, WriteScalar
from mmq.errors import BadInputError
from mmq.kernels import ops
from mmq.quantize.floats import to_float32
from mmq.quantize.kv_scales import k_bound, scale_from_bound, v_bound


def write_scalar(task: WriteScalar, context: TaskContext) -> None:
    """A scale known beforehand."""
    _emit_kv_scale(task.output.name, np.float32(task.value), context)


def analytic_k(task: AnalyticKScale, context: TaskContext) -> None:
    """The bound that the key norm puts on K."""
    norm = to_float32(context.reader.whole(task.norm), task.norm.dtype).astype(np.float64)
    bound = k_bound(norm, task.head_dim, gemma=context.gemma_norm)
    _emit_kv_scale(task.output.name, _finite_scale(bound, task.norm), context)


def analytic_v(task: AnalyticVScale, context: TaskContext) -> None:
    """The bound that v_proj and its input norm put on V."""
    values = np.concatenate(list(_weight_values(task.weight, context.reader, context.backend)))
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


def _weight_values(
    weight: WeightSource, reader: SourceReader, backend: str
) -> Iterator[np.ndarray[Any, np.dtype[np.float32]]]:
    """A weight's values as float32, piece by piece; NVFP4 needs its scalar and is not read here."""
    for codes, scale in WeightRows(reader, weight):
        if scale is None:
            yield to_float32(codes.reshape(-1), weight.weight.dtype).reshape(len(codes), -1)
        else:
            yield ops.dequantize_mxfp8_f32(codes, scale, backend=backend)


def _emit_kv_scale(name: str, value: np.float32, context: TaskContext) -> None:
    context.emit(scalar_bytes(value))
    context.rows.append(TensorRow(name, "kv-scale", "", "F32", (), 0, 4, float(value)))

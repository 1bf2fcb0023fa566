"""The work a plan consists of: tasks that turn source tensors into output tensors.

Tasks are plain data, so that a unit can be sent to another process. `tasks.py` carries them out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from mmq.convert.safetensors_header import TensorInfo
from mmq.quantize.formats import tensor_nbytes

#: Which file a task reads: the source, or the one given by --experts-from or --importance.
SOURCE, EXPERTS, IMPORTANCE = "source", "experts", "importance"


class Output(NamedTuple):
    """A tensor to be written."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


def output(name: str, dtype: str, shape: tuple[int, ...]) -> Output:
    """An `Output` with its size worked out."""
    return Output(name, dtype, shape, tensor_nbytes(dtype, shape))


class WeightSource(NamedTuple):
    """A linear's weight as stored: codes or floats, and the scales its format has.

    Attributes:
        format: "plain", "mxfp8", "modelopt" or "minimax" (see `modules`).
        shape: logical [O, K].
        origin: SOURCE or EXPERTS.
    """

    module: str
    format: str
    shape: tuple[int, ...]
    weight: TensorInfo
    scale: TensorInfo | None
    global_scale: TensorInfo | None
    origin: str = SOURCE

    @property
    def tensors(self) -> tuple[TensorInfo, ...]:
        return tuple(t for t in (self.weight, self.scale, self.global_scale) if t is not None)


@dataclass(frozen=True, slots=True)
class CopyTensor:
    """The bytes as they are; name and dtype tag may change."""

    source: TensorInfo
    output: Output

    @property
    def outputs(self) -> tuple[Output, ...]:
        return (self.output,)

    @property
    def consumes(self) -> tuple[TensorInfo, ...]:
        return (self.source,)


class Nvfp4Outputs(NamedTuple):
    """The tensors of one NVFP4 projection, in file order."""

    packed: Output
    block_scale: Output
    global_scale: Output
    input_scale: Output | None

    @property
    def present(self) -> tuple[Output, ...]:
        return tuple(o for o in self if o is not None)


@dataclass(frozen=True, slots=True)
class QuantizeNvfp4:
    """Projections that share one global scale (w1 with w3; w2 alone) become NVFP4.

    Attributes:
        divisor: whether the layout stores 1/s2.
        search: how block scales are chosen (`--scale-search`).
        importance: channel weights of each projection, or nothing.
        inputs: activation scale of each projection, as a multiplier, where results have one.
    """

    weights: tuple[WeightSource, ...]
    results: tuple[Nvfp4Outputs, ...]
    divisor: bool
    search: str
    importance: tuple[TensorInfo, ...] = ()
    inputs: tuple[float, ...] = ()

    @property
    def outputs(self) -> tuple[Output, ...]:
        return tuple(o for r in self.results for o in r.present)

    @property
    def consumes(self) -> tuple[TensorInfo, ...]:
        return tuple(t for w in self.weights for t in w.tensors)


@dataclass(frozen=True, slots=True)
class RelayoutNvfp4:
    """NVFP4 to the other NVFP4 layout: codes and block scales untouched, scalars re-expressed.

    Attributes:
        input_scale: the source's, or None: then `input` is written if the layout wants one.
        stored_global, stored_input: the scalars the source was made from, when its manifest tells.
        input: an activation scale as a multiplier.
    """

    weight: WeightSource
    input_scale: TensorInfo | None
    result: Nvfp4Outputs
    stored_global: float | None
    stored_input: float | None
    input: float = 1.0

    @property
    def outputs(self) -> tuple[Output, ...]:
        return self.result.present

    @property
    def consumes(self) -> tuple[TensorInfo, ...]:
        extra = () if self.input_scale is None else (self.input_scale,)
        return (*self.weight.tensors, *extra)


@dataclass(frozen=True, slots=True)
class QuantizeMxfp8:
    """A float weight becomes E4M3 codes and E8M0 scales."""

    weight: WeightSource
    codes: Output
    scale: Output

    @property
    def outputs(self) -> tuple[Output, ...]:
        return (self.codes, self.scale)

    @property
    def consumes(self) -> tuple[TensorInfo, ...]:
        return self.weight.tensors


@dataclass(frozen=True, slots=True)
class DequantizeBf16:
    """A quantised weight becomes BF16.

    Attributes:
        stored_global: the multiplier that a stored divisor was made from, when a manifest tells.
    """

    weight: WeightSource
    output: Output
    stored_global: float | None = None

    @property
    def outputs(self) -> tuple[Output, ...]:
        return (self.output,)

    @property
    def consumes(self) -> tuple[TensorInfo, ...]:
        return self.weight.tensors


@dataclass(frozen=True, slots=True)
class WriteScalar:
    """An F32 scalar known beforehand, such as a unit KV scale."""

    output: Output
    value: float

    @property
    def outputs(self) -> tuple[Output, ...]:
        return (self.output,)

    @property
    def consumes(self) -> tuple[TensorInfo, ...]:
        return ()


@dataclass(frozen=True, slots=True)
class AnalyticKScale:
    """K scale from the key norm's weight; reads what another task copies."""

    norm: TensorInfo
    head_dim: int
    output: Output

    @property
    def outputs(self) -> tuple[Output, ...]:
        return (self.output,)

    @property
    def consumes(self) -> tuple[TensorInfo, ...]:
        return ()


@dataclass(frozen=True, slots=True)
class AnalyticVScale:
    """V scale from v_proj and the layer's input norm; reads what other tasks copy."""

    weight: WeightSource
    norm: TensorInfo
    output: Output

    @property
    def outputs(self) -> tuple[Output, ...]:
        return (self.output,)

    @property
    def consumes(self) -> tuple[TensorInfo, ...]:
        return ()


Task = (
    CopyTensor
    | QuantizeNvfp4
    | RelayoutNvfp4
    | QuantizeMxfp8
    | DequantizeBf16
    | WriteScalar
    | AnalyticKScale
    | AnalyticVScale
)


@dataclass(frozen=True)
class WorkUnit:
    """One output shard and everything that fills it, in file order.

    Attributes:
        header: length field, JSON and padding, ready to write.
        data_bytes: payload after the header.
        read_bytes: source payload the tasks consume.
    """

    index: int
    filename: str
    tasks: tuple[Task, ...]
    header: bytes
    data_bytes: int
    read_bytes: int

    @property
    def file_bytes(self) -> int:
        return len(self.header) + self.data_bytes

    @property
    def outputs(self) -> list[Output]:
        return [o for task in self.tasks for o in task.outputs]

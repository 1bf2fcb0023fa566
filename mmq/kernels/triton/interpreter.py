"""Repairs of Triton's interpreter, which runs kernels on the CPU with TRITON_INTERPRET=1.

As of Triton 3.9 it is wrong, mostly in silence, about floats that NumPy does not have:

    `tl.dot` of BF16                 multiplies the raw 16-bit patterns
    `tl.dot` of E4M3                 reads the NaN codes as ±480
    `tl.dot_scaled`, E4M3 scales     decodes them as E8M0, so that NVFP4 gives nonsense
    `tl.dot_scaled`, BF16 operand    goes through F16, which overflows
    float → float8                   truncates, flushes and wraps around
    float8 → float                   reads NaN codes as numbers, loses subnormals in F16
    F32 → BF16, BF16 → F32           truncates; loses subnormals
    integer → BF16                   takes the integer for the pattern; refused beyond 2^24
    arithmetic on BF16 and float8    works on the patterns; here it is refused
    inline assembly                  is refused; here a registered twin in Python runs

Four numbers, F32 to E4M3: 17 gives 0x58 (16, ties to even), 465 gives 0x7E (448, saturated),
0.001 gives 0x01 (2^−9), NaN gives 0x7F: what `cvt.rn.satfinite.e4m3x2.f32` of PTX gives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import triton.language as tl
from numpy.typing import NDArray
from triton.runtime import interpreter as shipped

Array = NDArray[Any]

_FLOAT8 = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}
_NUMPY = {tl.float16: np.float16, tl.float32: np.float32, tl.float64: np.float64}
#: What NumPy has no arithmetic for.
_RAW = {tl.bfloat16, tl.float8e5, tl.float8e5b16, tl.float8e4nv, tl.float8e4b8, tl.float8e4b15}
_VALUES = {
    dtype: torch.arange(256).to(torch.uint8).view(form).float().numpy()
    for dtype, form in _FLOAT8.items()
}
#: What the repair converts to.
_PATTERNED = {tl.bfloat16, *_FLOAT8}
_BUILDER = shipped.InterpreterBuilder
_TWINS: dict[str, Callable[..., Any]] = {}
_FORMER: dict[tuple[object, str], object] = {}


def register_twin(asm: str | tl.constexpr, function: Callable[..., Any]) -> None:
    """Say what an inline assembly computes.

    Args:
        asm: the text, to the letter, that `tl.inline_asm_elementwise` is given.
        function: of one array for each operand, all of one shape, however many elements the
            assembly takes at a time (`pack`). It returns an array of that shape, or one for each
            output.

    Raises:
        ValueError: another function is registered for this text.
    """
    asm = getattr(asm, "value", asm)
    if _TWINS.setdefault(asm, function) is not function:
        raise ValueError(f"there is a twin already of: {asm}")


def twin(asm: str | tl.constexpr) -> Callable[..., Any]:
    """The function registered for `asm`.

    Raises:
        NotImplementedError: there is none.
    """
    asm = getattr(asm, "value", asm)
    if asm not in _TWINS:
        raise NotImplementedError(f"no Python twin is registered for: {asm}")
    return _TWINS[asm]


def repair() -> None:
    """Put the repairs in place of what Triton ships; a second call does nothing."""
    for (owner, name), function in _REPAIRS.items():
        _FORMER.setdefault((owner, name), getattr(owner, name))
        setattr(owner, name, function)


def undo() -> None:
    """Put back what Triton ships, for the tests that show what is wrong with it."""
    for (owner, name), function in _FORMER.items():
        setattr(owner, name, function)


def _former(owner: object, name: str) -> Any:
    return _FORMER[owner, name]


def _as_f32(data: Array, dtype: tl.dtype) -> Array:
    """The numbers of an array as the interpreter keeps it."""
    if dtype == tl.bfloat16:
        bits = np.ascontiguousarray(data).view(np.uint16).astype(np.uint32) << 16
        return bits.view(np.float32).reshape(data.shape)
    if dtype in _FLOAT8:
        return _VALUES[dtype][data.view(np.uint8)]
    return data.astype(np.float32)


def _from_f32(values: Array, dtype: tl.dtype) -> Array:
    """The patterns of F32 numbers: to nearest, ties to even, float8 saturating."""
    numbers = torch.from_numpy(np.array(values, np.float32))
    if dtype == tl.bfloat16:
        return numbers.bfloat16().view(torch.int16).numpy().view(np.uint16).reshape(values.shape)
    form = _FLOAT8[dtype]
    largest = torch.finfo(form).max
    codes = numbers.clamp(-largest, largest).to(form).view(torch.uint8)
    codes[numbers.isnan()] = 0x7F
    return codes.numpy().reshape(values.shape)


def _convert_float(data: Array, source: tl.dtype, target: tl.dtype, rounding: object) -> Array:
    """Patterns of `source` to patterns of `target`, unsigned integers of their widths."""
    nearest = rounding is None or rounding == shipped._ir.ROUNDING_MODE.RTNE
    if source == tl.float64:
        raise NotImplementedError(f"F64 to {target} in one step: convert to F32 first")
    known = {tl.float16, tl.float32} | _PATTERNED
    if not nearest or not {source, target} <= known:
        return _former(shipped, "_convert_float")(data, source, target, rounding)
    if source in _NUMPY:
        data = data.view(_NUMPY[source])
    with np.errstate(over="ignore"):  # inf is the F16 of what overflows it
        values = _as_f32(data, source)
        if target in _NUMPY:
            bits = np.dtype(f"uint{target.primitive_bitwidth}")
            return values.astype(_NUMPY[target]).view(bits)
    return _from_f32(values, target)


def _cast(builder: object, source: Any, target: tl.dtype) -> object:
    """Casts that Triton does not take for changes of a float's format."""
    form, wanted = source.dtype.scalar, target.scalar
    if form not in _RAW and wanted not in _RAW:
        return _former(_BUILDER, "cast_impl")(builder, source, target)
    if form == tl.bfloat16 and wanted not in _RAW:
        values = _as_f32(source.data, form)
        return shipped.TensorHandle(values.astype(shipped._get_np_dtype(wanted)), wanted)
    # F32 has to hold the source: two roundings are not one.
    exact = form in (tl.float16, tl.float32) or (
        form.is_int()
        and wanted == tl.bfloat16
        and np.all(np.abs(source.data.astype(np.float64)) <= 2**24)
    )
    if wanted not in _PATTERNED or not exact:
        raise NotImplementedError(f"{form} to {wanted} in one step: convert to F32 first")
    return shipped.TensorHandle(_from_f32(_as_f32(source.data, form), wanted), wanted)


def _dot(builder: object, a: Any, b: Any, acc: Any, precision: object, imprecise: object) -> object:
    x, y = (
        _as_f32(side.data, side.dtype.scalar) if side.dtype.scalar in _RAW else side.data
        for side in (a, b)
    )
    total = np.matmul(x, y, dtype=acc.data.dtype) + acc.data
    return shipped.TensorHandle(total, acc.dtype.scalar)


def _scale(handle: Any, compute_type: object) -> Array:
    """Block scales of `tl.dot_scaled` as F32."""
    if handle.dtype.scalar in _FLOAT8:
        return _as_f32(handle.data, handle.dtype.scalar)
    return _former(shipped, "_dot_scaled_scale_to_f32")(handle, compute_type)


def _operand(handle: Any) -> Array:
    """Unpacked operands of `tl.dot_scaled` as F32."""
    if handle.dtype.scalar == tl.uint8:
        return _former(shipped, "_mxfp_value_handle_to_float32")(handle)
    return _as_f32(handle.data, handle.dtype.scalar)


class _Results:
    """What Triton expects of an operation with several results."""

    def __init__(self, arrays: Sequence[Array], types: Sequence[tl.dtype]) -> None:
        self.handles = [
            shipped.TensorHandle(array, dtype.scalar)
            for array, dtype in zip(arrays, types, strict=True)
        ]

    def get_result(self, i: int) -> object:
        return self.handles[i]


def _inline_asm(
    builder: object, asm: str, constraints: str, operands: Any, types: Any, pure: bool, pack: int
) -> _Results:
    arrays = twin(asm)(*(operand.data for operand in operands))
    arrays = arrays if isinstance(arrays, list | tuple) else [arrays]
    for array, dtype in zip(arrays, types, strict=True):
        wanted = shipped._get_np_dtype(dtype.scalar)
        if array.dtype != wanted or array.shape != operands[0].data.shape:
            raise TypeError(f"{array.dtype}{list(array.shape)} for {dtype} from the twin of {asm}")
    return _Results(arrays, types)


def _refusing(name: str) -> Callable[..., object]:
    """The method `name`, but not for floats that NumPy would take for integers."""
    former = getattr(_BUILDER, name)

    def checked(builder: object, *arguments: Any) -> object:
        for argument in arguments:
            dtype = getattr(argument, "dtype", None)
            if isinstance(dtype, tl.dtype) and dtype.scalar in _RAW:
                raise NotImplementedError(f"{name} of {dtype.scalar}: convert to F32 first")
        return former(builder, *arguments)

    return checked


_ARITHMETIC = ["binary_op", "unary_op", "create_clampf", "create_fma"]
_REPAIRS: dict[tuple[object, str], object] = {
    (shipped, "_convert_float"): _convert_float,
    (shipped, "_dot_scaled_scale_to_f32"): _scale,
    (shipped, "_mxfp_value_handle_to_float32"): _operand,
    (_BUILDER, "cast_impl"): _cast,
    (_BUILDER, "create_dot"): _dot,
    (_BUILDER, "create_inline_asm"): _inline_asm,
    **{(_BUILDER, name): _refusing(name) for name in _ARITHMETIC},
}

"""Vectors for numba: sixteen lanes at a time, in Python syntax, for any processor.

numba widens uint8 arithmetic to int64, which keeps LLVM from vectorising byte loops. The types here
are LLVM's own vectors: `a + b`, `a > b` and `select(mask, a, b)` are one LLVM instruction each, and
LLVM cuts them into what the processor has (AVX-512, AVX2, SSE2, NEON). That changes the speed and
never a bit: no operation is specific to an instruction set, none is fast-math, none fuses.

    codes = load_u8x16(address)               sixteen bytes
    level = select(codes > u8x16(8), u8x16(1), u8x16(0))

Four lanes as an example: shuffle(…, [0, 1, 4, 5]) of [1, 2, 3, 4] and [5, 6, 7, 8] is [1, 2, 5, 6].
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import numba.extending
from llvmlite import ir
from numba import types

# numba's own annotations cover its decorators in part.
_extending: Any = numba.extending

#: A vector value in compiled code. numba types it; for mypy it is anything.
Lanes = Any


class Vector(types.Type):
    """`lanes` elements of a numba scalar type; boolean elements make a mask."""

    def __init__(self, element: Any, lanes: int) -> None:
        self.element, self.lanes = element, lanes
        super().__init__(f"Vector({element}, {lanes})")

    @property
    def is_float(self) -> bool:
        return isinstance(self.element, types.Float)


@_extending.register_model(Vector)
def _vector_model(manager: Any, vector: Vector) -> Any:
    is_mask = vector.element is types.boolean
    element = ir.IntType(1) if is_mask else manager[vector.element].get_value_type()
    form = ir.VectorType(element, vector.lanes)
    return _extending.models.PrimitiveModel(manager, vector, form)


_U8X8 = Vector(types.uint8, 8)
_U8X16 = Vector(types.uint8, 16)
_U16X16 = Vector(types.uint16, 16)
_U8X32 = Vector(types.uint8, 32)
_U8X64 = Vector(types.uint8, 64)
_F32X16 = Vector(types.float32, 16)
_F64X16 = Vector(types.float64, 16)
_F64X8 = Vector(types.float64, 8)
_I32X16 = Vector(types.int32, 16)


def _binary(symbol: Any, on_int: str, on_float: str = "") -> None:
    """Give two equal vector types the operator `symbol`: LLVM's `on_int` or `on_float`."""

    @_extending.type_callable(symbol)
    def type_operator(context: Any) -> Any:
        def typer(a: Any, b: Any) -> Any:
            fits = isinstance(a, Vector) and a == b and (not a.is_float or on_float)
            return a if fits else None

        return typer

    @_extending.lower_builtin(symbol, Vector, Vector)
    def lower(context: Any, b: Any, sig: Any, args: Any) -> Any:
        return getattr(b, on_float if sig.return_type.is_float else on_int)(*args)


def _comparison(symbol: Any, sign: str) -> None:
    """Compare two equal vector types lane by lane: a mask."""

    @_extending.type_callable(symbol)
    def type_operator(context: Any) -> Any:
        def typer(a: Any, b: Any) -> Any:
            fits = isinstance(a, Vector) and a == b
            return Vector(types.boolean, a.lanes) if fits else None

        return typer

    @_extending.lower_builtin(symbol, Vector, Vector)
    def lower(context: Any, b: Any, sig: Any, args: Any) -> Any:
        vector = sig.args[0]
        if vector.is_float:
            return b.fcmp_ordered(sign, *args)
        compare = b.icmp_signed if vector.element.signed else b.icmp_unsigned
        return compare(sign, *args)


_binary(operator.add, "add", "fadd")
_binary(operator.sub, "sub", "fsub")
_binary(operator.mul, "mul", "fmul")
_binary(operator.truediv, "", "fdiv")
_binary(operator.and_, "and_")
_binary(operator.or_, "or_")
_binary(operator.lshift, "shl")
_binary(operator.rshift, "lshr")  # on I32 too: no vector here is negative where it is shifted
_comparison(operator.gt, ">")
_comparison(operator.ge, ">=")
_comparison(operator.lt, "<")
_comparison(operator.eq, "==")


def _operation(function: Callable[..., Any]) -> Any:
    """What compiled code can call; it is called with values, not with what `function` takes."""
    return _extending.intrinsic(function)


def _named(function: Callable[..., Any], name: str) -> Any:
    function.__name__ = function.__qualname__ = name
    return _extending.intrinsic(function)


def _splat(vector: Vector, name: str) -> Any:
    def typed(typing_context: Any, scalar: Any) -> Any:
        def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
            one = context.cast(b, args[0], sig.args[0], vector.element)
            form = context.get_value_type(vector)
            first = b.insert_element(ir.Constant(form, ir.Undefined), one, _lane(0))
            return b.shuffle_vector(first, first, _lanes([0] * form.count))

        return vector(scalar), codegen

    return _named(typed, name)


def _load(kind: Any, name: str) -> Any:
    """A vector or a number, at any address."""

    def typed(typing_context: Any, address: Any) -> Any:
        def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
            pointer = context.get_value_type(kind).as_pointer()
            return b.load(b.inttoptr(args[0], pointer), align=1)

        return kind(types.intp), codegen

    return _named(typed, name)


def _conversion(vector: Vector, name: str) -> Any:
    """To `vector` by value: widening, narrowing (dropping high bits), rounding to nearest even."""

    def typed(typing_context: Any, value: Any) -> Any:
        def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
            operation = _cast_name(sig.args[0], vector)
            return getattr(b, operation)(args[0], context.get_value_type(vector))

        return vector(value), codegen

    return _named(typed, name)


def _cast_name(source: Vector, target: Vector) -> str:
    if source.is_float and target.is_float:
        return "fpext" if source.element.bitwidth < target.element.bitwidth else "fptrunc"
    if target.is_float:
        return "sitofp" if source.element.signed else "uitofp"
    if source.is_float:
        return "fptosi"
    return "zext" if source.element.bitwidth < target.element.bitwidth else "trunc"


def _bitcast(vector: Vector, name: str) -> Any:
    def typed(typing_context: Any, value: Any) -> Any:
        def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
            return b.bitcast(args[0], context.get_value_type(vector))

        return vector(value), codegen

    return _named(typed, name)


def shuffle(name: str, lanes: Sequence[int]) -> Any:
    """A function of two equal vectors that picks `lanes` of their concatenation."""

    def typed(typing_context: Any, a: Any, b: Any) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            return builder.shuffle_vector(*args, _lanes(lanes))

        return Vector(a.element, len(lanes))(a, b), codegen

    return _named(typed, name)


def _reduction(operation: str, name: str) -> Any:
    """One lane's value as int64, the outcome of LLVM's reduction over all lanes."""

    def typed(typing_context: Any, value: Any) -> Any:
        def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
            form = args[0].type
            full = f"llvm.vector.reduce.{operation}.v{form.count}{form.element.intrinsic_name}"
            return b.zext(_call(b, full, form.element, args), ir.IntType(64))

        return types.int64(value), codegen

    return _named(typed, name)


def _call(b: Any, name: str, result: Any, args: Sequence[Any]) -> Any:
    kind = ir.FunctionType(result, [argument.type for argument in args])
    return b.call(b.module.globals.get(name) or ir.Function(b.module, kind, name), args)


def _lane(number: int) -> Any:
    return ir.Constant(ir.IntType(32), number)


def _lanes(numbers: Sequence[int]) -> Any:
    return ir.Constant(ir.VectorType(ir.IntType(32), len(numbers)), list(numbers))


u8x16 = _splat(_U8X16, "u8x16")
u8x32 = _splat(_U8X32, "u8x32")
u8x64 = _splat(_U8X64, "u8x64")
i32x16 = _splat(_I32X16, "i32x16")
f32x16 = _splat(_F32X16, "f32x16")
f64x16 = _splat(_F64X16, "f64x16")
f64x8 = _splat(_F64X8, "f64x8")

load_u8 = _load(types.uint8, "load_u8")
load_u64 = _load(types.uint64, "load_u64")
load_u8x8 = _load(_U8X8, "load_u8x8")
load_u8x16 = _load(_U8X16, "load_u8x16")
load_u8x32 = _load(_U8X32, "load_u8x32")
load_u16x16 = _load(_U16X16, "load_u16x16")
load_f32x16 = _load(_F32X16, "load_f32x16")

to_u8x16 = _conversion(_U8X16, "to_u8x16")
to_i32x16 = _conversion(_I32X16, "to_i32x16")
to_f32x16 = _conversion(_F32X16, "to_f32x16")
to_f64x16 = _conversion(_F64X16, "to_f64x16")

bits_of = _bitcast(_I32X16, "bits_of")
floats_of = _bitcast(_F32X16, "floats_of")

largest_u8 = _reduction("umax", "largest_u8")
largest_i32 = _reduction("smax", "largest_i32")
smallest_i32 = _reduction("smin", "smallest_i32")


@_operation
def select(typing_context: Any, mask: Any, a: Any, b: Any) -> Any:
    """a where the mask is set, else b."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.select(*args)

    return a(mask, a, b), codegen


@_operation
def first_lane(typing_context: Any, mask: Any) -> Any:
    """Number of the first lane of 16 that is set, 16 if none is."""

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        i16 = ir.IntType(16)
        bits = b.bitcast(args[0], i16)
        name = "llvm.cttz.i16"
        kind = ir.FunctionType(i16, [i16, ir.IntType(1)])
        count = b.module.globals.get(name) or ir.Function(b.module, kind, name)
        return b.zext(b.call(count, [bits, ir.Constant(ir.IntType(1), 0)]), ir.IntType(64))

    return types.int64(mask), codegen


@_operation
def lane(typing_context: Any, vector: Any, number: Any) -> Any:
    """One lane's value."""

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        return b.extract_element(*args)

    return vector.element(vector, types.int32), codegen


@_operation
def store(typing_context: Any, address: Any, value: Any) -> Any:
    """Write a vector, or a scalar, at an address."""

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        b.store(args[1], b.inttoptr(args[0], args[1].type.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(types.intp, value), codegen


@_operation
def in_pairs(typing_context: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """Four F64 scalars as sixteen lanes: a a b b c c d d, twice."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        form = context.get_value_type(_F64X16)
        four = ir.Constant(ir.VectorType(form.element, 4), ir.Undefined)
        for number, value in enumerate(args):
            four = builder.insert_element(four, value, _lane(number))
        return builder.shuffle_vector(four, four, _lanes([0, 0, 1, 1, 2, 2, 3, 3] * 2))

    return _F64X16(*[types.float64] * 4), codegen


@_operation
def pack_nibbles(typing_context: Any, codes: Any) -> Any:
    """Two 4-bit codes a byte, the even lane in the low half: half as many lanes."""

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        half = codes.lanes // 2
        pairs = ir.VectorType(ir.IntType(16), half)
        pair = b.bitcast(args[0], pairs)  # the even lane is the low byte
        shifted = b.lshr(pair, ir.Constant(pairs, [4] * half))
        return b.trunc(b.or_(pair, shifted), ir.VectorType(ir.IntType(8), half))

    return Vector(codes.element, codes.lanes // 2)(codes), codegen


@_operation
def unpack_nibbles(typing_context: Any, packed: Any) -> Any:
    """The inverse of `pack_nibbles`: twice as many lanes."""

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        pairs = ir.VectorType(ir.IntType(16), packed.lanes)
        byte = b.zext(args[0], pairs)
        moved = b.or_(byte, b.shl(byte, ir.Constant(pairs, [4] * packed.lanes)))
        pair = b.and_(moved, ir.Constant(pairs, [0x0F0F] * packed.lanes))
        return b.bitcast(pair, ir.VectorType(ir.IntType(8), 2 * packed.lanes))

    return Vector(packed.element, 2 * packed.lanes)(packed), codegen


@_operation
def rank(typing_context: Any, values: Any, bounds: Any) -> Any:
    """How many of seven bounds each lane exceeds; a row of eight bytes bounds sixteen lanes."""

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        form = context.get_value_type(values)
        level = ir.Constant(form, [0] * values.lanes)
        for number in range(7):
            lanes = [number + 8 * (k // 16) for k in range(values.lanes)]
            bound = b.shuffle_vector(args[1], args[1], _lanes(lanes))
            level = b.sub(level, b.sext(b.icmp_unsigned(">", args[0], bound), form))
        return level

    return values(values, bounds), codegen

"""The kernels that convert weights, as what each is compiled for, and what each must not become.

What bit-equality rests on is visible in the compiled code: no approximate division, no fused
multiply-add, no flushed subnormals; and what speed rests on: 16-byte loads, no spilled registers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import triton

from . import amax, blocks, mxfp8, nvfp4
from .backend import PACKED_TILE, ROWS, THREADS, TILE, settings
from .cross_compile import Compiled, arithmetic_faults, compile_kernel
from .launch import TARGETS

_TYPES = {
    "codes": "*u8", "exponents": "*u8", "packed": "*u8", "scale": "*u8", "errors": "*fp64",
    "largest": "*i32", "importance": "*fp32", "s2": "fp32",
    "blocks": "i32", "groups": "i32", "count": "i32", "errors_3OB": "*fp64", "rows_O3": "*fp64",
    "rows": "i32", "row_blocks": "i32",
}  # fmt: skip
_BF16, _F32 = {"values": "*u16"}, {"values": "*fp32"}
_PLAIN = {"TILE": TILE}
_MAX = {"TILE": TILE, "SEARCH": "max", "WEIGHTED": False, "ERRORS": True}


@dataclass(frozen=True)
class Variant:
    """A kernel for one set of argument types, and the loads it is to have.

    Attributes:
        loads: bytes a thread loads at a time; 16 for elements, less for block scales.
        types: of the arguments whose type varies.
        constants: of the kernel's tl.constexpr parameters.
        remainders: integer remainders, which AMD computes with a reciprocal.
    """

    name: str
    kernel: triton.JITFunction
    loads: frozenset[int]
    types: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, object] = field(default_factory=lambda: _PLAIN)
    threads: int = THREADS
    remainders: int = 0


_FROM_MXFP8 = nvfp4.quantize_nvfp4_from_mxfp8_kernel
_FROM_FLOAT = nvfp4.quantize_nvfp4_from_float_kernel
_MSE, _FOUR_OVER_SIX = _MAX | {"SEARCH": "mse"}, _MAX | {"SEARCH": "four-over-six"}
_ONE_SIZE, _CODES, _PACKED = frozenset({16}), frozenset({16, 1}), frozenset({16, 2})

VARIANTS = [
    Variant("MXFP8 → NVFP4 max", _FROM_MXFP8, _CODES, {}, _MAX),
    Variant("MXFP8 → NVFP4 max, no errors", _FROM_MXFP8, _CODES, {}, _MAX | {"ERRORS": False}),
    Variant("MXFP8 → NVFP4 mse", _FROM_MXFP8, _CODES, {}, _MSE),
    Variant(
        "MXFP8 → NVFP4 mse, weighted", _FROM_MXFP8, _CODES, {}, _MSE | {"WEIGHTED": True},
        remainders=1,
    ),
    Variant("MXFP8 → NVFP4 four-over-six", _FROM_MXFP8, _CODES, {}, _FOUR_OVER_SIX),
    Variant("BF16 → NVFP4 max", _FROM_FLOAT, _ONE_SIZE, _BF16, _MAX),
    Variant("BF16 → NVFP4 mse", _FROM_FLOAT, _ONE_SIZE, _BF16, _MSE),
    Variant("F32 → NVFP4 max", _FROM_FLOAT, _ONE_SIZE, _F32, _MAX),
    Variant("F32 → NVFP4 mse", _FROM_FLOAT, _ONE_SIZE, _F32, _MSE),
    Variant("BF16 → MXFP8", mxfp8.quantize_mxfp8_kernel, _ONE_SIZE, _BF16),
    Variant("F32 → MXFP8", mxfp8.quantize_mxfp8_kernel, _ONE_SIZE, _F32),
    Variant("NVFP4 → BF16", nvfp4.dequantize_nvfp4_kernel, _PACKED, _BF16, {"TILE": PACKED_TILE}),
    Variant("NVFP4 → F32", nvfp4.dequantize_nvfp4_kernel, _PACKED, _F32, {"TILE": PACKED_TILE}),
    Variant("MXFP8 → BF16", mxfp8.dequantize_mxfp8_kernel, _CODES, _BF16),
    Variant("MXFP8 → F32", mxfp8.dequantize_mxfp8_kernel, _CODES, _F32),
    Variant("amax of MXFP8", amax.mxfp8_amax_kernel, _CODES),
    Variant("amax of BF16", amax.float_amax_kernel, _ONE_SIZE, _BF16),
    Variant("amax of F32", amax.float_amax_kernel, _ONE_SIZE, _F32),
    Variant("error sums of rows", blocks.row_sums_kernel, frozenset({8}), {}, {"R": ROWS}, ROWS),
]  # fmt: skip


def compile_variant(
    variant: Variant,
    target: str,
    *,
    ones: frozenset[str] = frozenset(),
    options: Mapping[str, object] | None = None,
) -> Compiled:
    """Compile as a launch would.

    Args:
        ones: arguments that are 1, which Triton turns into constants.
        options: instead of the launch options of the backend.
    """
    search = variant.constants.get("SEARCH", "max")
    options = options or settings(variant.threads, search, TARGETS[target])
    types = {**_TYPES, **variant.types}
    constants = {**variant.constants, **dict.fromkeys(ones, 1)}
    return compile_kernel(variant.kernel, types, constants, target, options)


def faults(compiled: Compiled, variant: Variant) -> list[str]:
    """Where the code could give other bits than the reference, or be slower than it should."""
    found = arithmetic_faults(compiled, variant.remainders)
    if compiled.spilled:
        found.append(f"spills {compiled.spilled}")
    if set(compiled.loads) != variant.loads:
        found.append(f"loads of {sorted(compiled.loads)} bytes, not {sorted(variant.loads)}")
    return found

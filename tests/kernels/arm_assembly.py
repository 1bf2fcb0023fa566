"""Prints the fused operations in each kernel's AArch64 code, and in that of a function that asks
for them.

Run with NUMBA_OPT=0: what numba has optimised for this processor names its instructions.
"""

from __future__ import annotations

import re
import sys

import llvmlite.binding as llvm
import numba
import numpy as np

from mmq.kernels import ops
from mmq.kernels.cpu import code_blocks, float_blocks, mxfp8_blocks

ARM = "aarch64-unknown-linux-gnu"


def fused(function) -> str:
    """Multiply-adds, and how many multiplications there are without one."""
    (form,) = set(function.inspect_llvm().values())
    form = re.sub(r"target datalayout = .*\n", "", form)
    module = llvm.parse_assembly(re.sub(r"target triple = .*", f'target triple = "{ARM}"', form))
    target = llvm.Target.from_triple(ARM).create_target_machine(cpu="neoverse-v1", opt=3)
    assembly = target.emit_assembly(module)
    found = re.findall(r"\tfn?m(?:add|sub|la|ls|ad|sb)\b", assembly)
    products = re.findall(r"\tfmul", assembly)
    return f"{function.__name__} {len(found)} {len(products)}"


@numba.njit(fastmath={"contract"})
def asks_for_it(a, b, c):
    return a * b + c


def main() -> None:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    codes, scale = np.full((2, 64), 0x40, np.uint8), np.full((2, 2), 120, np.uint8)
    ops.quantize_nvfp4_from_mxfp8(codes, scale, np.float32(1))
    ops.quantize_nvfp4_from_mxfp8(codes, scale, np.float32(1), search="mse")
    bits = np.full((2, 64), 0x3F80, np.uint16)
    ops.quantize_nvfp4_from_float(bits, "BF16", np.float32(1), search="mse")
    ops.quantize_mxfp8(bits, "BF16")
    asks_for_it(1.0, 2.0, 3.0)
    for function in (
        asks_for_it,
        code_blocks.quantize_nvfp4_codes_max,
        code_blocks.quantize_nvfp4_codes_mse,
        float_blocks.quantize_nvfp4_floats,
        mxfp8_blocks.quantize_mxfp8_floats,
    ):
        sys.stdout.write(fused(function) + "\n")


if __name__ == "__main__":
    main()

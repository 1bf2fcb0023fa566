"""Compile every kernel for every target on a machine without one, and look at what came out.

Triton brings its own ptxas and LLVM, so that neither a GPU nor a driver nor a CUDA toolkit is
needed. What bit-equality rests on is visible in the result: no approximate division, no fused
multiply-add, no flushed subnormals; and what speed rests on: 16-byte loads, no spilled registers.

The one place where fused multiply-adds belong is inside an IEEE division, which GPUs compute by
Newton steps with 5 of them; NVIDIA's path for extreme operands has another 12, once a kernel.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from . import amax, blocks, mxfp8, nvfp4
from .backend import PACKED_TILE, ROWS, THREADS, TILE, settings

TARGETS = {
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_103": GPUTarget("cuda", 103, 32),
    "sm_107": GPUTarget("cuda", 107, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx950": GPUTarget("hip", "gfx950", 64),
}

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


@dataclass(frozen=True)
class Compiled:
    """What one variant became on one target.

    Attributes:
        assembly: PTX, or AMD assembly.
        machine: opcodes of the machine code with their counts: SASS, or AMD's. None where the
            disassembler cannot read it.
        unread: what the disassembler said then.
        registers: of a thread (AMD: vector registers).
        spilled: bytes (AMD: registers) spilled to memory.
        shared: bytes of shared memory (LDS) of a program.
        loads: loads from global memory in the code, by bytes.
        divisions: IEEE F32 divisions.
    """

    target: str
    llvm: str
    assembly: str
    machine: Counter[str] | None
    registers: int
    spilled: int
    shared: int
    loads: Counter[int]
    divisions: int
    unread: str = ""


def compile_variant(
    variant: Variant,
    target: str,
    *,
    ones: frozenset[str] = frozenset(),
    options: Mapping[str, object] | None = None,
) -> Compiled:
    """Compile as a launch would: aligned pointers, and counts that are multiples of 16.

    Args:
        ones: arguments that are 1, which Triton turns into constants.
        options: instead of the launch options of the backend.
    """
    gpu = TARGETS[target]
    kernel = variant.kernel
    types = {**_TYPES, **variant.types}
    constants = {**variant.constants, **dict.fromkeys(ones, 1)}
    signature = {n: "constexpr" if n in constants else types[n] for n in kernel.arg_names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if signature[name].startswith("*") or signature[name] == "i32"
    }
    source = ASTSource(
        kernel,
        signature=signature,
        constexprs={(kernel.arg_names.index(name),): v for name, v in constants.items()},
        attrs=aligned,
    )
    search = variant.constants.get("SEARCH", "max")
    options = options or settings(variant.threads, search, gpu)
    with tempfile.TemporaryDirectory() as folder, triton.knobs.cache.scope():
        triton.knobs.cache.dir = folder
        result = triton.compile(source, target=gpu, options=dict(options))
        if gpu.backend == "cuda":
            return _nvidia(target, result, Path(folder) / "kernel.cubin")
        return _amd(target, result)


_BYTES = {"b8": 1, "b16": 2, "b32": 4, "b64": 8}
_AMD_BYTES = {"ubyte": 1, "ushort": 2, "dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16}
_SASS = re.compile(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", re.MULTILINE)


def _nvidia(target: str, result: object, cubin: Path) -> Compiled:
    ptx = result.asm["ptx"]
    cubin.write_bytes(result.asm["cubin"])
    tool = triton.knobs.nvidia.cuobjdump.path
    usage = subprocess.check_output([tool, "-res-usage", str(cubin)], text=True)
    used = {name: int(n) for name, n in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    sass = subprocess.run([tool, "-sass", str(cubin)], capture_output=True, text=True)
    loads: Counter[int] = Counter()
    for many, width in re.findall(r"\bld\.global\S*?(?:\.v(\d))?\.(b\d+)\b", ptx):
        loads[int(many or 1) * _BYTES[width]] += 1
    return Compiled(
        target=target,
        llvm=result.asm["llir"],
        assembly=ptx,
        machine=None if sass.returncode else Counter(_SASS.findall(sass.stdout)),
        registers=used["REG"],
        spilled=used["STACK"] + used["LOCAL"],
        shared=result.metadata.shared,
        loads=loads,
        divisions=ptx.count("div.rn.f32"),
        unread=sass.stderr.strip(),
    )


def _amd(target: str, result: object) -> Compiled:
    assembly = result.asm["amdgcn"]
    machine = Counter(re.findall(r"^\s+([a-z]\w+)", assembly, re.MULTILINE))
    fields = re.findall(r"\.(vgpr_count|vgpr_spill_count|sgpr_spill_count):\s+(\d+)", assembly)
    used = {name: int(n) for name, n in fields}
    loads: Counter[int] = Counter()
    for opcode, times in machine.items():
        if match := re.fullmatch(r"(?:buffer|global)_load_(\w+)", opcode):
            loads[_AMD_BYTES[match[1]]] += times
    return Compiled(
        target=target,
        llvm=result.asm["llir"],
        assembly=assembly,
        machine=machine,
        registers=used["vgpr_count"],
        spilled=used["vgpr_spill_count"] + used["sgpr_spill_count"],
        shared=result.metadata.shared,
        loads=loads,
        divisions=machine["v_div_fixup_f32"],
    )


def faults(compiled: Compiled, variant: Variant) -> list[str]:
    """Where the code could give other bits than the reference, or be slower than it should.

    Machine code is judged where it could be read: see `Compiled.machine`.
    """
    if compiled.target.startswith("sm_"):
        found = _nvidia_faults(compiled)
    else:
        found = _amd_faults(compiled, variant.remainders)
    flags = r"\b(?:fast|contract|reassoc|afn|arcp|nsz)\b|llvm\.fmuladd"
    if match := re.search(flags, compiled.llvm):
        found.append(f"LLVM may rewrite arithmetic: {match[0]}")
    if compiled.spilled:
        found.append(f"spills {compiled.spilled}")
    if set(compiled.loads) != variant.loads:
        found.append(f"loads of {sorted(compiled.loads)} bytes, not {sorted(variant.loads)}")
    return found


def _count(machine: Counter[str], pattern: str) -> int:
    return sum(n for opcode, n in machine.items() if re.match(pattern, opcode))


def _nvidia_faults(compiled: Compiled) -> list[str]:
    forbidden = r"\bdiv\.(?:full|approx)\S*|\bfma\.\S*|\brcp\.\S*|\S+\.ftz\S*"
    found = [f"PTX has {i}" for i in sorted(set(re.findall(forbidden, compiled.assembly)))]
    machine, divisions = compiled.machine, compiled.divisions
    if machine is None:
        return found
    if machine["FCHK"] != divisions:  # one check of the operands' range a division
        found.append(f"{machine['FCHK']} of {divisions} divisions in SASS")
    # FFMA2 is two operations. HFMA2, which sm_120 moves constants with, is none of ours.
    fused = _count(machine, r"FFMA(?!2)") + 2 * _count(machine, "FFMA2")
    if fused != 5 * divisions + 12 * bool(divisions):
        found.append(f"SASS has {fused} FFMA for {divisions} divisions")
    if _count(machine, "DFMA"):
        found.append("SASS has DFMA")
    if not divisions and (flushing := [o for o in machine if ".FTZ" in o]):
        found.append(f"SASS has {', '.join(sorted(flushing))}")
    return found


def _amd_faults(compiled: Compiled, remainders: int) -> list[str]:
    machine, divisions = compiled.machine, compiled.divisions
    found = []
    if (fused := _count(machine, r"v_(?:pk_)?(?:fma|fmac|mad|mac)_f32")) != 5 * divisions:
        found.append(f"{fused} fused operations for {divisions} divisions")
    if _count(machine, r"v_(?:fma|fmac|mad)_(?!f32)\w*f(?:16|64)"):
        found.append("fused operations on F64 or F16")
    if (reciprocals := _count(machine, "v_rcp_")) != divisions + remainders:
        found.append(f"{reciprocals} reciprocals for {divisions} divisions")
    for mode in ("float_denorm_mode_32 3", "float_denorm_mode_16_64 3"):
        if mode not in compiled.assembly:
            found.append(f"subnormals may be flushed: no {mode}")
    return found

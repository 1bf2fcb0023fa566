"""Compile kernels for every target on a machine without one, and look at what came out.

Triton brings its own ptxas and LLVM, so that neither a GPU nor a driver nor a CUDA toolkit is
needed. `arithmetic_faults` judges kernels whose bits are specified, `check` those of the forward:
whether they use the instructions that they are written for, spill, or need too much shared memory.

Fused multiply-adds belong in two places only, IEEE divisions and square roots, which GPUs compute
by Newton steps: 5 in a division, 2 in a root; NVIDIA's paths for extreme operands have another 12
and 3, once a kernel.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import triton
from triton.compiler import ASTSource

from .launch import TARGETS

#: Bytes of shared memory (LDS) that a program can have.
SHARED_LIMIT = {
    "sm_90": 232448,
    "sm_100": 232448,
    "sm_103": 232448,
    "sm_107": 232448,
    "sm_120": 101376,
    "gfx950": 163840,
}


@dataclass(frozen=True)
class Compiled:
    """What a kernel became on a target.

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
        roots: F32 square roots: IEEE ones (AMD: all).
        machine_text: the machine code as text; empty where the disassembler cannot read it.
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
    roots: int = 0
    unread: str = ""
    machine_text: str = ""


def compile_kernel(
    kernel: triton.JITFunction,
    types: Mapping[str, str],
    constants: Mapping[str, object],
    target: str,
    options: Mapping[str, object],
    *,
    odd: Collection[str] = (),
) -> Compiled:
    """Compile as a launch would: aligned pointers, and counts that are multiples of 16.

    Args:
        types: Triton's name of each argument's type, such as "*u8", "*bf16", "i32", "fp32"; names
            that the kernel does not have are ignored.
        constants: of the `tl.constexpr` parameters, and of arguments that are 1 or None, which
            Triton turns into constants.
        target: a name of `TARGETS`.
        options: launch options, such as `launch_options` gives.
        odd: pointers and I32 arguments that are not multiples of 16.
    """
    gpu, names = TARGETS[target], kernel.arg_names
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if name not in odd and (signature[name].startswith("*") or signature[name] == "i32")
    }
    source = ASTSource(
        kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs=aligned,
    )
    with tempfile.TemporaryDirectory() as folder, triton.knobs.cache.scope():
        triton.knobs.cache.dir = folder
        result = triton.compile(source, target=gpu, options=dict(options))
        if gpu.backend == "cuda":
            return _nvidia(target, result, Path(folder) / "kernel.cubin")
        return _amd(target, result)


_BYTES = {"b8": 1, "b16": 2, "b32": 4, "b64": 8}
_AMD_BYTES = {"byte": 1, "short": 2, "dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16}
#: Loads to registers, or straight to LDS (`buffer_load_lds_dwordx4`).
_AMD_LOAD = re.compile(
    r"(?:buffer|global)_load_(?:lds_)?[us]?(byte|short|dword(?:x\d)?)(?:_d16(?:_hi)?)?"
)
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
        roots=ptx.count("sqrt.rn.f32"),
        unread=sass.stderr.strip(),
        machine_text=sass.stdout,
    )


def _amd(target: str, result: object) -> Compiled:
    assembly = result.asm["amdgcn"]
    machine = Counter(re.findall(r"^\s+([a-z]\w+)", assembly, re.MULTILINE))
    fields = re.findall(r"\.(vgpr_count|vgpr_spill_count|sgpr_spill_count):\s+(\d+)", assembly)
    used = {name: int(n) for name, n in fields}
    loads: Counter[int] = Counter()
    for opcode, times in machine.items():
        if match := _AMD_LOAD.fullmatch(opcode):
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
        roots=_count(machine, "v_sqrt_f32"),
        machine_text=assembly,
    )


def arithmetic_faults(compiled: Compiled, remainders: int = 0) -> list[str]:
    """Where the code could give other bits than what is written.

    Machine code is judged where it could be read: see `Compiled.machine`.

    Args:
        remainders: integer remainders, which AMD computes with a reciprocal.
    """
    if compiled.target.startswith("sm_"):
        found = _nvidia_faults(compiled)
    else:
        found = _amd_faults(compiled, remainders)
    flags = r"\b(?:fast|contract|reassoc|afn|arcp|nsz)\b|llvm\.fmuladd"
    if match := re.search(flags, compiled.llvm):
        found.append(f"LLVM may rewrite arithmetic: {match[0]}")
    return found


def _count(machine: Counter[str], pattern: str) -> int:
    return sum(n for opcode, n in machine.items() if re.match(pattern, opcode))


def _nvidia_faults(compiled: Compiled) -> list[str]:
    forbidden = r"\b(?:div|r?sqrt)\.(?:full|approx)\S*|\bfma\.\S*|\brcp\.\S*|\S+\.ftz\S*"
    found = [f"PTX has {i}" for i in sorted(set(re.findall(forbidden, compiled.assembly)))]
    machine, divisions, roots = compiled.machine, compiled.divisions, compiled.roots
    if machine is None:
        return found
    if machine["FCHK"] != divisions:  # one check of the operands' range a division
        found.append(f"{machine['FCHK']} of {divisions} divisions in SASS")
    # FFMA2 is two operations. HFMA2, which sm_120 moves constants with, is none of ours.
    fused = _count(machine, r"FFMA(?!2)") + 2 * _count(machine, "FFMA2")
    if fused != 5 * divisions + 12 * bool(divisions) + 2 * roots + 3 * bool(roots):
        found.append(f"SASS has {fused} FFMA for {divisions} divisions, {roots} roots")
    if _count(machine, "DFMA"):
        found.append("SASS has DFMA")
    if not divisions and not roots and (flushing := [o for o in machine if ".FTZ" in o]):
        found.append(f"SASS has {', '.join(sorted(flushing))}")
    return found


def _amd_faults(compiled: Compiled, remainders: int) -> list[str]:
    machine, divisions, roots = compiled.machine, compiled.divisions, compiled.roots
    found = []
    fused = _count(machine, r"v_(?:pk_)?(?:fma|fmac|mad|mac)_f32")
    if fused != 5 * divisions + 2 * roots:
        found.append(f"{fused} fused operations for {divisions} divisions, {roots} roots")
    if _count(machine, r"v_(?:fma|fmac|mad)_(?!f32)\w*f(?:16|64)"):
        found.append("fused operations on F64 or F16")
    if (reciprocals := _count(machine, "v_rcp_")) != divisions + remainders:
        found.append(f"{reciprocals} reciprocals for {divisions} divisions")
    for mode in ("float_denorm_mode_32 3", "float_denorm_mode_16_64 3"):
        if mode not in compiled.assembly:
            found.append(f"subnormals may be flushed: no {mode}")
    return found


@dataclass(frozen=True)
class ForwardVariant:
    """A kernel of the forward for one set of types and constants, and what matters in its code.

    Attributes:
        types: as for `compile_kernel`.
        constants: on every target; `target_constants` adds to them or replaces them on one.
        options: launch options on a target, by its name.
        expect: for a target, a regular expression of what its code must have, such as the
            instruction that multiplies.
        forbid: for a target, a regular expression of what its code must not have.
        spill_bound: bytes (AMD: registers) that may be spilled; none where nothing is said.
        exact: its bits are specified, so that `arithmetic_faults` are faults too.
        remainders: as for `arithmetic_faults`.
        odd: as for `compile_kernel`.
        targets: those it is made for.
    """

    name: str
    kernel: triton.JITFunction
    types: Mapping[str, str]
    constants: Mapping[str, object]
    options: Callable[[str], Mapping[str, object]]
    expect: Mapping[str, str] = field(default_factory=dict)
    forbid: Mapping[str, str] = field(default_factory=dict)
    spill_bound: Mapping[str, int] = field(default_factory=dict)
    target_constants: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    exact: bool = False
    remainders: int = 0
    odd: Collection[str] = ()
    targets: Collection[str] = tuple(TARGETS)

    def compile(self, target: str) -> Compiled:
        """Compile for `target`."""
        constants = {**self.constants, **self.target_constants.get(target, {})}
        options = self.options(target)
        return compile_kernel(self.kernel, self.types, constants, target, options, odd=self.odd)


def check(compiled: Compiled, variant: ForwardVariant) -> list[str]:
    """What is wrong with the code of a forward kernel; nothing, if it is as it should be."""
    target = compiled.target
    code = compiled.assembly + compiled.machine_text
    found = arithmetic_faults(compiled, variant.remainders) if variant.exact else []
    if (wanted := variant.expect.get(target)) and not re.search(wanted, code):
        found.append(f"no {wanted}")
    if (unwanted := variant.forbid.get(target)) and (match := re.search(unwanted, code)):
        found.append(f"has {match[0]}")
    if compiled.spilled > variant.spill_bound.get(target, 0):
        found.append(f"spills {compiled.spilled}")
    if compiled.shared > SHARED_LIMIT[target]:
        found.append(f"{compiled.shared} of {SHARED_LIMIT[target]} bytes of shared memory")
    return found

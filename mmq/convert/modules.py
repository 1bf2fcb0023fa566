"""Tensors grouped into modules, and what format each module's weight is stored in.

A module is a name up to its last dot. Its format follows from which tensors it has and their
dtypes, never from config.json: configs lie, headers do not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from mmq.convert.safetensors_header import TensorInfo
from mmq.errors import BadInputError
from mmq.quantize.architecture import Role, is_fused_experts, role_of
from mmq.quantize.formats import MXFP8, NVFP4
from mmq.quantize.layouts import MINIMAX, MODELOPT, MXFP8_SCALE_NAMES, Nvfp4Layout

#: Formats of a module's weight. PLAIN covers BF16, F16, F32 and everything that is not a linear.
PLAIN, MXFP8_FORMAT, NVFP4_MODELOPT, NVFP4_MINIMAX = "plain", "mxfp8", "modelopt", "minimax"
NVFP4_LAYOUT_OF: dict[str, Nvfp4Layout] = {NVFP4_MODELOPT: MODELOPT, NVFP4_MINIMAX: MINIMAX}
_FLOATS = ("BF16", "F16", "F32")


class Module(NamedTuple):
    """One module: its tensors by suffix, its role in the model, and its weight's format.

    For quantised formats `weight`, `scale` and `global_scale` name the tensors that carry codes,
    block scales and tensor scale; for PLAIN, `weight` is the `.weight` tensor when there is one.
    """

    name: str
    tensors: dict[str, TensorInfo]
    role: Role
    format: str
    weight: TensorInfo | None
    scale: TensorInfo | None = None
    global_scale: TensorInfo | None = None

    @property
    def is_quantised(self) -> bool:
        return self.format != PLAIN

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape [O, K] of the weight, whatever its packing."""
        assert self.weight is not None
        shape = self.weight.shape
        if self.format in NVFP4_LAYOUT_OF:
            return (*shape[:-1], shape[-1] * 2)
        return shape


def group_modules(tensors: Mapping[str, TensorInfo]) -> dict[str, Module]:
    """All modules by name, in the order of `tensors`.

    Raises:
        BadInputError: a quantised weight without its scale, a scale without its weight, a scale
            of the wrong shape or dtype, fused 3-D experts.
    """
    grouped: dict[str, dict[str, TensorInfo]] = {}
    for name, tensor in tensors.items():
        module, _, suffix = name.rpartition(".")
        grouped.setdefault(module, {})[suffix] = tensor
    return {name: _module(name, parts) for name, parts in grouped.items()}


def _module(name: str, parts: dict[str, TensorInfo]) -> Module:
    role = role_of(name)
    for suffix, tensor in parts.items():
        if len(tensor.shape) == 3 and (is_fused_experts(name) or is_fused_experts(tensor.name)):
            raise BadInputError(
                "experts-fused",
                f"{tensor.name} holds all experts in one 3-D tensor; mmq reads one 2-D tensor"
                " per expert (w1, w2, w3), as the release stores them",
                where=tensor.name,
                got=f"{suffix} {list(tensor.shape)}",
                expected="experts.E.w1.weight [O, K]",
            )
    if MINIMAX.packed in parts:
        return _nvfp4(name, parts, role, NVFP4_MINIMAX)
    weight = parts.get("weight")
    if weight is not None and weight.dtype == "U8":
        return _nvfp4(name, parts, role, NVFP4_MODELOPT)
    if weight is not None and weight.dtype == MXFP8.element_dtype:
        return _mxfp8(name, parts, role, weight)
    if weight is None or weight.dtype in _FLOATS:
        _refuse_orphans(name, parts, weight)
        _refuse_non_float_experts(name, parts, role, weight)
        return Module(name, parts, role, PLAIN, weight)
    if role.linear in ("", "norms", "router"):
        return Module(name, parts, role, PLAIN, weight)
    raise BadInputError(
        "weight-dtype",
        f"{weight.name} is {weight.dtype}; mmq reads linears as BF16, MXFP8 or NVFP4",
        where=weight.name,
        got=weight.dtype,
        expected="BF16, F16, F32, F8_E4M3 (MXFP8) or U8 (NVFP4)",
    )


def _refuse_non_float_experts(
    name: str, parts: dict[str, TensorInfo], role: Role, weight: TensorInfo | None
) -> None:
    if role.is_routed_expert and weight is None:
        raise BadInputError(
            "expert-weight-missing",
            f"{name} has {', '.join(sorted(parts))} but no weight",
            where=name,
        )


def _refuse_orphans(name: str, parts: dict[str, TensorInfo], weight: TensorInfo | None) -> None:
    """A scale beside an unquantised weight (or none at all) means something was lost."""
    for suffix in (*MXFP8_SCALE_NAMES, MODELOPT.global_scale, MINIMAX.global_scale):
        if suffix in parts:
            got = "no weight" if weight is None else f"weight {weight.dtype}"
            raise BadInputError(
                "scale-without-weight",
                f"{parts[suffix].name} is a scale, but {name} has {got} for it",
                where=parts[suffix].name,
                got=got,
                expected="weight F8_E4M3 or U8",
            )


def _mxfp8(name: str, parts: dict[str, TensorInfo], role: Role, weight: TensorInfo) -> Module:
    names = [s for s in MXFP8_SCALE_NAMES if s in parts]
    if not names:
        raise BadInputError(
            "scale-missing",
            f"{weight.name} is F8_E4M3 but has no scale",
            where=weight.name,
            expected=f"{name}.weight_scale_inv",
        )
    if len(names) > 1:
        raise BadInputError(
            "scale-twice",
            f"{name} has both {names[0]} and {names[1]}: which one is true?",
            where=name,
        )
    scale = parts[names[0]]
    if scale.dtype not in ("U8", "F8_E8M0"):
        raise BadInputError(
            "scale-dtype",
            f"{scale.name} is {scale.dtype} {list(scale.shape)}: not an MXFP8 scale (one E8M0 byte"
            " per 1×32 block); 128×128 block scales are another format",
            where=scale.name,
            got=f"{scale.dtype} {list(scale.shape)}",
            expected="U8 or F8_E8M0",
        )
    _check_blocks(weight, scale, MXFP8.block, weight.shape)
    return Module(name, parts, role, MXFP8_FORMAT, weight, scale)


def _nvfp4(name: str, parts: dict[str, TensorInfo], role: Role, format: str) -> Module:
    layout = NVFP4_LAYOUT_OF[format]
    missing = [
        s for s in (layout.packed, layout.block_scale, layout.global_scale) if s not in parts
    ]
    if missing:
        raise BadInputError(
            "nvfp4-tensor-missing",
            f"{name} looks like NVFP4 ({layout.name} layout) but has no {', '.join(missing)}",
            where=name,
            got=", ".join(sorted(parts)),
            expected=", ".join((layout.packed, layout.block_scale, layout.global_scale)),
        )
    weight, scale = parts[layout.packed], parts[layout.block_scale]
    shape = (*weight.shape[:-1], weight.shape[-1] * 2) if weight.shape else ()
    if weight.dtype != "U8" or scale.dtype != "F8_E4M3":
        raise BadInputError(
            "nvfp4-dtype",
            f"{name}: NVFP4 codes are U8 and block scales F8_E4M3",
            where=name,
            got=f"{weight.dtype} and {scale.dtype}",
            expected="U8 and F8_E4M3",
        )
    _check_blocks(weight, scale, NVFP4.block, shape)
    return Module(name, parts, role, format, weight, scale, parts[layout.global_scale])


def _check_blocks(
    weight: TensorInfo, scale: TensorInfo, block: int, shape: tuple[int, ...]
) -> None:
    if len(shape) != 2 or 0 in shape:
        raise BadInputError(
            "weight-shape",
            f"{weight.name} is no matrix with elements",
            where=weight.name,
            got=list(shape),
        )
    if shape[1] % block:
        raise BadInputError(
            "dim-not-multiple",
            f"{weight.name}: inner dimension {shape[1]} is no multiple of the block of {block}",
            where=weight.name,
            got=f"weight {list(shape)}, scale {list(scale.shape)}",
            expected=f"inner dimension divisible by {block}",
        )
    expected = (shape[0], shape[1] // block)
    if scale.shape != expected:
        raise BadInputError(
            "scale-shape",
            f"{scale.name} {list(scale.shape)} does not fit {weight.name} {list(shape)}",
            where=scale.name,
            got=list(scale.shape),
            expected=list(expected),
        )

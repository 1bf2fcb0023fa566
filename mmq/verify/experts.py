"""NVFP4 modules: all their tensors, usable scalars, one global scale for w1 and w3."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np

from mmq.convert.modules import MXFP8_FORMAT, NVFP4_LAYOUT_OF, Module
from mmq.convert.safetensors_header import TensorInfo
from mmq.quantize.architecture import FUSED_GATE_UP, FUSED_LINEARS
from mmq.quantize.global_scale import MIN_GLOBAL_SCALE
from mmq.quantize.layouts import MINIMAX, MXFP8_SCALE, Nvfp4Layout
from mmq.report.findings import Finding
from mmq.verify.subject import MINIMAX_KIND, Subject

ReadScalar = Callable[[TensorInfo], np.float32]

#: Above it the largest weight would exceed 2688, which no trained projection does.
_LARGEST_PLAUSIBLE_S2 = 1.0


def is_scalar(tensor: TensorInfo) -> bool:
    """F32 of rank 0, or of shape [1]: both load everywhere (torchao alone wants rank 0)."""
    return tensor.dtype == "F32" and tensor.shape in ((), (1,))


def layout_of(module: Module) -> Nvfp4Layout:
    return NVFP4_LAYOUT_OF[module.format]


def check_layouts(subject: Subject) -> Iterator[Finding]:
    """One NVFP4 layout, and within a decoder layer one format for all routed experts."""
    counts = Counter(m.format for m in subject.nvfp4)
    if len(counts) > 1:
        rare = min(counts, key=lambda f: counts[f])
        name = next(m.name for m in subject.nvfp4 if m.format == rare)
        yield Finding(
            "layouts-mixed", "error", f"{counts[rare]} module(s) are in the {rare} layout, the"
            " others are not", where=name, got=rare, expected=subject.kind,
        )  # fmt: skip
    layers: dict[tuple[bool, int], dict[str, list[str]]] = {}
    for module in subject.modules.values():
        if module.role.is_routed_expert:
            formats = layers.setdefault((module.role.mtp, module.role.layer), {})
            formats.setdefault(module.format, []).append(module.name)
    for (_, layer), formats in layers.items():
        if len(formats) > 1:
            rare = min(formats, key=lambda f: len(formats[f]))
            yield Finding(
                "experts-mixed-formats", "error",
                f"layer {layer}: engines fuse its experts into one tensor, but"
                f" {len(formats[rare])} projection(s) are {rare}", where=formats[rare][0],
                got=rare, expected=", ".join(sorted(set(formats) - {rare})),
            )  # fmt: skip


def check_fused(subject: Subject) -> Iterator[Finding]:
    """Linears that engines fuse into one matrix (gate with up; q, k and v) have one format."""
    for name, module in subject.modules.items():
        parent, _, projection = name.rpartition(".")
        group = next((g for g in FUSED_LINEARS if g[0] == projection), ())
        for other in group[1:]:
            partner = subject.modules.get(f"{parent}.{other}")
            if module.role.linear and partner is not None and partner.format != module.format:
                yield Finding(
                    "fused-mixed-formats", "warning",
                    f"{partner.name} is {partner.format}, {name} {module.format}: engines fuse the"
                    " two, and most refuse a mixture", where=partner.name, got=partner.format,
                    expected=module.format,
                )  # fmt: skip


def check_leftovers(subject: Subject) -> Iterator[Finding]:
    """No tensor of the source beside a converted module's own."""
    for module in subject.nvfp4:
        layout = layout_of(module)
        own = {layout.packed, layout.block_scale, layout.global_scale, layout.input_scale, "bias"}
        for suffix in sorted(set(module.tensors) - own - {"k_scale", "v_scale"}):
            fate = (
                "vLLM renames it to weight_scale and overwrites the NVFP4 block scales, silently"
                if suffix == MXFP8_SCALE else "it is not part of the layout"
            )  # fmt: skip
            yield Finding(
                "leftover-tensor", "error",
                f"{module.name}.{suffix} stands beside the module's NVFP4 tensors: {fate}",
                where=f"{module.name}.{suffix}", got=module.tensors[suffix].dtype,
                expected="absent",
            )  # fmt: skip


def check_input_scales(subject: Subject) -> Iterator[Finding]:
    """Input scales on every NVFP4 projection or on none; the minimax layout needs them."""
    stored = [m for m in subject.nvfp4 if layout_of(m).input_scale in m.tensors]
    if not stored and subject.kind != MINIMAX_KIND:
        return
    lost = subject.lost_modules
    for module in subject.nvfp4:
        suffix = layout_of(module).input_scale
        if suffix not in module.tensors and module.name not in lost:
            yield Finding(
                "input-scale-missing", "error",
                f"{module.name} has no {suffix}: engines do not notice and use whatever is in"
                " memory", where=f"{module.name}.{suffix}", got="absent",
                expected=f"as on {len(stored):,} other projection(s)",
            )  # fmt: skip


def check_scalars(subject: Subject, read: ReadScalar) -> Iterator[Finding]:
    """Global and input scales: F32, rank 0 or [1], finite, normal, above zero; w1 equals w3."""
    values: dict[str, np.float32] = {}
    for module in subject.nvfp4:
        layout = layout_of(module)
        for suffix in (layout.global_scale, layout.input_scale):
            tensor = module.tensors.get(suffix)
            if tensor is None:
                continue
            if not is_scalar(tensor):
                yield _malformed(tensor)
                continue
            value = values[tensor.name] = read(tensor)
            if not is_usable(value):
                yield Finding(
                    "scalar-invalid", "error", f"{tensor.name} must be finite, normal and above"
                    " zero", where=tensor.name, got=str(value), expected="2^-126 to 2^126",
                )  # fmt: skip
    yield from _implausible(subject.nvfp4, values)
    yield from _shared_scales(subject.nvfp4, values)


def is_usable(value: np.float32) -> bool:
    """A normal positive F32 whose reciprocal is normal too."""
    return bool(MIN_GLOBAL_SCALE <= value <= 1 / MIN_GLOBAL_SCALE)


def _malformed(tensor: TensorInfo) -> Finding:
    return Finding(
        "scalar-shape", "error", f"{tensor.name} must be one F32", where=tensor.name,
        got=f"{tensor.dtype} {list(tensor.shape)}", expected="F32 [] or [1]",
    )  # fmt: skip


def _implausible(modules: Iterable[Module], values: Mapping[str, np.float32]) -> Iterator[Finding]:
    """A global scale in the other layout's sense: what divides under a name that multiplies."""
    for module in modules:
        name = f"{module.name}.{layout_of(module).global_scale}"
        value = values.get(name)
        if value is None or not is_usable(value):
            continue
        s2 = 1 / float(value) if layout_of(module).divisor else float(value)
        if s2 > _LARGEST_PLAUSIBLE_S2:
            sense = "divides" if layout_of(module).divisor else "multiplies"
            yield Finding(
                "global-scale-implausible", "warning",
                f"{name} {sense}, so the largest weight could be {2688 * s2:.4g}; it looks like"
                " the reciprocal", where=name, got=str(value), expected=str(np.float32(1 / value)),
            )  # fmt: skip


def _shared_scales(
    modules: Iterable[Module], values: Mapping[str, np.float32]
) -> Iterator[Finding]:
    pairs: dict[str, dict[str, str]] = {}
    for module in modules:
        if module.role.is_routed_expert and module.role.projection in FUSED_GATE_UP:
            name = f"{module.name}.{layout_of(module).global_scale}"
            pairs.setdefault(module.name.rpartition(".")[0], {})[module.role.projection] = name
    for pair in pairs.values():
        if len(pair) != 2:
            continue
        w1, w3 = (values.get(pair[p]) for p in FUSED_GATE_UP)
        if w1 is not None and w3 is not None and w1.tobytes() != w3.tobytes():
            yield Finding(
                "w1-w3-global-scale", "error",
                f"{pair['w3']} differs from w1's: engines use w1's for both", where=pair["w3"],
                got=str(w3), expected=str(w1),
            )  # fmt: skip


def check_mxfp8(subject: Subject) -> Iterator[Finding]:
    """MXFP8 scales are named weight_scale_inv and tagged U8."""
    for module in subject.modules.values():
        if module.format != MXFP8_FORMAT or module.scale is None:
            continue
        if module.scale.dtype != "U8":
            yield Finding(
                "mxfp8-scale-dtype", "error",
                f"{module.scale.name} is tagged {module.scale.dtype}: vLLM and SGLang convert that"
                " by value and load garbage, silently", where=module.scale.name,
                got=module.scale.dtype, expected="U8",
            )  # fmt: skip
        if not module.scale.name.endswith("." + MXFP8_SCALE):
            yield Finding(
                "mxfp8-scale-name", "error",
                f"{module.scale.name}: SGLang finds MXFP8 scales only as {MXFP8_SCALE}",
                where=module.scale.name, expected=f"{module.name}.{MXFP8_SCALE}",
            )  # fmt: skip


def check_left_at_mxfp8(subject: Subject) -> Iterator[Finding]:
    """In the minimax layout every routed expert is NVFP4: its config has no list of exceptions."""
    if subject.kind != MINIMAX_KIND:
        return
    for module in subject.modules.values():
        if module.role.is_routed_expert and module.format not in NVFP4_LAYOUT_OF:
            yield Finding(
                "expert-not-nvfp4", "error",
                f"{module.name} is {module.format}; with moe_quant_algo NVFP4 engines expect"
                f" {MINIMAX.packed} for every expert", where=module.name, got=module.format,
                expected="nvfp4",
            )  # fmt: skip

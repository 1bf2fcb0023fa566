"""From modules to tasks: what is written for each module, and what is dropped with which reason."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mmq.convert.calibration_files import CalibrationFiles
from mmq.convert.checkpoint import Checkpoint
from mmq.convert.completeness import config_count
from mmq.convert.importance import importance_of
from mmq.convert.modules import NVFP4_LAYOUT_OF, Module, group_modules
from mmq.convert.options import ConvertOptions
from mmq.convert.relayout import StoredScalars, read_stored_scalars
from mmq.convert.safetensors_header import TensorInfo
from mmq.convert.work import (
    EXPERTS,
    IMPORTANCE,
    SOURCE,
    AnalyticKScale,
    AnalyticVScale,
    CopyTensor,
    DequantizeBf16,
    Nvfp4Outputs,
    Output,
    QuantizeMxfp8,
    QuantizeNvfp4,
    RelayoutNvfp4,
    Task,
    WeightSource,
    WriteScalar,
    output,
)
from mmq.errors import BadInputError
from mmq.quantize.architecture import FUSED_GATE_UP
from mmq.quantize.formats import MXFP8, NVFP4
from mmq.quantize.layouts import LAYOUTS, MODELOPT, MXFP8_SCALE, MXFP8_SCALE_NAMES, Nvfp4Layout

_KV_SUFFIXES = ("k_scale", "v_scale")


def weight_source(module: Module, origin: str = SOURCE) -> WeightSource:
    """The module's weight as tasks read it."""
    assert module.weight is not None
    return WeightSource(
        module.name, module.format, module.shape, module.weight, module.scale,
        module.global_scale, origin,
    )  # fmt: skip


class TaskBuilder:
    """Makes the tasks of one conversion; collects what it drops.

    Args:
        quantised: modules whose format changes, as policy and --ignore decided.
        others: what is read besides the source, by origin.
        files: scales that a calibration found.
    """

    def __init__(
        self,
        source: Checkpoint,
        modules: Mapping[str, Module],
        options: ConvertOptions,
        quantised: frozenset[str],
        others: Mapping[str, Checkpoint],
        files: CalibrationFiles,
    ) -> None:
        self.modules = modules
        self.options = options
        self.quantised = quantised
        self.layout: Nvfp4Layout = LAYOUTS[options.layout]
        self.experts = group_modules(others[EXPERTS].tensors) if EXPERTS in others else None
        self.importance = others.get(IMPORTANCE)
        self.head_dim = config_count(source.text_config, "head_dim")
        normed = source.text_config.get("use_qk_norm", True)
        self.qk_norm = source.text_config.get("qk_norm_type") if normed else "no norm"
        self.stored: StoredScalars = read_stored_scalars(source)
        self.files = files
        self.dropped: list[tuple[TensorInfo, str]] = []

    def group(self, modules: list[Module]) -> tuple[Task, ...]:
        """Tasks of modules that belong together (one expert, or a single module)."""
        tasks: list[Task] = []
        pending: list[Module] = []
        for module in sorted(modules, key=lambda m: m.name):
            if module.role.mtp and self.options.mtp == "drop" and self.options.to == "nvfp4":
                self._drop(module, "MTP: the NVFP4 layout has none (--mtp keep converts it)")
            elif module.name in self.quantised and self.options.to == "nvfp4":
                pending.append(module)
            else:
                tasks.extend(self._module(module))
        tasks.extend(self._nvfp4(pending))
        return tuple(tasks)

    def _drop(self, module: Module, reason: str) -> None:
        self.dropped.extend((t, reason) for t in module.tensors.values())

    def _module(self, module: Module) -> Iterator[Task]:
        """A module that is not becoming NVFP4."""
        if module.name not in self.quantised:
            yield from self._copies(module)
        elif self.options.to == "bf16":
            weight = weight_source(module)
            yield DequantizeBf16(
                weight,
                output(f"{module.name}.weight", "BF16", module.shape),
                self.stored.get(f"{module.name}.{MODELOPT.global_scale}"),
            )
            yield from self._rest(module, weight.tensors, "not part of a BF16 checkpoint")
        else:
            weight = weight_source(module)
            rows, columns = module.shape
            yield QuantizeMxfp8(
                weight,
                output(f"{module.name}.weight", MXFP8.element_dtype, module.shape),
                output(f"{module.name}.{MXFP8_SCALE}", "U8", (rows, columns // MXFP8.block)),
            )
            yield from self._rest(module, weight.tensors, "not part of an MXFP8 checkpoint")
        yield from self._kv_scales(module)

    def _copies(self, module: Module) -> Iterator[Task]:
        for suffix, tensor in module.tensors.items():
            if suffix in _KV_SUFFIXES:
                self.dropped.append((tensor, self._kv_reason()))
                continue
            name, dtype = tensor.name, tensor.dtype
            if module.scale is tensor and suffix in MXFP8_SCALE_NAMES and dtype != "F8_E4M3":
                # every engine takes this name; F8_E8M0 would be converted by value, silently
                name, dtype = f"{module.name}.{MXFP8_SCALE}", "U8"
            yield CopyTensor(tensor, output(name, dtype, tensor.shape))

    def _rest(self, module: Module, taken: tuple[TensorInfo, ...], reason: str) -> Iterator[Task]:
        """What a converted module holds besides its weight: biases stay, stale scalars go."""
        for suffix, tensor in module.tensors.items():
            if tensor in taken:
                continue
            if suffix == "bias":
                yield CopyTensor(tensor, output(tensor.name, tensor.dtype, tensor.shape))
            else:
                kv = suffix in _KV_SUFFIXES
                self.dropped.append((tensor, self._kv_reason() if kv else reason))

    def _kv_reason(self) -> str:
        return f"KV scale of the source, replaced by --kv-scales {self.options.kv_scales}"

    def _nvfp4(self, modules: list[Module]) -> Iterator[Task]:
        """One expert's projections; w1 and w3 share a global scale and so a task.

        They come first either way, so that a change of layout and back restores a file's order.
        """
        modules = sorted(modules, key=lambda m: m.role.projection not in FUSED_GATE_UP)
        relaid = [m for m in modules if m.format in NVFP4_LAYOUT_OF]
        for module in relaid:
            task = self._relayout(module)
            yield task
            yield from self._rest(module, task.consumes, "replaced")
        fresh = [m for m in modules if m.format not in NVFP4_LAYOUT_OF]
        fused = [m for m in fresh if m.role.projection in FUSED_GATE_UP]
        single = [m for m in fresh if m.role.projection not in FUSED_GATE_UP]
        for share in (fused, *([m] for m in single)):
            if not share:
                continue
            weights = tuple(self._expert_weight(m) for m in share)
            results = tuple(self._nvfp4_outputs(m) for m in share)
            weigh = self.importance
            importance = tuple(importance_of(weigh, m) for m in share) if weigh else ()
            search = self.options.scale_search
            inputs = tuple(self._input_value(m) for m in share)
            yield QuantizeNvfp4(weights, results, self.layout.divisor, search, importance, inputs)
            for module in share:
                taken = weight_source(module).tensors
                yield from self._rest(module, taken, "replaced by NVFP4 scalars")

    def _expert_weight(self, module: Module) -> WeightSource:
        if self.experts is None:
            return weight_source(module)
        other = self.experts.get(module.name)
        if other is None or other.is_quantised or other.shape != module.shape:
            got = "absent" if other is None else f"{other.format} {list(other.shape)}"
            raise BadInputError(
                "experts-from-mismatch",
                f"--experts-from has no float weight of the same shape for {module.name}",
                where=module.name,
                got=got,
                expected=f"BF16 {list(module.shape)}",
            )
        reason = "replaced by the weight of --experts-from"
        self.dropped.extend((t, reason) for t in weight_source(module).tensors)
        return weight_source(other, EXPERTS)

    def _nvfp4_outputs(self, module: Module) -> Nvfp4Outputs:
        rows, columns = module.shape
        if rows * columns // NVFP4.block % 4:
            raise BadInputError(
                "expert-shape",
                f"{module.name}: {rows} rows of {columns} give block scales that would misalign"
                " the F32 scalars after them",
                where=module.name,
                got=list(module.shape),
                expected="rows × columns divisible by 64",
            )
        layout, name = self.layout, module.name
        scalar = layout.scalar_shape
        with_input = self.options.input_scales != "none"
        return Nvfp4Outputs(
            output(f"{name}.{layout.packed}", "U8", (rows, columns // 2)),
            output(f"{name}.{layout.block_scale}", "F8_E4M3", (rows, columns // NVFP4.block)),
            output(f"{name}.{layout.global_scale}", "F32", scalar),
            output(f"{name}.{layout.input_scale}", "F32", scalar) if with_input else None,
        )

    def _relayout(self, module: Module) -> RelayoutNvfp4:
        source_layout = NVFP4_LAYOUT_OF[module.format]
        result = self._nvfp4_outputs(module)
        # a file's scales replace the source's
        from_file = self.files.input_scales is not None
        input_scale = None if from_file else module.tensors.get(source_layout.input_scale)
        return RelayoutNvfp4(
            weight_source(module),
            input_scale if result.input_scale else None,
            result,
            self.stored.get(f"{module.name}.{self.layout.global_scale}"),
            None if from_file else self.stored.get(f"{module.name}.{self.layout.input_scale}"),
            self._input_value(module),
        )

    def _input_value(self, module: Module) -> float:
        """The activation scale written beside a projection, as a multiplier."""
        scales = self.files.input_scales
        return 1.0 if scales is None else scales.get(module.name, 1.0)

    def _kv_scales(self, module: Module) -> Iterator[Task]:
        """The K or V scale that stands beside k_proj or v_proj of a main-model layer."""
        projection = module.role.projection
        if (
            self.options.kv_scales == "none"
            or module.role.mtp
            or module.role.linear != "attention"
            or projection not in ("k_proj", "v_proj")
        ):
            return
        side = projection[0]
        out = output(f"{module.name}.{side}_scale", "F32", ())
        if self.options.kv_scales == "unit":
            yield WriteScalar(out, 1.0)
        elif self.files.kv_scales is not None:
            yield WriteScalar(out, self.files.kv_scales[out.name])
        elif side == "k":
            yield self._analytic_k(module, out)
        else:
            yield self._analytic_v(module, out)

    def _analytic_k(self, module: Module, out: Output) -> AnalyticKScale:
        if self.qk_norm not in (None, "per_head"):
            raise _no_bound(f"keys are not normed per head ({self.qk_norm})", "config.json")
        head_dim = self._head_dim()
        return AnalyticKScale(self._norm(module, "self_attn.k_norm", head_dim), head_dim, out)

    def _analytic_v(self, module: Module, out: Output) -> AnalyticVScale:
        if "bias" in module.tensors:
            raise _no_bound(f"{module.name} has a bias", module.name)
        if len(module.shape) != 2 or 0 in module.shape:
            raise _no_bound(f"{module.name} is no matrix: {list(module.shape)}", module.name)
        norm = self._norm(module, "input_layernorm", module.shape[1])
        return AnalyticVScale(weight_source(module), norm, out)

    def _head_dim(self) -> int:
        if self.head_dim <= 0:
            raise _no_bound("config.json has no head_dim", "config.json")
        return self.head_dim

    def _norm(self, module: Module, name: str, width: int) -> TensorInfo:
        prefix = module.name.rpartition(".self_attn.")[0]
        norm: Any = self.modules.get(f"{prefix}.{name}")
        if norm is None or norm.weight is None:
            raise _no_bound(f"{prefix}.{name}.weight is not stored", module.name)
        weight: TensorInfo = norm.weight
        if weight.shape != (width,) or weight.dtype not in ("BF16", "F16", "F32"):
            found = f"{weight.dtype} {list(weight.shape)}"
            raise _no_bound(f"{weight.name} is {found}, not {width} floats", weight.name)
        return weight


def _no_bound(why: str, where: str) -> BadInputError:
    return BadInputError(
        "kv-scale-no-bound",
        f"the analytic KV bound cannot be derived: {why}",
        where=where,
        hint="--kv-scales unit, or --kv-scales none",
    )

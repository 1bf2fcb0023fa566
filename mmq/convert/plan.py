"""The plan: what becomes of every source tensor, decided before a byte is read.

    Checkpoint ─► modules ─► (policy, --ignore) ─► tasks ─► groups in natural order ─► WorkUnits

Groups follow the tensors' natural order, not the source's shards, so that the same tensors in
other shards give the same output bytes. An expert, or a weight with its scale, is never split.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from mmq.convert.calibration_files import CalibrationFiles, open_calibration_files
from mmq.convert.checkpoint import Checkpoint, open_checkpoint
from mmq.convert.completeness import check_architecture, check_complete
from mmq.convert.modules import NVFP4_LAYOUT_OF, Module, group_modules
from mmq.convert.options import ConvertOptions
from mmq.convert.plan_tasks import TaskBuilder
from mmq.convert.safetensors_header import TensorInfo, header_bytes
from mmq.convert.work import EXPERTS, IMPORTANCE, Task, WorkUnit
from mmq.errors import BadInputError, UsageError
from mmq.quantize.architecture import Role, natural_key
from mmq.quantize.formats import DTYPE_BITS
from mmq.quantize.policy import SCHEMES, IgnoreMatch, apply_ignore, check_fused_groups, split_pairs
from mmq.report.findings import Finding

SHARD_METADATA = {"format": "pt"}


class Dropped(NamedTuple):
    """A source tensor that has no place in the output, and why."""

    tensor: TensorInfo
    reason: str


@dataclass(frozen=True)
class ConversionPlan:
    """Everything a conversion will do.

    Attributes:
        quantised: modules whose format changes.
        ignored: what each --ignore pattern matched.
        findings: warnings and notes about source and options.
        others: what tasks read besides the source, by origin (--experts-from, --importance).
        calibration: option → where the numbers of its file come from.
    """

    source: Checkpoint
    others: Mapping[str, Checkpoint]
    options: ConvertOptions
    modules: Mapping[str, Module]
    units: tuple[WorkUnit, ...]
    quantised: frozenset[str]
    dropped: tuple[Dropped, ...]
    ignored: tuple[IgnoreMatch, ...]
    findings: tuple[Finding, ...]
    calibration: Mapping[str, Any]

    @property
    def output_bytes(self) -> int:
        """Payload of all shards, KV scales included."""
        return sum(unit.data_bytes for unit in self.units)

    @property
    def file_bytes(self) -> int:
        """Shard files with their headers."""
        return sum(unit.file_bytes for unit in self.units)

    @property
    def read_bytes(self) -> int:
        return sum(unit.read_bytes for unit in self.units)

    @property
    def kv_scale_bytes(self) -> int:
        """Bytes of the KV scales alone, which size figures count apart."""
        return sum(o.nbytes for u in self.units for o in u.outputs if is_kv_scale(o.name))


def is_kv_scale(name: str) -> bool:
    """Whether a tensor is a KV-cache scale as engines name them."""
    return name.endswith((".k_proj.k_scale", ".v_proj.v_scale"))


def build_plan(source: Checkpoint, options: ConvertOptions) -> ConversionPlan:
    """Decide every output tensor and where it goes.

    Raises:
        BadInputError: the source is incomplete, inconsistent or not MiniMax-M3.
        UsageError: options contradict each other or the source.
    """
    options = options.resolved()
    check_architecture(source)
    modules = group_modules(source.tensors)
    keeps_mtp = options.mtp == "keep" or options.to != "nvfp4"
    findings = [*source.notes, *check_complete(source, modules, mtp=keeps_mtp)]
    files = open_calibration_files(source, modules, options)
    others = _others(options, files)
    candidates = _candidates(modules, options)
    ignored, reports = apply_ignore(options.ignore, modules, frozenset(candidates))
    _check_ignorable(options, [modules[n] for n in candidates if n in ignored])
    check_fused_groups({n: modules[n].role for n in candidates}, ignored)
    quantised = frozenset(candidates) - ignored
    _check_something_to_do(quantised, candidates, options)
    findings.extend(_ignore_findings(reports))
    findings.extend(_split_findings({n: modules[n].role for n in candidates}, ignored))
    findings.extend(_layout_findings(source, options))

    builder = TaskBuilder(source, modules, options, quantised, others, files)
    groups, dropped = _collect(builder, modules)
    units = tuple(_pack(groups, options.max_shard_bytes))
    return ConversionPlan(
        source, others, options, modules, units, quantised,
        tuple(Dropped(t, r) for t, r in dropped), reports, tuple(findings), files.told,
    )  # fmt: skip


def _others(options: ConvertOptions, files: CalibrationFiles) -> dict[str, Checkpoint]:
    others = {}
    if options.experts_from:
        others[EXPERTS] = open_checkpoint(options.experts_from)
    if files.importance is not None:
        others[IMPORTANCE] = files.importance
    return others


def _candidates(modules: Mapping[str, Module], options: ConvertOptions) -> dict[str, None]:
    """Modules the policy would change, in order (a dict serves as an ordered set)."""
    scheme = SCHEMES[options.to]
    chosen: dict[str, None] = {}
    for name, module in modules.items():
        if module.role.mtp and options.mtp == "drop" and options.to == "nvfp4":
            continue
        if options.to == "bf16":
            if module.is_quantised:
                chosen[name] = None
        elif module.role.linear in scheme.components and module.weight is not None:
            _check_convertible(module, options)
            if not (options.to == "mxfp8" and module.is_quantised):
                chosen[name] = None
    return chosen


def _check_convertible(module: Module, options: ConvertOptions) -> None:
    layout = NVFP4_LAYOUT_OF.get(module.format)
    if layout is None:
        block = 16 if options.to == "nvfp4" else 32
        if len(module.shape) != 2 or module.shape[1] % block:
            raise BadInputError(
                "dim-not-multiple",
                f"{module.name}: inner dimension is no multiple of the block of {block}",
                where=module.name, got=list(module.shape), expected=f"[O, multiple of {block}]",
            )  # fmt: skip
        return
    if options.experts_from:
        raise UsageError(
            "option-conflict",
            f"{module.name} is NVFP4 already, so --experts-from has nothing to do",
            where=module.name,
            hint="name the MXFP8 or BF16 checkpoint as SRC",
        )
    if options.to == "mxfp8":
        raise UsageError(
            "target-unsupported",
            f"{module.name} is NVFP4 already; making MXFP8 of it would only lose precision",
            where=module.name,
            hint="mmq convert SRC OUT --to bf16",
        )
    if options.layout == layout.name:
        raise UsageError(
            "already-converted",
            f"{module.name} is NVFP4 in the {layout.name} layout already",
            where=module.name,
            hint=f"--layout {'minimax' if layout.name == 'modelopt' else 'modelopt'}, or --to bf16",
        )


def _check_ignorable(options: ConvertOptions, ignored: list[Module]) -> None:
    """Ignoring leaves MXFP8 or floats in place; a checkpoint of two NVFP4 layouts loads nowhere."""
    for module in ignored:
        if options.to == "nvfp4" and options.layout == "minimax":
            raise UsageError(
                "option-conflict",
                "--layout minimax has one format for all routed experts, so --ignore cannot leave"
                f" {module.name} as it is",
                where=module.name,
                hint="--layout modelopt",
            )
        if options.to == "bf16" or module.format in NVFP4_LAYOUT_OF:
            raise UsageError(
                "option-conflict",
                f"--ignore would leave {module.name} as {module.format} in a checkpoint whose"
                " config cannot say so",
                where=module.name,
                hint="leave out --ignore: it chooses what --to nvfp4 and --to mxfp8 quantise",
            )


def _check_something_to_do(
    quantised: frozenset[str], candidates: Mapping[str, None], options: ConvertOptions
) -> None:
    if quantised:
        return
    ignored = bool(candidates)
    raise BadInputError(
        "nothing-to-convert",
        f"no module would become {options.to.upper()}"
        + (": --ignore matches all of them" if ignored else ": none of the kind is stored"),
        got="0 modules",
        expected="at least one",
        hint="narrow --ignore" if ignored else "mmq inspect SRC",
    )


def _ignore_findings(reports: tuple[IgnoreMatch, ...]) -> Iterator[Finding]:
    for report in reports:
        if not report.modules:
            yield Finding(
                "ignore-matches-nothing", "warning",
                f"--ignore {report.pattern} matches no module (patterns match full module names)",
                where=report.pattern, got="0 modules",
            )  # fmt: skip
            continue
        yield Finding(
            "ignore-matched", "note",
            f"--ignore {report.pattern} matches {report.modules} module(s),"
            f" {len(report.quantised)} of which would have been quantised",
            where=report.pattern, got=", ".join(report.quantised[:3]),
        )  # fmt: skip


def _split_findings(candidates: Mapping[str, Role], ignored: frozenset[str]) -> Iterator[Finding]:
    for left, quantised in split_pairs(candidates, ignored):
        yield Finding(
            "ignore-splits-fused", "warning",
            f"--ignore leaves {left} unquantised but not {quantised}; engines fuse the two, and"
            " most refuse a mixture", where=left,
        )  # fmt: skip


def _layout_findings(source: Checkpoint, options: ConvertOptions) -> Iterator[Finding]:
    if options.to != "nvfp4":
        return
    if options.layout == "modelopt":
        if options.kv_scales == "none" and options.kv_format in ("fp8", "nvfp4"):
            yield Finding(
                "kv-format-without-scales", "warning",
                f"--kv-format {options.kv_format} declares a quantised KV cache, but --kv-scales"
                " none writes no scales: engines use 1.0 without a word", where="--kv-format",
            )  # fmt: skip
        return
    sparse = source.text_config.get("sparse_attention_config")
    freq = sparse.get("sparse_attention_freq") if isinstance(sparse, Mapping) else None
    if not (isinstance(freq, list) and freq and all(freq)):
        yield Finding(
            "layout-minimax-dense-layers", "warning",
            "plain M3 has dense-attention layers; SGLang's Blackwell KV pool for the minimax layout"
            " wants sparse attention in every layer, so this output runs on its Hopper route only",
            where="--layout minimax",
        )  # fmt: skip


def _collect(
    builder: TaskBuilder, modules: Mapping[str, Module]
) -> tuple[list[tuple[Task, ...]], list[tuple[TensorInfo, str]]]:
    """Groups of tasks in natural order; each group goes into one shard."""
    keyed: dict[str, list[Module]] = {}
    for name, module in modules.items():
        # all of an expert in one shard: w1 and w3 share a scale, and loaders read it once
        key = name.rpartition(".")[0] if module.role.expert >= 0 else name
        keyed.setdefault(key, []).append(module)
    groups = []
    for key in sorted(sorted(keyed), key=natural_key):
        tasks = builder.group(keyed[key])
        if tasks:
            groups.append(tasks)
    return groups, builder.dropped


def _pack(groups: list[tuple[Task, ...]], max_bytes: int) -> Iterator[WorkUnit]:
    shards: list[list[Task]] = [[]]
    filled = 0
    for tasks in groups:
        nbytes = sum(o.nbytes for t in tasks for o in t.outputs)
        if shards[-1] and filled + nbytes > max_bytes:
            shards.append([])
            filled = 0
        shards[-1].extend(tasks)
        filled += nbytes
    for index, shard in enumerate(shards, 1):
        tasks = _aligned(shard)
        outputs = [o for t in tasks for o in t.outputs]
        yield WorkUnit(
            index=index,
            filename=f"model-{index:05d}-of-{len(shards):05d}.safetensors",
            tasks=tasks,
            header=header_bytes(outputs, SHARD_METADATA),
            data_bytes=sum(o.nbytes for o in outputs),
            read_bytes=sum(t.nbytes for task in tasks for t in task.consumes),
        )


def _aligned(tasks: list[Task]) -> tuple[Task, ...]:
    """Order that keeps every tensor aligned to its element size, as torch views demand.

    Everything whose size is a multiple of four stays in place; 8-byte elements go first, tensors
    of odd size last, the widest elements first.
    """

    def rank(task: Task) -> int:
        width = max(DTYPE_BITS[o.dtype] for o in task.outputs)
        if width == 64:
            return 0
        return 1 if all(o.nbytes % 4 == 0 for o in task.outputs) else 66 - width

    return tuple(sorted(tasks, key=rank))

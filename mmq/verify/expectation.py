"""What OUT should hold: the plan of its source, under OUT's own options or inferred ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from mmq.convert.checkpoint import Checkpoint, open_checkpoint
from mmq.convert.completeness import check_architecture
from mmq.convert.completeness import check_complete as check_source_complete
from mmq.convert.modules import MXFP8_FORMAT, NVFP4_LAYOUT_OF, Module, group_modules
from mmq.convert.options import INPUT_SCALES, KV_SCALES, ConvertOptions
from mmq.convert.plan import ConversionPlan, build_plan
from mmq.convert.relayout import MANIFEST_NAME
from mmq.errors import IncompleteError, MmqError
from mmq.quantize.version import NUMERICS_VERSION
from mmq.report.findings import Finding
from mmq.verify.kv_cache import is_kv_scale
from mmq.verify.subject import MINIMAX_KIND, MODELOPT_KIND, MXFP8_KIND, Subject


@dataclass
class Expectation:
    """A source, and what mmq would make of it.

    Attributes:
        modules: the source's modules.
        plan: None when OUT's options cannot be applied to the source.
        own: whether OUT's manifest told the options, so that sizes must agree to the byte.
        exact: whether its numerics version is ours too, so that every byte must agree.
        unknown_kv: KV-scale values cannot be known (their file is gone).
        unknown_inputs: activation scales cannot be known (their file is gone).
        unknown_experts: the --experts-from checkpoint is gone; SRC's experts stand in for it.
        skipped: what cannot be compared, and why.
    """

    source: Checkpoint
    modules: Mapping[str, Module]
    plan: ConversionPlan | None = None
    own: bool = False
    exact: bool = False
    unknown_kv: bool = False
    unknown_inputs: bool = False
    unknown_experts: bool = False
    skipped: list[str] = field(default_factory=list)


def open_source(location: str) -> Expectation:
    """The source, checked as convert checks it.

    Raises:
        BadInputError: damaged, incomplete, or not MiniMax-M3.
    """
    source = open_checkpoint(location)
    check_architecture(source)
    modules = group_modules(source.tensors)
    check_source_complete(source, modules, mtp=False)
    return Expectation(source, modules)


def plan_expectation(expectation: Expectation, subject: Subject) -> list[Finding]:
    """Fill in the plan, from OUT's manifest if it has one, else from what OUT looks like."""
    findings: list[Finding] = []
    options = None
    if subject.manifest is not None:
        options = _options_of(subject.manifest)
        if options is None:
            findings.append(
                Finding("manifest-invalid", "error",
                        "mmq-manifest.json holds no options that this mmq understands",
                        where=MANIFEST_NAME)
            )  # fmt: skip
    if options is not None:
        version = (subject.manifest or {}).get("numerics_version")
        expectation.own, expectation.exact = True, version == NUMERICS_VERSION
        if not expectation.exact:
            expectation.skipped.append(
                f"byte comparison of quantised tensors: OUT's numerics version is {version}, this"
                f" mmq's {NUMERICS_VERSION}; values are compared instead"
            )
        options = _available(options, expectation)
        findings += _identity(expectation.source, subject)
    else:
        options = infer_options(subject)
    findings += _plan(expectation, options)
    return findings


def _plan(expectation: Expectation, options: ConvertOptions) -> list[Finding]:
    try:
        expectation.plan = build_plan(expectation.source, options)
    except MmqError as error:
        if isinstance(error, IncompleteError) or error.id.startswith("hub-"):
            raise  # the Hub's silence says nothing about OUT
        if error.id == "kv-scale-no-bound" and not expectation.own:
            return _plan(expectation, replace(options, kv_scales="unit"))
        return [
            Finding(
                "plan-impossible", "error",
                f"the source cannot be converted into what OUT is: {error.message}",
                where=error.where or "", got=f"--to {options.to} --layout {options.layout}",
            )
        ]  # fmt: skip
    return []


def _options_of(manifest: Mapping[str, Any]) -> ConvertOptions | None:
    value = manifest.get("options")
    if not isinstance(value, dict) or not {"to", "layout", "ignore"} <= set(value):
        return None
    known = {f.name for f in fields(ConvertOptions)}
    if not set(value) <= known or not all(_has_type(key, item) for key, item in value.items()):
        return None
    try:
        return ConvertOptions(**{**value, "ignore": tuple(value["ignore"])}).resolved()
    except MmqError:
        return None


def _has_type(key: str, value: Any) -> bool:
    """Whether a manifest's option has the type that `ConvertOptions` gives it."""
    if key == "ignore":
        return isinstance(value, list) and all(isinstance(item, str) for item in value)
    if key in ("max_shard_bytes", "allow_nonfinite"):
        return type(value) is (int if key == "max_shard_bytes" else bool)
    return value is None or isinstance(value, str)


def _available(options: ConvertOptions, expectation: Expectation) -> ConvertOptions:
    """Options without the files that a conversion read and that are gone by now."""
    if _is_gone(options.kv_scales, KV_SCALES):
        expectation.unknown_kv = True
        expectation.skipped.append(
            f"values of the KV scales: they came from {options.kv_scales}, which is not there"
        )
        options = replace(options, kv_scales="unit")
    if _is_gone(options.input_scales, INPUT_SCALES):
        expectation.unknown_inputs = True
        expectation.skipped.append(
            f"values of the input scales: they came from {options.input_scales}, which is not there"
        )
        options = replace(options, input_scales="unit")
    if options.experts_from and not Path(options.experts_from).expanduser().exists():
        expectation.unknown_experts = True
        expectation.skipped.append(
            f"byte comparison of experts: they came from {options.experts_from}, which is not"
            " there; their values are compared with the source's"
        )
        options = replace(options, experts_from=None)
    if options.importance and not Path(options.importance).expanduser().is_file():
        expectation.exact = False
        expectation.skipped.append(
            f"byte comparison of experts: their errors were weighed by {options.importance}, which"
            " is not there; their values are compared with the source's"
        )
        options = replace(options, importance=None)
    return options


def _is_gone(value: str | None, words: tuple[str, ...]) -> bool:
    """Whether an option names a file that is not there."""
    return value not in (*words, None) and not Path(str(value)).expanduser().is_file()


def _identity(source: Checkpoint, subject: Subject) -> list[Finding]:
    """A note when the manifest names other source files; equal tensors may still lie in them."""
    recorded = (subject.manifest or {}).get("source")
    shards = recorded.get("shards") if isinstance(recorded, dict) else None
    if not isinstance(shards, list) or not source.shards:
        return []
    was: dict[str, Any] = {str(s.get("name")): s.get("header_sha256") for s in shards
                           if isinstance(s, dict)}  # fmt: skip
    now = {name: shard.header_sha256 for name, shard in source.shards.items()}
    if was == now:
        return []
    odd = sorted(n for n in was.keys() | now.keys() if was.get(n) != now.get(n))
    return [
        Finding("source-identity", "note",
                "OUT was converted from files with other headers than this source's", where=odd[0],
                got=str(now.get(odd[0])), expected=str(was.get(odd[0])))
    ]  # fmt: skip


def infer_options(subject: Subject) -> ConvertOptions:
    """Options that would give a checkpoint of OUT's kind."""
    mtp = "keep" if any(m.role.mtp for m in subject.modules.values()) else "drop"
    kind = subject.kind
    if kind not in (MODELOPT_KIND, MINIMAX_KIND):
        return ConvertOptions(to="mxfp8" if kind == MXFP8_KIND else "bf16")
    has_kv = any(is_kv_scale(name) for name in subject.tensors)
    some = "analytic" if kind == MODELOPT_KIND else "unit"
    inputs = any(NVFP4_LAYOUT_OF[m.format].input_scale in m.tensors for m in subject.nvfp4)
    return ConvertOptions(
        layout=kind, mtp=mtp, kv_scales=some if has_kv else "none",
        input_scales="unit" if inputs or kind == MINIMAX_KIND else "none",
        ignore=tuple(_kept_layers(subject)),
    )  # fmt: skip


def _kept_layers(subject: Subject) -> list[str]:
    """Patterns of layers whose experts OUT keeps as MXFP8, and says so in its config."""
    declared = subject.quantization.get("quantized_layers")
    declared = declared if isinstance(declared, Mapping) else {}
    kept: dict[str, bool] = {}
    for module in subject.modules.values():
        if module.role.is_routed_expert:
            entry = declared.get(module.name)
            says = entry.get("quant_algo") if isinstance(entry, Mapping) else None
            layer = module.name.partition(".experts.")[0]
            agrees = module.format == MXFP8_FORMAT and says == "MXFP8"
            kept[layer] = kept.get(layer, True) and agrees
    return [f"{layer}.experts.*" for layer, keep in kept.items() if keep]

"""Names, dtypes, shapes, sizes and configs of OUT against the plan of its source."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from mmq import __version__
from mmq.convert.checkpoint import CONFIG_NAME
from mmq.convert.configs import build_configs
from mmq.convert.journal import flatten
from mmq.convert.modules import PLAIN
from mmq.convert.plan import ConversionPlan
from mmq.convert.safetensors_header import TensorInfo
from mmq.convert.work import Output
from mmq.quantize.architecture import role_of
from mmq.quantize.layouts import MINIMAX, MODELOPT
from mmq.report.findings import Finding
from mmq.verify.expectation import Expectation
from mmq.verify.kv_cache import is_kv_scale
from mmq.verify.model_config import MTP_KEYS
from mmq.verify.quant_config import canonical
from mmq.verify.subject import Subject

#: Allowed and unremarkable deviation of a foreign checkpoint's payload from the plan's.
SIZE_FAIL, SIZE_WARN = 0.002, 0.0005

_SCALARS = tuple(
    f".{suffix}" for layout in (MODELOPT, MINIMAX)
    for suffix in (layout.global_scale, layout.input_scale)
)  # fmt: skip


def agrees(tensor: TensorInfo, planned: Output, *, own: bool) -> bool:
    """Same dtype and shape; a foreign scalar may be [] or [1]."""
    if tensor.dtype != planned.dtype:
        return False
    scalar = not own and planned.name.endswith((*_SCALARS, ".k_scale", ".v_scale"))
    return tensor.shape == planned.shape or (scalar and {tensor.shape, planned.shape} <= {(), (1,)})


def check_tensors(subject: Subject, expectation: Expectation, named: set[str]) -> Iterator[Finding]:
    """Every planned tensor is stored as planned, and nothing else is.

    Args:
        named: tensors and modules that a sharper check has reported already.
    """
    planned = _planned(expectation)
    chosen = _chosen(subject, expectation, planned)
    told = {*named, *subject.broken, *subject.lost_tensors}
    for name, output in planned.items():
        if _is_told(name, told) or (is_kv_scale(name) and not expectation.own):
            continue
        tensor = subject.tensors.get(name)
        other = name.rpartition(".")[0] in chosen
        if tensor is None and not other:
            yield Finding(
                "tensor-missing", "error", f"{name} is not stored", where=name, got="absent",
                expected=f"{output.dtype} {list(output.shape)}",
            )  # fmt: skip
        elif tensor is not None and not agrees(tensor, output, own=expectation.own):
            yield _mismatch(tensor, output, chosen=other)
    for name, tensor in subject.tensors.items():
        known = name in planned or name.rpartition(".")[0] in chosen or _is_told(name, told)
        if not known and (expectation.own or not is_kv_scale(name)):
            yield Finding(
                "tensor-unexpected", "error", f"{name} has no origin in the source", where=name,
                got=f"{tensor.dtype} {list(tensor.shape)}", expected="absent",
            )  # fmt: skip


def _planned(expectation: Expectation) -> dict[str, Output]:
    assert expectation.plan is not None
    return {o.name: o for unit in expectation.plan.units for o in unit.outputs}


def _is_told(name: str, told: set[str]) -> bool:
    return name in told or name.rpartition(".")[0] in told


def _mismatch(tensor: TensorInfo, output: Output, *, chosen: bool) -> Finding:
    text = f"{tensor.name} is not stored as the plan has it"
    text += ", as OUT's config says" if chosen else ""
    severity = "warning" if chosen else "error"
    got = f"{tensor.dtype} {list(tensor.shape)}"
    expected = f"{output.dtype} {list(output.shape)}"
    if tensor.dtype != output.dtype:
        return Finding("tensor-dtype", severity, text, tensor.name, got, expected)
    return Finding("tensor-shape", severity, text, tensor.name, got, expected)


def _chosen(subject: Subject, expectation: Expectation, planned: Mapping[str, Output]) -> set[str]:
    """Modules for which a foreign converter chose another format, and declared it."""
    if expectation.own:
        return set()
    layers = subject.quantization.get("quantized_layers")
    listed = set(map(canonical, layers)) if isinstance(layers, Mapping) else set()
    return {
        name for name, module in subject.modules.items()
        if not module.role.is_routed_expert
        and (output := planned.get(f"{name}.weight")) is not None
        and module.weight is not None and module.weight.dtype != output.dtype
        and (name in listed) == (module.format != PLAIN)
    }  # fmt: skip


def check_sizes(subject: Subject, expectation: Expectation) -> Iterator[Finding]:
    """Total payload: to the byte for mmq's own output, ±0.05 % (warning) and ±0.2 % for others."""
    plan = expectation.plan
    assert plan is not None
    if expectation.own:
        yield from _files(subject, plan)
    if subject.lost_shards:
        return
    planned = _planned(expectation)
    chosen = _chosen(subject, expectation, planned)
    got = _bytes_outside(subject.tensors.values(), chosen)
    expected = _bytes_outside(planned.values(), chosen)
    share = abs(got - expected) / max(expected, 1)
    if got != expected and (expectation.own or share > SIZE_WARN):
        severe = expectation.own or share > SIZE_FAIL
        yield Finding(
            "size-total", "error" if severe else "warning",
            f"the tensors take {got:,} bytes, the plan {expected:,} ({(got / expected - 1):+.3%})",
            where="payload", got=f"{got:,}", expected=f"{expected:,}",
        )  # fmt: skip
    yield from _expert_bytes(subject, plan)


def _bytes_outside(tensors: Iterable[TensorInfo | Output], chosen: set[str]) -> int:
    """Payload of modules whose format is not a choice of OUT's own."""
    return sum(t.nbytes for t in tensors if t.name.rpartition(".")[0] not in chosen)


def _files(subject: Subject, plan: ConversionPlan) -> Iterator[Finding]:
    planned = {unit.filename: unit.file_bytes for unit in plan.units}
    for name in sorted(set(planned) ^ set(subject.shards)):
        if name not in subject.lost_shards:
            yield Finding(
                "shards-differ", "error",
                f"{name} is {'not there' if name in planned else 'no shard of the plan'}",
                where=name, expected=f"{len(planned)} shards",
            )  # fmt: skip
    for name, shard in subject.shards.items():
        if name in planned and shard.file_bytes != planned[name]:
            yield Finding(
                "shard-size", "error", f"{name} has another size than the plan gives",
                where=name, got=f"{shard.file_bytes:,}", expected=f"{planned[name]:,}",
            )  # fmt: skip


def _expert_bytes(subject: Subject, plan: ConversionPlan) -> Iterator[Finding]:
    """Routed experts must shrink as planned, 0.5455 from MXFP8: more means something stayed."""
    source = expert_bytes(plan.source.tensors.values())
    stored = expert_bytes(subject.tensors.values())
    planned = expert_bytes(o for unit in plan.units for o in unit.outputs)
    if source and abs(stored - planned) > SIZE_FAIL * planned:
        yield Finding(
            "expert-bytes", "error",
            f"the routed experts take {stored / source:.4f} of the source's bytes instead of"
            f" {planned / source:.4f}", where="routed experts", got=f"{stored:,} bytes",
            expected=f"{planned:,} bytes",
        )  # fmt: skip


def expert_bytes(tensors: Iterable[TensorInfo | Output]) -> int:
    """Payload of the main model's routed experts."""
    return sum(
        t.nbytes for t in tensors
        if ".experts." in t.name
        and role_of(t.name.rpartition(".")[0]).component == "routed_experts"
    )  # fmt: skip


def check_configs(subject: Subject, expectation: Expectation) -> Iterator[Finding]:
    """config.json: as mmq writes it, or (foreign) the source's outside its quantisation block."""
    assert expectation.plan is not None
    if expectation.own:
        # another version of mmq may have worded the same configs otherwise
        written = (subject.manifest or {}).get("versions")
        same = isinstance(written, Mapping) and written.get("mmq") == __version__
        severity = "error" if same else "warning"
        for name, expected in build_configs(expectation.plan).items():
            got = subject.config if name == CONFIG_NAME else subject.hf_config
            if got is not None:
                yield from _differences(name, got, expected, severity, ignored=("producer",))
        return
    ignored = ("quantization_config", "transformers_version", *MTP_KEYS)
    source = expectation.source.config
    yield from _differences(CONFIG_NAME, subject.config, source, "warning", ignored=ignored)


def _differences(
    name: str, got: Mapping[str, Any], expected: Mapping[str, Any], severity: str, *,
    ignored: tuple[str, ...],
) -> Iterator[Finding]:  # fmt: skip
    ours, theirs = dict(flatten(got)), dict(flatten(expected))
    for key in sorted(ours.keys() | theirs.keys()):
        if set(ignored) & set(key.split(".")) or _same(ours.get(key), theirs.get(key)):
            continue
        yield Finding(
            "config-differs", severity, f"{name}: {key} is not what the source and options give",
            where=f"{name}: {key}", got=str(ours.get(key, "absent"))[:200],
            expected=str(theirs.get(key, "absent"))[:200],
        )  # fmt: skip


def _same(ours: Any, theirs: Any) -> bool:
    """Equal; lists of names in any order, for an exclusion list is a set."""
    if (
        isinstance(ours, list)
        and isinstance(theirs, list)
        and all(isinstance(item, str) for item in (*ours, *theirs))
    ):
        return sorted(ours) == sorted(theirs)
    return bool(ours == theirs)

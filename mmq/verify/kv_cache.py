"""KV-cache scales: pairs, values, names, and what the configs declare about them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from mmq.convert.checkpoint import CONFIG_NAME, HF_QUANT_CONFIG_NAME
from mmq.convert.safetensors_header import TensorInfo
from mmq.quantize.architecture import TEXT
from mmq.quantize.layouts import K_SCALE, KV_SCALE_NAMES_DROPPED, V_SCALE
from mmq.report.findings import Finding
from mmq.verify.completeness import count_of
from mmq.verify.experts import ReadScalar, is_scalar
from mmq.verify.quant_config import declared_kv, hf_block
from mmq.verify.subject import MINIMAX_KIND, MODELOPT_KIND, Subject

_INDEX_SCALE = "idx_k_scale"
_SCHEME = {"num_bits": 8, "type": "float", "dynamic": False}


def is_kv_scale(name: str) -> bool:
    """Whether a tensor is a K or V scale under the names engines read."""
    return name.endswith((f".{K_SCALE}", f".{V_SCALE}"))


def _layers(subject: Subject) -> dict[str, dict[str, TensorInfo]]:
    """Layer prefix → its k and v scales."""
    found: dict[str, dict[str, TensorInfo]] = {}
    for name, tensor in subject.tensors.items():
        for side, suffix in (("k", K_SCALE), ("v", V_SCALE)):
            if name.endswith("." + suffix):
                found.setdefault(name.removesuffix(suffix), {})[side] = tensor
    return found


def check_kv_scales(subject: Subject, read: ReadScalar | None) -> Iterator[Finding]:
    """All of the KV scales; values only where they can be read."""
    layers = _layers(subject)
    yield from _names(subject)
    yield from _pairs(subject, layers)
    yield from _declared(subject, bool(layers))
    if layers:
        yield from _engines(subject)
    if read is not None:
        for scales in layers.values():
            for tensor in scales.values():
                yield from _value(tensor, read, unit=subject.kind == MINIMAX_KIND)
        for name, tensor in subject.tensors.items():
            if name.endswith("." + _INDEX_SCALE):
                yield from _value(tensor, read, unit=subject.kind == MINIMAX_KIND)


def _names(subject: Subject) -> Iterator[Finding]:
    for name, tensor in subject.tensors.items():
        if any(name.endswith("." + dropped) for dropped in KV_SCALE_NAMES_DROPPED):
            yield Finding(
                "kv-scale-name", "error",
                f"{name} is a KV scale under a name that engines drop: they use 1.0, silently",
                where=name, got=tensor.name.rpartition(".")[2], expected=f"{K_SCALE}, {V_SCALE}",
            )  # fmt: skip


def _pairs(subject: Subject, layers: Mapping[str, Mapping[str, Any]]) -> Iterator[Finding]:
    lost = subject.lost_tensors
    for prefix, scales in layers.items():
        present = next(iter(scales))
        missing = prefix + (V_SCALE if present == "k" else K_SCALE)
        if len(scales) == 1 and missing not in lost:
            yield Finding(
                "kv-scale-unpaired", "error",
                f"{missing} is absent while its partner is there: engines use 1.0 for both, or"
                " fail", where=missing, got=f"only {present}_scale", expected="both, or neither",
            )  # fmt: skip
    if not layers:
        return
    for layer in range(count_of(subject.text_config, "num_hidden_layers")):
        prefix = f"{TEXT}model.layers.{layer}."
        if prefix not in layers and prefix + K_SCALE not in lost:
            yield Finding(
                "kv-scale-missing", "error",
                f"layer {layer} has no KV scales while {len(layers)} others have: it would run with"
                " 1.0", where=prefix + K_SCALE, got="absent", expected="as in the other layers",
            )  # fmt: skip


def _value(tensor: TensorInfo, read: ReadScalar, *, unit: bool) -> Iterator[Finding]:
    if not is_scalar(tensor):
        yield Finding(
            "kv-scale-shape", "error", f"{tensor.name} must be one F32", where=tensor.name,
            got=f"{tensor.dtype} {list(tensor.shape)}", expected="F32 [] or [1]",
        )  # fmt: skip
        return
    value = read(tensor)
    if not (np.isfinite(value) and value >= np.float32(2.0**-126)):
        yield Finding(
            "kv-scale-invalid", "error", f"{tensor.name} must be finite, normal and above zero",
            where=tensor.name, got=str(value), expected="a dequantisation multiplier > 0",
        )  # fmt: skip
    elif unit and value != 1.0:
        yield Finding(
            "kv-scale-not-unit", "error",
            f"{tensor.name}: the minimax layout's engine takes KV scales only if exactly 1.0",
            where=tensor.name, got=str(value), expected="1.0, or absent",
        )  # fmt: skip


def _engines(subject: Subject) -> Iterator[Finding]:
    """What becomes of sound scales."""
    sparse = subject.text_config.get("sparse_attention_config")
    freq = sparse.get("sparse_attention_freq") if isinstance(sparse, Mapping) else None
    if isinstance(freq, list) and any(freq) and subject.kind == MODELOPT_KIND:
        yield Finding(
            "kv-scale-sparse-layers", "note",
            "vLLM drops the KV scales of sparse-attention layers, silently, and runs them with 1.0",
            where=CONFIG_NAME, got=f"{sum(map(bool, freq))} of {len(freq)} layers are sparse",
        )  # fmt: skip


def _declared(subject: Subject, stored: bool) -> Iterator[Finding]:
    block, second = subject.quantization, hf_block(subject)
    kv = declared_kv(block) or (declared_kv(second) if second else None)
    where = CONFIG_NAME if declared_kv(block) else HF_QUANT_CONFIG_NAME
    if subject.kind == MINIMAX_KIND:
        return  # unit outer scales by definition
    if kv and not stored:
        yield Finding(
            "kv-scales-absent", "warning",
            f"{where} declares a static {kv} KV cache, but no K or V scale is stored: engines fall"
            " back to 1.0, silently", where=where, got="no scales",
            expected=f"{K_SCALE}, {V_SCALE}",
        )  # fmt: skip
    if stored and not kv:
        yield Finding(
            "kv-format-undeclared", "note",
            "KV scales are stored, but no config declares a KV-cache format: engines keep the"
            " model's dtype unless told otherwise", where=CONFIG_NAME,
        )  # fmt: skip
    if kv == "NVFP4" and subject.kind == MODELOPT_KIND:
        yield Finding(
            "kv-nvfp4-declared", "warning",
            f"{where} declares an NVFP4 KV cache: vLLM refuses M3 then on anything but SM100, and"
            " SGLang keeps the model's dtype, silently", where=where, got="NVFP4",
            expected="FP8, which every engine starts with",
        )  # fmt: skip
    elif kv not in (None, "FP8", "NVFP4"):
        yield Finding("kv-format-unknown", "error", f"{where} declares a KV cache of {kv}",
                      where=where, got=kv, expected="FP8 or NVFP4")  # fmt: skip
    scheme = block.get("kv_cache_scheme")
    if kv and isinstance(scheme, Mapping):
        wanted = _SCHEME | ({"num_bits": 4} if kv == "NVFP4" else {})
        odd = {k: scheme.get(k) for k, v in wanted.items() if scheme.get(k) != v}
        if odd:
            yield Finding(
                "kv-scheme", "error", f"kv_cache_scheme contradicts static {kv} scales",
                where=f"{CONFIG_NAME}: kv_cache_scheme", got=str(odd), expected=str(wanted),
            )  # fmt: skip

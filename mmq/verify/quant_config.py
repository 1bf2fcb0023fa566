"""Quantisation configs against what the headers show, module by module.

modelopt   config.json `quantization_config` and hf_quant_config.json, both complete and equal
minimax    one block, the vendor's, with the keys that switch SGLang to NVFP4 experts
mxfp8      the vendor's block
plain      none
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mmq.convert.checkpoint import CONFIG_NAME, HF_QUANT_CONFIG_NAME
from mmq.convert.modules import MXFP8_FORMAT, NVFP4_LAYOUT_OF, Module
from mmq.quantize.architecture import TEXT
from mmq.quantize.formats import MXFP8, NVFP4
from mmq.report.findings import Finding
from mmq.verify.exclusions import Exclusions, check_exclusions
from mmq.verify.subject import MINIMAX_KIND, MODELOPT_KIND, MXFP8_KIND, PLAIN_KIND, Subject

MIXED = "MIXED_PRECISION"
_ALGOS = {
    MXFP8_FORMAT: ("MXFP8", MXFP8.block),
    **dict.fromkeys(NVFP4_LAYOUT_OF, ("NVFP4", NVFP4.block)),
}
#: The other hub spelling of the language model's prefix that loaders accept.
_ALIAS, _CANONICAL = "model.language_model.", "language_model.model."
_LISTS = ("ignore", "exclude_modules", "ignored_layers", "modules_to_not_convert")

#: Values SGLang and vLLM accept in the vendor's block; a missing key is fine unless required.
_MINIMAX_KEYS: dict[str, tuple[Any, bool, str]] = {
    "quant_method": ("mxfp8", True, "SGLang switches to NVFP4 experts only with it"),
    "moe_quant_algo": ("NVFP4", True, "without it SGLang builds MXFP8 experts and drops every"
                       " packed tensor, silently"),
    "moe_quant_format": ("nvfp4-pack-quantized", True, "without exactly this SGLang builds MXFP8"
                         " experts and drops every packed tensor, silently"),
    "group_size": (16, False, "SGLang refuses others"),
    "weight_block_size": ([1, 32], False, "SGLang refuses others"),
    "activation_scheme": ("dynamic", False, "SGLang refuses others"),
    "kv_cache_quant_algo": ("FP8", False, "SGLang refuses others, it packs NVFP4 by itself"),
    "attention_quant_algo": ("FP8", False, "SGLang refuses others"),
    "index_k_quant_type": ("nvfp4", False, "SGLang refuses others"),
}  # fmt: skip
_MXFP8_KEYS: dict[str, tuple[Any, bool, str]] = {
    "quant_method": ("mxfp8", True, "engines load the FP8 weights without their block scales"),
    "weight_block_size": ([1, 32], False, "the stored blocks are 1×32"),
}


def check_quantization(subject: Subject) -> Iterator[Finding]:
    """Everything config.json and hf_quant_config.json say about quantisation."""
    block = subject.quantization
    if not block and subject.kind != PLAIN_KIND:
        yield Finding(
            "config-quantization-missing", "error",
            "config.json has no quantization_config, so vLLM does not know how to load the weights",
            where=CONFIG_NAME,
        )  # fmt: skip
    if subject.kind == MINIMAX_KIND:
        yield from _vendor(subject, _MINIMAX_KEYS)
        yield from _no_second_file(subject)
    elif subject.kind == MODELOPT_KIND or block.get("quant_method") == "modelopt":
        yield from _modelopt(subject)
    elif subject.kind == MXFP8_KIND:
        yield from _vendor(subject, _MXFP8_KEYS)
        yield from _no_second_file(subject)
    elif block or subject.hf_config is not None:
        yield Finding(
            "config-declares-quantization", "error",
            "a quantisation config is there, but no stored weight is quantised",
            where=CONFIG_NAME if block else HF_QUANT_CONFIG_NAME,
            got=str(block.get("quant_method")), expected="none",
        )  # fmt: skip


def _no_second_file(subject: Subject) -> Iterator[Finding]:
    if subject.hf_config is not None:
        yield Finding(
            "hf-quant-config-unexpected", "warning",
            f"this layout has no {HF_QUANT_CONFIG_NAME}; engines that find one read it as"
            " ModelOpt's", where=HF_QUANT_CONFIG_NAME,
        )  # fmt: skip


def hf_block(subject: Subject) -> Mapping[str, Any] | None:
    """The `quantization` part of hf_quant_config.json; None when absent."""
    if subject.hf_config is None:
        return None
    block = subject.hf_config.get("quantization")
    return block if isinstance(block, Mapping) else {}


def _modelopt(subject: Subject) -> Iterator[Finding]:
    block, second = subject.quantization, hf_block(subject)
    if block and block.get("quant_method") != "modelopt":
        yield Finding(
            "config-quant-method", "error", "the ModelOpt layout needs quant_method modelopt",
            where=f"{CONFIG_NAME}: quant_method", got=str(block.get("quant_method")),
            expected="modelopt",
        )  # fmt: skip
    if second is None:
        yield Finding(
            "hf-quant-config-missing", "warning",
            f"there is no {HF_QUANT_CONFIG_NAME}: TensorRT-LLM reads only that, and servers fall"
            " back to it", where=HF_QUANT_CONFIG_NAME,
        )  # fmt: skip
    for where, part in ((CONFIG_NAME, block), (HF_QUANT_CONFIG_NAME, second)):
        if part or (part is not None and where == HF_QUANT_CONFIG_NAME):
            yield from _algo(subject, where, part)
            yield from _quantized_layers(subject, where, part)
            yield from _lists(subject, where, part)
    if block and second is not None:
        yield from _agreement(block, second)


def _algo(subject: Subject, where: str, block: Mapping[str, Any]) -> Iterator[Finding]:
    mixed = len({_ALGOS[m.format][0] for m in subject.modules.values() if m.is_quantised}) > 1
    algo = block.get("quant_algo")
    if algo != MIXED and (mixed or algo not in ("NVFP4", "MXFP8")):
        yield Finding(
            "config-quant-algo", "error",
            f"{where} must say quant_algo {MIXED}: NVFP4 and MXFP8 modules are stored",
            where=f"{where}: quant_algo", got=str(algo), expected=MIXED,
        )  # fmt: skip


def canonical(key: str) -> str:
    """A quantized_layers key in the spelling tensors have."""
    return _CANONICAL + key.removeprefix(_ALIAS) if key.startswith(_ALIAS) else key


def _quantized_layers(subject: Subject, where: str, block: Mapping[str, Any]) -> Iterator[Finding]:
    layers = block.get("quantized_layers")
    if not isinstance(layers, Mapping) or not layers:
        if block.get("quant_algo") == MIXED:
            yield Finding(
                "quantized-layers-absent", "error",
                f"{where} has no quantized_layers: under {MIXED} nothing is quantised then",
                where=f"{where}: quantized_layers",
            )  # fmt: skip
        return
    listed = {canonical(key): value for key, value in layers.items()}
    explained = {*subject.broken, *subject.lost_modules}
    for key, entry in listed.items():
        module = subject.modules.get(key)
        if module is None and TEXT + key in subject.modules:
            yield Finding(
                "quantized-layers-prefix", "error",
                f"{where} lists {key} without the prefix {TEXT!r}: vLLM then leaves everything"
                " unquantised and loads rubbish, silently", where=key, got=key, expected=TEXT + key,
            )  # fmt: skip
        elif module is None and key not in explained:
            yield Finding("quantized-layers-unknown", "error",
                          f"{where} lists {key}, which is not stored", where=key)  # fmt: skip
        elif module is not None:
            yield from _entry(where, module, entry)
    for name, module in subject.modules.items():
        short = name.removeprefix(TEXT)
        if module.is_quantised and name not in listed and short not in listed:
            yield Finding(
                "quantized-layers-missing", "error",
                f"{name} is stored as {_ALGOS[module.format][0]}, but {where} does not list it:"
                " engines build it unquantised and drop its scales", where=name, got="not listed",
                expected=_ALGOS[module.format][0],
            )  # fmt: skip


def _entry(where: str, module: Module, entry: Any) -> Iterator[Finding]:
    algo, group = _ALGOS.get(module.format, ("unquantised", None))
    declared = entry.get("quant_algo") if isinstance(entry, Mapping) else entry
    if declared != algo:
        stored = module.weight.dtype if module.weight else "no weight"
        yield Finding(
            "quantized-layers-format", "error",
            f"{where} says {module.name} is {declared}, but it is stored as {algo} ({stored})",
            where=module.name, got=algo, expected=str(declared),
        )  # fmt: skip
        return
    size = entry.get("group_size") if isinstance(entry, Mapping) else None
    if size is None and algo == "NVFP4":
        yield Finding(
            "quantized-layers-group-size", "warning",
            f"{where} gives no group_size for {module.name}", where=module.name,
            expected=str(group),
        )  # fmt: skip
    elif size not in (None, group):
        yield Finding(
            "quantized-layers-group-size", "error",
            f"{where} gives {module.name} group_size {size}; its scales stand for {group} inputs",
            where=module.name, got=str(size), expected=str(group),
        )  # fmt: skip


def exclusion_lists(block: Mapping[str, Any]) -> dict[str, list[str]]:
    """Exclusion lists of a config block, by key."""
    found = {}
    for key in _LISTS:
        value = block.get(key)
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            found[key] = value
    return found


def _lists(subject: Subject, where: str, block: Mapping[str, Any]) -> Iterator[Finding]:
    lists = exclusion_lists(block)
    if not any(lists.values()):
        if block.get("quant_algo") == MIXED:
            return  # servers quantise only what quantized_layers lists
        lists = {"exclude_modules": []}
    elif where == CONFIG_NAME and "ignore" not in lists and block.get("quant_algo") != MIXED:
        yield Finding(
            "exclusions-key", "warning",
            f"{where} has its exclusions under {', '.join(lists)}; vLLM reads only `ignore` there",
            where=f"{where}: ignore",
        )  # fmt: skip
    distinct: list[set[str]] = []
    for key, patterns in lists.items():
        if set(patterns) in distinct:
            continue  # the same list under its other name
        distinct.append(set(patterns))
        yield from check_exclusions(
            f"{where}: {key}", patterns, subject.modules.values(),
            engine="a loader that goes by it expects a half-width weight",
        )  # fmt: skip


def _agreement(block: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[Finding]:
    """Both files say the same; engines read one, the other, or one as a fallback."""
    sides: dict[str, tuple[Any, Any]] = {
        "quant_algo": (block.get("quant_algo"), second.get("quant_algo")),
        "quantized_layers": (block.get("quantized_layers"), second.get("quantized_layers")),
        "kv_cache_quant_algo": (declared_kv(block), declared_kv(second)),
    }
    lists = [set(v) for b in (block, second) for v in exclusion_lists(b).values()]
    if len(lists) > 1:
        odd = next((one for one in lists if one != lists[0]), lists[0])
        sides["exclusions"] = (sorted(lists[0] ^ odd), []) if lists[0] != odd else ([], [])
    for key, (ours, theirs) in sides.items():
        if ours != theirs:
            got, expected = _difference(ours, theirs)
            yield Finding(
                "configs-disagree", "error",
                f"{CONFIG_NAME} and {HF_QUANT_CONFIG_NAME} differ in {key}: which one an engine"
                " goes by depends on the engine", where=key, got=got, expected=expected,
            )  # fmt: skip


def _difference(ours: Any, theirs: Any) -> tuple[str, str]:
    """The first disagreement of two values, short enough to print."""
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        keys = sorted(k for k in {*ours, *theirs} if ours.get(k) != theirs.get(k))
        return f"{keys[0]}: {ours.get(keys[0])}", f"{keys[0]}: {theirs.get(keys[0])}"
    if isinstance(ours, list) and not theirs:
        return f"in one list only: {', '.join(ours[:3])}", "the same list everywhere"
    return str(ours)[:200], str(theirs)[:200]


def declared_kv(block: Mapping[str, Any]) -> str | None:
    """KV-cache format a block declares: "FP8", "NVFP4", another word, or None."""
    algo = block.get("kv_cache_quant_algo")
    if isinstance(algo, str) and algo:
        return algo.upper()
    scheme = block.get("kv_cache_scheme")
    if not isinstance(scheme, Mapping):
        return None
    bits = scheme.get("num_bits")
    return {8: "FP8", 4: "NVFP4"}.get(bits, f"{bits} bits") if isinstance(bits, int) else None


def _vendor(subject: Subject, keys: Mapping[str, tuple[Any, bool, str]]) -> Iterator[Finding]:
    """The vendor's block: required and constrained keys, and what it leaves unquantised."""
    block = subject.quantization
    if not block:
        return
    for key, (expected, required, why) in keys.items():
        value = block.get(key)
        same = value == expected
        if key == "moe_quant_algo" and isinstance(value, str):
            same = value.upper() == expected
        if not same and (required or value is not None):
            yield Finding(
                "config-vendor-key", "error", f"config.json: {key}: {why}",
                where=f"{CONFIG_NAME}: {key}", got=str(value), expected=str(expected),
            )  # fmt: skip
    lists = exclusion_lists(block) or {"ignored_layers": []}
    for key, patterns in lists.items():
        if f"{TEXT}lm_head" in subject.modules and not Exclusions(patterns).match(TEXT + "lm_head"):
            yield Finding(
                "lm-head-not-ignored", "error",
                f"config.json: {key} must name lm_head: without, vLLM makes a quantised lm_head"
                " whose scale never comes", where=f"{TEXT}lm_head", expected="lm_head",
            )  # fmt: skip
        others = [m for m in subject.modules.values() if m.name != f"{TEXT}lm_head"]
        yield from check_exclusions(
            f"{CONFIG_NAME}: {key}", patterns, others,
            engine="engines would expect block scales for it",
        )  # fmt: skip

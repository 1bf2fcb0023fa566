"""Keys of config.json that engines need for M3, and what they do, silently, without them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from mmq.convert.checkpoint import CONFIG_NAME
from mmq.convert.completeness import MODEL_TYPES
from mmq.report.findings import Finding
from mmq.verify.subject import MINIMAX_KIND, Subject

MTP_KEYS = ("num_mtp_modules", "num_nextn_predict_layers")
_LISTS = ("sparse_attention_freq", "sparse_disable_index_value")


class Need(NamedTuple):
    """One demand on config.json.

    Attributes:
        key: the key, as findings name it.
        met: whether config.json and its text_config satisfy it.
        without: what goes wrong otherwise.
    """

    key: str
    met: Callable[[Mapping[str, Any], Mapping[str, Any]], bool]
    without: str


def _sparse(text: Mapping[str, Any]) -> Mapping[str, Any]:
    value = text.get("sparse_attention_config")
    return value if isinstance(value, Mapping) else {}


def _full_length(text: Mapping[str, Any], value: Any) -> bool:
    return isinstance(value, list) and len(value) == text.get("num_hidden_layers")


NEEDS: tuple[Need, ...] = (
    Need(
        "text_config.partial_rotary_factor",
        lambda _, text: "partial_rotary_factor" in text,
        "transformers ignores rotary_dim and would rotate the whole head",
    ),
    Need(
        "text_config.sparse_attention_config",
        lambda _, text: bool(_sparse(text)),
        "transformers has no indexer then, and vLLM assumes layers 3 to 59",
    ),
    Need(
        "text_config.sparse_attention_config.sparse_num_index_heads",
        lambda _, text: not _sparse(text)
        or _sparse(text).get("sparse_num_index_heads") == text.get("num_key_value_heads"),
        "engines select blocks per KV head, so it must equal num_key_value_heads",
    ),
    Need(
        f"text_config.sparse_attention_config.{{{', '.join(_LISTS)}}}",
        lambda _, text: not _sparse(text)
        or all(_full_length(text, _sparse(text).get(key)) for key in _LISTS),
        "engines need one entry per layer to know which layers have an indexer",
    ),
    Need(
        "text_config.moe_layer_freq",
        lambda _, text: _full_length(text, text.get("moe_layer_freq")),
        "transformers makes every layer a mixture of experts, vLLM three dense ones",
    ),
    Need(
        "text_config.hidden_act",
        lambda _, text: text.get("hidden_act") == "swigluoai",
        "vLLM refuses other activations than swigluoai",
    ),
    Need(
        "text_config.shared_intermediate_size",
        lambda _, text: text.get("shared_intermediate_size", text.get("intermediate_size"))
        == text.get("intermediate_size"),
        "vLLM and SGLang ignore it and use intermediate_size",
    ),
    Need(
        "vision_config",
        lambda config, _: isinstance(config.get("vision_config"), Mapping),
        "vLLM and SGLang refuse the model, transformers assumes 1280 × 32 layers",
    ),
)  # fmt: skip


def check_model_config(subject: Subject, source: Mapping[str, Any] | None) -> Iterator[Finding]:
    """Demands of `NEEDS`; what the source lacks as well is a note, for convert copied it.

    Args:
        source: the source's config.json, when there is a source.
    """
    if not subject.config:
        yield Finding("config-missing", "error", "there is no config.json: no engine loads this",
                      where=CONFIG_NAME)  # fmt: skip
        return
    model_type = subject.config.get("model_type")
    if model_type not in MODEL_TYPES:
        yield Finding(
            "config-model-type", "warning", f"model_type {model_type!r} is not MiniMax-M3's: the"
            " checks of names, shapes and engines do not fit it", where=CONFIG_NAME,
            got=str(model_type), expected=", ".join(MODEL_TYPES),
        )  # fmt: skip
        return
    for need in NEEDS:
        if need.met(subject.config, subject.text_config):
            continue
        inherited = source is not None and not need.met(source, _text(source))
        yield Finding(
            "config-engine-key", "note" if inherited else "warning",
            f"config.json: {need.key} is missing or wrong: {need.without}",
            where=need.key, got="as in the source" if inherited else "",
        )  # fmt: skip
    yield from _layout_notes(subject)


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    text = config.get("text_config", config)
    return text if isinstance(text, Mapping) else {}


def _layout_notes(subject: Subject) -> Iterator[Finding]:
    if subject.kind != MINIMAX_KIND:
        return
    freq = _sparse(subject.text_config).get("sparse_attention_freq")
    everywhere = isinstance(freq, list) and bool(freq) and all(freq)
    hopper = "" if everywhere else "; with dense-attention layers, on its Hopper route only"
    yield Finding(
        "layout-minimax-engines", "note",
        f"only SGLang loads the minimax layout for M3{hopper}. vLLM 0.33 stops at the experts'"
        " shape; transformers leaves them random with a mere warning", where=CONFIG_NAME,
    )  # fmt: skip


def mtp_declared(config: Mapping[str, Any]) -> set[int]:
    """How many MTP modules a config declares; the release says 7 in one key and 1 in another."""
    values = (part.get(key) for part in (config, _text(config)) for key in MTP_KEYS)
    return {value for value in values if type(value) is int and value > 0}


def check_mtp(
    subject: Subject, source: Mapping[str, Any] | None, source_has_mtp: bool
) -> Iterator[Finding]:
    """MTP modules in config.json against stored ones.

    Args:
        source: the source's config.json, when there is a source.
        source_has_mtp: whether there is a source that stores MTP tensors.
    """
    declared = mtp_declared(subject.config)
    counts = ", ".join(map(str, sorted(declared))) or "no"
    stored = len({m.role.layer for m in subject.modules.values() if m.role.mtp and m.role.linear})
    if declared and not stored:
        # the release itself declares one that it does not have, and engines cope
        yield Finding(
            "mtp-declared-absent", "warning" if source_has_mtp else "note",
            f"config.json declares {counts} MTP module(s) whose tensors are not stored",
            where=CONFIG_NAME, got="0 stored", expected="as many as declared, or none declared",
        )  # fmt: skip
    elif stored and stored not in declared:
        inherited = source is not None and mtp_declared(source) == declared
        yield Finding(
            "mtp-count", "note" if inherited else "warning",
            f"config.json declares {counts} MTP module(s), {stored} are stored",
            where=CONFIG_NAME, got=counts, expected=str(stored),
        )  # fmt: skip

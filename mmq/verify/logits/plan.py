"""What follows from a logits run's settings before a weight is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from mmq.convert.checkpoint import Checkpoint
from mmq.convert.modules import Module
from mmq.errors import BadInputError
from mmq.verify.logits.arms import KV_MODES, Arm
from mmq.verify.logits.head import FINAL_NORM, LM_HEAD
from mmq.verify.logits.settings import DEFAULT_WINDOWS, LogitsSettings
from mmq.verify.logits.stream import EMBEDDING
from mmq.verify.logits.tokens import TokenSet, check_ids, open_tokenizer, read_texts, read_tokens
from mmq.verify.model.config import TextConfig
from mmq.verify.model.operations import EXACT_CACHE, CacheMode

#: Shortest default context: what small models are trained on.
_MIN_CONTEXT = 512
_GIB = 1 << 30
#: What the text model has besides its layers.
ENDS = (EMBEDDING, FINAL_NORM, LM_HEAD)


class TokenWish(Protocol):
    """What was asked for: `LogitsSettings` and `CalibrateSettings` have these."""

    @property
    def texts(self) -> tuple[Path, ...]: ...
    @property
    def tokens(self) -> Path | None: ...
    @property
    def context(self) -> int | None: ...
    @property
    def windows(self) -> int | None: ...


def choose_tokens(wish: TokenWish, config: TextConfig, source: Checkpoint) -> TokenSet:
    """The tokens of a run, by the source's tokenizer.

    Raises:
        UsageError: texts or ids that cannot be read, or do not fit the vocabulary.
        BadInputError: there is text, and no tokenizer.
    """
    context = wish.context or default_context(config, source.config)
    limit = DEFAULT_WINDOWS if wish.windows is None else wish.windows or None
    if wish.tokens is not None:
        tokens = read_tokens(wish.tokens, context, limit, _bos(source.root))
    else:
        assert source.root is not None
        tokens = read_texts(wish.texts, open_tokenizer(source.root), context, limit)
    check_ids(tokens, config.vocab, source.location)
    return tokens


def _bos(root: Path | None) -> int | None:
    """What starts a window, where ids are given and a tokenizer may be missing."""
    try:
        return open_tokenizer(root).bos if root is not None else None
    except BadInputError:
        return None


def default_context(config: TextConfig, config_json: Mapping[str, Any]) -> int:
    """Twice what is needed for selection to bind, within what the model was made for."""
    text = config_json.get("text_config")
    longest = (text if isinstance(text, Mapping) else {}).get("max_position_embeddings")
    wanted = max(_MIN_CONTEXT, 2 * config.binding_context)
    return min(wanted, longest) if isinstance(longest, int) and longest > 1 else wanted


def cache_mode(settings: LogitsSettings, declared: Mapping[str, Any]) -> CacheMode:
    """The KV cache of the arms "kv" and "both".

    Args:
        declared: OUT's quantization_config.
    """
    name = settings.kv
    if name == "auto":
        algorithm = str(declared.get("kv_cache_quant_algo") or "exact").lower()
        name = algorithm if algorithm in KV_MODES else "exact"
    format, staged = KV_MODES[name]
    index_k = settings.index_k
    if index_k == "auto":
        index_k = "nvfp4" if declared.get("index_k_quant_type") == "nvfp4" else "exact"
    if (format, index_k) == ("exact", "exact"):
        return EXACT_CACHE
    return CacheMode(format, staged, KV_MODES[index_k][0])


@dataclass(frozen=True)
class Estimate:
    """What a run will take.

    Attributes:
        read_bytes: of both checkpoints, if every expert is reached.
        disk_bytes: of hidden states.
        memory_bytes: the largest layer's decoded attention or the head's rows, one expert, and the
            MLP's input and output of all tokens.
    """

    read_bytes: int
    disk_bytes: int
    memory_bytes: int

    @property
    def text(self) -> str:
        return (
            f"up to {self.read_bytes / 1e9:,.2f} GB of weights to read,"
            f" {self.disk_bytes / 1e9:,.2f} GB of hidden states on disk,"
            f" about {self.memory_bytes / _GIB:,.2f} GiB of memory"
        )


def estimate(
    config: TextConfig, sides: Sequence[Mapping[str, Module]], arms: Sequence[Arm],
    tokens: TokenSet, layers: int, element_bytes: int,
) -> Estimate:  # fmt: skip
    """From shapes alone."""
    read = sum(_needed_bytes(modules, layers) for modules in sides)
    state = tokens.count * config.hidden * 4
    heads, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    index = (config.kv_heads + 1) * config.index_dim
    attention = config.hidden * (2 * heads + 2 * kv + index) * element_bytes
    same_side = max(sum(a.side == side for a in arms) for side in ("source", "candidate"))
    window = max(w.length for w in tokens.windows)
    scores = window * (2 * heads + 2 * kv + 4 * config.hidden) * 4
    experts = 3 * config.hidden * max(_intermediate(sides[0]), 1) * element_bytes
    memory = attention + experts + scores + 3 * same_side * state
    return Estimate(read, 2 * len(arms) * state, memory)


def _needed_bytes(modules: Mapping[str, Module], layers: int) -> int:
    return sum(
        sum(t.nbytes for t in module.tensors.values())
        for module in modules.values()
        if not module.role.mtp and (module.name in ENDS or 0 <= module.role.layer < layers)
    )


def _intermediate(modules: Mapping[str, Module]) -> int:
    for module in modules.values():
        if module.role.is_routed_expert and module.weight is not None:
            return min(module.shape)
    return 0

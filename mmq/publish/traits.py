"""What a checkpoint is to an engine: its layout, its KV cache, how many GPUs it needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

#: Share of a GPU's memory that weights may take, and the memory of the smallest GPU considered.
_GPU_GB, _WEIGHTS_SHARE = 80, 0.87


@dataclass(frozen=True)
class Traits:
    """What decides how a checkpoint is served.

    Attributes:
        layout: modelopt, minimax, mxfp8 or bf16.
        m31: M3.1, which has sparse attention in every layer; M3 has dense ones.
        kv: the KV-cache format that the config declares, "FP8", "NVFP4" or "".
        vision: whether it reads images.
        file_bytes: bytes of the weight files.
    """

    layout: str
    m31: bool
    kv: str
    vision: bool
    file_bytes: int
    context: int

    @property
    def gpus(self) -> int:
        """GPUs of 80 GB that hold the weights with room for a cache: 1, 2, 4 or 8."""
        for count in (1, 2, 4):
            if self.file_bytes <= count * _GPU_GB * _WEIGHTS_SHARE * 1e9:
                return count
        return 8

    @property
    def vram_gb(self) -> int:
        """Weights and a fifth, the rule of vLLM's recipes."""
        return max(1, round(self.file_bytes * 1.2 / 1e9))


def traits_of(config: Mapping[str, Any], file_bytes: int) -> Traits:
    """Traits from config.json."""
    text = config.get("text_config")
    text = text if isinstance(text, Mapping) else config
    block = config.get("quantization_config")
    block = block if isinstance(block, Mapping) else {}
    sparse = text.get("sparse_attention_config")
    freq = sparse.get("sparse_attention_freq") if isinstance(sparse, Mapping) else None
    context = text.get("max_position_embeddings")
    return Traits(
        layout=_layout(block),
        m31=isinstance(freq, list) and bool(freq) and all(freq),
        kv=str(block.get("kv_cache_quant_algo") or ""),
        vision=isinstance(config.get("vision_config"), Mapping),
        file_bytes=file_bytes,
        context=context if isinstance(context, int) else 0,
    )


def _layout(block: Mapping[str, Any]) -> str:
    if block.get("quant_method") == "modelopt":
        return "modelopt"
    if block.get("moe_quant_algo"):
        return "minimax"
    return "mxfp8" if block.get("quant_method") == "mxfp8" else "bf16"

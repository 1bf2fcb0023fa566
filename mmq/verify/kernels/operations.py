"""Names of the operations that have kernels, in the order of every table; imports no Triton."""

from __future__ import annotations

from mmq.kernels.kv_pages import KvFormat

#: Formats of a cache as attention reads it, and as keys are stored.
CACHES = ("bf16", "fp8", "nvfp4", "nvfp4 staged")
FORMATS: tuple[KvFormat, ...] = ("bf16", "fp8", "nvfp4")
#: Attention over chosen blocks, of many tokens or one a sequence, and over all keys.
ATTENTION = ("prefill", "decode", "dense")
STAGING = "NVFP4 to FP8 staging"
RANKS = "selection over ranks"
ROUTER = "router"
W4A16, W4A4 = "MoE W4A16", "MoE W4A4"
TO_NVFP4, TO_MXFP8 = "quantise to NVFP4", "quantise to MXFP8"
FROM_NVFP4, FROM_MXFP8, AMAX = "dequantise NVFP4", "dequantise MXFP8", "largest magnitude"
WEIGHTS = (TO_NVFP4, TO_MXFP8, FROM_NVFP4, FROM_MXFP8, AMAX)


def attention_op(kind: str, format: str) -> str:
    """Name of one of `ATTENTION` over one of `CACHES`."""
    return f"{kind} attention, {format} cache"


def selection_op(format: str) -> str:
    """Name of block scores and selection from keys in one of `FORMATS`."""
    return f"block scores and selection, {format} keys"


def write_op(format: str) -> str:
    """Name of writing and reading pages in one of `FORMATS`."""
    return f"KV write and read, {format}"


def projection_op(x: str) -> str:
    """Name of the fused projection of activations in "bf16" or "mxfp8"."""
    return f"QKV, norm, RoPE, KV write, {x} × mxfp8"


OPERATIONS: tuple[str, ...] = (
    STAGING,
    *(selection_op(format) for format in FORMATS),
    RANKS,
    *(attention_op(kind, format) for kind in ATTENTION for format in CACHES),
    *(write_op(format) for format in FORMATS),
    *(projection_op(x) for x in ("bf16", "mxfp8")),
    ROUTER,
    W4A16,
    W4A4,
    *WEIGHTS,
)

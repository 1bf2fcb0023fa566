"""How many tokens of KV cache fit beside the weights on some GPUs.

    room of a GPU   = memory · (1 − reserve) − weights on it
    token on a GPU  = layers · 2 · heads on it · head_dim · bytes per element, and the index keys
    tokens          = room / token, in whole blocks; times count / tp copies of the model

With tensor parallelism TP each GPU holds heads / TP of the K/V heads, but never less than one: M3
has four, so beyond TP 4 they are replicated, and a token costs as much on each GPU as at TP 4. All
ranks need the index keys, of which a token has one vector a layer: they are whole on each. Norms,
routers and the vision side are whole on each GPU too, K/V projections follow their heads, and
everything else is divided by TP.

Four numbers: M3 at TP 4 holds 1 head of 4: NVFP4 34,560 / 4 = 8,640 B a token, with NVFP4 index
keys (4,104 B, whole) 12,744 B; 10 GB of room hold 784,640 tokens in blocks of 128.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from mmq.convert.sizes import Sized, kv_bytes
from mmq.errors import BadInputError, UsageError
from mmq.quantize.architecture import Role, role_of
from mmq.report.tables import KvBytes

#: Tokens of M3's longest context, and what "a million tokens" means here.
MILLION = 1 << 20
KV_FORMATS = ("bf16", "fp8", "hybrid", "nvfp4")
INDEX_FORMATS = ("bf16", "fp8", "nvfp4")
#: Tokens of a page where config.json names no block.
_BLOCK = 128

_WHOLE = ("norms", "router", "vision", "multi_modal_projector", "patch_merge_mlp", "kv_scales")
_BY_HEAD = ("k_proj", "v_proj", "index_q_proj")
_ABSENT = ("mtp", "draft")


@cache
def gpu_table() -> dict[str, Any]:
    """Memory of each GPU, and the share that is not used, with sources."""
    table: dict[str, Any] = json.loads(
        files("mmq.convert").joinpath("data", "gpus.json").read_text("utf-8")
    )
    return table


@dataclass(frozen=True)
class Placement:
    """Where a model is to run.

    Attributes:
        gpu: a name of `gpu_table`, or "<number>GB".
        count: GPUs in all; every `tp` of them hold one copy of the model.
    """

    gpu: str
    count: int
    tp: int

    @property
    def memory(self) -> int:
        """Bytes of one GPU.

        Raises:
            UsageError: no such GPU.
        """
        table = gpu_table()["gpus"]
        entry = table.get(self.gpu.upper())
        if entry is not None:
            return int(entry["gb"] * 10**9)
        number = self.gpu.upper().removesuffix("GB")
        if number != self.gpu.upper() and number.isascii() and number.isdigit() and int(number):
            return int(number) * 10**9
        raise UsageError(
            "option-value", f"--gpu {self.gpu} is unknown", got=self.gpu,
            expected=f"{', '.join(table)}, or a size such as 96GB",
        )  # fmt: skip

    def check(self) -> None:
        """Raises UsageError unless the copies of the model come out even."""
        _ = self.memory
        if self.count % self.tp:
            raise UsageError(
                "option-value", f"--count {self.count} is no multiple of --tp {self.tp}: each copy"
                " of the model takes that many GPUs", got=self.count, expected=f"{self.tp}, "
                f"{2 * self.tp}, …",
            )  # fmt: skip


def per_million(kv: KvBytes) -> dict[str, int]:
    """Bytes of 1,048,576 tokens for each format that applies, index keys apart."""
    formats = (*KV_FORMATS, *(f"index_{name}" for name in INDEX_FORMATS))
    found = {name: getattr(kv, name) for name in formats}
    return {name: MILLION * nbytes for name, nbytes in found.items() if nbytes}


def weights_per_gpu(tensors: Iterable[Sized], kv_heads: int, tp: int) -> int:
    """Bytes of weights on one of `tp` GPUs, the fullest one."""
    heads = heads_per_gpu(kv_heads, tp)
    total = 0
    for tensor in tensors:
        total += -(-tensor.nbytes * _share(role_of(tensor.name.rpartition(".")[0]), kv_heads,
                                           heads, tp) // (kv_heads * tp))  # fmt: skip
    return total


def _share(role: Role, kv_heads: int, heads: int, tp: int) -> int:
    """What of a module one GPU holds, in parts of kv_heads · tp."""
    if role.component in _ABSENT:
        return 0
    if role.component in _WHOLE or role.projection == "index_k_proj":
        return kv_heads * tp
    if role.projection in _BY_HEAD:
        return heads * tp
    return kv_heads


def heads_per_gpu(kv_heads: int, tp: int) -> int:
    """K/V heads on the fullest GPU: one at least, so that they are replicated beyond `kv_heads`."""
    return max(1, -(-kv_heads // tp))


def budget(
    tensors: Iterable[Sized], text_config: Mapping[str, Any], placement: Placement
) -> dict[str, Any]:
    """Tokens that fit, for each format of K and V beside each format of the index keys.

    Raises:
        UsageError: no such GPU.
        BadInputError: config.json does not say how large the cache is.
    """
    kv = kv_bytes(text_config)
    if kv is None:
        raise BadInputError(
            "config-inconsistent", "config.json lacks layers, KV heads or head_dim: the size of"
            " its KV cache is unknown", where="config.json",
        )  # fmt: skip
    reserve = gpu_table()["reserve"]["share"]
    memory = placement.memory
    weights = weights_per_gpu(tensors, kv.heads, placement.tp)
    room = memory - int(memory * reserve) - weights
    copies = placement.count // placement.tp
    block = _block(text_config)
    rows = []
    for format in KV_FORMATS:
        for index in INDEX_FORMATS if kv.index_bf16 else (None,):
            token = token_bytes(kv, format, index, placement.tp)
            if token is not None:
                tokens = max(0, room) // (token * block) * block
                rows.append({"kv": format, "index_k": index, "bytes_per_token": token,
                             "tokens": tokens * copies})  # fmt: skip
    return {
        "gpu": placement.gpu, "count": placement.count, "tp": placement.tp, "copies": copies,
        "memory_bytes": memory, "reserve": reserve, "weight_bytes": weights, "room_bytes": room,
        "kv_heads": heads_per_gpu(kv.heads, placement.tp), "block": block, "rows": rows,
    }  # fmt: skip


def token_bytes(kv: KvBytes, format: str, index: str | None, tp: int) -> int | None:
    """Bytes of one token on one GPU; None where a format does not apply."""
    whole = getattr(kv, format)
    keys = 0 if index is None else getattr(kv, f"index_{index}")
    if whole is None or keys is None:
        return None
    return int(whole) // kv.heads * heads_per_gpu(kv.heads, tp) + int(keys)


def _block(text_config: Mapping[str, Any]) -> int:
    sparse = text_config.get("sparse_attention_config")
    block = sparse.get("sparse_block_size") if isinstance(sparse, Mapping) else None
    return block if type(block) is int and block > 0 else _BLOCK

"""KV-cache sizes and what fits beside the weights, as lines of text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmq.report.tables import columns, short_size

_NAMES = {"bf16": "BF16", "fp8": "FP8", "hybrid": "hybrid", "nvfp4": "NVFP4"}


def million_lines(per_million: Mapping[str, int]) -> list[str]:
    """Bytes of 1,048,576 tokens; index keys in a line of their own."""
    if not per_million:
        return []

    def told(prefix: str) -> str:
        sizes = [
            f"{name} {_binary(per_million[prefix + key])}"
            for key, name in _NAMES.items() if prefix + key in per_million
        ]  # fmt: skip
        return ", ".join(sizes)

    lines = [f"  1,048,576 tokens: {told('')}"]
    index = told("index_")
    return [*lines, f"  their index keys: {index}"] if index else lines


def _binary(nbytes: int) -> str:
    gib = nbytes / 2**30
    return f"{gib:.2f} GiB" if gib >= 0.1 else f"{nbytes / 2**20:.2f} MiB"


def budget_lines(data: Mapping[str, Any], what: str) -> list[str]:
    """What `mmq inspect --gpu` prints; `data` is convert.kv_budget.budget.

    Args:
        what: whose weights.
    """
    heads = f"{data['kv_heads']} KV head{'s' if data['kv_heads'] > 1 else ''}"
    copies = data["copies"]
    lines = [
        f"fits     {what} on {data['count']} × {data['gpu']}, TP {data['tp']}"
        + (f", {copies} copies" if copies > 1 else ""),
        f"  of {short_size(data['memory_bytes'])} a GPU: {100 * data['reserve']:.0f} % reserved,"
        f" {short_size(data['weight_bytes'])} of weights, {_room(data['room_bytes'])} for the"
        f" cache ({heads})",
    ]
    if data["room_bytes"] <= 0:
        return lines
    index = list(dict.fromkeys(row["index_k"] for row in data["rows"]))
    names = ["tokens" if i is None else f"index keys {_NAMES[i]}" for i in index]
    tokens = {(row["kv"], row["index_k"]): row["tokens"] for row in data["rows"]}
    body = [
        (f"  {_NAMES[kv]}", *(f"{tokens[kv, i]:,}" for i in index))
        for kv in dict.fromkeys(row["kv"] for row in data["rows"])
    ]
    return [*lines, *columns([("  tokens", *names), *body], left=1)]


def _room(nbytes: int) -> str:
    return short_size(nbytes) if nbytes > 0 else f"{-nbytes / 10**9:,.3f} GB too little"

"""Faults of a converted checkpoint, planted one at a time: what level weights must name."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from planted import Planted

from mmq.kernels import ops

LAYER = "language_model.model.layers.2."
OTHER_LAYER = "language_model.model.layers.3."
MOE = LAYER + "block_sparse_moe."
EXPERT = MOE + "experts.5."


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        plant: damages the checkpoint.
        named: tensors, or a file, one of which level structure or weights must name.
        layer: where it is; None where it is in no layer.
    """

    plant: Callable[[Planted], None]
    named: tuple[str, ...]
    layer: int | None = 2


def _swap_nibbles(out: Planted) -> None:
    for projection in ("w1", "w2", "w3"):
        out.poke(f"{EXPERT}{projection}.weight", lambda a: (a >> 4) | ((a & 15) << 4))


def _swap_scale_bytes(out: Planted) -> None:
    """The largest and the smallest of a tensor's block scales."""

    def swap(scale):
        high, low = scale.argmax(), scale.argmin()
        flat = scale.reshape(-1)
        flat[[high, low]] = flat[[low, high]]
        return scale

    out.poke(f"{EXPERT}w2.weight_scale", swap)


def _exchange(out: Planted, first: str, second: str) -> None:
    a, b = (np.frombuffer(out[name].data, np.uint8) for name in (first, second))
    for name, data in ((first, b), (second, a)):
        out.poke(name, lambda stored, data=data: data.view(stored.dtype).reshape(stored.shape))


def _exchange_w1_w3(out: Planted) -> None:
    for suffix in ("weight", "weight_scale"):
        _exchange(out, f"{EXPERT}w1.{suffix}", f"{EXPERT}w3.{suffix}")


def _invert_global_scale(out: Planted) -> None:
    for projection in ("w1", "w3"):
        out.poke(f"{EXPERT}{projection}.weight_scale_2", lambda s2: 1 / s2)


def _decode_w3_by_w1s_global(out: Planted) -> None:
    """Every w3 quantised under a global scale of its own, but w1's stored, as loaders take it."""
    for name in out.shard_index():
        if name.startswith(MOE + "experts.") and name.endswith(".w3.weight"):
            packed, scale = (
                np.frombuffer(out[part].data, np.uint8).reshape(out[part].shape)
                for part in (name, f"{name}_scale")
            )
            s2 = np.frombuffer(out[f"{name}_scale_2"].data, "<f4")[0]
            values = ops.dequantize_nvfp4_f32(packed, scale, s2)
            own = ops.quantize_nvfp4_from_float(values, "F32", np.float32(s2 / 2))
            out.poke(name, lambda _, own=own: own.packed)
            out.poke(f"{name}_scale", lambda _, own=own: own.scale)


def _zero_expert(out: Planted) -> None:
    for projection in ("w1", "w2", "w3"):
        out.poke(f"{EXPERT}{projection}.weight", np.zeros_like)


def _permute_router(out: Planted) -> None:
    out.poke(f"{MOE}gate.weight", lambda gate: gate[[1, 0, *range(2, len(gate))]])


def _lose_one_plus(out: Planted) -> None:
    """As if the weights were meant for x · w: the stored w is one less."""

    def shift(bits):
        values = (bits.astype(np.uint32) << 16).view(np.float32) - 1
        return (values.view(np.uint32) >> 16).astype(np.uint16)

    out.poke(f"{LAYER}post_attention_layernorm.weight", shift)


def _zero_index_k(out: Planted) -> None:
    out.poke(f"{LAYER}self_attn.index_k_proj.weight", np.zeros_like)


def _layer_from_elsewhere(out: Planted) -> None:
    """Another layer's experts under this layer's names."""
    for name in out.shard_index():
        if name.startswith(MOE + "experts."):
            other = np.frombuffer(out[name.replace(LAYER, OTHER_LAYER)].data, np.uint8)
            out.poke(name, lambda a, other=other: other.view(a.dtype).reshape(a.shape))


def _source_shard(out: Planted) -> None:
    source = sorted(out.source.glob("*.safetensors"))[0]
    target = sorted(out.folder.glob("*.safetensors"))[0]
    shutil.copyfile(source, target)


def _other_tokenizer(out: Planted) -> None:
    path = out.folder / "tokenizer.json"
    path.write_text(path.read_text("utf-8").replace('"e"', '"E "', 1), "utf-8")


def _scale_kv(factor: float) -> Callable[[Planted], None]:
    def plant(out: Planted) -> None:
        for name in out.shard_index():
            if name.endswith((".k_scale", ".v_scale")):
                out.poke(name, lambda scale: scale * np.float32(factor))

    return plant


def _three(suffix: str) -> tuple[str, ...]:
    return tuple(f"{EXPERT}{projection}.{suffix}" for projection in ("w1", "w2", "w3"))


KV_SCALE = "language_model.model.layers.0.self_attn.k_proj.k_scale"

FAULTS: dict[str, Fault] = {
    "nibbles swapped in one expert": Fault(_swap_nibbles, _three("weight")),
    "two scale bytes swapped": Fault(_swap_scale_bytes, (f"{EXPERT}w2.weight_scale",)),
    "w1 and w3 exchanged": Fault(_exchange_w1_w3, _three("weight")),
    "global scale inverted": Fault(_invert_global_scale, _three("weight_scale_2")),
    "w3 decoded by w1's global": Fault(_decode_w3_by_w1s_global, _three("weight_scale")),
    "one expert zeroed": Fault(_zero_expert, _three("weight")),
    "two router rows exchanged": Fault(_permute_router, (f"{MOE}gate.weight",)),
    "a norm's 1 + w lost": Fault(_lose_one_plus, (f"{LAYER}post_attention_layernorm.weight",)),
    "index_k zeroed": Fault(_zero_index_k, (f"{LAYER}self_attn.index_k_proj.weight",)),
    "experts of another layer": Fault(_layer_from_elsewhere, _three("weight")),
    "a source shard copied over": Fault(_source_shard, (), None),
    "tokenizer changed": Fault(_other_tokenizer, ("tokenizer.json",), None),
    "KV scales × 4": Fault(_scale_kv(4), (KV_SCALE,), None),
    "KV scales ÷ 4": Fault(_scale_kv(1 / 4), (KV_SCALE,), None),
    "KV scales ÷ 16": Fault(_scale_kv(1 / 16), (KV_SCALE,), None),
}

"""Tensors of the small model: random, uneven from block to block, and the same on every machine.

Values come from integers and exact floating-point steps alone, each tensor from a seed of its own
name, so that neither NumPy's version nor another tensor's presence changes a byte.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mmq.demo.hub_config import ModelSize
from mmq.quantize.floats import bf16_bits

Float64 = npt.NDArray[np.float64]

#: Mixed into every tensor's seed.
SEED = 20261130
_BLOCK = 32
#: Factors by row and by block of 32: trained weights are as uneven as this, normal ones are not.
_ROW_FACTORS = np.array([0.375, 0.5, 0.75, 1.0, 1.0, 1.5, 2.5])
_BLOCK_FACTORS = np.array([0.25, 0.5, 0.75, 1.0, 1.0, 1.25, 1.75, 4.0])


class DemoTensor(NamedTuple):
    """A tensor as it goes into a shard: safetensors dtype tag, shape, little-endian bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes


def small_tensors(size: ModelSize) -> Iterator[DemoTensor]:
    """Every tensor of the model under its hub name; a weight and its scale are neighbours."""
    text = "language_model.model."
    yield _bf16(text + "embed_tokens.weight", (size.vocab, size.hidden), 1.0)
    for layer, sparse in enumerate(size.sparse):
        prefix = f"{text}layers.{layer}."
        yield from _norms(prefix, ("input_layernorm", "post_attention_layernorm"), size.hidden)
        yield from _attention(prefix + "self_attn.", size)
        if sparse:
            yield from _indexer(prefix + "self_attn.", size)
            yield from _experts(prefix + "block_sparse_moe.", size)
        else:
            yield from _mlp(prefix + "mlp.", size.hidden, size.dense_intermediate)
    yield from _norms(text, ("norm",), size.hidden)
    yield _bf16("language_model.lm_head.weight", (size.vocab, size.hidden))
    yield from _projectors(size)
    yield from _vision(size)


def encode_mxfp8(values_OK: Float64) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """(E4M3 codes [O, K], E8M0 scale bytes [O, K/32]): OCP's floor exponent, saturating RNE.

    scale = 2^(floor(log2 amax) − 8), code = e4m3(value / scale); four numbers (448, 1, −2.5, 0)
    in one block give scale 2^0 (byte 127) and codes 0x7E, 0x38, 0xC2, 0x00.
    """
    rows, columns = values_OK.shape
    blocks = values_OK.reshape(rows, columns // _BLOCK, _BLOCK)
    amax = np.abs(blocks).max(axis=2)
    exponent = np.clip(np.frexp(amax)[1] - 1 - 8, -127, 127)
    codes = _encode_e4m3(np.ldexp(blocks, -exponent[:, :, None]))
    return codes.reshape(rows, columns), (exponent + 127).astype(np.uint8)


def _encode_e4m3(values: Float64) -> npt.NDArray[np.uint8]:
    magnitude = np.abs(values)
    # floor(log2), not below E4M3's subnormals: there the step stays 2^-9
    exponent = np.where(magnitude > 0, np.clip(np.frexp(magnitude)[1] - 1, -6, 8), -6)
    steps = np.rint(np.ldexp(magnitude, 3 - exponent)).astype(np.int64)
    # a mantissa that rounds up to 16 carries into the exponent by itself
    code = np.minimum(((exponent + 7) << 3) + steps - 8, 0x7E)
    signed: npt.NDArray[np.uint8] = (code | np.signbit(values) * 0x80).astype(np.uint8)
    return signed


def _random(name: str, shape: tuple[int, ...]) -> Float64:
    """Near-normal values of variance 1: sums of four uniform integers."""
    generator = np.random.Generator(np.random.PCG64(zlib.crc32(name.encode()) ^ SEED))
    draws = generator.integers(-(1 << 15), 1 << 15, size=(4, *shape), dtype=np.int64)
    values: Float64 = draws.sum(axis=0) / (65536 * math.sqrt(4 / 12))
    return values


def _linear(name: str, shape: tuple[int, int], gain: float) -> Float64:
    """A weight of gain/√K standard deviation, times row and block factors."""
    rows, columns = shape
    generator = np.random.Generator(np.random.PCG64(zlib.crc32(name.encode()[::-1]) ^ SEED))
    row_index = generator.integers(0, len(_ROW_FACTORS), size=(rows, 1))
    block_index = generator.integers(0, len(_BLOCK_FACTORS), size=(rows, columns // _BLOCK))
    factors = _ROW_FACTORS[row_index] * np.repeat(_BLOCK_FACTORS[block_index], _BLOCK, axis=1)
    values: Float64 = _random(name, shape) * factors * (gain / math.sqrt(columns))
    return values


def _mxfp8(module: str, rows: int, columns: int, gain: float = 0.6) -> Iterator[DemoTensor]:
    codes, scale = encode_mxfp8(_linear(module, (rows, columns), gain))
    yield DemoTensor(f"{module}.weight", "F8_E4M3", codes.shape, codes.tobytes())
    yield DemoTensor(f"{module}.weight_scale_inv", "U8", scale.shape, scale.tobytes())


def _bf16(name: str, shape: tuple[int, ...], std: float | None = None) -> DemoTensor:
    std = 1 / math.sqrt(math.prod(shape[1:])) if std is None else std
    bits = bf16_bits((_random(name, shape) * std).astype(np.float32))
    return DemoTensor(name, "BF16", shape, bits.astype("<u2").tobytes())


def _f32(name: str, shape: tuple[int, ...], std: float) -> DemoTensor:
    return DemoTensor(name, "F32", shape, (_random(name, shape) * std).astype("<f4").tobytes())


def _norms(prefix: str, names: tuple[str, ...], width: int) -> Iterator[DemoTensor]:
    """Gemma norms scale by 1 + w, so their weights are small."""
    for name in names:
        yield _bf16(f"{prefix}{name}.weight", (width,), 0.1)


def _attention(prefix: str, size: ModelSize) -> Iterator[DemoTensor]:
    queries, keys = size.heads * size.head_dim, size.kv_heads * size.head_dim
    yield from _norms(prefix, ("q_norm", "k_norm"), size.head_dim)
    for name, rows in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
        yield from _mxfp8(prefix + name, rows, size.hidden)
    yield from _mxfp8(prefix + "o_proj", size.hidden, queries)


def _indexer(prefix: str, size: ModelSize) -> Iterator[DemoTensor]:
    yield from _norms(prefix, ("index_q_norm", "index_k_norm"), size.index_dim)
    yield from _mxfp8(prefix + "index_q_proj", size.kv_heads * size.index_dim, size.hidden)
    yield from _mxfp8(prefix + "index_k_proj", size.index_dim, size.hidden)


def _mlp(prefix: str, hidden: int, intermediate: int) -> Iterator[DemoTensor]:
    yield from _mxfp8(prefix + "gate_proj", intermediate, hidden)
    yield from _mxfp8(prefix + "up_proj", intermediate, hidden)
    yield from _mxfp8(prefix + "down_proj", hidden, intermediate)


def _experts(prefix: str, size: ModelSize) -> Iterator[DemoTensor]:
    # wide router logits: with near-ties, other roundings would choose other experts
    yield _f32(prefix + "gate.weight", (size.experts, size.hidden), 2 / math.sqrt(size.hidden))
    yield _f32(prefix + "e_score_correction_bias", (size.experts,), 0.05)
    yield from _mlp(prefix + "shared_experts.", size.hidden, size.intermediate)
    for expert in range(size.experts):
        module = f"{prefix}experts.{expert}."
        yield from _mxfp8(module + "w1", size.intermediate, size.hidden)
        # another magnitude than w1's: a shared global scale has work to do
        yield from _mxfp8(module + "w3", size.intermediate, size.hidden, 1.5)
        # quiet, so that four-bit experts do not upset the routing of the layers after them
        yield from _mxfp8(module + "w2", size.hidden, size.intermediate, 0.15)


def _projectors(size: ModelSize) -> Iterator[DemoTensor]:
    hidden = size.hidden
    for module, columns in (
        ("multi_modal_projector.linear_1", size.vision_hidden),
        ("multi_modal_projector.linear_2", hidden),
        ("patch_merge_mlp.linear_1", 4 * hidden),
        ("patch_merge_mlp.linear_2", hidden),
    ):
        yield from _biased(module, hidden, columns)


def _biased(module: str, rows: int, columns: int) -> Iterator[DemoTensor]:
    yield _bf16(f"{module}.weight", (rows, columns))
    yield _bf16(f"{module}.bias", (rows,), 0.05)


def _vision(size: ModelSize) -> Iterator[DemoTensor]:
    prefix, width = "vision_tower.vision_model.", size.vision_hidden
    patch = (width, 3, 2, size.patch, size.patch)
    yield _f32(prefix + "embeddings.patch_embedding.weight", patch, 0.02)
    # spelled as the release spells it
    yield from _layer_norm(prefix + "pre_layrnorm", width)
    for layer in range(size.vision_layers):
        block = f"{prefix}encoder.layers.{layer}."
        for name in ("layer_norm1", "layer_norm2"):
            yield from _layer_norm(block + name, width)
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            yield from _biased(f"{block}self_attn.{name}", width, width)
        yield from _biased(block + "mlp.fc1", size.vision_intermediate, width)
        yield from _biased(block + "mlp.fc2", width, size.vision_intermediate)


def _layer_norm(module: str, width: int) -> Iterator[DemoTensor]:
    """An ordinary layer norm: its weight is around 1."""
    weight = (1 + 0.1 * _random(f"{module}.weight", (width,))).astype(np.float32)
    yield DemoTensor(
        f"{module}.weight", "BF16", (width,), bf16_bits(weight).astype("<u2").tobytes()
    )
    yield _bf16(f"{module}.bias", (width,), 0.05)

"""Weights of one layer to run kernels on: made up from a seed, or those that a checkpoint has.

Dimensions: Z columns of the projected row, M hidden, I intermediate, E experts, D head dimension,
T tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mmq.errors import BadInputError
from mmq.kernels.reference.moe import Mlp, Mxfp8Weight, Nvfp4Weight, Weight, to_f32
from mmq.kernels.reference.qkv_rope import HeadNorms, Heads, Rope, RowLayout, project_heads
from mmq.kernels.reference.router import Routing, route
from mmq.quantize.architecture import TEXT
from mmq.verify.kernels.geometry import Geometry
from mmq.verify.model.config import TextConfig, read_text_config
from mmq.verify.model.layer import EXPERT, MLP, kv_scales
from mmq.verify.model.weights import ModelWeights
from mmq.verify.subject import open_subject


@dataclass(frozen=True)
class Material:
    """A layer's weights, and what is drawn beside them from `seed`.

    Attributes:
        name: what cases are called by.
        row_ZM: q, k, v, index_q and index_k projections, one above the other.
        experts: of `geometry.reached` experts; empty where they are not NVFP4.
        shared: None where it is not MXFP8.
        real: rows are projections of a Gaussian; else they are Gaussians themselves.
        reasons: what the checkpoint has not, as the reason why it is left out.
    """

    name: str
    geometry: Geometry
    row_ZM: Weight
    norms: HeadNorms
    gate_EM: Tensor
    bias_E: Tensor | None
    experts: list[Mlp]
    shared: Mlp | None
    k_scale: float
    v_scale: float
    index_scale: float = 1.0
    real: bool = False
    seed: int = 0
    reasons: dict[str, str] = field(default_factory=dict)

    def generator(self, salt: int) -> torch.Generator:
        """Numbers for one purpose, the same in every process."""
        return torch.Generator().manual_seed(1000 * self.seed + salt)

    def hidden(self, tokens: int, salt: int = 1) -> Tensor:
        """Gaussian activations BF16 [T, M]."""
        return normal(self.generator(salt), tokens, self.geometry.hidden).bfloat16()

    def heads(self, tokens: int, salt: int = 2) -> Heads:
        """Heads of positions 0 to T − 1, F32."""
        geometry, generator = self.geometry, self.generator(salt)
        if self.real:
            x_TM = normal(generator, tokens, geometry.hidden)
            row_TZ = (x_TM @ to_f32(self.row_ZM).T).bfloat16()
        else:
            row_TZ = normal(generator, tokens, geometry.row.width).bfloat16()
        rope = Rope(geometry.rotary_dim, geometry.theta)
        return project_heads(row_TZ, geometry.row, self.norms, torch.arange(tokens), rope)

    def routing(self, x_TM: Tensor) -> Routing:
        """Routing of tokens to the experts that have weights here."""
        reached = self.geometry.reached
        bias_E = None if self.bias_E is None else self.bias_E[:reached]
        return route(
            x_TM, self.gate_EM[:reached], bias_E,
            top_k=min(self.geometry.top_experts, reached), scaling=self.geometry.scaling,
        )  # fmt: skip


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    """F32 Gaussian numbers."""
    return torch.randn(shape, generator=generator)


def made_up(geometry: Geometry, name: str, seed: int = 0) -> Material:
    """Random weights, of a size at which SwiGLU's limits bind and every rounding shows."""
    generator = torch.Generator().manual_seed(seed)
    q, k, index_q, index_k = (normal(generator, 4, geometry.dim) * 0.3).bfloat16()
    width, inner = geometry.hidden, geometry.inner
    return Material(
        name,
        geometry,
        _mxfp8(generator, geometry.row.width, width),
        HeadNorms(q, k, index_q, index_k, geometry.eps, geometry.gemma),
        normal(generator, geometry.experts, width) * (2 / math.sqrt(width)),
        normal(generator, geometry.experts) * 0.1,
        [_expert(generator, width, inner) for _ in range(geometry.reached)],
        Mlp(
            _mxfp8(generator, inner, width), _mxfp8(generator, inner, width),
            _mxfp8(generator, width, inner),
        ),
        k_scale=0.0123, v_scale=0.0377, index_scale=0.021, seed=seed,
    )  # fmt: skip


def _expert(generator: torch.Generator, width: int, inner: int) -> Mlp:
    shapes = (inner, width, 0.013), (inner, width, 0.013), (width, inner, 0.037)
    return Mlp(*(_nvfp4(generator, *shape) for shape in shapes))


def _nvfp4(generator: torch.Generator, rows: int, columns: int, input_scale: float) -> Nvfp4Weight:
    """Any codes, scales from 0.25 to 1.9, and an s2 that is no power of two."""
    packed = torch.randint(0, 256, (rows, columns // 2), generator=generator, dtype=torch.uint8)
    scale = torch.randint(0x28, 0x40, (rows, columns // 16), generator=generator, dtype=torch.uint8)
    part = torch.rand(1, generator=generator).item()
    s2 = torch.tensor((1 + part) / math.sqrt(columns), dtype=torch.float32)
    return Nvfp4Weight(packed, scale, s2.item(), input_scale)


def _mxfp8(generator: torch.Generator, rows: int, columns: int) -> Mxfp8Weight:
    """Codes from 0.5 to 3.75 of both signs."""
    codes = torch.randint(0x30, 0x48, (rows, columns), generator=generator, dtype=torch.uint8)
    codes |= torch.randint(0, 2, (rows, columns), generator=generator, dtype=torch.uint8) << 7
    middle = 127 - round(math.log2(math.sqrt(columns)))
    shape = rows, columns // 32
    exponents = torch.randint(middle - 1, middle + 2, shape, generator=generator)
    return Mxfp8Weight(codes, exponents.to(torch.uint8))


#: How much of a large layer the interpreter is given: it runs a program of 128 rows and 64 columns
#: in 10 ms, and an expert of M3 has 3,456 of them.
EMULATED_HIDDEN, EMULATED_INNER, EMULATED_EXPERTS = 512, 256, 4


def layer_of(location: str, *, cut: bool) -> Material:
    """The first layer of a checkpoint that has experts, and if there is one, an indexer.

    Args:
        cut: leave out what would take the interpreter minutes; `name` says what is left.

    Raises:
        BadInputError: it has no such layer, or its config does not describe a forward.
    """
    subject, _ = open_subject(location)
    if subject.root is None or not subject.shards:
        raise BadInputError(
            "weights-missing", f"{location} has no weights to run kernels on", where=location
        )
    config = read_text_config(subject.config)
    both = [n for n in range(config.layers) if config.moe[n] and config.sparse[n]]
    number = next(iter(both or [n for n in range(config.layers) if config.moe[n]]), None)
    if number is None:
        raise BadInputError(
            "no-expert-layer", f"{location} has no layer with experts", where="config.json"
        )
    weights = ModelWeights(location, subject.modules, subject.paths)
    try:
        return _read_layer(weights, config, number, cut)
    finally:
        weights.close()


def _read_layer(weights: ModelWeights, config: TextConfig, number: int, cut: bool) -> Material:
    prefix = f"{TEXT}model.layers.{number}."
    ranks = config.kv_heads if cut and config.hidden > EMULATED_HIDDEN else 1
    hidden = min(config.hidden, EMULATED_HIDDEN) if cut else config.hidden
    reached = min(config.experts, max(EMULATED_EXPERTS if cut else 8, config.experts_per_token))
    moe = prefix + "block_sparse_moe."
    experts = [_mlp(weights, f"{moe}experts.{e}.", EXPERT) for e in range(reached)]
    inner = _rows(experts[0].gate_IM)
    inner_cut = min(inner, EMULATED_INNER) if cut else inner
    geometry = Geometry(
        config.heads // ranks, config.kv_heads // ranks, config.head_dim, config.rotary_dim,
        config.rope_theta, config.eps, config.gemma, max(config.block, 16), max(config.top_k, 1),
        max(config.local_blocks, 1), config.init_blocks, hidden, inner_cut, config.experts, reached,
        config.experts_per_token, config.routed_scaling,
        context=config.binding_context + 3 * max(config.block, 16) + 5, queries=5 if cut else 20,
    )  # fmt: skip
    reasons = {}
    nvfp4 = all(isinstance(w, Nvfp4Weight) for mlp in experts for w in mlp)
    if not nvfp4:
        reasons["experts"] = f"the experts of layer {number} are not NVFP4"
        experts = []
    shared: Mlp | None = _mlp(weights, moe + "shared_experts.", MLP)
    if not all(isinstance(w, Mxfp8Weight) for w in shared or ()):
        shared = None
    k_scale, v_scale = kv_scales(weights, number)
    gate_EM = weights.vector(moe + "gate")
    bias_E = (
        weights.vector(moe.rstrip("."), "e_score_correction_bias") if config.routing_bias else None
    )
    row_ZM, norms = _attention(weights, prefix + "self_attn.", config, number)
    row_ZM = _cut(row_ZM, config, ranks, hidden)
    whole = ranks == 1 and hidden == config.hidden and inner_cut == inner
    size = "" if whole else f", {hidden} of {config.hidden} columns, {inner_cut} of {inner} rows"
    return Material(
        f"layer {number}{size}", geometry, row_ZM, norms, gate_EM[:, :hidden].contiguous(), bias_E,
        [_cut_mlp(mlp, hidden, inner_cut) for mlp in experts],
        None if shared is None else _cut_mlp(shared, hidden, inner_cut),
        k_scale, v_scale, real=True, seed=number, reasons=reasons,
    )  # fmt: skip


def _mlp(weights: ModelWeights, prefix: str, parts: tuple[str, str, str]) -> Mlp:
    return Mlp(*(_stored(weights, prefix + part) for part in parts))


def _stored(weights: ModelWeights, name: str) -> Weight:
    """A weight as it is stored, with the scale of its activations where there is one."""
    weight = weights.stored(name)
    if not isinstance(weight, Nvfp4Weight):
        return weight
    return weight._replace(input_scale=weights.scalar(f"{name}.input_scale") or 1.0)


def _rows(weight: Weight) -> int:
    return len(weight if isinstance(weight, Tensor) else weight[0])


def _attention(
    weights: ModelWeights, name: str, config: TextConfig, number: int
) -> tuple[Weight, HeadNorms]:
    """Projections one above the other, and norms; a layer without an indexer lends it q and k."""
    sparse = config.sparse[number]
    index = ("index_q_proj", "index_k_proj") if sparse else ()
    parts = [weights.stored(name + p) for p in ("q_proj", "k_proj", "v_proj", *index)]
    if not sparse:
        columns = config.kv_heads * config.head_dim
        parts += [_take(parts[0], slice(columns)), _take(parts[1], slice(config.head_dim))]
    q_D, k_D = weights.vector(name + "q_norm"), weights.vector(name + "k_norm")
    index_q_E = weights.vector(name + "index_q_norm") if sparse else q_D
    index_k_E = weights.vector(name + "index_k_norm") if sparse else k_D
    return _stacked(parts), HeadNorms(q_D, k_D, index_q_E, index_k_E, config.eps, config.gemma)


def _stacked(parts: list[Weight]) -> Weight:
    mxfp8 = [part for part in parts if isinstance(part, Mxfp8Weight)]
    if len(mxfp8) == len(parts):
        return Mxfp8Weight(torch.cat([p[0] for p in mxfp8]), torch.cat([p[1] for p in mxfp8]))
    return torch.cat([to_f32(part) for part in parts]).bfloat16()


def _take(weight: Weight, rows: slice | Tensor) -> Weight:
    if isinstance(weight, Mxfp8Weight):
        return Mxfp8Weight(weight.codes_OK[rows], weight.exponent_OG[rows])
    return to_f32(weight)[rows]


def _cut(row_ZM: Weight, config: TextConfig, ranks: int, hidden: int) -> Weight:
    """One rank's heads, and some columns."""
    layout = RowLayout(
        config.heads, config.kv_heads, config.head_dim, config.kv_heads, config.head_dim
    )
    own = _take(row_ZM, layout.shard_columns(0, ranks)) if ranks > 1 else row_ZM
    if isinstance(own, Mxfp8Weight):
        codes, exponents = own.codes_OK[:, :hidden], own.exponent_OG[:, : hidden // 32]
        return Mxfp8Weight(codes.contiguous(), exponents.contiguous())
    return to_f32(own)[:, :hidden].bfloat16().contiguous()


def _cut_mlp(mlp: Mlp, hidden: int, inner: int) -> Mlp:
    sizes = (inner, hidden), (inner, hidden), (hidden, inner)
    return Mlp(*(_part(w, *size) for w, size in zip(mlp, sizes, strict=True)))


def _part(weight: Weight, rows: int, columns: int) -> Weight:
    if isinstance(weight, Nvfp4Weight):
        packed, scale = weight.packed_OP, weight.scale_OB
        return weight._replace(
            packed_OP=packed[:rows, : columns // 2].contiguous(),
            scale_OB=scale[:rows, : columns // 16].contiguous(),
        )
    if isinstance(weight, Mxfp8Weight):
        codes, exponents = weight
        return Mxfp8Weight(
            codes[:rows, :columns].contiguous(), exponents[:rows, : columns // 32].contiguous()
        )
    return weight[:rows, :columns]

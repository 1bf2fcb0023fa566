"""The MoE layer of NVFP4 experts and an MXFP8 shared expert in three launches, or four.

Reference: `mmq.kernels.reference.moe`, order "engine", step by step.

    map_blocks   slots sorted by expert, cut into blocks of one expert     PyTorch, no synchronising
    gate_up      g, u = bf16(alpha · W xᵀ), act = SwiGLU(g, u)             gate_up_kernel
    down         out = bf16(bf16(alpha2 · W2 actᵀ) · share)                down_kernel
    combine      y = bf16(bf16(bf16(Σ out) · scaling) + out_shared)        combine_kernel

Four numbers: experts [[1, 0], [1, 2]] of two tokens have the slots 1, 0, 2, 3 by expert, and in
blocks of 16 the blocks (expert 0, from 0, 1 slot), (1, 1, 2), (2, 3, 1).

The shared expert is expert number E of the same launches, with all tokens and a decoder of its own.
No public kernel fuses an MXFP8 shared expert with NVFP4 experts: DeepGEMM PR 409 fuses a BF16 one.

Activations "bf16" (W4A16) decode weights to BF16; "nvfp4" (W4A4) quantise x, in a launch of its
own, and act. Of other pairs Triton makes code that multiplies by wrong scales, without an error:
`supports` says which, and `moe` refuses them.

Dimensions: T tokens, K experts of a token, E experts, M hidden, I intermediate, S slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from ..reference.moe import M3_SWIGLU, Mlp, Mxfp8Weight, Nvfp4Weight, Swiglu
from ..reference.router import Routing
from ..support import Support
from .expert_gemm import combine_kernel, down_kernel, gate_up_kernel
from .launch import launch_options, target_name
from .nvfp4 import quantize_nvfp4_from_float_kernel

#: Rows of weights of a program: what block-scaled tcgen05.mma takes at least.
ROWS = 128
#: Columns of a step, and threads: with 128 columns, or 128 threads, the decoders spill.
COLUMNS = 64
THREADS = 256
#: Slots of a block: 16 is the least that block-scaled tcgen05.mma takes, more than 64 spill.
SLOTS = (16, 32, 64)
#: Elements that a program of `combine` or of the quantiser takes.
TILE = 2048


class UnsupportedDotError(ValueError):
    """There is no right code for these operand formats."""


class Stack(NamedTuple):
    """One projection of all experts: packed U8 [E, O, K/2], scale U8 [E, O, K/16], F32 [E] each."""

    packed: Tensor
    scale: Tensor
    s2_E: Tensor
    input_scale_E: Tensor


class Layer(NamedTuple):
    """Weights of a layer.

    Attributes:
        gate, up: W1 and W3, [E, I, M]. down: W2, [E, M, I].
        x_scale: input scale of W1 and W3 of all experts: x is quantised once.
        shared: MXFP8 [I, M], [I, M], [M, I]; None if there is no shared expert.
    """

    gate: Stack
    up: Stack
    down: Stack
    x_scale: float
    shared: Mlp | None


class BlockMap(NamedTuple):
    """Which slots each program works on, I32.

    Attributes:
        slots: by expert; slot token · K + choice, and from T · K on one a token, the shared
            expert's.
        expert: of each block, −1 where there is nothing to do.
        first, count: its part of `slots`.
        size: most slots of a block.
    """

    slots: Tensor
    expert: Tensor
    first: Tensor
    count: Tensor
    size: int


def stack_experts(experts: Sequence[Mlp], shared: Mlp | None = None) -> Layer:
    """Weights of single experts as one layer.

    Raises:
        ValueError: the experts' weights are not NVFP4, the shared expert's not MXFP8 or not of
            their widths, or x would have to be quantised more than once.
    """
    columns = tuple(_stack([expert[i] for expert in experts]) for i in range(3))
    scales = torch.cat([columns[0].input_scale_E, columns[1].input_scale_E]).unique().tolist()
    if len(scales) > 1:
        raise ValueError(f"W1 and W3 quantise x by {scales}, where one scale is needed")
    for weight, stack in zip(shared or (), columns, strict=False):
        rows, bytes_P = stack.packed.shape[1:]
        if not isinstance(weight, Mxfp8Weight) or weight.codes_OK.shape != (rows, 2 * bytes_P):
            raise ValueError("the shared expert is not MXFP8 of the experts' widths")
    return Layer(*columns, scales[0], shared)


def _stack(weights: Sequence[object]) -> Stack:
    if not all(isinstance(weight, Nvfp4Weight) for weight in weights):
        raise ValueError("the experts' weights are not NVFP4")
    device = weights[0].packed_OP.device
    return Stack(
        torch.stack([weight.packed_OP for weight in weights]),
        torch.stack([weight.scale_OB for weight in weights]),
        torch.tensor([weight.s2 for weight in weights], dtype=torch.float32, device=device),
        torch.tensor(
            [weight.input_scale for weight in weights], dtype=torch.float32, device=device
        ),
    )


def map_blocks(experts_TK: Tensor, experts: int, size: int, shared: bool) -> BlockMap:
    """Sort slots by expert and cut them into blocks; as many blocks as there can be at most.

    Nothing is copied to the host, so that the launch needs no synchronisation.
    """
    slots, device = experts_TK.numel(), experts_TK.device
    expert_S = experts_TK.flatten().long()
    order_S = expert_S.sort(stable=True).indices
    count_E = torch.zeros(experts, dtype=torch.int64, device=device)
    count_E.scatter_add_(0, expert_S, torch.ones_like(expert_S))
    if shared:
        tokens = experts_TK.shape[0]
        order_S = torch.cat([order_S, torch.arange(slots, slots + tokens, device=device)])
        count_E = torch.cat([count_E, torch.tensor([tokens], device=device)])
    blocks_E = (count_E + size - 1) // size
    ends_E = blocks_E.cumsum(0)
    most = slots // size + min(experts, slots)
    most += triton.cdiv(experts_TK.shape[0], size) if shared else 0
    block = torch.arange(most, device=device)
    expert = torch.searchsorted(ends_E, block, right=True)
    live = expert < len(count_E)
    expert = expert.clamp(max=len(count_E) - 1)
    inside = (block - (ends_E - blocks_E)[expert]) * size
    first = (count_E.cumsum(0) - count_E)[expert] + inside
    count = (count_E[expert] - inside).clamp(0, size)
    expert = expert.where(live, -1)
    return BlockMap(*(each.int() for each in (order_S, expert, first, count.where(live, 0))), size)


class Intermediate(NamedTuple):
    """What `gate_up` leaves: act BF16 [S, I] by slot; or NVFP4, and BF16 of the shared expert."""

    act: Tensor | None
    packed: Tensor | None = None
    scale: Tensor | None = None


def gate_up(
    x_TM: Tensor,
    layer: Layer,
    blocks: BlockMap,
    top_k: int,
    activations: str = "bf16",
    swiglu: Swiglu = M3_SWIGLU,
) -> Intermediate:
    """Steps 2 and 3, for BF16 x."""
    (tokens, width), (experts, inner, _) = x_TM.shape, layer.gate.packed.shape
    quantised, slots, routed = activations == "nvfp4", len(blocks.slots), tokens * top_k
    x_packed = x_scale = None
    alpha1_E, alpha3_E = layer.gate.s2_E, layer.up.s2_E
    if quantised:
        x_packed, x_scale = quantize(x_TM, layer.x_scale)
        alpha1_E, alpha3_E = alpha1_E * layer.x_scale, alpha3_E * layer.x_scale
        act = Intermediate(
            _empty(x_TM, (slots - routed, inner)),
            _empty(x_TM, (routed, inner // 2), torch.uint8),
            _empty(x_TM, (routed, inner // 16), torch.uint8),
        )
    else:
        act = Intermediate(_empty(x_TM, (slots, inner)))
    shared = layer.shared or Mlp(*[Mxfp8Weight(None, None)] * 3)
    gate_up_kernel[(triton.cdiv(inner, ROWS), len(blocks.expert))](
        x_TM, x_packed, x_scale,
        layer.gate.packed, layer.gate.scale, layer.up.packed, layer.up.scale, alpha1_E, alpha3_E,
        *shared.gate_IM, *shared.up_IM, *blocks[:4],
        *act, layer.down.input_scale_E, *swiglu, experts, routed, top_k, width, inner,
        **_constants(blocks, quantised, layer),
    )  # fmt: skip
    return act


def down(
    act: Intermediate, layer: Layer, blocks: BlockMap, routing: Routing, activations: str = "bf16"
) -> Tensor:
    """Steps 4 and 5: BF16 [S, M] by slot."""
    experts, width = layer.down.packed.shape[:2]
    inner, routed = 2 * layer.down.packed.shape[2], routing.experts_TK.numel()
    out_SM = _empty(layer.down.s2_E, (len(blocks.slots), width), torch.bfloat16)
    quantised = activations == "nvfp4"
    alpha2_E = layer.down.s2_E * layer.down.input_scale_E if quantised else layer.down.s2_E
    shared = layer.shared.down_MI if layer.shared else (None, None)
    down_kernel[(triton.cdiv(width, ROWS), len(blocks.expert))](
        *act, layer.down.packed, layer.down.scale, alpha2_E, *shared, routing.shares_TK,
        *blocks[:4], out_SM, experts, routed, width, inner,
        **_constants(blocks, quantised, layer),
    )  # fmt: skip
    return out_SM


def combine(out_SM: Tensor, routing: Routing, shared: bool) -> Tensor:
    """Steps 6 to 8: BF16 [T, M]."""
    (tokens, top_k), width = routing.experts_TK.shape, out_SM.shape[1]
    y_TM = _empty(out_SM, (tokens, width))
    combine_kernel[(tokens, triton.cdiv(width, TILE))](
        out_SM, y_TM, routing.scaling, tokens, top_k, width,
        C=TILE, SHARED=shared, **launch_options(TILE // 16),
    )  # fmt: skip
    return y_TM


def moe(
    hidden_TM: Tensor,
    routing: Routing,
    layer: Layer,
    *,
    activations: str = "bf16",
    swiglu: Swiglu = M3_SWIGLU,
) -> Tensor:
    """The layer's output, BF16 [T, M].

    Args:
        hidden_TM: BF16, on the device of the weights.
        activations: "bf16" or "nvfp4".

    Raises:
        UnsupportedDotError: there is no right code for these activations.
        ValueError: hidden states are not BF16 of the layer's width.
    """
    support = supports(target_name(), activations=activations)
    if not support.ok:
        raise UnsupportedDotError(f"NVFP4 × {activations}: {support.reason}")
    width = layer.down.packed.shape[1]
    if hidden_TM.dtype != torch.bfloat16 or hidden_TM.shape[1] != width:
        given = f"{hidden_TM.dtype}{list(hidden_TM.shape)}"
        raise ValueError(f"hidden states are {given}, not BF16 of width {width}")
    if not len(hidden_TM):
        return torch.empty_like(hidden_TM)
    tokens, top_k = routing.experts_TK.shape
    experts = len(layer.gate.packed)
    size = block_size(tokens * top_k, experts)
    blocks = map_blocks(routing.experts_TK, experts, size, layer.shared is not None)
    act = gate_up(hidden_TM.contiguous(), layer, blocks, top_k, activations, swiglu)
    out_SM = down(act, layer, blocks, routing, activations)
    return combine(out_SM, routing, layer.shared is not None)


def block_size(slots: int, experts: int) -> int:
    """Slots of a block: enough for an expert's mean, within `SLOTS`."""
    return next((size for size in SLOTS if slots <= size * experts), SLOTS[-1])


def quantize(x_TK: Tensor, s2: float) -> tuple[Tensor, Tensor]:
    """BF16 to NVFP4 under a given s2: packed U8 [T, K/2] and scales U8 [T, K/16]."""
    rows, columns = x_TK.shape
    packed = _empty(x_TK, (rows, columns // 2), torch.uint8)
    scale = _empty(x_TK, (rows, columns // 16), torch.uint8)
    quantize_nvfp4_from_float_kernel[(triton.cdiv(x_TK.numel(), TILE),)](
        x_TK.view(torch.uint16), packed, scale, None, s2, x_TK.numel() // 16, None, columns // 16,
        TILE=TILE, SEARCH="max", WEIGHTED=False, ERRORS=False, **launch_options(TILE // 16),
    )  # fmt: skip
    return packed, scale


def _empty(like: Tensor, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
    """Memory for a kernel to write, where `like` is and of its type unless said otherwise."""
    return torch.empty(shape, dtype=dtype or like.dtype, device=like.device)


def _constants(blocks: BlockMap, quantised: bool, layer: Layer) -> dict[str, object]:
    native = quantised and supports(target_name(), activations="nvfp4").path == "native"
    return {
        "ROWS": ROWS, "N": blocks.size, "BK": COLUMNS,
        "QUANTISED": quantised, "NATIVE": native, "SHARED": layer.shared is not None,
        **launch_options(THREADS),
    }  # fmt: skip


_BF16_DOT = {
    "sm_90": "wgmma", "sm_100": "tcgen05.mma kind::f16", "sm_103": "tcgen05.mma kind::f16",
    "sm_107": "tcgen05.mma kind::f16", "sm_120": "mma.sync", "gfx950": "v_mfma_f32 bf16",
}  # fmt: skip
_NVFP4_DOT = {
    "sm_100": "tcgen05.mma kind::mxf4nvf4, block16",
    "sm_103": "tcgen05.mma kind::mxf4nvf4, block16",
    "sm_107": "tcgen05.mma kind::mxf4nvf4, block16",
    "sm_120": "mma.sync kind::mxf4nvf4, scale_vec::4X",
}
_NO_DOT = {
    "fp8": "hardware takes E4M3 elements with E8M0 scales of 32 only; Triton compiles E4M3 scales "
    "of 16 to kind::mxf8f6f4, which reads them as something else, without an error",
    "mxfp8": "the sides of a block-scaled dot have one kind of scales, and NVFP4 has E4M3 of 16 "
    "where MXFP8 has E8M0 of 32",
}


def supports(target: str, *, activations: str = "bf16") -> Support:
    """How NVFP4 weights and these activations are multiplied on `target`, a name of `TARGETS`."""
    if activations in _NO_DOT:
        return Support("unsupported", _NO_DOT[activations])
    if activations not in ("bf16", "nvfp4"):
        return Support("unsupported", "activations are bf16 or nvfp4")
    decoded = f"decoded to BF16, where it is exact: {_BF16_DOT.get(target, 'BF16 dot')}"
    if activations == "nvfp4" and target in _NVFP4_DOT:
        return Support("native", _NVFP4_DOT[target])
    return Support("fallback", decoded)

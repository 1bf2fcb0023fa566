"""How each NVFP4 layout names its expert tensors, and what loaders demand of the rest.

modelopt: value = e2m1 · e4m3 · weight_scale_2          (a multiplier)
minimax:  value = e2m1 · e4m3 / weight_global_scale     (a divisor, compressed-tensors' sense)

Sources: ModelOpt `examples/minimax_m3`; SGLang `minimax_m3_nvfp4.py`; docs/layouts.md.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Nvfp4Layout:
    """Tensor names and scalar conventions of one NVFP4 layout.

    Attributes:
        packed: suffix of the U8 codes [O, K/2], low nibble = even column.
        block_scale: suffix of the E4M3 block scales [O, K/16], linear, row-major.
        global_scale: suffix of the F32 tensor scale.
        input_scale: suffix of the F32 activation scale.
        divisor: whether the tensor scale divides (1/s2) instead of multiplying (s2).
        scalar_shape: shape of both F32 scalars.
    """

    name: str
    packed: str
    block_scale: str
    global_scale: str
    input_scale: str
    divisor: bool
    scalar_shape: tuple[int, ...]
    default_kv_scales: str
    default_input_scales: str
    allowed_kv_scales: tuple[str, ...]


MODELOPT = Nvfp4Layout(
    name="modelopt",
    packed="weight",
    block_scale="weight_scale",
    global_scale="weight_scale_2",
    input_scale="input_scale",
    divisor=False,
    scalar_shape=(),
    default_kv_scales="analytic",
    default_input_scales="unit",
    allowed_kv_scales=("analytic", "unit", "none", "file"),
)

MINIMAX = Nvfp4Layout(
    name="minimax",
    packed="weight_packed",
    block_scale="weight_scale",
    global_scale="weight_global_scale",
    input_scale="input_global_scale",
    divisor=True,
    scalar_shape=(1,),
    # the engine's KV pool insists on outer scales of exactly 1.0, or none at all
    default_kv_scales="none",
    default_input_scales="unit",
    allowed_kv_scales=("unit", "none"),
)

LAYOUTS: dict[str, Nvfp4Layout] = {layout.name: layout for layout in (MODELOPT, MINIMAX)}

#: The name SGLang, transformers and vLLM all accept for MXFP8 block scales in the output.
MXFP8_SCALE = "weight_scale_inv"
#: Names under which sources store it.
MXFP8_SCALE_NAMES = ("weight_scale_inv", "weight_scale")

#: F32 [] dequantisation multipliers of the KV cache, by attention module.
K_SCALE = "self_attn.k_proj.k_scale"
V_SCALE = "self_attn.v_proj.v_scale"
#: KV-scale names seen in the wild that M3 loaders drop silently.
KV_SCALE_NAMES_DROPPED = (
    "k_proj.output_scale",
    "v_proj.output_scale",
    "kv_scale",
    "qkv_proj.k_scale",
)

"""How big things are: bytes by component and format, and KV-cache bytes per token.

    KV bytes per token = layers · 2 (K and V) · KV heads · head_dim · bytes per element
    bytes per element: BF16 2, FP8 1, NVFP4 9/16 (4 bits, and an 8-bit scale per 16)

M3 has 60 · 2 · 4 · 128 = 61,440 elements: FP8 61,440 B, NVFP4 34,560 B. Sizes are decimal GB
unless they say GiB.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from mmq.errors import UsageError
from mmq.quantize.architecture import COMPONENTS, role_of
from mmq.quantize.formats import NVFP4
from mmq.quantize.layouts import K_SCALE, MINIMAX, MODELOPT, MXFP8_SCALE_NAMES, V_SCALE
from mmq.report.tables import KvBytes, SizeRow

#: Announced sizes of the conversion, in GB: MXFP8 release and NVFP4 checkpoint.
ANNOUNCED_GB = (451.5, 250.1)
#: (tensors, payload bytes) of the MXFP8 release, without and with its one MTP layer.
RELEASES = {(45_838, 443_742_085_120): "", (46_637, 451_470_145_024): " with its MTP layer"}

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
#: A plain number below this is taken for one whose unit was forgotten.
_LEAST_PLAIN = 10**6
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(I?)B?", re.ASCII | re.IGNORECASE)

_NUMBER = re.compile(r"\.\d+(?=\.)")
_NVFP4_SCALARS = {
    suffix
    for layout in (MODELOPT, MINIMAX)
    for suffix in (layout.global_scale, layout.input_scale)
}  # fmt: skip


class Sized(Protocol):
    """A tensor, read or about to be written."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def nbytes(self) -> int: ...


def size_rows(tensors: Iterable[Sized]) -> list[SizeRow]:
    """Tensors and bytes by component, format and dtype, in the order reports use."""
    kinds: dict[tuple[str, str], tuple[str, str, str]] = {}
    totals: dict[tuple[str, str, str], list[int]] = {}
    for tensor in tensors:
        # a release has 45,838 names of some 70 kinds; roles are looked up once per kind
        template = (_NUMBER.sub(".#", tensor.name), tensor.dtype)
        kind = kinds.get(template)
        if kind is None:
            kind = kinds[template] = _kind(tensor.name, tensor.dtype)
        total = totals.setdefault(kind, [0, 0])
        total[0] += 1
        total[1] += tensor.nbytes
    order = {component: index for index, component in enumerate(COMPONENTS)}
    rows = [SizeRow(*kind, count, nbytes) for kind, (count, nbytes) in totals.items()]
    return sorted(rows, key=lambda r: (order.get(r.component, len(order)), r.format, r.dtype))


def _kind(name: str, dtype: str) -> tuple[str, str, str]:
    """(component, format, dtype) of one tensor; a scale belongs to its weight's format."""
    module, _, suffix = name.rpartition(".")
    if name.endswith(("." + K_SCALE, "." + V_SCALE)):
        return "kv_scales", dtype, dtype
    component = role_of(module).component
    mxfp8 = dtype == "F8_E4M3" and suffix == "weight"
    if mxfp8 or (suffix in MXFP8_SCALE_NAMES and dtype in ("U8", "F8_E8M0")):
        return component, "MXFP8", dtype
    packed = dtype == "U8" and suffix in (MODELOPT.packed, MINIMAX.packed)
    scale = dtype == NVFP4.scale_dtype and suffix == MODELOPT.block_scale
    if packed or scale or suffix in _NVFP4_SCALARS:
        return component, "NVFP4", dtype
    return component, dtype, dtype


def release_of(tensors: int, nbytes: int) -> str | None:
    """Which revision of the MXFP8 release has these totals; None when neither does."""
    suffix = RELEASES.get((tensors, nbytes))
    return None if suffix is None else f"the MXFP8 release{suffix}"


def kv_bytes(text_config: Mapping[str, Any]) -> KvBytes | None:
    """KV-cache bytes per token for each cache format; None when config.json lacks the keys.

    Args:
        text_config: needs num_hidden_layers, num_key_value_heads and head_dim (or hidden_size and
            num_attention_heads); sparse_attention_config adds the hybrid and the index keys.
    """
    layers = _count(text_config, "num_hidden_layers")
    heads = _count(text_config, "num_key_value_heads")
    head_dim = _count(text_config, "head_dim") or _derived_head_dim(text_config)
    if not (layers and heads and head_dim):
        return None
    per_layer = 2 * heads * head_dim
    nvfp4_layer = _nvfp4_bytes(per_layer, head_dim)
    sparse = _sparse_layers(text_config, layers)
    hybrid = None
    if sparse is not None and nvfp4_layer is not None:
        hybrid = sparse * nvfp4_layer + (layers - sparse) * per_layer
    index_dim = _count(_mapping(text_config, "sparse_attention_config"), "sparse_index_dim")
    index = (sparse or 0) * index_dim
    return KvBytes(
        layers, sparse, heads, head_dim,
        bf16=2 * layers * per_layer,
        fp8=layers * per_layer,
        nvfp4=None if nvfp4_layer is None else layers * nvfp4_layer,
        hybrid=hybrid,
        index_bf16=2 * index or None,
        index_fp8=index or None,
        index_nvfp4=_nvfp4_bytes(index, index_dim) or None,
    )  # fmt: skip


def _nvfp4_bytes(elements: int, row: int) -> int | None:
    """Bytes of codes and block scales; None when rows do not fill whole blocks."""
    if not row or row % NVFP4.block:
        return None
    return elements // 2 + elements // NVFP4.block


def _sparse_layers(text_config: Mapping[str, Any], layers: int) -> int | None:
    """Layers with sparse attention (and so an index-key cache); None when config does not say."""
    sparse = _mapping(text_config, "sparse_attention_config")
    freq = sparse.get("sparse_attention_freq")
    if not isinstance(freq, list) or len(freq) != layers:
        return None
    return sum(map(bool, freq)) if sparse.get("use_sparse_attention", True) else 0


def _derived_head_dim(text_config: Mapping[str, Any]) -> int:
    heads = _count(text_config, "num_attention_heads")
    return _count(text_config, "hidden_size") // heads if heads else 0


def _count(config: Mapping[str, Any], key: str) -> int:
    """A positive integer of the config, 0 when absent or something else."""
    value = config.get(key)
    return value if type(value) is int and value > 0 else 0


def _mapping(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = config.get(key)
    return value if isinstance(value, Mapping) else {}


def parse_size(text: str) -> int:
    """Bytes from ``5GB``, ``4.5GiB``, ``500MB`` or a plain number.

    Raises:
        UsageError: not a positive size; or a small number that lost its unit, which would put
            each tensor into a shard of its own.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is not None:
        number, unit, binary = match[1], match[2].upper(), match[3]
        factor = (_BINARY_UNITS if binary else _UNITS).get(unit, 0)
        nbytes = int(float(number) * factor) if "." in number else int(number) * factor
        if text.strip().isdecimal() and 0 < nbytes < _LEAST_PLAIN:
            raise UsageError(
                "option-value", f"{text} bytes? A size has a unit", got=text,
                expected="such as 5GB, 4.5GiB or 500MB", hint=f"{text.strip()}GB",
            )  # fmt: skip
        if nbytes > 0:
            return nbytes
    raise UsageError(
        "option-value", f"{text} is no size", got=text, expected="such as 5GB, 4.5GiB or 500MB"
    )

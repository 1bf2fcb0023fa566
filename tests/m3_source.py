"""A small, complete M3-shaped MXFP8 checkpoint in memory, written and read without mmq.

Three layers (one dense), four experts, router with bias, shared experts, indexer, vision tower and
projectors. Weights depend on their names alone, so equal names in another checkpoint are equal
bytes. `hostile.good()` adds config and side files; `hostile` breaks it in one place at a time.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import struct
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

INDEX = "model.safetensors.index.json"
TEXT = "language_model.model."
WIDTH = {"F64": 8, "I64": 8, "F32": 4, "BF16": 2, "F16": 2, "I16": 2}


def _e4m3_values() -> np.ndarray:
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    value = np.where(exponent, (8 + mantissa) * 2.0 ** (exponent - 10.0), mantissa * 2.0**-9)
    value[code & 127 == 127] = np.nan
    return np.where(code & 128, -value, value)


E4M3 = _e4m3_values()
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


class Tensor(NamedTuple):
    """One stored tensor: `data` is its little-endian bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    def bytes_as(self, dtype: str) -> np.ndarray:
        return np.frombuffer(self.data, dtype).reshape(self.shape).copy()

    def f64(self) -> np.ndarray:
        """Values of a plain float tensor."""
        if self.dtype == "BF16":
            bits = self.bytes_as("<u2").astype("<u4") << 16
            return bits.view("<f4").astype(np.float64)
        return self.bytes_as({"F32": "<f4", "F16": "<f2", "F64": "<f8"}[self.dtype]).astype("<f8")


def tensor(dtype: str, array: Any, storage: str = "u1") -> Tensor:
    """A Tensor from an array of its storage type."""
    array = np.ascontiguousarray(array, storage)
    return Tensor(dtype, array.shape if array.size > 1 or array.ndim else (), array.tobytes())


def bf16(values: Any) -> Tensor:
    """BF16, truncated: the fixture needs values that are exact, not values that are close."""
    return tensor("BF16", np.ascontiguousarray(values, "<f4").view("<u4") >> 16, "<u2")


def f32(values: Any) -> Tensor:
    return Tensor("F32", np.shape(values), np.asarray(values, "<f4").tobytes())


def mxfp8(values: np.ndarray) -> tuple[Tensor, Tensor]:
    """Codes and E8M0 scales (floor exponent, nearest code) of a matrix."""
    rows, columns = values.shape
    blocks = values.reshape(rows, columns // 32, 32)
    amax = np.abs(blocks).max(-1, keepdims=True)
    exponent = np.where(amax > 0, np.floor(np.log2(np.where(amax > 0, amax, 1))) - 8, -127)
    scaled = np.minimum(np.abs(blocks) * 2.0**-exponent, 448)
    middles = (E4M3[:126] + E4M3[1:127]) / 2
    codes = np.searchsorted(middles, scaled) | np.where(np.signbit(blocks), 128, 0)
    codes = codes.reshape(rows, columns)
    return tensor("F8_E4M3", codes), tensor("U8", exponent[..., 0] + 127)


def mxfp8_values(codes: Tensor, scale: Tensor) -> np.ndarray:
    """What MXFP8 bytes mean, in float64, from the definition."""
    step = 2.0 ** (scale.bytes_as("u1").astype(np.float64) - 127)
    return E4M3[codes.bytes_as("u1")] * np.repeat(step, 32, axis=1)


def nvfp4_values(packed: Tensor, scale: Tensor, multiplier: float) -> np.ndarray:
    """What NVFP4 bytes mean, in float64, from the definition."""
    byte = packed.bytes_as("u1")
    codes = np.stack([byte & 15, byte >> 4], -1).reshape(len(byte), -1)
    return E2M1[codes] * np.repeat(E4M3[scale.bytes_as("u1")], 16, axis=1) * multiplier


def shard_bytes(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None, edit: Any = None
) -> bytes:
    """A safetensors file; `edit` may change the header before it is written."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    end = 0
    for name, t in tensors.items():
        header[name] = {
            "dtype": t.dtype,
            "shape": list(t.shape),
            "data_offsets": [end, end := end + len(t.data)],
        }
    if edit:
        edit(header)
    text = json.dumps(header, ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(t.data for t in tensors.values())


def read_shard(path: Path) -> dict[str, Tensor]:
    """Tensors of a shard, read without mmq, in file order."""
    raw = path.read_bytes()
    start = 8 + struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8:start])
    header.pop("__metadata__", None)
    found = {}
    for name, spec in header.items():
        begin, end = spec["data_offsets"]
        data = raw[start + begin : start + end]
        found[name] = Tensor(spec["dtype"], tuple(spec["shape"]), data)
    return found


def read_folder(folder: Path) -> dict[str, Tensor]:
    """Tensors of a finished checkpoint, through its index."""
    weight_map = json.loads((folder / INDEX).read_bytes())["weight_map"]
    shards = {name: read_shard(folder / name) for name in sorted(set(weight_map.values()))}
    assert {n for s in shards.values() for n in s} == set(weight_map)
    return {name: shards[shard][name] for name, shard in weight_map.items()}


def snapshot(folder: Path) -> dict[str, tuple[str, int, int]]:
    """SHA-256, mode and mtime of every file below a folder: equal means untouched."""
    return {
        p.relative_to(folder).as_posix(): (sha256(p), p.lstat().st_mode, p.lstat().st_mtime_ns)
        for p in sorted(folder.rglob("*"))
        if p.is_file()
    }


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def hashes(folder: Path, leave_out: Iterable[str] = ("mmq-convert.json",)) -> dict[str, str]:
    """SHA-256 of every file of an output; the report holds timings, so it stays out."""
    files = {p.relative_to(folder).as_posix(): p for p in folder.rglob("*") if p.is_file()}
    return {name: sha256(files[name]) for name in sorted(set(files) - set(leave_out))}


class Size(NamedTuple):
    """Dimensions; all different where they can be, so that a transposed shape is noticed."""

    layers: int = 3
    dense: int = 1
    experts: int = 4
    hidden: int = 128
    inter: int = 64
    dense_inter: int = 96
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    vocab: int = 256
    vision: int = 32


@dataclass
class Source:
    """A checkpoint in memory: shard → tensor name → tensor, and everything beside it."""

    size: Size
    shards: dict[str, dict[str, Tensor]]
    config: dict[str, Any]
    files: dict[str, bytes]
    metadata: dict[str, str] | None = field(default_factory=lambda: {"format": "pt"})
    weight_map: dict[str, str] | None = None
    total_size: int | None = None
    indexed: bool = True
    header_edits: dict[str, Callable[[dict[str, Any]], Any]] = field(default_factory=dict)
    after: list[Callable[[Path], Any]] = field(default_factory=list)

    def shard_of(self, name: str) -> str:
        return next(s for s, tensors in self.shards.items() if name in tensors)

    def __getitem__(self, name: str) -> Tensor:
        return self.shards[self.shard_of(name)][name]

    def __setitem__(self, name: str, value: Tensor) -> None:
        self.shards[self.shard_of(name)][name] = value

    def pop(self, name: str) -> Tensor:
        return self.shards[self.shard_of(name)].pop(name)

    def all(self) -> dict[str, Tensor]:
        return {n: t for tensors in self.shards.values() for n, t in tensors.items()}

    def set_values(self, module: str, values: np.ndarray) -> None:
        """Give an MXFP8 module other values."""
        self[f"{module}.weight"], self[f"{module}.weight_scale_inv"] = mxfp8(values)

    def values(self, module: str) -> np.ndarray:
        return mxfp8_values(self[f"{module}.weight"], self[f"{module}.weight_scale_inv"])

    def copy(self) -> Source:
        shards = {s: dict(tensors) for s, tensors in self.shards.items()}
        return replace(
            self, shards=shards, config=copy.deepcopy(self.config), files=dict(self.files),
            header_edits=dict(self.header_edits), after=list(self.after),
        )  # fmt: skip

    def write(self, folder: Path) -> Path:
        """Put it on disk; returns the folder."""
        folder.mkdir(parents=True, exist_ok=True)
        for shard, tensors in self.shards.items():
            (folder / shard).parent.mkdir(parents=True, exist_ok=True)
            edit = self.header_edits.get(shard)
            (folder / shard).write_bytes(shard_bytes(tensors, self.metadata, edit))
        for name, data in self.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
        if self.config:
            _write_json(folder / "config.json", self.config)
        if self.indexed:
            stored = {n: s for s, tensors in self.shards.items() for n in tensors}
            total = sum(len(t.data) for t in self.all().values())
            index = {
                "metadata": {"total_size": total if self.total_size is None else self.total_size},
                "weight_map": dict(sorted((self.weight_map or stored).items())),
            }
            _write_json(folder / INDEX, index)
        for action in self.after:
            action(folder)
        return folder


def _write_json(path: Path, value: Any) -> None:
    path.write_bytes((json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


def layer(number: int) -> str:
    return f"{TEXT}layers.{number}."


def expert(number: int, expert: int, projection: str) -> str:
    """Module name of one projection of a routed expert."""
    return f"{layer(number)}block_sparse_moe.experts.{expert}.{projection}"


@functools.cache
def _values(rows: int, columns: int) -> np.ndarray:
    rng = np.random.default_rng(rows * 100_003 + columns)
    return rng.standard_normal((rows, columns)) * 0.02


@functools.cache
def _codes(rows: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    codes, scale = mxfp8(_values(rows, columns))
    return codes.bytes_as("u1"), scale.bytes_as("u1")


def linear(name: str, rows: int, columns: int) -> dict[str, Tensor]:
    """An MXFP8 module whose values depend on its name: rows of one matrix, rotated and scaled."""
    seed = zlib.crc32(name.encode())
    codes, scale = (np.roll(a, seed % rows, axis=0) for a in _codes(rows, columns))
    return {
        f"{name}.weight": tensor("F8_E4M3", codes),
        f"{name}.weight_scale_inv": tensor("U8", scale + seed % 3),
    }


def plain(name: str, *shape: int, make: Callable[[Any], Tensor] = bf16) -> dict[str, Tensor]:
    """A float tensor whose values depend on its name."""
    count = int(np.prod(shape))
    values = np.roll(_values(1, count), zlib.crc32(name.encode()) % count)
    return {name: make(values.reshape(shape))}


def moe_layer(prefix: str, size: Size) -> dict[str, Tensor]:
    """Router, shared expert, indexer and routed experts of one sparse layer."""
    tensors: dict[str, Tensor] = {}
    attention, moe = f"{prefix}self_attn.", f"{prefix}block_sparse_moe."
    for name, rows in (("index_q", size.kv_heads * size.head_dim), ("index_k", size.head_dim)):
        tensors |= linear(f"{attention}{name}_proj", rows, size.hidden)
        tensors |= plain(f"{attention}{name}_norm.weight", size.head_dim)
    tensors |= plain(f"{moe}gate.weight", size.experts, size.hidden, make=f32)
    tensors |= plain(f"{moe}e_score_correction_bias", size.experts, make=f32)
    tensors |= _mlp(f"{moe}shared_experts.", size.hidden, size.inter)
    for number in range(size.experts):
        for projection in ("w1", "w2", "w3"):
            down = projection == "w2"
            shape = (size.hidden, size.inter) if down else (size.inter, size.hidden)
            tensors |= linear(f"{moe}experts.{number}.{projection}", *shape)
    return tensors


def _mlp(prefix: str, hidden: int, inter: int) -> dict[str, Tensor]:
    return (
        linear(f"{prefix}gate_proj", inter, hidden)
        | linear(f"{prefix}up_proj", inter, hidden)
        | linear(f"{prefix}down_proj", hidden, inter)
    )


def decoder_layer(prefix: str, size: Size, *, sparse: bool) -> dict[str, Tensor]:
    """All tensors of one decoder layer."""
    tensors: dict[str, Tensor] = {}
    for norm in ("input_layernorm", "post_attention_layernorm"):
        tensors |= plain(f"{prefix}{norm}.weight", size.hidden)
    kv = size.kv_heads * size.head_dim
    for name, rows in (("q", size.heads * size.head_dim), ("k", kv), ("v", kv)):
        tensors |= linear(f"{prefix}self_attn.{name}_proj", rows, size.hidden)
    tensors |= linear(f"{prefix}self_attn.o_proj", size.hidden, size.heads * size.head_dim)
    for norm in ("q_norm", "k_norm"):
        tensors |= plain(f"{prefix}self_attn.{norm}.weight", size.head_dim)
    if sparse:
        return tensors | moe_layer(prefix, size)
    return tensors | _mlp(f"{prefix}mlp.", size.hidden, size.dense_inter)


def vision(size: Size) -> dict[str, Tensor]:
    """Tower, projector and patch merger, with the 5-D F32 patch embedding."""
    tower, v, h = "vision_tower.vision_model.", size.vision, size.hidden
    tensors = plain(f"{tower}embeddings.patch_embedding.weight", v, 3, 2, 7, 7, make=f32)
    for part in ("weight", "bias"):
        tensors |= plain(f"{tower}pre_layrnorm.{part}", v)  # spelt as in the release
    block = f"{tower}encoder.layers.0."
    for name in ("layer_norm1", "layer_norm2"):
        tensors |= plain(f"{block}{name}.weight", v) | plain(f"{block}{name}.bias", v)
    shapes = {f"self_attn.{p}_proj": (v, v) for p in ("q", "k", "v", "out")}
    shapes |= {"mlp.fc1": (48, v), "mlp.fc2": (v, 48)}
    linears = {block + name: shape for name, shape in shapes.items()}
    for name in ("multi_modal_projector", "patch_merge_mlp"):
        inputs = v if name.startswith("multi") else 4 * h
        linears |= {f"{name}.linear_1": (h, inputs), f"{name}.linear_2": (h, h)}
    for name, shape in linears.items():
        tensors |= plain(f"{name}.weight", *shape) | plain(f"{name}.bias", shape[0])
    return tensors

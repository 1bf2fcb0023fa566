"""What a loader does with a checkpoint, reduced to names, dtypes and shapes.

An engine builds parameters from config.json, then maps every stored name to a part of one. Each
`*_rules.py` restates both halves for one engine as data and small functions:

    parameters(files)       {Slot: Wanted}  what the engine allocates and hopes to find
    place(name, names)      the Slot a stored tensor is copied into, or None when it is dropped

`load` plays the loader: which slots were filled, which were not, what was dropped or fits badly.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from mmq.convert.checkpoint import open_checkpoint

Shape = tuple[int, ...]


class LoaderError(Exception):
    """The engine refuses the checkpoint, loudly."""


class Tensor(NamedTuple):
    """A stored tensor's safetensors dtype tag and shape."""

    dtype: str
    shape: Shape


@dataclass(frozen=True)
class Files:
    """A checkpoint folder as loaders see it before they read data."""

    config: dict[str, Any]
    hf_quant: dict[str, Any] | None
    tensors: dict[str, Tensor]

    @property
    def quantization(self) -> dict[str, Any]:
        return self.config.get("quantization_config") or {}


def read_files(folder: Path) -> Files:
    """Headers and configs of a folder."""
    hf_quant = folder / "hf_quant_config.json"
    return Files(
        json.loads((folder / "config.json").read_bytes()),
        json.loads(hf_quant.read_bytes()) if hf_quant.is_file() else None,
        {t.name: Tensor(t.dtype, t.shape) for t in open_checkpoint(folder).tensors.values()},
    )


class Slot(NamedTuple):
    """A parameter, or the part of a fused one that a single stored tensor fills."""

    parameter: str
    part: str = ""


class Wanted(NamedTuple):
    """What fits a slot.

    Attributes:
        dtypes: stored dtypes whose values arrive: the parameter's own, or one the copy converts.
        shapes: accepted shapes; scalars come as [] or [1].
        optional: the engine puts a default in its place without a word.
    """

    dtypes: tuple[str, ...]
    shapes: tuple[Shape, ...]
    optional: bool = False


SCALAR: tuple[Shape, ...] = ((), (1,))
Parameters = dict[Slot, Wanted]


def bf16(*shape: int) -> Wanted:
    """A BF16 parameter."""
    return Wanted(("BF16",), (shape,))


def mxfp8(shape: Shape, scale: str) -> dict[str, Wanted]:
    """An MXFP8 weight's parameters: codes, and uint8 exponents.

    The exponents arrive by copy_, which converts an F8_E8M0 tensor by value: only U8 fits.
    """
    rows, columns = shape
    return {
        "weight": Wanted(("F8_E4M3",), (shape,)),
        scale: Wanted(("U8",), ((rows, columns // 32),)),
    }


def nvfp4(shape: Shape, codes: str, *scalars: str) -> dict[str, Wanted]:
    """An NVFP4 weight's parameters: packed codes, block scales, and F32 scalars."""
    rows, columns = shape
    return {
        codes: Wanted(("U8",), ((rows, columns // 2),)),
        "weight_scale": Wanted(("F8_E4M3",), ((rows, columns // 16),)),
        **{scalar: Wanted(("F32",), SCALAR) for scalar in scalars},
    }


@dataclass
class Load:
    """The result of playing a loader."""

    filled: dict[Slot, str] = field(default_factory=dict)
    unused: list[str] = field(default_factory=list)
    missing: list[Slot] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    overwritten: list[str] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        """Everything wanted is there and fits, nothing was written twice."""
        return bool(self.filled) and not (self.missing or self.wrong or self.overwritten)


def load(
    files: Files,
    parameters: Callable[[Files], Parameters],
    place: Callable[[str, frozenset[str]], Slot | None],
) -> Load:
    """Play the loader over all tensors, in the file's order."""
    wanted = parameters(files)
    names = frozenset(slot.parameter for slot in wanted)
    result = Load()
    for name, tensor in files.tensors.items():
        slot = place(name, names)
        if slot is None or slot not in wanted:
            result.unused.append(name)
            continue
        if slot in result.filled:
            result.overwritten.append(f"{name} over {result.filled[slot]}")
        result.filled[slot] = name
        fits = wanted[slot]
        if tensor.dtype not in fits.dtypes or tensor.shape not in fits.shapes:
            result.wrong.append(f"{name}: {tensor} into {slot}, which wants {fits}")
    result.missing = [
        s for s, fits in wanted.items() if s not in result.filled and not fits.optional
    ]
    return result


@dataclass(frozen=True)
class Dims:
    """The dimensions loaders read from config.json.

    Attributes:
        moe / sparse: per layer, whether its MLP is a mixture of experts, its attention sparse.
    """

    hidden: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int
    index_heads: int
    index_dim: int
    inter: int
    dense_inter: int
    experts: int
    moe: tuple[bool, ...]
    sparse: tuple[bool, ...]

    @classmethod
    def read(cls, config: Mapping[str, Any], *, default_moe: Any, default_sparse: Any) -> Dims:
        """Dims of a config.json; the defaults are what the engine assumes where keys are absent."""
        text = config["text_config"]
        layers = text["num_hidden_layers"]
        sparse = text.get("sparse_attention_config") or {}
        return cls(
            hidden=text["hidden_size"],
            vocab=text["vocab_size"],
            heads=text["num_attention_heads"],
            kv_heads=text["num_key_value_heads"],
            head_dim=text["head_dim"],
            index_heads=sparse.get("sparse_num_index_heads", 4),
            index_dim=sparse.get("sparse_index_dim", 128),
            inter=text["intermediate_size"],
            dense_inter=text["dense_intermediate_size"],
            experts=text["num_local_experts"],
            moe=_flags(text.get("moe_layer_freq"), default_moe, layers),
            sparse=_flags(sparse.get("sparse_attention_freq"), default_sparse, layers),
        )

    def attention(self, layer: int) -> dict[str, Shape]:
        """[O, K] of a layer's attention projections under their hub names."""
        width, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes = {
            "q_proj": (width, self.hidden),
            "k_proj": (keys, self.hidden),
            "v_proj": (keys, self.hidden),
        }
        if self.sparse[layer]:
            shapes["index_q_proj"] = (self.index_heads * self.index_dim, self.hidden)
            shapes["index_k_proj"] = (self.index_dim, self.hidden)
        return shapes

    @property
    def expert(self) -> dict[str, Shape]:
        """[O, K] of one expert's projections under their hub names."""
        up = (self.inter, self.hidden)
        return {"w1": up, "w3": up, "w2": (self.hidden, self.inter)}

    def head_norms(self, layer: int) -> dict[str, int]:
        """Widths of a layer's per-head norms under their hub names."""
        widths = {"q_norm": self.head_dim, "k_norm": self.head_dim}
        if self.sparse[layer]:
            widths |= {"index_q_norm": self.index_dim, "index_k_norm": self.index_dim}
        return widths


def _flags(stored: Any, default: Any, layers: int) -> tuple[bool, ...]:
    values = default if stored is None else stored
    return tuple(bool(v) for v in values[:layers])


def vision_shapes(config: Mapping[str, Any]) -> Iterator[tuple[str, Shape]]:
    """Hub name and shape of every vision and projector tensor that a config.json describes."""
    vision = config["vision_config"]
    width, inter, patch = vision["hidden_size"], vision["intermediate_size"], vision["patch_size"]
    hidden, middle = config["text_config"]["hidden_size"], config["projector_hidden_size"]
    tower = "vision_tower.vision_model."
    yield tower + "embeddings.patch_embedding.weight", (width, 3, 2, patch, patch)
    yield from _pair(tower + "pre_layrnorm", (width,))
    for layer in range(vision["num_hidden_layers"]):
        block = f"{tower}encoder.layers.{layer}."
        yield from _pair(block + "layer_norm1", (width,))
        yield from _pair(block + "layer_norm2", (width,))
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            yield from _pair(f"{block}self_attn.{name}", (width, width))
        yield from _pair(block + "mlp.fc1", (inter, width))
        yield from _pair(block + "mlp.fc2", (width, inter))
    yield from _pair("multi_modal_projector.linear_1", (middle, width))
    yield from _pair("multi_modal_projector.linear_2", (hidden, middle))
    yield from _pair("patch_merge_mlp.linear_1", (middle, 4 * hidden))
    yield from _pair("patch_merge_mlp.linear_2", (hidden, middle))


def _pair(module: str, weight: Shape) -> Iterator[tuple[str, Shape]]:
    yield module + ".weight", weight
    yield module + ".bias", weight[:1]


class ListedLayers:
    """quantized_layers of a ModelOpt config, looked up as vLLM and SGLang both do it.

    Args:
        layers: module → {"quant_algo": …}, under the names the engine has after its own renaming.
        packed: fused module → the parts it is made of.
        candidates: names under which a module's prefix may be listed.
    """

    def __init__(
        self,
        layers: Mapping[str, Mapping[str, Any]],
        packed: Mapping[str, tuple[str, ...]],
        candidates: Callable[[str], Iterable[str]],
    ) -> None:
        self.layers = {name: str(info["quant_algo"]).upper() for name, info in layers.items()}
        self._packed = packed
        self._candidates = candidates
        self._below: dict[str, str] = {}
        for name, algo in self.layers.items():
            parent = name
            while "." in parent:
                parent = parent.rpartition(".")[0]
                self._below.setdefault(parent, algo)

    def resolve(self, prefix: str) -> str | None:
        """`_resolve_quant_algo`: itself, else the parts of a fused name, else what is listed
        first below it; None leaves the module unquantised.

        Raises:
            LoaderError: parts of one fused matrix in several formats.
        """
        names = list(self._candidates(prefix))
        for name in names:
            if name in self.layers:
                return self.layers[name]
        base, _, last = prefix.rpartition(".")
        parts = [
            f"{b}.{part}" for b in self._candidates(base) for part in self._packed.get(last, ())
        ]
        listed = {self.layers[part] for part in parts if part in self.layers}
        if len(listed) > 1:
            raise LoaderError(f"Mixed quant_algo within fused layer {prefix}")
        if listed:
            return listed.pop()
        return next((self._below[name] for name in names if name in self._below), None)

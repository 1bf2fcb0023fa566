"""A small, complete MiniMax-M3 in MXFP8, as a folder the Hub could have delivered.

Three shards with an index, hub names, a hub-style config.json, F32 routers, a vision tower, and
the files that stand beside weights. One expert's w1 lies in another shard than its w3, as happens
in the release; the bytes are the same on every machine.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mmq.convert.checkpoint import CONFIG_NAME, INDEX_NAME
from mmq.convert.safetensors_header import header_bytes
from mmq.convert.writer import write_file
from mmq.demo.hub_config import ModelSize, hub_config
from mmq.demo.small_weights import DemoTensor, small_tensors

SHARDS = 3
#: Stored in the last shard although the rest of its expert is in an earlier one.
STRAYED_MODULE = "language_model.model.layers.1.block_sparse_moe.experts.0.w1"


def build_small_model(folder: Path, size: ModelSize | None = None) -> Path:
    """Write the model into `folder`, replacing files of the same names; returns `folder`.

    Args:
        size: other dimensions; shapes must stay multiples of 32.
    """
    size = size or ModelSize()
    folder.mkdir(parents=True, exist_ok=True)
    weight_map: dict[str, str] = {}
    total = 0
    for index, tensors in enumerate(_shards(list(small_tensors(size))), 1):
        name = f"model-{index:05d}-of-{SHARDS:05d}.safetensors"
        specs = [(t.name, t.dtype, t.shape, len(t.data)) for t in tensors]
        header = header_bytes(specs, {"format": "pt"})
        write_file(folder / name, header + b"".join(t.data for t in tensors))
        weight_map.update(dict.fromkeys((t.name for t in tensors), name))
        total += sum(len(t.data) for t in tensors)
    index_json = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    for name, value in (*_side_jsons(size), (CONFIG_NAME, hub_config(size))):
        write_file(folder / name, _json(value))
    for name, text in _SIDE_TEXTS.items():
        write_file(folder / name, text.encode("utf-8"))
    write_file(folder / INDEX_NAME, _json(index_json))
    return folder


def _shards(tensors: list[DemoTensor]) -> list[list[DemoTensor]]:
    """Three runs of about equal size, and one module that strayed."""
    strayed = [t for t in tensors if t.name.startswith(STRAYED_MODULE + ".")]
    shards: list[list[DemoTensor]] = [[] for _ in range(SHARDS)]
    total = sum(len(t.data) for t in tensors)
    done = 0
    for tensor in tensors:
        if tensor not in strayed:
            shards[min(done * SHARDS // total, SHARDS - 1)].append(tensor)
        done += len(tensor.data)
    shards[-1] += strayed
    return [sorted(shard, key=_widest_first) for shard in shards]


def _widest_first(tensor: DemoTensor) -> int:
    """Aligned without padding: F32 before BF16 before bytes."""
    return {"F32": 0, "BF16": 1}.get(tensor.dtype, 2)


def _json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode("utf-8")


def _side_jsons(size: ModelSize) -> Iterator[tuple[str, dict[str, Any]]]:
    yield "generation_config.json", {
        "bos_token_id": 0, "eos_token_id": 1, "do_sample": True, "temperature": 1.0,
        "top_p": 0.95, "top_k": 40,
    }  # fmt: skip
    yield "tokenizer.json", _byte_tokenizer()
    yield "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>", "eos_token": "<eos>",
        "add_bos_token": False, "model_max_length": 4096,
    }  # fmt: skip
    yield "preprocessor_config.json", {
        "image_processor_type": "MiniMaxM3VLImageProcessor", "patch_size": size.patch,
        "merge_size": 2, "temporal_patch_size": 2,
    }  # fmt: skip


def _byte_tokenizer() -> dict[str, Any]:
    """A byte-level tokenizer in Hugging Face's format: two special tokens, then the 256 bytes."""
    special = [
        {"id": i, "content": token, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False, "special": True}
        for i, token in enumerate(("<bos>", "<eos>"))
    ]  # fmt: skip
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
                  "use_regex": False}  # fmt: skip
    vocabulary = {"<bos>": 0, "<eos>": 1}
    for byte, character in enumerate(_byte_characters()):
        vocabulary[character] = 2 + byte
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": special,
        "normalizer": None, "pre_tokenizer": byte_level, "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "dropout": None, "unk_token": None,
                  "continuing_subword_prefix": None, "end_of_word_suffix": None,
                  "fuse_unk": False, "byte_fallback": False, "vocab": vocabulary, "merges": []},
    }  # fmt: skip


def _byte_characters() -> Iterator[str]:
    """GPT-2's printable stand-ins for the 256 bytes, in byte order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    stand_in = 0x100
    for byte in range(256):
        if byte in printable:
            yield chr(byte)
        else:
            yield chr(stand_in)
            stand_in += 1


_SIDE_TEXTS = {
    "chat_template.jinja": (
        "{# 对话模板 · chat template #}"
        "{% for m in messages %}<bos>{{ m.role }}\n{{ m.content }}<eos>\n{% endfor %}"
    ),
    "configuration_minimax_m3_vl.py": (
        '"""Stands for the release\'s remote code; copied as it is."""\n'
    ),
    "LICENSE": "Random numbers made by `mmq demo`; public domain (CC0 1.0).\n",
    "README.md": (
        "---\nlicense: cc0-1.0\n---\n\n# A small MiniMax-M3\n\nRandom weights in the release's"
        " layout, made by `mmq demo`.\n"
    ),
}

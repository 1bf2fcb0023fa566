"""What the interpreting process runs for the QKV kernels: outputs poisoned first, pages returned.

A module of its own, since functions travel by name.
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor

from mmq.kernels.triton import kv_cache, qkv_kernels, qkv_rope
from mmq.kernels.triton.launch import pretended

KERNELS = ("project_rows_kernel", "insert_heads_kernel", "project_and_insert_kernel")


def poisoned(shape, dtype, device):
    """NaN, or bytes 0xEE."""
    return torch.full(shape, 0xEE if dtype == torch.uint8 else torch.nan, dtype=dtype)


@contextmanager
def broken(changes: list[tuple[str, str]]) -> Iterator[None]:
    """The kernels with changes to their text, each of which has to apply once."""
    text = Path(qkv_kernels.__file__).read_text("utf-8")
    for old, new in changes:
        if text.count(old) != 1:
            raise ValueError(f"{text.count(old)} times: {old}")
        text = text.replace(old, new)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "qkv_broken.py"
        path.write_text(text, "utf-8")
        spec = importlib.util.spec_from_file_location("mmq.kernels.triton.qkv_broken", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        with ExitStack() as patches:
            for name in KERNELS:
                patches.enter_context(patch.object(qkv_rope, name, getattr(module, name)))
            yield


@contextmanager
def settings(
    *, target="sm_90", insert_tokens=16, wide_tokens=64, changes=(), said=None
) -> Iterator[None]:
    """A target to pretend, tokens of a program, changes to the kernels, and a target's name."""
    insert = qkv_rope.INSERT._replace(tokens=insert_tokens)
    wide = qkv_rope.WIDE._replace(tokens=wide_tokens)
    with (
        pretended(target),
        patch.object(qkv_rope, "_empty", poisoned),
        patch.object(qkv_rope, "target_name", lambda: said or target),
        patch.object(qkv_rope, "INSERT", insert),
        patch.object(qkv_rope, "WIDE", wide),
        broken(list(changes)),
    ):
        yield


def heads(how, row_TZ, layout, norms, tables):
    """`how`: keywords of `settings`, here and below."""
    with settings(**how):
        return qkv_rope.project_heads(row_TZ, layout, norms, tables)


def rows(how, x, w, layout) -> Tensor:
    with settings(**how):
        return qkv_rope.project_rows(x, w, layout)


def inserted(how, row_TZ, layout, norms, tables, destination):
    """Queries, and the bytes of both caches."""
    destination = own(destination)
    with settings(**how):
        queries = qkv_rope.insert_heads(row_TZ, layout, norms, tables, destination)
    return *queries, *pages(destination)


def fused(how, x, w, layout, norms, tables, destination):
    """The same from one kernel."""
    destination = own(destination)
    with settings(**how):
        queries = qkv_rope.project_and_insert(x, w, layout, norms, tables, destination)
    return *queries, *pages(destination)


def unfused(how, x, w, layout, norms, tables, destination):
    """The same from two: the GEMM, then norm, RoPE and write."""
    return inserted(how, rows(how, x, w, layout), layout, norms, tables, destination)


def in_steps(how, x, w, layout, norms, tables, destination):
    """The same pages from four: GEMM, norm and RoPE into F32 heads, a write for each cache."""
    destination = own(destination)
    projected = heads(how, rows(how, x, w, layout), layout, norms, tables)
    slots_T = destination.slots_T
    kv_cache.write_pages(destination.cache, slots_T, projected.k_TGD, projected.v_TGD)
    keys_T1E = projected.index_k_TE[:, None].contiguous()
    kv_cache.write_pages(destination.index_cache, slots_T, keys_T1E, None)
    return pages(destination)


def own(destination):
    """The destination with pages of its own, since what arrives may be read-only."""
    cache, index_cache = destination.cache, destination.index_cache
    copies = [c and replace(c, pages_PZ=c.pages_PZ.clone()) for c in (cache, index_cache)]
    return replace(destination, cache=copies[0], index_cache=copies[1])


def pages(destination) -> tuple[Tensor, Tensor | None]:
    index_cache = destination.index_cache
    return destination.cache.pages_PZ, index_cache and index_cache.pages_PZ

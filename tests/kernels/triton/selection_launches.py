"""What the interpreting process runs: selection kernels, or mutants of them, on NumPy arrays.

A mutant is the module's source with some text replaced, imported from a file of its own.
"""

from __future__ import annotations

import importlib.util
import itertools
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import triton

from mmq.kernels.triton import block_selection, selection_ranks

_number = itertools.count()


def mutate(module, edits):
    """`module` with each (old, new) text replaced, which must be there once; itself if none are."""
    if not edits:
        return module
    source = Path(module.__file__).read_text("utf-8")
    for old, new in edits:
        assert source.count(old) == 1, f"{source.count(old)} times in {module.__name__}: {old}"
        source = source.replace(old, new)
    name = f"{module.__package__}.mutant_{next(_number)}"
    path = Path(tempfile.mkdtemp()) / f"{name}.py"
    path.write_text(source, "utf-8")
    spec = importlib.util.spec_from_file_location(name, path)
    mutant = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mutant)
    return mutant


@contextmanager
def _set(module, **constants):
    former = {name: getattr(module, name) for name in constants}
    for name, value in constants.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in former.items():
            setattr(module, name, value)


def score(case, *, edits=(), columns=64, many=None, **ranks):
    """`score_pages` of a `PagesCase`, into NaN: F32 [G, T, J].

    Args:
        columns: blocks of a program.
        many: tokens of a tile where sequences have many.
    """
    module = mutate(block_selection, edits)
    q_TGE, cache, batch, lengths_Q = case.tensors()
    rank, total = ranks.get("rank", 0), ranks.get("ranks", 1)
    width = module.owned_blocks(case.page_table_QN.shape[1], rank, total)
    out_GTJ = torch.full((q_TGE.shape[1], q_TGE.shape[0], width), torch.nan)
    tokens = dict.fromkeys(module.MANY_TOKENS, many) if many else module.MANY_TOKENS
    with _set(module, COLUMNS=columns, MANY_TOKENS=tokens):
        module.score_pages(q_TGE, cache, batch, lengths_Q, out_GTJ=out_GTJ, **ranks)
    return out_GTJ.numpy()


def _rows(tokens):
    """One program for all tokens: the interpreter spends its time on programs and operations."""
    return triton.next_power_of_2(max(1, tokens))


def select(scores_GTN, positions_T, *, edits=(), chunk=1024, **rules):
    """`select_blocks` into −7: I32 [G, T, C]."""
    module = mutate(block_selection, edits)
    scores_GTN = torch.from_numpy(scores_GTN)
    out_GTC = torch.full((*scores_GTN.shape[:2], rules.get("top_k", 16)), -7, dtype=torch.int32)
    with _set(module, CHUNK=chunk, ROWS=_rows(len(positions_T))):
        module.select_blocks(scores_GTN, torch.from_numpy(positions_T), out_GTC=out_GTC, **rules)
    return out_GTC.numpy()


def candidates(scores_GTN, positions_T, rank, ranks, *, edits=(), chunk=1024, **rules):
    """`candidate_keys` of every `ranks`-th column, the others poisoned: I64 [G, T, C]."""
    with _edited_keys(edits):
        poisoned_GTN = torch.full(scores_GTN.shape, torch.inf)
        poisoned_GTN[..., rank::ranks] = torch.from_numpy(scores_GTN[..., rank::ranks])
        own_GTJ = poisoned_GTN[..., rank::ranks]
        shape = *scores_GTN.shape[:2], rules.get("top_k", 16)
        out_GTC = torch.full(shape, -7, dtype=torch.int64)
        rows = {"ROWS": _rows(len(positions_T))}
        with _set(block_selection, CHUNK=chunk, **rows), _set(selection_ranks, **rows):
            selection_ranks.candidate_keys(
                own_GTJ, torch.from_numpy(positions_T),
                rank=rank, ranks=ranks, out_GTC=out_GTC, **rules,
            )  # fmt: skip
    return out_GTC.numpy()


@contextmanager
def _edited_keys(edits):
    """With `best_keys` of a mutant of `block_selection`."""
    with _set(selection_ranks, best_keys=mutate(block_selection, edits).best_keys):
        yield


def merge(keys_PGTC, *, edits=()):
    """`merge_candidates` into −7: I32 [G, T, C]."""
    module = mutate(selection_ranks, edits)
    out_GTC = torch.full(keys_PGTC.shape[1:], -7, dtype=torch.int32)
    with _set(module, ROWS=_rows(keys_PGTC[0, :, :, 0].size)):
        module.merge_candidates(torch.from_numpy(np.ascontiguousarray(keys_PGTC)), out_GTC=out_GTC)
    return out_GTC.numpy()

"""KV-cache bytes against real pages, and what fits beside the weights against plain arithmetic."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from in_process import run_mmq

from mmq.convert import kv_budget
from mmq.convert.checkpoint import open_checkpoint
from mmq.convert.kv_budget import Placement, budget, gpu_table, per_million, token_bytes
from mmq.convert.sizes import kv_bytes
from mmq.demo.bundled import bundled_model
from mmq.errors import UsageError
from mmq.kernels.kv_pages import PagedCache, PageLayout
from mmq.kernels.reference import kv_cache

RELEASE = "minimax-m3-mxfp8-mtp"
LAYERS, SPARSE = 60, 57


@pytest.fixture(scope="module")
def release():
    return open_checkpoint(RELEASE)


@pytest.fixture(scope="module")
def kv(release):
    return kv_bytes(release.text_config)


def written_bytes(format, heads=4, sides=2, order="linear"):
    """Bytes that a block's tokens change in a page, counted by writing them twice."""
    layout = PageLayout(format, heads=heads, sides=sides, v_scale_order=order)
    changed = torch.zeros(layout.page_bytes, dtype=torch.bool)
    x = torch.randn(layout.tokens, heads, layout.dim, generator=torch.Generator().manual_seed(1))
    for fill in (0x00, 0xEE):
        pages = torch.full((1, layout.page_bytes), fill, dtype=torch.uint8)
        slots = torch.arange(layout.tokens)
        v = x.flip(0) if sides == 2 else None
        kv_cache.write_pages(PagedCache(layout, pages, 0.01, 0.01), slots, x, v)
        changed |= pages[0] != fill
    assert changed.all(), "a page has no byte that nothing is written to"
    return int(changed.sum()) / layout.tokens


def test_formats_are_the_bytes_of_real_pages(kv):
    page = {format: written_bytes(format) for format in ("bf16", "fp8", "nvfp4")}
    assert kv.bf16 == LAYERS * page["bf16"] == 122_880
    assert kv.fp8 == LAYERS * page["fp8"] == 61_440
    assert kv.nvfp4 == LAYERS * page["nvfp4"] == 34_560
    assert kv.hybrid == SPARSE * page["nvfp4"] + 3 * page["fp8"] == 35_904
    assert written_bytes("nvfp4", order="quads") == page["nvfp4"]
    assert kv.nvfp4 / kv.fp8 == 0.5625


def test_index_keys_are_the_bytes_of_real_pages(kv):
    index = {f: SPARSE * written_bytes(f, heads=1, sides=1) for f in ("bf16", "fp8", "nvfp4")}
    assert (kv.index_bf16, kv.index_fp8, kv.index_nvfp4) == tuple(index.values())
    assert index == {"bf16": 14_592, "fp8": 7_296, "nvfp4": 4_104}


def test_a_million_tokens(kv):
    found = per_million(kv)
    assert found["nvfp4"] == 34_560 * 1_048_576 == 33.75 * 2**30
    assert found["fp8"] == 60 * 2**30 and found["bf16"] == 120 * 2**30
    assert found["index_bf16"] == 14_592 << 20 and set(found) == {
        "bf16", "fp8", "nvfp4", "hybrid", "index_bf16", "index_fp8", "index_nvfp4",
    }  # fmt: skip


@pytest.mark.parametrize("tp", [1, 2, 3, 4, 8, 16])
@pytest.mark.parametrize("format", ["bf16", "fp8", "nvfp4"])
def test_tokens_on_one_gpu_are_pages_of_its_heads(kv, format, tp):
    """Heads replicate beyond TP 4, and index keys are whole everywhere."""
    heads = {1: 4, 2: 2, 3: 2, 4: 1, 8: 1, 16: 1}[tp]
    expected = LAYERS * written_bytes(format, heads=heads)
    expected += SPARSE * written_bytes(format, heads=1, sides=1)
    assert token_bytes(kv, format, format, tp) == expected


def by_hand(release, tp):
    """Weights of one GPU, module by module, from the names."""
    total = 0
    for name, tensor in release.tensors.items():
        if ".mtp." in name:
            continue
        if (
            not name.startswith("language_model.")
            or "norm" in name
            or name.endswith(("block_sparse_moe.gate.weight", "e_score_correction_bias"))
            or "index_k_proj" in name
        ):
            total += tensor.nbytes
        elif any(p in name for p in ("self_attn.k_proj", "self_attn.v_proj", "index_q_proj")):
            total += tensor.nbytes / min(tp, 4)
        else:
            total += tensor.nbytes / tp
    return total


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_weights_of_one_gpu(release, tp):
    got = kv_budget.weights_per_gpu(release.tensors.values(), 4, tp)
    expected = by_hand(release, tp)
    assert expected <= got < expected + len(release.tensors)
    if tp == 1:
        mtp = sum(t.nbytes for n, t in release.tensors.items() if ".mtp." in n)
        assert got == release.nbytes - mtp


def test_four_b200(release, kv):
    data = budget(release.tensors.values(), release.text_config, Placement("B200", 4, 4))
    weights = data["weight_bytes"]
    room = 180 * 10**9 * 0.9 - weights
    assert data["room_bytes"] == room > 0 and data["kv_heads"] == 1
    rows = {(r["kv"], r["index_k"]): r for r in data["rows"]}
    assert len(rows) == 12
    for (format, index), row in rows.items():
        each = getattr(kv, format) / 4 + getattr(kv, f"index_{index}")
        assert row["bytes_per_token"] == each
        assert row["tokens"] % 128 == 0
        assert row["tokens"] * each <= room < (row["tokens"] + 128) * each
    assert rows["nvfp4", "nvfp4"]["tokens"] > rows["hybrid", "nvfp4"]["tokens"]


def test_copies_multiply_and_replicated_heads_do_not_help(release):
    def tokens(count, tp):
        data = budget(release.tensors.values(), release.text_config, Placement("288gb", count, tp))
        return {(r["kv"], r["index_k"]): r for r in data["rows"]}

    four, eight, twice = tokens(4, 4), tokens(8, 8), tokens(8, 4)
    for key in four:
        assert twice[key]["tokens"] == 2 * four[key]["tokens"]
        assert eight[key]["bytes_per_token"] == four[key]["bytes_per_token"]
        # half the weights a GPU, but every GPU holds every token of its copy
        assert four[key]["tokens"] < eight[key]["tokens"] < twice[key]["tokens"]


def test_too_little_room(release):
    data = budget(release.tensors.values(), release.text_config, Placement("H100", 4, 4))
    assert data["room_bytes"] < 0 and {r["tokens"] for r in data["rows"]} == {0}


def test_the_table_has_sources():
    table = gpu_table()
    assert table["reserve"]["source"] and 0 < table["reserve"]["share"] < 0.5
    assert {"B200", "B300", "H200", "MI355X"} <= set(table["gpus"])
    for name, gpu in table["gpus"].items():
        assert name == name.upper() and 16 < gpu["gb"] < 1000 and len(gpu["source"]) > 20


def whole_index_divided(patch):
    right = kv_budget.token_bytes

    def divided(kv, format, index, tp):
        value = right(kv, format, index, tp)
        return value - (getattr(kv, f"index_{index}") * 3 // 4 if tp == 4 else 0)

    patch.setattr(kv_budget, "token_bytes", divided)


def heads_never_replicated(patch):
    patch.setattr(kv_budget, "heads_per_gpu", lambda heads, tp: heads / tp)


def no_reserve(patch):
    table = {**gpu_table(), "reserve": {"share": 0.0}}
    patch.setattr(kv_budget, "gpu_table", lambda: table)


def binary_gigabytes(patch):
    patch.setattr(Placement, "memory", property(lambda self: 180 * 2**30))


def partial_blocks(patch):
    patch.setattr(kv_budget, "_block", lambda config: 1)


@pytest.mark.parametrize(
    "mistake",
    [whole_index_divided, heads_never_replicated, no_reserve, binary_gigabytes, partial_blocks],
)
def test_a_mistake_is_seen(release, kv, monkeypatch, mistake):
    mistake(monkeypatch)

    def all_checks():
        test_four_b200(release, kv)
        for tp in (4, 8):
            heads = kv_budget.heads_per_gpu(4, tp)
            assert heads == 1
            kept = token_bytes(kv, "fp8", "fp8", tp)
            assert kept == LAYERS * 256 + SPARSE * 128

    with pytest.raises(AssertionError):
        all_checks()


def result_of(*words):
    code, events, _ = run_mmq("inspect", *words)
    return code, events[-1]


def test_inspect_prints_and_writes_it(capsys):
    from mmq.cli import main

    words = ["inspect", str(bundled_model()), "--gpu", "b200", "--count", "8", "--tp", "4"]
    code, data = result_of(*words[1:])
    assert code == 0
    stored, converted = data["kv_budget"]["stored"], data["kv_budget"]["converted"]
    assert stored["copies"] == 2 and converted["weight_bytes"] < stored["weight_bytes"]
    assert data["kv_bytes_per_million_tokens"]["nvfp4"] == 288 << 20
    assert main(words) == 0
    text = capsys.readouterr().out
    assert "weights as converted on 8 × b200, TP 4, 2 copies" in text
    assert f"{converted['rows'][-1]['tokens']:,}" in text
    assert "1,048,576 tokens: BF16 1.00 GiB" in text
    assert result_of(bundled_model())[1]["kv_budget"] is None


@pytest.mark.parametrize("words", [
    ("--gpu", "no such"), ("--gpu", "GB"), ("--gpu", "-1GB"), ("--count", "4"),
    ("--gpu", "B200", "--count", "6", "--tp", "4"),
])  # fmt: skip
def test_words_that_make_no_sense(words):
    code, events, _ = run_mmq("inspect", bundled_model(), *words)
    assert code == 2, events


def test_size_as_a_gpu():
    assert Placement("96GB", 1, 1).memory == 96 * 10**9
    with pytest.raises(UsageError):
        _ = dataclasses.replace(Placement("B200", 1, 1), gpu="B2000").memory


def test_the_table_is_part_of_the_package():
    from importlib.resources import files

    assert json.loads(files("mmq.convert").joinpath("data", "gpus.json").read_text("utf-8"))

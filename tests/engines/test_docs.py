"""The pages' worked example and figures, against the files and the plan."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from loading import Files, read_files

from mmq.convert.checkpoint import open_checkpoint
from mmq.convert.options import ConvertOptions
from mmq.convert.plan import build_plan
from mmq.convert.sizes import kv_bytes, size_rows

DOCS = Path(__file__).parents[2] / "docs"
EXPERT = "language_model.model.layers.1.block_sparse_moe.experts.0.w1."


def _page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def _hex(folder: Path, tensor: str, count: int) -> str:
    info = open_checkpoint(folder).tensors[EXPERT + tensor]
    with (folder / info.shard).open("rb") as file:
        file.seek(info.offset)
        return file.read(min(count, info.nbytes)).hex(" ")


@pytest.mark.parametrize(("tensor", "count"), [("weight", 16), ("weight_scale_inv", 1)])
def test_source_bytes_of_the_example(small_source: Path, tensor: str, count: int) -> None:
    line = rf"\.{tensor}\s+{_hex(small_source, tensor, count)} "
    assert re.search(line, _page("layouts.md"))


@pytest.mark.parametrize(
    ("layout", "tensor", "count"),
    [
        ("modelopt", "weight", 8),
        ("modelopt", "weight_scale", 4),
        ("modelopt", "weight_scale_2", 4),
        ("modelopt", "input_scale", 4),
        ("minimax", "weight_packed", 8),
        ("minimax", "weight_scale", 4),
        ("minimax", "weight_global_scale", 4),
        ("minimax", "input_global_scale", 4),
    ],
)
def test_output_bytes_of_the_example(
    small_folders: dict[str, Path], layout: str, tensor: str, count: int
) -> None:
    line = rf"\.{tensor}\s+{_hex(small_folders[layout], tensor, count)} "
    assert re.search(line, _page("layouts.md"))


def test_config_blocks_are_as_written(small_folders: dict[str, Path]) -> None:
    """Every word of the shown blocks is in the written ones, and no key is left out."""
    shown = re.findall(r"```json\n(.*?)```", _page("layouts.md"), re.DOTALL)
    assert len(shown) == 2
    for text, layout in zip(shown, ("modelopt", "minimax"), strict=True):
        block = read_files(small_folders[layout]).quantization
        words = set(re.findall(r'"([^"]+)"', text)) - {"quantization_config"}
        written = set(re.findall(r"'([^']+)'", repr(block)))
        assert words <= written, words - written
        assert block.keys() <= words
        if layout == "modelopt":
            assert f"({len(block['quantized_layers'])} here" in _page("layouts.md")


def test_sizes_of_the_release() -> None:
    source = open_checkpoint("minimax-m3-mxfp8")
    plan = build_plan(source, ConvertOptions())
    minimax = build_plan(source, ConvertOptions(layout="minimax"))
    page, layouts = _page("model.md"), _page("layouts.md")
    components: dict[str, int] = {}
    for row in size_rows(source.tensors.values()):
        components[row.component] = components.get(row.component, 0) + row.nbytes
    weights = plan.output_bytes - plan.kv_scale_bytes
    outputs = [o for unit in plan.units for o in unit.outputs]
    experts = sum(o.nbytes for o in outputs if ".experts." in o.name)
    for figure in (*components.values(), source.nbytes, weights, experts, len(source.tensors)):
        assert f"{figure:,}" in page
    assert f"{len(outputs) - 120:,} and 120 KV scales" in page
    assert f"{weights:,}" in layouts
    assert f"{plan.file_bytes:,}" in layouts and f"{minimax.file_bytes:,}" in layouts


def test_kv_bytes_per_token(release_files: dict[str, Files]) -> None:
    kv = kv_bytes(release_files["modelopt"].config["text_config"])
    assert kv is not None
    page = _page("kv-cache.md")
    for figure in (
        kv.bf16,
        kv.fp8,
        kv.nvfp4,
        kv.hybrid,
        kv.index_bf16,
        kv.index_fp8,
        kv.index_nvfp4,
    ):
        assert f"{figure:,}" in page


def test_tensor_count_of_the_engines_page(release_files: dict[str, Files]) -> None:
    assert f"({len(release_files['modelopt'].tensors):,} tensors" in _page("engines.md")


@pytest.mark.parametrize("page", ["engines.md", "layouts.md", "model.md", "kv-cache.md"])
def test_links_lead_somewhere(page: str) -> None:
    for link in re.findall(r"\]\(([^)#:]+)\)", _page(page)):
        assert (DOCS / link).is_file(), link

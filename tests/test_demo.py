"""The demo from end to end, its small model, and what independent readers make of both.

transformers is the oracle: it runs the small model from MXFP8, from mmq's BF16 of it, and from
mmq's BF16 of the NVFP4 outputs. compressed-tensors and safetensors read the files by themselves.
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import preset_name_to_scheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import MiniMaxM3SparseForConditionalGeneration

import mmq.demo.run as demo
from mmq.console import Console
from mmq.convert.checkpoint import open_checkpoint
from mmq.convert.options import ConvertOptions
from mmq.convert.run import RunSettings, convert
from mmq.demo.hub_config import ModelSize, hub_config
from mmq.demo.small_model import STRAYED_MODULE, build_small_model
from mmq.demo.small_weights import encode_mxfp8
from mmq.kernels import ops
from mmq.quantize.global_scale import reciprocal_scale

#: SHA-256 of the three shards one after another; any change of the builder changes it.
GOLDEN = "aea9bd5a12a217cf6731f6aed07921b889fddde6577c3e26718d9767cba54ec5"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def source(root: Path) -> Path:
    return build_small_model(root / "source")


@pytest.fixture(scope="module")
def converted(root: Path, source: Path) -> dict[str, Path]:
    """bf16 of the source; both NVFP4 layouts; bf16 of each."""
    quiet = Console("quiet")

    def run(origin: Path, name: str, **options: Any) -> Path:
        out = root / name
        convert(str(origin), out, ConvertOptions(**options), RunSettings(jobs=1), quiet)
        return out

    folders = {"bf16": run(source, "bf16", to="bf16")}
    for layout in ("modelopt", "minimax"):
        folders[layout] = run(source, layout, layout=layout, max_shard_bytes=3_000_000)
        folders[f"{layout}-bf16"] = run(folders[layout], f"{layout}-bf16", to="bf16")
    return folders


# The demo itself.


def _demo(folder: Path, mode: str = "human") -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    code = demo.run_demo(Console(mode, stdout=out, stderr=err), folder)
    return code, out.getvalue(), err.getvalue()


def test_demo_passes_and_shows_every_command(tmp_path: Path) -> None:
    code, text, _ = _demo(tmp_path)
    assert code == 0
    commands = [line.split()[2] for line in text.splitlines() if line.startswith("$ mmq ")]
    assert commands == ["inspect", "convert", "convert", "verify"]
    assert "verdict  pass," in text
    assert "logits   PPL" in text
    # 144 projections of 256 × 96: (4.5 bits + two F32) over 8.25 bits is 13,832 of 25,344 B
    assert "0.5458 of what they were" in text


def test_demo_runs_again_to_the_same_bytes(tmp_path: Path) -> None:
    assert _demo(tmp_path)[0] == 0
    first = _hashes(tmp_path / "nvfp4")
    code, text, _ = _demo(tmp_path, "json")
    assert code == 0
    assert _hashes(tmp_path / "nvfp4") == first and len(first) == 3
    events = [json.loads(line) for line in text.splitlines()]
    assert {e["event"] for e in events} >= {"demo", "command", "step"}


def _hashes(folder: Path) -> dict[str, str]:
    shards = sorted(folder.glob("*.safetensors"))
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in shards}


def test_demo_fails_when_the_output_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def convert_badly(source: str, out: Path, *args: Any) -> Any:
        report = convert(source, out, *args)
        tensor = open_checkpoint(out).tensors[f"{STRAYED_MODULE}.weight_scale"]
        data = bytearray((out / tensor.shard).read_bytes())
        data[tensor.offset] ^= 0x08  # one block twice as large
        (out / tensor.shard).write_bytes(data)
        return report

    monkeypatch.setattr(demo, "convert", convert_badly)
    code, text, _ = _demo(tmp_path)
    assert code == 3
    assert "verdict  fail," in text and f"{STRAYED_MODULE}.weight" in text


# Its small model.


def test_small_model_is_the_same_on_every_machine(source: Path) -> None:
    digest = hashlib.sha256()
    for path in sorted(source.glob("*.safetensors")):
        digest.update(path.read_bytes())
    assert digest.hexdigest() == GOLDEN


def test_w1_and_w3_of_an_expert_are_in_different_shards(source: Path) -> None:
    tensors = open_checkpoint(source).tensors
    stem = STRAYED_MODULE.removesuffix("w1")
    assert tensors[stem + "w1.weight"].shard != tensors[stem + "w3.weight"].shard
    assert tensors[stem + "w1.weight"].shard == tensors[stem + "w1.weight_scale_inv"].shard


def test_block_scales_are_uneven(source: Path) -> None:
    checkpoint = open_checkpoint(source)
    for name in ("w1", "w2", "w3"):
        tensor = checkpoint.tensors[f"{STRAYED_MODULE[:-2]}{name}.weight_scale_inv"]
        raw = (source / tensor.shard).read_bytes()[tensor.offset :][: tensor.nbytes]
        exponents = np.frombuffer(raw, np.uint8)
        assert exponents.max() - exponents.min() >= 5


def test_config_states_what_engines_would_otherwise_assume() -> None:
    config = hub_config(ModelSize())
    text, vision = config["text_config"], config["vision_config"]
    sparse, quantization = text["sparse_attention_config"], config["quantization_config"]
    layers = text["num_hidden_layers"]
    assert text["partial_rotary_factor"] * text["head_dim"] == text["rotary_dim"]
    assert sparse["sparse_num_index_heads"] == text["num_key_value_heads"]
    for flags in (
        text["moe_layer_freq"],
        sparse["sparse_attention_freq"],
        sparse["sparse_disable_index_value"],
    ):
        assert len(flags) == layers and 0 < sum(flags) < layers
    assert text["hidden_act"] == "swigluoai"
    assert text["shared_intermediate_size"] == text["intermediate_size"]
    assert vision["hidden_size"] and config["projector_hidden_size"]
    assert quantization["quant_method"] == "mxfp8"
    assert "lm_head" in quantization["ignored_layers"]


def test_numpy_encoder_is_mmqs_quantizer() -> None:
    rng = np.random.default_rng(5)
    values = rng.standard_normal((64, 256)) * np.exp2(rng.integers(-30, 30, (64, 1)))
    values[0], values[1, :4] = 0, (448, 1, -2.5, 0)
    values[1, 4:] = 0
    values[2] = np.linspace(440, 500, 256)  # saturates
    values = values.astype(np.float32)
    codes, scale = encode_mxfp8(values.astype(np.float64))
    expected = ops.quantize_mxfp8(values, "F32")
    nonzero = np.abs(values).reshape(64, 8, 32).max(axis=2) > 0
    np.testing.assert_array_equal(codes, expected.codes)
    np.testing.assert_array_equal(scale[nonzero], expected.scale[nonzero])


# transformers as the oracle.

TOKENS = torch.from_numpy(np.random.default_rng(11).integers(0, 500, (1, 96)))


def _logits(folder: Path) -> torch.Tensor:
    """FP32 logits; every tensor must find its parameter (MTP aside, there is none here)."""
    model, info = MiniMaxM3SparseForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        return model.eval()(input_ids=TOKENS).logits[0]


@pytest.fixture(scope="module")
def oracle(source: Path) -> torch.Tensor:
    return _logits(source)


def test_transformers_runs_the_mxfp8_source(oracle: torch.Tensor) -> None:
    assert oracle.shape == (96, 512)
    assert torch.isfinite(oracle).all() and oracle.std() > 0.1


def test_bf16_conversion_gives_the_very_same_logits(
    converted: dict[str, Path], oracle: torch.Tensor
) -> None:
    assert torch.equal(_logits(converted["bf16"]), oracle)


#: Relative error of the logits: 0.12 with right NVFP4 experts; 0.40 when w1's global scale is twice
#: too large, 0.46 when block scales are one block off, 0.57 when nibbles are swapped.
ERROR_LIMIT = 0.2


@pytest.mark.parametrize("layout", ["modelopt", "minimax"])
def test_nvfp4_gives_close_but_different_logits(
    converted: dict[str, Path], oracle: torch.Tensor, layout: str
) -> None:
    error = _error(_logits(converted[f"{layout}-bf16"]), oracle)
    assert 0.01 < error < ERROR_LIMIT


def test_swapped_nibbles_would_show_in_the_logits(
    converted: dict[str, Path], oracle: torch.Tensor, tmp_path: Path
) -> None:
    damaged = shutil.copytree(converted["modelopt"], tmp_path / "damaged")
    for tensor in open_checkpoint(damaged).tensors.values():
        if ".experts." in tensor.name and tensor.name.endswith(".weight"):
            shard = np.memmap(damaged / tensor.shard, np.uint8, "r+")
            codes = shard[tensor.offset : tensor.offset + tensor.nbytes]
            codes[:] = codes >> 4 | codes << 4
    out = tmp_path / "bf16"
    convert(str(damaged), out, ConvertOptions(to="bf16"), RunSettings(jobs=1), Console("quiet"))
    assert _error(_logits(out), oracle) > 2 * ERROR_LIMIT


def _error(logits: torch.Tensor, oracle: torch.Tensor) -> float:
    return float((logits - oracle).norm() / oracle.norm())


# compressed-tensors and safetensors as independent readers.

EXPERT_TENSORS = ("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale")
SCHEME = preset_name_to_scheme("NVFP4", ["Linear"])


def _experts(folder: Path) -> Iterator[dict[str, torch.Tensor]]:
    """State of every NVFP4 projection, as safetensors reads it."""
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
    for name in sorted(tensors):
        if name.endswith(".weight_packed"):
            stem = name.removesuffix("weight_packed")
            yield {suffix: tensors[stem + suffix] for suffix in EXPERT_TENSORS} | {"name": name}  # type: ignore[dict-item]


def test_compressed_tensors_reads_every_expert_of_the_minimax_layout(
    converted: dict[str, Path],
) -> None:
    """Its decoder computes e2m1 · fl(e4m3 / g), mmq e2m1 · fl(e4m3 · fl(1/g)), both in F32.

    Each is reproduced to the bit; between the two lie at most three roundings of half an ulp.
    """
    count = 0
    for state in _experts(converted["minimax"]):
        packed, scale, divisor = (state[name] for name in EXPERT_TENSORS[:3])
        shape = (packed.shape[0], packed.shape[1] * 2)
        elements = unpack_fp4_from_uint8(packed, *shape, dtype=torch.float32)
        theirs = dequantize(
            elements, scale.float(), args=SCHEME.weights, global_scale=divisor, dtype=torch.float32
        ).numpy()
        exact = elements.numpy() * np.repeat((scale.float() / divisor).numpy(), 16, axis=1)
        np.testing.assert_array_equal(theirs, exact)
        codes, blocks = packed.numpy(), scale.view(torch.uint8).numpy()
        ours = ops.dequantize_nvfp4_f32(codes, blocks, reciprocal_scale(divisor.numpy()[0]))
        assert (np.abs(theirs - ours) <= 3 * 2.0**-24 * np.abs(ours)).all()
        np.testing.assert_array_equal(theirs == 0, ours == 0)
        assert ours.any()
        count += 1
    assert count == 3 * 16 * 3


def test_compressed_tensors_decompressor_gives_mmqs_bf16(converted: dict[str, Path]) -> None:
    """The whole decompressor, in BF16: two orders of F32 rounding move few values, by one ulp."""
    bf16 = open_checkpoint(converted["minimax-bf16"])
    moved = total = 0
    for state in _experts(converted["minimax"]):
        name = str(state.pop("name")).removesuffix("_packed")
        theirs = NVFP4PackedCompressor.decompress(dict(state), SCHEME)["weight"]
        with safe_open(bf16.shards[bf16.tensors[name].shard].path, "pt") as file:
            ours = file.get_tensor(name)
        bits = theirs.view(torch.int16).int() - ours.view(torch.int16).int()
        assert bits.abs().max() <= 1
        moved, total = moved + int((bits != 0).sum()), total + bits.numel()
    assert total == 3 * 16 * 3 * 128 * 256
    assert moved <= total // 10_000


@pytest.mark.parametrize("name", ["source", "modelopt", "minimax", "bf16"])
def test_safetensors_reads_every_file(source: Path, converted: dict[str, Path], name: str) -> None:
    folder = source if name == "source" else converted[name]
    expected = open_checkpoint(folder)
    seen = set()
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            assert file.metadata() == {"format": "pt"}
            for tensor_name in file.keys():  # noqa: SIM118 (not a dict)
                piece = file.get_slice(tensor_name)
                info = expected.tensors[tensor_name]
                assert (tuple(piece.get_shape()), piece.get_dtype()) == (info.shape, info.dtype)
                seen.add(tensor_name)
    assert seen == set(expected.tensors) and seen

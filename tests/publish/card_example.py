"""An output as a card sees it: made up, complete, with figures of every kind."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from mmq.publish.card_facts import CardFacts
from mmq.publish.folder import NamedFile, OutputFolder
from mmq.publish.provenance import provenance
from mmq.publish.serve import servings
from mmq.publish.traits import Traits, traits_of
from mmq.report.schema import (
    ArmFigures,
    ComponentSize,
    ConvertReport,
    Endpoint,
    FileEntry,
    FindingEntry,
    FormatSize,
    GateResult,
    LevelResult,
    LogitsReport,
    Measure,
    PositionBin,
    Quality,
    Timing,
    VerifyReport,
)

REPO = "acme/MiniMax-M3-NVFP4"
COMMIT = "c5454eb0" * 5
LFS = "ab" * 32
BYTES = 250_116_419_880

CONFIG: dict[str, Any] = {
    "text_config": {
        "max_position_embeddings": 1_048_576, "num_local_experts": 128, "num_experts_per_tok": 4,
        "sparse_attention_config": {"sparse_attention_freq": [0, 0, 0, 1]},
    },
    "vision_config": {"hidden_size": 1280},
    "quantization_config": {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"},
}  # fmt: skip


def manifest(**options: Any) -> dict[str, Any]:
    return {
        "format": "mmq-manifest/1",
        "numerics_version": 2,
        "versions": {"mmq": "0.1.0", "python": "3.11.7", "numpy": "2.4.6"},
        "options": {
            "to": "nvfp4", "layout": "modelopt", "mtp": "drop", "input_scales": "unit",
            "kv_scales": "analytic", "kv_format": "auto", "scale_search": "mse",
            "importance": None, "ignore": [], "max_shard_bytes": 5_000_000_000,
            "experts_from": None, "allow_nonfinite": False, **options,
        },
        "source": {
            "repo": "MiniMaxAI/MiniMax-M3-MXFP8", "commit": COMMIT,
            "shards": [
                {"name": "model-00001-of-00002.safetensors", "bytes": 10, "sha256": LFS,
                 "header_sha256": "cd" * 32},
                {"name": "model-00002-of-00002.safetensors", "bytes": 20, "sha256": None,
                 "header_sha256": "ef" * 32},
            ],
        },
    }  # fmt: skip


def arm(ppl: float, kld: float, top1: float) -> ArmFigures:
    return ArmFigures(
        perplexity=Measure(value=ppl, se=0.0713), ln_ratio=Measure(value=0.011, se=0.002),
        delta_ppl_percent=Measure(value=1.106, se=0.21), kld_mean=Measure(value=kld, se=0.0011),
        kld_median=Measure(value=0.021), kld_p90=Measure(value=0.11), kld_p99=Measure(value=0.62),
        kld_p999=Measure(value=1.9), kld_max=Measure(value=4.2),
        delta_p_mean=Measure(value=-0.2, se=0.1), delta_p_rms=Measure(value=5.0),
        top1=Measure(value=top1, se=0.003), top5=Measure(value=0.94),
    )  # fmt: skip


def logits() -> LogitsReport:
    return LogitsReport(
        settings={"kv": "fp8", "index_k": "exact", "dtype": "float32", "device": "cpu"},
        convention={"context": 4096, "bos": "none", "texts": ["en.txt", "ja.txt"]},
        tokens=131_072, scored=131_040, windows=32, tokens_sha256="12" * 32, tokens_file=None,
        source_perplexity=Measure(value=13.336, se=0.07),
        arms={"weights": arm(13.4, 0.04, 0.931), "both": arm(13.4827, 0.0431, 0.9292)},
        judged="both", by_file={}, by_position=[
            PositionBin(first=0, last=2047, tokens=65_504, kld_mean=0.04, top1=0.93)
        ],
        kld_curve=[0.0, 1.0], layers=[],
        gates=[GateResult(gate="kld_mean", value=0.0431, se=0.0011, target=0.05, fail=0.07,
                          status="pass")],
        timing={},
    )  # fmt: skip


def verify_report(with_logits: bool = True) -> VerifyReport:
    levels = [
        LevelResult(level="structure", status="pass", checks={"index": 89_614, "shapes": 100},
                    seconds=4.0),
        LevelResult(level="weights", status="pass", checks={"tensors": 89_614}, seconds=900.0),
    ]  # fmt: skip
    if with_logits:
        levels.append(LevelResult(level="logits", status="warn", checks={"windows": 32}, seconds=9))
    return VerifyReport(
        versions={"mmq": "0.1.0"}, numerics_version=2,
        checkpoint=Endpoint(location="/home/someone/out", tensors=9, shards=50, payload_bytes=1),
        against=Endpoint(location="/home/someone/src", tensors=9, shards=2, payload_bytes=2),
        verdict="warn", levels=levels, metrics={"sqnr_db_mean": 21.9},
        logits=logits() if with_logits else None,
        findings=[FindingEntry(id="x", severity="warning", message="<b>evil</b> | `code`")],
        files=[FileEntry(name="model-00001-of-00001.safetensors", bytes=1, sha256=LFS)],
    )  # fmt: skip


def convert_report() -> ConvertReport:
    return ConvertReport(
        versions={}, numerics_version=2, options={},
        source=Endpoint(location="/home/someone/src", tensors=1, shards=31,
                        payload_bytes=443_742_085_120),
        output=Endpoint(location=".", tensors=1, shards=50, payload_bytes=250_091_245_024),
        kv_scale_bytes=480, side_folder_bytes={"dspark": 2_301_867_426}, reduction=0.436,
        components=[
            ComponentSize(component="routed_experts", before_bytes=426_032_234_496,
                          after_bytes=232_381_393_920),
            ComponentSize(component="attention", before_bytes=6_617_825_280,
                          after_bytes=6_617_825_280),
        ],
        sizes=[
            FormatSize(component="routed_experts", before_bytes=426_032_234_496, after_bytes=0,
                       format="MXFP8"),
            FormatSize(component="routed_experts", before_bytes=0, after_bytes=232_381_393_920,
                       format="NVFP4"),
            FormatSize(component="attention", before_bytes=6_617_825_280,
                       after_bytes=6_617_825_280, format="MXFP8"),
        ],
        quality=Quality(tensors=21_888, sqnr_db=21.79, mean_tensor_sqnr_db=21.8,
                        worst_tensor_sqnr_db=20.9, worst_tensor="a_b|c", max_error=0.1,
                        max_error_tensor="a"),
        dropped={"MTP module": 799}, config_edits=[], findings=[], files=[],
        timing=Timing(seconds=1, read_bytes=1, written_bytes=1, read_gb_per_s=1, jobs=1,
                      resumed_shards=0, peak_pss_bytes=None),
    )  # fmt: skip


def traits(**values: Any) -> Traits:
    return replace(traits_of(CONFIG, BYTES), **values)


def facts(
    *, with_logits: bool = True, verified: bool = True, blame: str = "",
    manifest_value: dict[str, Any] | None = None, repo: str = REPO, **values: Any,
) -> CardFacts:  # fmt: skip
    folder = OutputFolder(
        Path("/nowhere"), manifest_value or manifest(),
        (NamedFile("model-00001-of-00001.safetensors", 1, LFS),),
        ("model-00001-of-00001.safetensors",), CONFIG, convert_report(),
        verify_report(with_logits) if verified else None,
    )  # fmt: skip
    found = traits(**values)
    return CardFacts(
        repo, folder, found, provenance(folder, None), tuple(servings(repo, found, {})),
        "34" * 32, blame,
    )  # fmt: skip

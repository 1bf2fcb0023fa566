"""Reports made up from the schema's models: small, as large as a release's, and hostile."""

from __future__ import annotations

import hashlib
import math
import random
from typing import Any

from mmq.report.schema import (
    ArmFigures,
    ComponentSize,
    ConvertReport,
    Endpoint,
    FileEntry,
    FindingEntry,
    FormatSize,
    GateResult,
    Histogram,
    KernelResult,
    KernelsReport,
    LevelResult,
    LogitsReport,
    Measure,
    ModuleQuality,
    PositionBin,
    Quality,
    Timing,
    VerifyReport,
)

ARMS = ("weights", "kv", "both", "replay")
#: Markup, line ends, escape sequences, text direction, and what each format has for syntax.
HOSTILE = (
    "</code></td><script>alert(1)</script><img src=x onerror=alert(2)>\n::error::forged\r\n"
    "\x1b[31mred\x1b[0m \x00 \u202egnp.exe \x85 ]]> <!-- & \"' | `x` [a](http://evil.test) @someone"
    " %0A *b* _i_ ${{ secrets.X }} {{ 1337*7 }} {% raw %}"
)
_VERSIONS = {"mmq": "0.1.0", "python": "3.11.7"}


def measure(value: float, se: float | None = None) -> Measure:
    return Measure(value=value, se=se)


def arm(scale: float = 1.0) -> ArmFigures:
    return ArmFigures(
        perplexity=measure(8.13 * scale, 0.21), ln_ratio=measure(0.004 * scale, 0.0012),
        delta_ppl_percent=measure(0.401 * scale, 0.12), kld_mean=measure(0.0137 * scale, 0.00087),
        kld_median=measure(0.0057, 0.0004), kld_p90=measure(0.033, 0.003),
        kld_p99=measure(0.111, 0.007), kld_p999=measure(0.186, 0.008), kld_max=measure(0.199),
        delta_p_mean=measure(-4.4e-6, 5.6e-6), delta_p_rms=measure(0.0004, 0.00002),
        top1=measure(0.953, 0.004), top5=measure(0.964, 0.002),
    )  # fmt: skip


def layer_entry(number: int, experts: int, rng: random.Random) -> dict[str, Any]:
    def figures(drift: float) -> dict[str, Any]:
        found: dict[str, Any] = {"cosine": {"mean": 1 - drift, "min": 1 - 20 * drift}}
        if experts:
            found["routing"] = {"same": 1 - 40 * drift, "flips": number, "near_ties": 1,
                                "widest_flip": 0.1}  # fmt: skip
            found["selection"] = {"overlap": 1 - 10 * drift, "p1": 0.5, "exact": 0.9, "rows": 9}
        return found

    arms = {name: figures(1e-4 * (number + n + 1)) for n, name in enumerate(ARMS)}
    tokens = [int(rng.lognormvariate(5, 1)) * (rng.random() > 0.02) for _ in range(experts)]
    return {"layer": number, "arms": {"source": {}, **arms}, "expert_tokens": tokens}


def logits(layers: int = 4, experts: int = 8, texts: tuple[str, ...] = ("a.txt", "b.txt")) -> Any:
    rng = random.Random(7)
    arms = {name: arm(1 + n / 10) for n, name in enumerate(ARMS)}
    return LogitsReport(
        settings={"dtype": "float32", "device": "cpu", "kv": "fp8", "index_k": "exact",
                  "arms": ["source", *ARMS]},
        convention={"source": "text", "context": 256, "text_sha256": dict.fromkeys(texts, "0")},
        tokens=2048, scored=2040, windows=8, tokens_sha256="ab" * 32,
        tokens_file="mmq-verify-tokens.npy", source_perplexity=measure(8.1, 0.2), arms=arms,
        judged="both", by_file=dict.fromkeys(texts, arms),
        by_position=[
            PositionBin(first=16 * n + 1, last=16 * n + 16, tokens=128,
                        kld_mean=0.01 + 0.001 * math.sin(n), top1=0.95 - 0.002 * n)
            for n in range(16)
        ],
        kld_curve=[float(f"{1e-5 * 1.05**n:.4g}") for n in range(201)],
        layers=[layer_entry(n, experts if n else 0, rng) for n in range(layers)],
        gates=[
            GateResult(gate="kld_mean", value=0.0164, se=0.0009, target=0.05, fail=0.07,
                       status="pass"),
            GateResult(gate="top1", value=0.803, se=0.011, target=0.95, fail=0.9, status="fail"),
            GateResult(gate="kv_delta_ppl_percent", value=0.22, se=0.18, target=0.5, fail=1,
                       status="inconclusive", more_windows=6),
        ],
        timing={"layers_seconds": 7.9, "head_seconds": 0.3},
    )  # fmt: skip


def finding(id: str, severity: str = "error", **more: str) -> FindingEntry:
    return FindingEntry(id=id, severity=severity, message=more.pop("message", f"{id}!"), **more)


def files(count: int = 3, salt: str = "") -> list[FileEntry]:
    return [
        FileEntry(name=f"model-{n:05}.safetensors", bytes=5 * 10**9 - n,
                  sha256=hashlib.sha256(f"{n}{salt}".encode()).hexdigest())
        for n in range(count)
    ]  # fmt: skip


def endpoint(location: str, nbytes: int) -> Endpoint:
    return Endpoint(location=location, tensors=430, shards=3, payload_bytes=nbytes)


def verify_report(**changes: Any) -> VerifyReport:
    """A verification that failed at one gate, unless `changes` say otherwise."""
    levels = [
        LevelResult(level="structure", status="pass", seconds=0.1,
                    checks={"opened": 1, "kv scales": 3}, skipped=[]),
        LevelResult(level="weights", status="pass", seconds=1.5, checks={"tensors compared": 726},
                    skipped=["input scales: calibrated elsewhere"]),
        LevelResult(level="logits", status="fail", seconds=11.0,
                    checks={"layers run": 20, "gates": 3}),
    ]  # fmt: skip
    values = {
        "versions": _VERSIONS, "numerics_version": 2, "checkpoint": endpoint("out", 6_705_248),
        "against": endpoint("src", 8_915_904), "verdict": "fail", "levels": levels,
        "metrics": {"compared_tensors": 726.0, "sqnr_db_mean": 21.894}, "logits": logits(),
        "findings": [
            finding("kv-scale-sparse-layers", "note", where="config.json"),
            finding("gate-fail", message="top1 (share of tokens) is beyond its limit", where="out",
                    got="0.8034 ± 0.011", expected="target 0.95, limit 0.9", level="logits",
                    check="gates"),
        ],
        "files": files(),
    }  # fmt: skip
    return VerifyReport(**{**values, **changes})


def kernels_report() -> VerifyReport:
    """Level kernels: one operation within its bound, one beyond, one not run."""

    def result(op: str, status: Any, worst: float | None, bound: float = 0.01) -> KernelResult:
        return KernelResult(op=op, status=status, path="native", reason=f"why {op}",
                            target="sm_100", cases=3, values=999, worst=worst, bound=bound,
                            exact=False, seconds=0.5)  # fmt: skip

    results = [result("moe", "native", 0.004), result("router", "native", 0.4),
               result("selection", "skipped", None), result("qkv", "crashed", None)]  # fmt: skip
    kernels = KernelsReport(device="B200", backend="cuda", target="sm_100", triton="3.9.0",
                            torch="2.13.0", results=results)  # fmt: skip
    level = LevelResult(level="kernels", status="fail", seconds=2.0,
                        checks={r.op: r.cases for r in results})  # fmt: skip
    found = [finding("kernel-differs", where="router; 7 tokens"),
             finding("kernel-crashed", where="qkv", got="boom")]  # fmt: skip
    return verify_report(levels=[level], kernels=kernels, logits=None, metrics={}, findings=found,
                         against=None, files=[])  # fmt: skip


def quality(layers: int = 4) -> Quality:
    rng = random.Random(3)
    modules = [
        ModuleQuality(layer=layer, module=f"routed_experts {p}", tensors=128,
                      sqnr_db=round(21.5 + rng.random(), 3), worst_tensor_sqnr_db=21.0)
        for layer in range(1, layers) for p in ("w1", "w2", "w3")
    ]  # fmt: skip
    return Quality(
        tensors=144, sqnr_db=21.884, mean_tensor_sqnr_db=21.894, worst_tensor_sqnr_db=21.676,
        worst_tensor="language_model.model.layers.3.block_sparse_moe.experts.12.w3.weight",
        max_error=0.32, max_error_tensor="language_model.model.layers.1.mlp.w1.weight",
        by_module=modules,
        histogram=Histogram(edges=[21.6, 21.7, 21.8, 21.9, 22.0], counts=[3, 0, 100, 41]),
    )  # fmt: skip


def convert_report(**changes: Any) -> ConvertReport:
    values = {
        "versions": _VERSIONS, "numerics_version": 2,
        "options": {"to": "nvfp4", "layout": "modelopt", "ignore": [], "importance": None},
        "source": endpoint("src", 8_915_904), "output": endpoint(".", 6_705_248),
        "kv_scale_bytes": 32, "side_folder_bytes": {"dspark": 2000}, "reduction": 0.248,
        "components": [
            ComponentSize(component="routed_experts", before_bytes=4_866_048,
                          after_bytes=2_655_360),
            ComponentSize(component="attention", before_bytes=4_049_856, after_bytes=4_049_888),
        ],
        "sizes": [
            FormatSize(component="routed_experts", format="MXFP8", before_bytes=4_866_048,
                       after_bytes=0),
            FormatSize(component="routed_experts", format="NVFP4", before_bytes=0,
                       after_bytes=2_655_360),
            FormatSize(component="attention", format="MXFP8", before_bytes=4_049_856,
                       after_bytes=4_049_888),
        ],
        "quality": quality(), "dropped": {"MTP": 799}, "config_edits": ["mtp: 1 → 0"],
        "findings": [finding("mtp-declared-absent", "note", where="config.json")],
        "timing": Timing(seconds=15.7, read_bytes=8_915_904, written_bytes=6_803_968,
                         read_gb_per_s=0.1, jobs=2, resumed_shards=0, peak_pss_bytes=218_336_256,
                         spent={"compute": 9.5, "write": 1.5}),
        "files": files(),
    }  # fmt: skip
    return ConvertReport(**{**values, **changes})


def release_reports() -> tuple[VerifyReport, ConvertReport]:
    """As large as a release's: 60 layers of 128 experts, 60 shards, more findings than fit."""
    long = "language_model.model.layers.{}.block_sparse_moe.experts.127.w1.weight_scale"
    findings = [
        finding(f"block-error-{n % 20}", "error" if n % 3 else "warning", where=long.format(n % 60),
                message=f"{long.format(n % 60)}: 17 blocks of 8,192 are beyond their bound",
                got="1.2345" * 20, expected="0.5" * 20, level="weights", check="tensors compared")
        for n in range(2000)
    ]  # fmt: skip
    big = logits(60, 128, tuple(f"text-{n}.txt" for n in range(40)))
    verify = verify_report(logits=big, findings=findings, files=files(70))
    return verify, convert_report(quality=quality(60), files=files(70))


def hostile_reports() -> tuple[VerifyReport, ConvertReport]:
    """Every free text of both kinds is hostile."""
    words = {"message": HOSTILE, "where": HOSTILE, "got": HOSTILE, "expected": HOSTILE}
    found = [FindingEntry(id=HOSTILE, severity="error", **words)]
    dangerous = logits(texts=(HOSTILE, HOSTILE + "2"))
    changes = {
        "arms": {HOSTILE: arm(), "both": arm()}, "settings": {HOSTILE: HOSTILE},
        "convention": {HOSTILE: [HOSTILE]}, "tokens_sha256": HOSTILE,
        "gates": [GateResult(gate=HOSTILE, value=1, se=None, target=0, fail=0, status="fail")],
        "layers": [{"layer": HOSTILE, "arms": [HOSTILE], "expert_tokens": HOSTILE}, {}],
    }  # fmt: skip
    levels = [LevelResult(level="weights", status="fail", seconds=1, checks={HOSTILE: 1},
                          skipped=[HOSTILE])]  # fmt: skip
    verify = verify_report(
        findings=found, levels=levels, metrics={HOSTILE: 1.0}, versions={HOSTILE: HOSTILE},
        checkpoint=endpoint(HOSTILE, 5), against=endpoint(HOSTILE, 9),
        logits=dangerous.model_copy(update=changes),
        files=[FileEntry(name=HOSTILE, bytes=1, sha256=HOSTILE)],
    )  # fmt: skip
    bad_quality = quality().model_copy(
        update={"worst_tensor": HOSTILE, "max_error_tensor": HOSTILE, "by_module": [
            ModuleQuality(layer=1, module=HOSTILE, tensors=1, sqnr_db=20, worst_tensor_sqnr_db=20)
        ]}
    )  # fmt: skip
    convert = convert_report(
        findings=found, options={HOSTILE: HOSTILE}, dropped={HOSTILE: 1}, config_edits=[HOSTILE],
        side_folder_bytes={HOSTILE: 1}, versions={HOSTILE: HOSTILE}, quality=bad_quality,
        components=[ComponentSize(component=HOSTILE, before_bytes=1, after_bytes=1)], sizes=[],
        source=endpoint(HOSTILE, 9), files=[FileEntry(name=HOSTILE, bytes=1, sha256=HOSTILE)],
        timing=Timing(seconds=1, read_bytes=1, written_bytes=1, read_gb_per_s=0, jobs=1,
                      resumed_shards=0, peak_pss_bytes=None, device=HOSTILE, backend=HOSTILE,
                      spent={HOSTILE: 1.0}),
    )  # fmt: skip
    return verify, convert

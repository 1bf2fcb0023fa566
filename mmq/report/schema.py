"""The report schema: what mmq-convert.json and mmq-verify.json hold (`kind` says which).

The JSON Schema in `mmq/report/data/report.schema.json` is generated from these models
(`scripts/build_schema.py`); a test keeps the two equal.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

SCHEMA_VERSION = 1
#: Settings are nested two deep; far deeper ones only exhaust what reads them.
MOST_NESTED = 16


def _shallow(value: dict[str, Any]) -> dict[str, Any]:
    """The settings, unless they are nested deeper than any that mmq writes."""
    layer: list[Any] = [value]
    for _ in range(MOST_NESTED):
        inner = (w for v in layer for w in (v.values() if isinstance(v, dict) else v))
        layer = [w for w in inner if isinstance(w, dict | list)]
        if not layer:
            return value
    raise ValueError(f"nested deeper than {MOST_NESTED}")


#: How many of something: no less than none, no more than a signed 64-bit number.
Count = Annotated[int, Field(ge=0, lt=1 << 63)]
Settings = Annotated[dict[str, Any], AfterValidator(_shallow)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid")


class FileEntry(_Model):
    """A file judged or written."""

    name: str
    bytes: Count
    sha256: str


class FindingEntry(_Model):
    """What a check noticed (see `mmq.report.findings.Finding`)."""

    id: str
    severity: Literal["error", "warning", "note"]
    message: str
    where: str = ""
    got: str = ""
    expected: str = ""
    level: str = Field(default="", description="verify: the level whose finding it is")
    check: str = Field(default="", description="verify: the check that made it")


class ComponentSize(_Model):
    """Payload bytes of one component, before and after."""

    component: str
    before_bytes: Count
    after_bytes: Count


class FormatSize(ComponentSize):
    """Payload bytes of one component in one format; scales count as their weight's format."""

    format: str


class Endpoint(_Model):
    """A checkpoint: where it was, and how large its payload is."""

    location: str
    tensors: Count
    shards: Count
    payload_bytes: Count
    file_bytes: Count | None = None
    repo: str = Field(default="", description="its repository on the Hub, where that is known")
    commit: str = Field(default="", description="the commit of it, where that is known")


class ModuleQuality(_Model):
    """Error of the quantised weights of one kind in one layer."""

    layer: Count | None
    module: str = Field(description="component and projection, such as routed_experts w1")
    tensors: Count
    sqnr_db: float = Field(description="over all values of these tensors")
    worst_tensor_sqnr_db: float


class Histogram(_Model):
    """How many values lie in each bin: counts[i] of them in [edges[i], edges[i+1])."""

    edges: list[float]
    counts: list[Count]

    @model_validator(mode="after")
    def _bins_have_two_edges(self) -> Histogram:
        if len(self.edges) != len(self.counts) + 1:
            raise ValueError("a histogram has one edge more than counts")
        return self


class Quality(_Model):
    """Error of quantised weights against the source's values, over all of them."""

    tensors: Count
    sqnr_db: float | None = Field(description="10·log10(Σx²/Σ(x−q)²) over all quantised weights")
    mean_tensor_sqnr_db: float | None
    worst_tensor_sqnr_db: float | None
    worst_tensor: str | None
    max_error: float | None
    max_error_tensor: str | None
    by_module: list[ModuleQuality] = Field(default_factory=list)
    histogram: Histogram | None = Field(default=None, description="of the tensors' SQNR, in dB")


class Timing(_Model):
    """Wall time of this run; shards done by an earlier run are not in it."""

    seconds: float
    read_bytes: Count
    written_bytes: Count
    read_gb_per_s: float
    jobs: Count
    resumed_shards: Count
    peak_pss_bytes: Count | None
    device: str = Field(default="cpu", description="cpu, or the GPU's name")
    backend: str = Field(default="", description="which implementation of the operations ran")
    spent: dict[str, float] = Field(
        default_factory=dict,
        description="seconds of all jobs together: compute, read, hash, write (sync included)",
    )


class ConvertReport(_Model):
    """mmq-convert.json."""

    schema_version: int = SCHEMA_VERSION
    kind: Literal["convert"] = "convert"
    versions: dict[str, str]
    numerics_version: Count
    options: Settings
    source: Endpoint
    output: Endpoint
    kv_scale_bytes: Count
    side_folder_bytes: dict[str, Count] = Field(description="drafts and other models copied whole")
    reduction: float = Field(description="1 − output/source payload, KV scales apart")
    components: list[ComponentSize]
    sizes: list[FormatSize] = Field(default_factory=list, description="components by format")
    quality: Quality
    dropped: dict[str, Count] = Field(description="reason → number of tensors")
    config_edits: list[str]
    calibration: Settings = Field(
        default_factory=dict,
        description="option → its file's hash, observer, tokens and texts, where numbers came"
        " from data",
    )
    findings: list[FindingEntry]
    timing: Timing
    files: list[FileEntry]


class Measure(_Model):
    """A measured figure and its standard error, where one can be given."""

    value: float
    se: float | None = None


class ArmFigures(_Model):
    """One forward against the source's, over the scored tokens (see docs/verify.md)."""

    perplexity: Measure
    ln_ratio: Measure = Field(description="mean NLL difference, nats: ln of the PPL ratio")
    delta_ppl_percent: Measure
    kld_mean: Measure = Field(description="KL(source ‖ arm), nats, full vocabulary")
    kld_median: Measure
    kld_p90: Measure
    kld_p99: Measure
    kld_p999: Measure
    kld_max: Measure
    delta_p_mean: Measure
    delta_p_rms: Measure
    top1: Measure = Field(description="share of tokens with the same most likely token")
    top5: Measure = Field(description="mean common share of the five most likely tokens")


class PositionBin(_Model):
    """Figures of the tokens at some positions of their windows."""

    first: Count
    last: Count
    tokens: Count
    kld_mean: float
    top1: float


class GateResult(_Model):
    """One figure held against its limits."""

    gate: str
    value: float
    se: float | None
    target: float
    fail: float
    status: Literal["pass", "warn", "inconclusive", "fail"]
    more_windows: Count | None = Field(
        default=None, description="inconclusive: how many more would decide at this spread"
    )


class LogitsReport(_Model):
    """Level logits: settings, figures by arm, what each layer did, gates."""

    settings: Settings
    convention: Settings
    tokens: Count
    scored: Count
    windows: Count
    tokens_sha256: str
    tokens_file: str | None
    source_perplexity: Measure
    arms: dict[str, ArmFigures]
    judged: str = Field(description="the arm that the gates judge")
    by_file: dict[str, dict[str, ArmFigures]] = Field(description="text → arm → figures")
    by_position: list[PositionBin]
    kld_curve: list[float] = Field(description="sorted per-token KLD of the judged arm")
    layers: list[Settings]
    gates: list[GateResult]
    timing: dict[str, float]


class KernelResult(_Model):
    """Level kernels: one operation's kernel beside its reference, over all of its cases."""

    op: str
    status: Literal["native", "emulated", "skipped", "crashed"] = Field(
        description="native: executed on the GPU; emulated: by Triton's interpreter on the CPU"
    )
    path: str = Field(description="native, fallback or unsupported: how the target computes it")
    reason: str = Field(description="of the path; why it was skipped; what it crashed with")
    target: str = Field(description="sm_100, gfx950, …; emulated: the target that is pretended")
    cases: Count
    values: Count = Field(description="numbers compared, over all cases")
    worst: float | None = Field(
        description="exact: values whose bits differ; else the difference that is largest beside"
        " its own bound; null: not finite"
    )
    bound: float = Field(description="what `worst` may be")
    exact: bool = Field(description="every case is held to the same bits")
    seconds: float


class KernelsReport(_Model):
    """Level kernels: where it ran, and each operation."""

    device: str
    backend: str = Field(description="cuda, rocm, interpreter, or none")
    target: str
    triton: str
    torch: str
    results: list[KernelResult]


class LevelResult(_Model):
    """One level of verification: passed, failed, or skipped with the reason."""

    level: Literal["structure", "weights", "logits", "kernels"]
    status: Literal["pass", "warn", "inconclusive", "fail", "skipped"]
    checks: dict[str, Count] = Field(description="check → number of things it looked at")
    skipped: list[str] = Field(default_factory=list)
    seconds: float


class SourceShard(_Model):
    """A weight file of the source that OUT was held against; `sha256` where it is known."""

    name: str
    bytes: Count
    header_sha256: str
    sha256: str | None = None


class VerifyReport(_Model):
    """mmq-verify.json."""

    schema_version: int = SCHEMA_VERSION
    kind: Literal["verify"] = "verify"
    versions: dict[str, str]
    numerics_version: Count
    checkpoint: Endpoint
    against: Endpoint | None
    verdict: Literal["pass", "warn", "inconclusive", "fail"]
    levels: list[LevelResult]
    metrics: dict[str, float]
    logits: LogitsReport | None = None
    kernels: KernelsReport | None = None
    findings: list[FindingEntry]
    files: list[FileEntry]
    against_files: list[SourceShard] = Field(default_factory=list)

"""The report schema: what mmq-convert.json and mmq-verify.json hold (`kind` says which).

The JSON Schema in `mmq/report/data/report.schema.json` is generated from these models
(`scripts/build_schema.py`); a test keeps the two equal.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

SCHEMA_VERSION = 1


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid")


class FileEntry(_Model):
    """A file judged or written."""

    name: str
    bytes: int
    sha256: str


class FindingEntry(_Model):
    """What a check noticed (see `mmq.report.findings.Finding`)."""

    id: str
    severity: Literal["error", "warning", "note"]
    message: str
    where: str = ""
    got: str = ""
    expected: str = ""


class ComponentSize(_Model):
    """Payload bytes of one component, before and after."""

    component: str
    before_bytes: int
    after_bytes: int


class Endpoint(_Model):
    """A checkpoint: where it was, and how large its payload is."""

    location: str
    tensors: int
    shards: int
    payload_bytes: int
    file_bytes: int | None = None


class Quality(_Model):
    """Error of quantised weights against the source's values, over all of them."""

    tensors: int
    sqnr_db: float | None = Field(description="10·log10(Σx²/Σ(x−q)²) over all quantised weights")
    mean_tensor_sqnr_db: float | None
    worst_tensor_sqnr_db: float | None
    worst_tensor: str | None
    max_error: float | None
    max_error_tensor: str | None


class Timing(_Model):
    """Wall time of this run; shards done by an earlier run are not in it."""

    seconds: float
    read_bytes: int
    written_bytes: int
    read_gb_per_s: float
    jobs: int
    resumed_shards: int
    peak_pss_bytes: int | None


class ConvertReport(_Model):
    """mmq-convert.json."""

    schema_version: int = SCHEMA_VERSION
    kind: Literal["convert"] = "convert"
    versions: dict[str, str]
    numerics_version: int
    options: dict[str, Any]
    source: Endpoint
    output: Endpoint
    kv_scale_bytes: int
    side_folder_bytes: dict[str, int] = Field(description="drafts and other models copied whole")
    reduction: float = Field(description="1 − output/source payload, KV scales apart")
    components: list[ComponentSize]
    quality: Quality
    dropped: dict[str, int] = Field(description="reason → number of tensors")
    config_edits: list[str]
    findings: list[FindingEntry]
    timing: Timing
    files: list[FileEntry]


class LevelResult(_Model):
    """One level of verification: passed, failed, or skipped with the reason."""

    level: Literal["structure", "weights", "logits", "kernels"]
    status: Literal["pass", "warn", "fail", "skipped"]
    checks: dict[str, int] = Field(description="check → number of things it looked at")
    skipped: list[str] = Field(default_factory=list)
    seconds: float


class VerifyReport(_Model):
    """mmq-verify.json."""

    schema_version: int = SCHEMA_VERSION
    kind: Literal["verify"] = "verify"
    versions: dict[str, str]
    numerics_version: int
    checkpoint: Endpoint
    against: Endpoint | None
    verdict: Literal["pass", "warn", "inconclusive", "fail"]
    levels: list[LevelResult]
    metrics: dict[str, float]
    findings: list[FindingEntry]
    files: list[FileEntry]

"""What a conversion is asked to do: everything that decides output bytes, and nothing else."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from mmq.errors import UsageError
from mmq.quantize.layouts import LAYOUTS, Nvfp4Layout

TARGETS = ("nvfp4", "mxfp8", "bf16")
SCALE_SEARCHES = ("max", "mse", "four-over-six")
KV_SCALES, INPUT_SCALES = ("analytic", "unit", "none"), ("unit", "none")
KV_FORMATS = ("auto", "nvfp4", "fp8", "none")
DEFAULT_SHARD_BYTES = 5_000_000_000


@dataclass(frozen=True)
class ConvertOptions:
    """Options of `mmq convert`; None means "the layout's default" until `resolved`.

    Attributes:
        to: target of the weights: nvfp4, mxfp8 or bf16.
        layout: NVFP4 layout, modelopt or minimax.
        mtp: drop or keep the multi-token-prediction modules.
        input_scales: unit (1.0 beside every NVFP4 projection), none, or the path of a scales file.
        kv_scales: analytic, unit, none, or the path of a scales file.
        kv_format: KV-cache format the config declares.
        scale_search: how NVFP4 block scales are chosen: mse (least error), max (as ModelOpt) or
            four-over-six.
        importance: file of channel weights for the search, or None.
        ignore: fnmatch patterns over full module names that stay as they are.
        max_shard_bytes: upper bound of a shard's payload; a tensor is never split.
        experts_from: BF16 checkpoint whose experts are quantised instead of the source's.
        allow_nonfinite: record NaN/Inf in copied tensors instead of stopping.
    """

    to: str = "nvfp4"
    layout: str = "modelopt"
    mtp: str = "drop"
    input_scales: str | None = None
    kv_scales: str | None = None
    kv_format: str = "auto"
    scale_search: str = "mse"
    importance: str | None = None
    ignore: tuple[str, ...] = ()
    max_shard_bytes: int = DEFAULT_SHARD_BYTES
    experts_from: str | None = None
    allow_nonfinite: bool = False

    def resolved(self) -> ConvertOptions:
        """The same with defaults filled in and contradictions refused.

        Raises:
            UsageError: unknown value, or a combination no loader accepts.
        """
        _choice("--to", self.to, TARGETS)
        _choice("--layout", self.layout, tuple(LAYOUTS))
        _choice("--mtp", self.mtp, ("drop", "keep"))
        _choice("--kv-format", self.kv_format, KV_FORMATS)
        _choice("--scale-search", self.scale_search, SCALE_SEARCHES)
        if self.importance and (self.to != "nvfp4" or self.scale_search == "max"):
            raise UsageError(
                "option-conflict",
                "--importance weighs the errors of a scale search",
                hint="--to nvfp4 --scale-search mse",
            )
        if self.max_shard_bytes <= 0:
            raise UsageError("option-value", "--max-shard-size must be positive")
        to_nvfp4 = self.to == "nvfp4"
        layout = LAYOUTS[self.layout]
        kv_scales = self.kv_scales or (layout.default_kv_scales if to_nvfp4 else "none")
        input_scales = self.input_scales or (layout.default_input_scales if to_nvfp4 else "none")
        if to_nvfp4:
            _check_layout(layout, kv_scales, input_scales, self.kv_format)
        elif kv_scales != "none" or input_scales != "none" or self.kv_format != "auto":
            raise UsageError(
                "option-conflict",
                f"KV and input scales belong to NVFP4 checkpoints; --to {self.to} has none",
                hint="leave out --kv-scales, --kv-format and --input-scales",
            )
        if self.experts_from and not to_nvfp4:
            raise UsageError("option-conflict", "--experts-from needs --to nvfp4")
        return ConvertOptions(
            **{**asdict(self), "kv_scales": kv_scales, "input_scales": input_scales,
               "ignore": tuple(self.ignore)}
        )  # fmt: skip

    def as_dict(self) -> dict[str, Any]:
        """Options as the manifest and the fingerprint store them."""
        return {**asdict(self), "ignore": list(self.ignore)}


def _choice(option: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UsageError(
            "option-value", f"{option} {value} is unknown", got=value, expected=", ".join(choices)
        )


def _check_layout(layout: Nvfp4Layout, kv_scales: str, input_scales: str, kv_format: str) -> None:
    kind = kv_scales if kv_scales in KV_SCALES else "file"
    if kind not in layout.allowed_kv_scales:
        raise UsageError(
            "option-conflict",
            f"--kv-scales {kv_scales} does not fit --layout {layout.name}: its engine takes KV"
            " scales only if absent or exactly 1.0",
            got=kv_scales,
            expected=" or ".join(layout.allowed_kv_scales),
        )
    if layout.name == "minimax" and input_scales == "none":
        raise UsageError(
            "option-conflict",
            "--layout minimax needs input_global_scale beside every projection",
            hint="--input-scales unit",
        )
    if layout.name == "minimax" and kv_format == "nvfp4":
        raise UsageError(
            "option-conflict",
            "--kv-format nvfp4 is refused by the engine that reads --layout minimax; it packs"
            " NVFP4 itself under kv_cache_quant_algo FP8",
            hint="--kv-format auto",
        )

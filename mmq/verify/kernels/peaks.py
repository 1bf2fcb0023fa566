"""What devices promise: dense peaks and memory bandwidth, for the roofline of `mmq bench`.

    time ≥ max(FLOPs / peak of the operands' format, bytes / bandwidth)

Four numbers: an H200 has 989 TFLOP/s of BF16 and 4.8 TB/s, so that below 206 FLOPs a byte memory
is the limit. Peaks with structured sparsity are left out; nothing here uses it.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Format = Literal["f32", "bf16", "fp8", "nvfp4"]


class Peaks(NamedTuple):
    """One device.

    Attributes:
        tflops: by the format of the operands; a format that a device lacks runs as the next wider.
        terabytes: of memory bandwidth, TB/s.
        source: where the numbers are from.
    """

    tflops: dict[Format, float]
    terabytes: float
    source: str


#: Part of a device's name → peaks; the first that fits is taken.
DEVICES: dict[str, Peaks] = {
    "H200": Peaks(
        {"f32": 67, "bf16": 989, "fp8": 1979}, 4.8,
        "NVIDIA H200 Tensor Core GPU datasheet, SXM (half of the figures with sparsity)",
    ),
    "H100": Peaks(
        {"f32": 67, "bf16": 989, "fp8": 1979}, 3.35,
        "NVIDIA H100 Tensor Core GPU datasheet, SXM (half of the figures with sparsity)",
    ),
    "B300": Peaks(
        {"f32": 75, "bf16": 2250, "fp8": 4500, "nvfp4": 13500}, 8.0,
        "NVIDIA DGX B300 datasheet, an eighth of 8 GPUs (FP4 dense 108 PFLOP/s, FP8 72 sparse)",
    ),
    "B200": Peaks(
        {"f32": 75, "bf16": 2250, "fp8": 4500, "nvfp4": 9000}, 8.0,
        "NVIDIA DGX B200 datasheet, an eighth of 8 GPUs (FP4 144 PFLOP/s, FP8 72, both sparse)",
    ),
    "MI355X": Peaks(
        {"f32": 157, "bf16": 2517, "fp8": 5033, "nvfp4": 2517}, 8.0,
        "AMD Instinct MI355X data sheet; NVFP4 is decoded to BF16, MXFP4's peak is not its own",
    ),
    "MI350X": Peaks(
        {"f32": 144, "bf16": 2307, "fp8": 4614, "nvfp4": 2307}, 8.0,
        "AMD Instinct MI350X data sheet; NVFP4 is decoded to BF16, MXFP4's peak is not its own",
    ),
}  # fmt: skip


def peaks_of(name: str) -> Peaks | None:
    """Those of a device by the name PyTorch has for it."""
    return next((peaks for part, peaks in DEVICES.items() if part in name), None)


def least_seconds(peaks: Peaks, flops: float, nbytes: float, format: Format) -> float:
    """No device that keeps its promises is faster."""
    wider: tuple[Format, ...] = ("nvfp4", "fp8", "bf16", "f32")
    usable = wider[wider.index(format) :]
    peak = next(peaks.tflops[f] for f in usable if f in peaks.tflops)
    return max(flops / (peak * 1e12), nbytes / (peaks.terabytes * 1e12))

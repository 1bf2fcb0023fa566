"""mmq beside NVIDIA ModelOpt and torchao: the same bytes where they claim the same rule.

    make check-oracles        (own virtual environment; the output is kept in docs/oracles.md)

Prints Markdown. Exits 1 when a difference has no explanation below:
- ModelOpt's NVFP4 quantiser and its NVFP4 and MXFP8 decoders must agree with mmq in all bytes and
  values.
- torchao's NVFP4 decoder and MXFP8 quantiser (floor) must agree too. Its NVFP4 quantiser raises
  block scales below 2^−6 to 2^−6, stores zero blocks that way, keeps −0, and multiplies by a
  reciprocal where the format's definition divides. Each difference must be one of those.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, NamedTuple

import numpy as np
import torch
from modelopt.torch.quantization.qtensor import MXFP8QTensor, NVFP4QTensor
from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_mx
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor

from mmq.kernels import ops
from mmq.quantize.global_scale import nvfp4_global_scale

ROWS, COLUMNS = 1024, 2048
TINY_SCALE = 0x08  # 2^−6: torchao's smallest block scale


class Source(NamedTuple):
    """One tensor: its name, its values as the peers read them, and mmq's NVFP4 of it."""

    name: str
    values: torch.Tensor  # F32 or BF16 [O, K]
    s2: np.float32
    nvfp4: ops.Nvfp4


class Row(NamedTuple):
    """One comparison on one source; an `unexplained` of None marks a part of the row before."""

    peer: str
    what: str
    source: str
    compared: int
    different: int
    unexplained: int | None


def gaussian(seed: int) -> np.ndarray:
    """N(0, 0.02²)."""
    return np.random.default_rng(seed).standard_normal((ROWS, COLUMNS), np.float32) * np.float32(
        0.02
    )


def language_model_like(seed: int) -> np.ndarray:
    """Lognormal rows with outliers, some zero and −0 blocks, some rows far below the rest."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((ROWS, COLUMNS), np.float32)
    values *= rng.lognormal(-4, 1, (ROWS, 1)).astype(np.float32)
    values[rng.random(values.shape) < 1e-4] *= 30
    values[:8] *= np.float32(2.0**-14)
    values[8:12, ::2] = 0
    values[12, :512] = 0
    values[13, :512] = -0.0
    return values


def sources() -> list[Source]:
    """Both distributions, straight from BF16 and born as MXFP8."""
    out = []
    for name, values in (("Gaussian", gaussian(0)), ("LLM-like", language_model_like(1))):
        brain = torch.from_numpy(values).bfloat16()
        bits = brain.view(torch.int16).numpy().view(np.uint16)
        s2 = nvfp4_global_scale(ops.float_amax(bits, "BF16"))
        nvfp4 = ops.quantize_nvfp4_from_float(bits, "BF16", s2)
        out.append(Source(f"{name}, BF16", brain, s2, nvfp4))

        codes, scale, _ = ops.quantize_mxfp8(bits, "BF16")
        s2 = nvfp4_global_scale(ops.mxfp8_amax(codes, scale))
        nvfp4 = ops.quantize_nvfp4_from_mxfp8(codes, scale, s2)
        restored = torch.from_numpy(ops.dequantize_mxfp8_f32(codes, scale))
        out.append(Source(f"{name}, MXFP8", restored, s2, nvfp4))
    return out


def tensor(s2: np.float32) -> torch.Tensor:
    """s2 as torch's F32 scalar."""
    return torch.tensor(float(s2), dtype=torch.float32)


def nibbles(packed: np.ndarray) -> np.ndarray:
    """E2M1 codes U8 [O, K] in column order."""
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(packed.shape[0], -1)


def modelopt_quantizer(source: Source) -> list[Row]:
    """Codes, block scales and global scale, byte for byte."""
    s2 = NVFP4QTensor.get_weights_scaling_factor_2(source.values)
    quantized, scale, _ = NVFP4QTensor.quantize(source.values.clone(), 16)
    counts = [
        ("global scale", 1, int(s2.item() != float(source.s2))),
        ("block scales", *differences(scale.view(torch.uint8).numpy(), source.nvfp4.scale)),
        (
            "element codes",
            *differences(nibbles(quantized._quantized_data.numpy()), nibbles(source.nvfp4.packed)),
        ),
    ]
    return [Row("ModelOpt", w, source.name, n, d, d) for w, n, d in counts]


def torchao_quantizer(source: Source) -> list[Row]:
    """Block scales and codes; differences are explained one by one."""
    foreign = NVFP4Tensor.to_nvfp4(source.values, per_tensor_scale=tensor(source.s2))
    scale = foreign.scale.view(torch.uint8).numpy()
    codes, ours = nibbles(foreign.qdata.view(torch.uint8).numpy()), nibbles(source.nvfp4.packed)

    values = source.values.float().numpy()
    zero_block = (values.reshape(ROWS, -1, 16) == 0).all(-1)
    raised = (source.nvfp4.scale < TINY_SCALE) | zero_block
    other_scale = scale != source.nvfp4.scale
    scale_row = Row(
        "torchao", "block scales", source.name, scale.size, int(other_scale.sum()),
        int((other_scale & ~(raised & (scale == TINY_SCALE))).sum()),
    )  # fmt: skip

    step = torch.from_numpy(source.nvfp4.scale).view(torch.float8_e4m3fn).float() * tensor(
        source.s2
    )
    quotient = np.abs(values.reshape(ROWS, -1, 16) / step.numpy()[..., None]).reshape(codes.shape)
    midpoints = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32)
    nearest = midpoints[np.abs(quotient[..., None] - midpoints).argmin(-1)]
    at_tie = np.abs(quotient - nearest) <= nearest * np.float32(2.0**-22)  # a few F32 roundings
    other = codes != ours
    same_block = ~np.repeat(other_scale, 16, axis=1)
    minus_zero = other & same_block & (values == 0) & np.signbit(values)
    tie = other & same_block & ~minus_zero & at_tie
    in_raised = other & ~same_block
    explained = {"−0 kept": minus_zero, "ties": tie, "in raised blocks": in_raised}
    unexplained = other & ~(minus_zero | tie | in_raised)
    codes_row = Row(
        "torchao", "element codes", source.name, codes.size, int(other.sum()),
        int(unexplained.sum()),
    )  # fmt: skip
    parts = [
        Row("torchao", f"… {name}", source.name, codes.size, int(part.sum()), None)
        for name, part in explained.items()
    ]
    return [scale_row, codes_row, *parts]


def nvfp4_decoders(source: Source) -> list[Row]:
    """Both peers read mmq's bytes; F32 and BF16 values must be mmq's."""
    packed, scale = torch.from_numpy(source.nvfp4.packed), torch.from_numpy(source.nvfp4.scale)
    scale, s2 = scale.view(torch.float8_e4m3fn), tensor(source.s2)

    def modelopt(dtype: torch.dtype) -> torch.Tensor:
        quantized = NVFP4QTensor(source.values.shape, dtype, packed)
        return quantized.dequantize(dtype=dtype, scale=scale, double_scale=s2, block_sizes={-1: 16})

    def torchao(dtype: torch.dtype) -> torch.Tensor:
        return NVFP4Tensor(packed, scale, 16, dtype, s2).dequantize(dtype)

    f32 = ops.dequantize_nvfp4_f32(source.nvfp4.packed, source.nvfp4.scale, source.s2)
    bits = ops.dequantize_nvfp4(source.nvfp4.packed, source.nvfp4.scale, source.s2)
    bf16 = (bits.astype(np.uint32) << 16).view(np.float32)
    rows = []
    peers: list[tuple[str, Callable[[torch.dtype], torch.Tensor]]] = [
        ("ModelOpt", modelopt),
        ("torchao", torchao),
    ]
    for peer, decode in peers:
        for what, dtype, ours in (("F32", torch.float32, f32), ("BF16", torch.bfloat16, bf16)):
            count = differences(decode(dtype).float().numpy(), ours)
            rows.append(Row(peer, f"NVFP4 → {what}", source.name, *count, count[1]))
    return rows


def mxfp8(name: str, values: np.ndarray) -> list[Row]:
    """torchao quantises to MXFP8 by the same floor rule; ModelOpt reads mmq's MXFP8."""
    brain = torch.from_numpy(values).bfloat16()
    bits = brain.view(torch.int16).numpy().view(np.uint16)
    codes, scale, _ = ops.quantize_mxfp8(bits, "BF16")
    peer_scale, peer_codes = to_mx(brain, torch.float8_e4m3fn, 32, ScaleCalculationMode.FLOOR)
    count = differences(peer_scale.view(torch.uint8).reshape(scale.shape).numpy(), scale)
    rows = [Row("torchao", "MXFP8 scales (floor)", name, *count, count[1])]
    count = differences(peer_codes.view(torch.uint8).reshape(codes.shape).numpy(), codes)
    rows.append(Row("torchao", "MXFP8 codes (floor)", name, *count, count[1]))

    quantized = MXFP8QTensor(
        brain.shape, torch.float32, torch.from_numpy(codes).view(torch.float8_e4m3fn)
    )
    decoded = quantized.dequantize(dtype=torch.float32, scale=torch.from_numpy(scale))
    count = differences(decoded.numpy(), ops.dequantize_mxfp8_f32(codes, scale))
    return [*rows, Row("ModelOpt", "MXFP8 → F32", name, *count, count[1])]


def differences(one: np.ndarray, other: np.ndarray) -> tuple[int, int]:
    """(numbers compared, numbers that differ)."""
    if one.shape != other.shape:
        raise SystemExit(f"shapes differ: {one.shape} and {other.shape}")
    return one.size, int((one != other).sum())


def render(rows: list[Row]) -> str:
    """The Markdown page: one line per comparison, one column per source."""
    columns = list(dict.fromkeys(row.source for row in rows))
    cells: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        cells.setdefault((row.peer, row.what), {})[row.source] = row
    names = ("nvidia-modelopt", "torchao", "torch", "numpy")
    lines = [
        "# mmq beside ModelOpt and torchao",
        "",
        "Written by `make check-oracles`: how many numbers differ from mmq's. What torchao does",
        "differently: see the top of `scripts/check_oracles.py` and [numerics.md](numerics.md).",
        "",
        f"Versions: {', '.join(f'{name} {version(name)}' for name in names)}.",
        f"Each tensor has {ROWS} × {COLUMNS} weights, from fixed seeds.",
        "",
        f"| peer | compared | {' | '.join(columns)} | unexplained |",
        f"|---|---|{'---|' * len(columns)}---|",
    ]
    for (peer, what), found in cells.items():
        counts = [f"{found[name].different:,}" if name in found else "–" for name in columns]
        open_ = [row.unexplained for row in found.values() if row.unexplained is not None]
        total = f"{sum(open_):,}" if open_ else ""
        lines.append(f"| {peer} | {what} | {' | '.join(counts)} | {total} |")
    compared = sum(row.compared for row in rows if row.unexplained is not None)
    unexplained = sum(row.unexplained or 0 for row in rows)
    return "\n".join(
        [*lines, "", f"{compared:,} numbers compared, {unexplained:,} unexplained differences."]
    )


def main() -> int:
    """Compare everything, print, and say whether all is explained."""
    rows: list[Row] = []
    checks: list[Callable[[Any], list[Row]]] = [
        modelopt_quantizer,
        torchao_quantizer,
        nvfp4_decoders,
    ]
    for source in sources():
        for check in checks:
            rows += check(source)
    rows += mxfp8("Gaussian, BF16", gaussian(0))
    rows += mxfp8("LLM-like, BF16", language_model_like(1))
    print(render(rows))
    return 1 if any(row.unexplained for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())

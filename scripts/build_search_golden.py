"""The golden bytes of the scale searches: tests/data/nvfp4-search-golden.json.

    python scripts/build_search_golden.py            write the file
    python scripts/build_search_golden.py --check    exit 1 if it would change

Inputs are stored with the outputs, so that no random generator takes part in the test. Run it only
for a change of output bytes that is meant, together with NUMERICS_VERSION and the changelog.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from mmq.kernels import ops
from mmq.quantize.global_scale import nvfp4_global_scale

GOLDEN = Path(__file__).parents[1] / "tests" / "data" / "nvfp4-search-golden.json"


def inputs() -> dict[str, Any]:
    """Name to BF16 bits U16 [O, 64]: ordinary weights, outliers, far smaller rows, zeros, ties."""
    rng = np.random.default_rng(20)
    normal = rng.standard_normal((6, 64)) * 0.02
    heavy = rng.standard_t(3, (6, 64)) * rng.lognormal(0, 1, (6, 1))
    small = rng.standard_normal((6, 64)) * np.exp2(-4.0 * np.arange(6))[:, None]
    ties = rng.choice([0, 0.25, 0.75, 1.25, 1.5, 2.5, 3.5, 5, 6, 7, 8], (6, 64)) * 19 / 16
    ties[2, 16:32] = 0
    ties[4:] *= rng.choice([-1.0, 1.0], (2, 64))
    tensors = {"normal": normal, "heavy": heavy, "small": small, "ties": ties}
    return {name: _bf16(values) for name, values in tensors.items()}


def _bf16(values: Any) -> Any:
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def _case(bits: Any, importance: Any) -> dict[str, Any]:
    codes, exponents, _ = ops.quantize_mxfp8(bits, "BF16", backend="reference")
    outputs: dict[str, Any] = {}
    for search in ops.SEARCHES:
        s2 = nvfp4_global_scale(ops.float_amax(bits, "BF16"), search)
        options: dict[str, Any] = {"search": search, "backend": "reference"}
        runs = {
            "bf16": ops.quantize_nvfp4_from_float(bits, "BF16", s2, **options),
            "mxfp8": ops.quantize_nvfp4_from_mxfp8(codes, exponents, s2, **options),
        }
        if search != "max":
            options["importance"] = importance
            runs["bf16 weighted"] = ops.quantize_nvfp4_from_float(bits, "BF16", s2, **options)
        outputs[search] = {"s2": float(s2).hex()} | {
            name: {
                "packed": [row.tobytes().hex() for row in out.packed],
                "scale": [row.tobytes().hex() for row in out.scale],
                "error": [value.hex() for value in out.error],
            }
            for name, out in runs.items()
        }
    return {
        "bf16": [row.tobytes().hex() for row in bits.astype("<u2")],
        "mxfp8_codes": [row.tobytes().hex() for row in codes],
        "mxfp8_exponents": [row.tobytes().hex() for row in exponents],
        "outputs": outputs,
    }


def content() -> str:
    """The file's text."""
    importance = np.exp2(np.arange(64) % 7 - 3).astype(np.float32)
    importance[::13] = 0
    cases = {name: _case(bits, importance) for name, bits in inputs().items()}
    return json.dumps({"importance": importance.tolist(), "cases": cases}, indent=1) + "\n"


def main() -> int:
    """Write, or compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    text = content()
    if parser.parse_args().check:
        return int(GOLDEN.read_text("utf-8") != text)
    GOLDEN.write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

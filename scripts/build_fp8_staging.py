"""What NVFP4 staged as FP8 gives: tests/data/fp8_staging.json, and its figures in docs/numerics.md.

    python scripts/build_fp8_staging.py            write both
    python scripts/build_fp8_staging.py --check    exit 1 if either would change

All 16 × 256 pairs of an element and a block scale, in exact rational arithmetic. Nothing of the
package takes part: the formats are spelled out here once more.
"""

from __future__ import annotations

import argparse
import json
import sys
from bisect import bisect_left
from fractions import Fraction
from pathlib import Path

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "tests" / "data" / "fp8_staging.json"
DOCS = ROOT / "docs" / "numerics.md"
BEGIN, END = "<!-- fp8-staging -->\n", "<!-- end of fp8-staging -->\n"

E2M1 = [Fraction(v) for v in ("0", "0.5", "1", "1.5", "2", "3", "4", "6")]
#: Magnitudes of the codes 0 … 126, by exponent and mantissa; 127 is NaN.
E4M3 = [(m + 8 * (e > 0)) * Fraction(2) ** (max(e, 1) - 10) for e in range(16) for m in range(8)][
    :127
]


def nearest(magnitude: Fraction) -> int:
    """The E4M3 code nearest to a magnitude, the even one of two; at most 126 (448)."""
    above = bisect_left(E4M3, magnitude)
    if above == len(E4M3):
        return 126
    candidates = {max(above - 1, 0), above}
    return min(candidates, key=lambda code: (abs(E4M3[code] - magnitude), code % 2))


def staged(code: int, scale: int) -> int:
    """The E4M3 code of an E2M1 code under an E4M3 scale code."""
    if scale & 127 == 127:
        return 127
    sign = (code >> 3) ^ (scale >> 7)
    return sign << 7 | nearest(E2M1[code & 7] * E4M3[scale & 127])


def table() -> str:
    """The file: for each E2M1 code, the results under scales 0 … 255, in hexadecimal."""
    rows = [bytes(staged(code, scale) for scale in range(256)).hex() for code in range(16)]
    return json.dumps({"staged": rows}, indent=1) + "\n"


def figures() -> str:
    """The section of the docs: how the 8 × 127 magnitudes fare."""
    products = [element * scale for element in E2M1 for scale in E4M3]
    results = [E4M3[nearest(product)] for product in products]
    pairs = [(x, y) for x, y in zip(products, results, strict=True) if x != y]
    saturated = [x for x, _ in pairs if x > 464]  # 464 is a tie between 448 and what would be 480
    vanished = [x for x, y in pairs if not y]
    normal = max(abs(x - y) / x for x, y in pairs if Fraction(1, 64) <= x <= 464)
    subnormal = max(abs(x - y) / x for x, y in pairs if y and x < Fraction(1, 64))
    total = len(products)
    lines = [
        f"| of {total} pairs of magnitudes (8 elements, 127 scales) | |",
        "|---|---|",
        f"| exact | {total - len(pairs)} ({1 - len(pairs) / total:.1%}) |",
        f"| rounded | {len(pairs)} ({len(pairs) / total:.1%}) |",
        f"| of these saturated, from above 464 | {len(saturated)} ({len(saturated) / total:.1%}) |",
        f"| of these to zero | {len(vanished)} (0.5 · 2^−9) |",
        f"| largest relative error from 2^−6 to 464 | {normal} ({float(normal):.2%}) |",
        f"| largest below 2^−6, where E4M3 is subnormal | {subnormal} ({float(subnormal):.2%}) |",
    ]
    return "\n".join(lines) + "\n"


def page() -> str:
    """docs/numerics.md with its figures replaced."""
    text = DOCS.read_text("utf-8")
    before, rest = text.split(BEGIN)
    return before + BEGIN + figures() + END + rest.split(END)[1]


def main() -> int:
    """Write, or compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="exit 1 if a file would change")
    made = {TABLE: table(), DOCS: page()}
    if parser.parse_args().check:
        stale = [path for path, text in made.items() if path.read_text("utf-8") != text]
        print("\n".join(f"{path.relative_to(ROOT)} would change" for path in stale))
        return bool(stale)
    for path, text in made.items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

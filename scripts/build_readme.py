"""Run the commands that README.md shows and put their real output between its markers.

    python scripts/build_readme.py [--layer FOLDER]

Without --layer everything but the full-size conversion is refreshed; with it a full-size M3 layer
is built in FOLDER (benchmarks/big_source.py, 10 GB), converted and verified, which takes minutes
and 20 GB of disk.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from page_blocks import ROOT, block, filled, run

from mmq.demo.bundled import bundled_gates, bundled_model, bundled_texts

README = ROOT / "README.md"
#: Lines of the plan that the page shows.
PLAN_LINES = 8
#: What the page calls the bundled model, and how it is verified.
SMALL = "small-m3"
LOGITS = (
    "--level logits --gates gates.yaml --text english.txt --text code.txt --text german.txt"
    " --windows 12"
)


def plan() -> str:
    """The release's plan, cut off after its totals."""
    # from the root, so that the free disk is told of no folder of the one who ran this
    lines = run(Path("/"), "mmq convert minimax-m3-mxfp8-mtp OUT --to nvfp4 --dry-run")
    rest = f"… {len(lines) - PLAN_LINES} more lines: components, formats, config, engines, disk"
    return block([*lines[:PLAN_LINES], rest])


def convert_small(folder: Path) -> None:
    """The bundled model, its texts and gates under short names, and its conversion."""
    (folder / SMALL).symlink_to(bundled_model())
    for file in (*bundled_texts(), bundled_gates()):
        (folder / file.name).symlink_to(file)
    run(folder, f"mmq convert {SMALL} {SMALL}-nvfp4 --to nvfp4 --quiet")


def logits(folder: Path) -> str:
    """The bundled model verified over texts."""
    return block(run(folder, f"mmq verify {SMALL}-nvfp4 --against {SMALL} {LOGITS}"))


def fault(folder: Path) -> str:
    """What verify and publish say of a flipped bit; level logits is not needed to see it."""
    shard = folder / f"{SMALL}-nvfp4" / "model-00001-of-00001.safetensors"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    verify = run(folder, f"mmq verify {SMALL}-nvfp4 --against {SMALL}", status=3)
    publish = run(
        folder, f"mmq publish {SMALL}-nvfp4 acme/{SMALL}-nvfp4", {"HF_TOKEN": "hf_x"}, status=7
    )
    return block(verify, publish)


def layer(folder: Path) -> str:
    """A full-size layer converted and verified."""
    folder.mkdir(parents=True, exist_ok=True)
    build = [sys.executable, str(ROOT / "benchmarks" / "big_source.py"), "m3-layer"]
    subprocess.run(build, cwd=folder, check=True)
    convert = run(folder, "mmq convert m3-layer m3-layer-nvfp4 --to nvfp4")
    return block(convert, run(folder, "mmq verify m3-layer-nvfp4 --against m3-layer"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layer", type=Path, help="folder for a full-size layer and its output")
    folder = parser.parse_args().layer
    text = filled(README.read_text("utf-8"), "dry-run", plan())
    with tempfile.TemporaryDirectory() as name:
        small = Path(name)
        convert_small(small)
        text = filled(text, "logits", logits(small))
        text = filled(text, "fault", fault(small))
    if folder:
        text = filled(text, "convert", layer(folder))
    README.write_text(text, "utf-8")


if __name__ == "__main__":
    main()

"""Run the commands that README.md shows and put their real output between its markers.

    python scripts/build_readme.py [--layer FOLDER]

Without --layer the plan and the bundled model's verification are refreshed; with it a full-size M3
layer is built in FOLDER (benchmarks/big_source.py, 10 GB), converted and verified, which takes
minutes and 20 GB of disk.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from mmq.demo.bundled import bundled_gates, bundled_model, bundled_texts

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"


def show(folder: Path, *commands: str) -> str:
    """Commands with what they print, as a terminal shows it (progress lines left out)."""
    lines = []
    for command in commands:
        words = [sys.executable, "-m", *command.split()]
        run = subprocess.run(
            words, cwd=folder, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        text = run.stdout.decode("utf-8")
        kept = [x.rstrip() for x in text.splitlines() if " elapsed" not in x]
        lines += [f"$ {command}", *kept, ""]
    return "```\n" + "\n".join(lines).rstrip() + "\n```"


def logits() -> str:
    """The bundled model converted and verified, under short names."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "small-m3").symlink_to(bundled_model())
        for file in (*bundled_texts(), bundled_gates()):
            (folder / file.name).symlink_to(file)
        show(folder, "mmq convert small-m3 small-m3-nvfp4 --to nvfp4 --quiet")
        return show(
            folder,
            "mmq verify small-m3-nvfp4 --against small-m3 --level logits --gates gates.yaml"
            " --text english.txt --text code.txt --text german.txt --windows 12",
        )


def fill(text: str, marker: str, block: str) -> str:
    start, end = f"<!-- {marker} -->", f"<!-- /{marker} -->"
    head, found, rest = text.partition(start)
    if not found or end not in rest:
        raise SystemExit(f"README.md has no {start} … {end}")
    return f"{head}{start}\n{block}\n{end}{rest.partition(end)[2]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layer", type=Path, help="folder for a full-size layer and its output")
    folder = parser.parse_args().layer
    text = README.read_text("utf-8")
    # from the root, so that the free disk is told of no folder of the one who ran this
    plan = show(Path("/"), "mmq convert minimax-m3-mxfp8-mtp OUT --to nvfp4 --dry-run")
    text = fill(text, "dry-run", plan)
    text = fill(text, "logits", logits())
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
        build = [sys.executable, str(ROOT / "benchmarks" / "big_source.py"), "m3-layer"]
        subprocess.run(build, cwd=folder, check=True)
        convert = "mmq convert m3-layer m3-layer-nvfp4 --to nvfp4"
        verify = "mmq verify m3-layer-nvfp4 --against m3-layer"
        text = fill(text, "convert", show(folder, convert, verify))
    README.write_text(text, "utf-8")


if __name__ == "__main__":
    main()

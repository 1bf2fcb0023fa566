"""Run the commands that docs/publish.md shows, against a Hub on this machine, and put their output
between its markers.

    python scripts/build_publish_doc.py

The Hub is the one that the tests use (tests/loopback_hub); what is published is the demo's model.
Takes a minute.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "publish.md"
REPO = "acme/Small-M3-NVFP4"
SOURCE = "acme/Small-M3-MXFP8"
#: Lines of the card's changes that the page shows.
CARD_LINES = 24

sys.path[:0] = [str(ROOT), str(ROOT / "tests")]


def run(folder: Path, environment: dict[str, str], command: str, status: int = 0) -> list[str]:
    """What a command prints, as a terminal shows it."""
    done = subprocess.run(
        [sys.executable, "-m", *command.split()], cwd=folder, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, env={**os.environ, **environment, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    text = done.stdout.decode("utf-8")
    if done.returncode != status:
        raise SystemExit(f"{command}: exit {done.returncode}\n{text}")
    lines = [line.rstrip() for line in text.splitlines() if " elapsed" not in line]
    return [f"$ {command}", *lines]


def block(*parts: list[str]) -> str:
    return "```\n" + "\n\n".join("\n".join(lines) for lines in parts) + "\n```"


def fill(text: str, marker: str, content: str) -> str:
    start, end = f"<!-- {marker} -->", f"<!-- /{marker} -->"
    head, found, rest = text.partition(start)
    if not found or end not in rest:
        raise SystemExit(f"{PAGE.name} has no {start} … {end}")
    return f"{head}{start}\n{content}\n{end}{rest.partition(end)[2]}"


def shortened(lines: list[str]) -> list[str]:
    """The card's changes cut off after their beginning."""
    at = lines.index("README.md") + 1 if "README.md" in lines else len(lines)
    left = len(lines) - at - CARD_LINES
    return lines if left <= 0 else [*lines[: at + CARD_LINES], f"  … {left} more lines of the card"]


def main() -> None:
    from loopback_hub.hub_server import LoopbackHub

    from mmq.demo.bundled import bundled_gates, bundled_model, bundled_texts

    with LoopbackHub() as hub, tempfile.TemporaryDirectory() as name:
        folder, environment = Path(name), {**hub.environment, "COLUMNS": "100"}
        (folder / "src").symlink_to(bundled_model())
        texts = " ".join(f"--text {path}" for path in bundled_texts())
        run(folder, environment, "mmq convert src OUT --max-shard-size 2MB --jobs 1")
        run(folder, environment, f"mmq verify OUT --against src --level logits --windows 10 {texts}"
            f" --gates {bundled_gates()}")  # fmt: skip
        card = f"--base-model {SOURCE} --license apache-2.0"
        text = PAGE.read_text("utf-8")
        dry = run(folder, environment, f"mmq publish OUT {REPO} {card} --dry-run")
        text = fill(text, "dry-run", block(shortened(dry)))
        done = run(folder, environment, f"mmq publish OUT {REPO} {card}")
        again = run(folder, environment, f"mmq publish OUT {REPO} {card}")
        text = fill(
            text, "publish", block(done, again).replace(hub.endpoint, "https://huggingface.co")
        )
        shard = sorted((folder / "OUT").glob("model-*.safetensors"))[0]
        shard.write_bytes(shard.read_bytes()[:-1] + b"\0")
        refused = run(folder, environment, f"mmq publish OUT {REPO} {card}", status=7)
        text = fill(text, "refused", block(refused))
    PAGE.write_text(text, "utf-8")


if __name__ == "__main__":
    main()

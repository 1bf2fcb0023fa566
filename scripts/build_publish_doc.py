"""Run the commands that docs/publish.md shows, against a Hub on this machine, and put their output
between its markers.

    python scripts/build_publish_doc.py

The Hub is the one that the tests use (tests/loopback_hub); what is published is the demo's model.
Takes a minute.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from page_blocks import ROOT, block, filled, run

PAGE = ROOT / "docs" / "publish.md"
REPO = "acme/Small-M3-NVFP4"
SOURCE = "acme/Small-M3-MXFP8"
#: Lines of the card's changes that the page shows.
CARD_LINES = 24

sys.path[:0] = [str(ROOT), str(ROOT / "tests")]


def shortened(lines: list[str]) -> list[str]:
    """The card's changes cut off after their beginning."""
    at = lines.index("README.md") + 1 if "README.md" in lines else len(lines)
    left = len(lines) - at - CARD_LINES
    return lines if left <= 0 else [*lines[: at + CARD_LINES], f"  … {left} more lines of the card"]


def main() -> None:
    from loopback_hub.hub_server import LoopbackHub

    from mmq.demo.bundled import bundled_gates, bundled_model, bundled_texts

    with LoopbackHub() as hub, tempfile.TemporaryDirectory() as name:
        folder, environment = Path(name), hub.environment
        (folder / "src").symlink_to(bundled_model())
        texts = " ".join(f"--text {path}" for path in bundled_texts())
        run(folder, "mmq convert src OUT --max-shard-size 2MB --jobs 1", environment)
        run(folder, f"mmq verify OUT --against src --level logits --windows 10 {texts}"
            f" --gates {bundled_gates()}", environment)  # fmt: skip
        card = f"--base-model {SOURCE} --license apache-2.0"
        text = PAGE.read_text("utf-8")
        dry = run(folder, f"mmq publish OUT {REPO} {card} --dry-run", environment)
        text = filled(text, "dry-run", block(shortened(dry)))
        done = run(folder, f"mmq publish OUT {REPO} {card}", environment)
        again = run(folder, f"mmq publish OUT {REPO} {card}", environment)
        text = filled(
            text, "publish", block(done, again).replace(hub.endpoint, "https://huggingface.co")
        )
        shard = sorted((folder / "OUT").glob("model-*.safetensors"))[0]
        shard.write_bytes(shard.read_bytes()[:-1] + b"\0")
        refused = run(folder, f"mmq publish OUT {REPO} {card}", environment, status=7)
        text = filled(text, "refused", block(refused))
    PAGE.write_text(text, "utf-8")


if __name__ == "__main__":
    main()

"""Take README.md's pictures: a report on the bundled model, in a headless Chromium.

python scripts/build_readme_picture.py
"""

from __future__ import annotations

import base64
import sys
import tempfile
from pathlib import Path
from typing import Any

from build_readme import LOGITS, SMALL, convert_small
from page_blocks import ROOT, run

#: Pictures by name, and the section whose top each of them begins at.
PICTURES = {"report.png": "", "report-tokens.png": "tokens"}
WIDTH, HEIGHT = 1120, 960


def take(browser: Any, section: str, target: Path) -> None:
    """A picture of the page from the top of a section on."""
    where = f"document.getElementById('{section}').getBoundingClientRect().top + scrollY"
    top = browser.value(where) if section else 0
    clip = {"x": 0, "y": top, "width": WIDTH, "height": HEIGHT, "scale": 1}
    shot = browser.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
    target.write_bytes(base64.b64decode(shot["data"]))


def main() -> None:
    from chromium import Browser, find_chromium

    program = find_chromium()
    if program is None:
        raise SystemExit("no Chromium on this machine")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        convert_small(folder)
        run(folder, f"mmq verify {SMALL}-nvfp4 --against {SMALL} {LOGITS}")
        run(folder, f"mmq report {SMALL}-nvfp4 --format html -o report.html")
        with Browser(program, folder / "profile") as browser:
            browser.open(folder / "report.html", width=WIDTH)
            for picture, section in PICTURES.items():
                take(browser, section, ROOT / "docs" / picture)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "tests" / "report"))
    main()

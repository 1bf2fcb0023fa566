"""Write the outputs that docs/kernels.md shows.

python scripts/build_kernels_doc.py [support|parity|bench]…

A test keeps `support` current, which needs Triton and nothing else; the others show what one
machine said.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "docs" / "kernels.md"
COMMANDS = {
    "support": ["doctor", "--kernels"],
    "parity": ["verify", "--level", "kernels", "--device", "cpu"],
    "bench": ["bench", "--kernels", "--device", "cpu"],
}


def support() -> str:
    """What `mmq doctor --kernels` prints, without a process of its own."""
    from mmq.commands.doctor import kernel_table
    from mmq.verify.kernels.support_table import support_cells

    return "\n".join(kernel_table(support_cells())) + "\n"


def output(name: str) -> str:
    """What a command prints on this machine."""
    command = [sys.executable, "-m", "mmq", *COMMANDS[name]]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def with_output(page: str, name: str, text: str) -> str:
    """The page with one output replaced."""
    start, end = f"<!-- {name} -->\n", f"<!-- /{name} -->\n"
    before, rest = page.split(start)
    _, after = rest.split(end)
    shown = f"```\n$ mmq {' '.join(COMMANDS[name])}\n{text}```\n"
    return before + start + shown + end + after


def shown(page: str, name: str) -> str:
    """What the page shows of one command."""
    return page.split(f"<!-- {name} -->\n")[1].split(f"<!-- /{name} -->\n")[0]


if __name__ == "__main__":
    page = TARGET.read_text("utf-8")
    for name in sys.argv[1:] or COMMANDS:
        page = with_output(page, name, support() if name == "support" else output(name))
    TARGET.write_text(page, encoding="utf-8")

"""What the tests of pipelines call things."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE, REPO = "acme/small-m3", "acme/small-m3-nvfp4"
